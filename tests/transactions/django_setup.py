"""Django as far as it is needed here: settings once a process, a connection for each database."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from tests.transactions.routes import Place, Route


def connection_for(route: Route, place: Place) -> Any:
    """This thread's Django connection to the route's database."""
    # Tests here are coroutines that call sync code on purpose.
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
    import django
    from django.conf import settings

    if not settings.configured:
        settings.configure(DATABASES={}, USE_TZ=True)
        django.setup()
    from django.db import connections

    alias = f"{route.flavour}:{place.url if route.flavour == 'pg' else place.file}"
    if alias not in connections.settings:
        if route.flavour == "sqlite":
            found: dict[str, Any] = {"ENGINE": "django.db.backends.sqlite3", "NAME": place.file}
        else:
            parts = urlsplit(place.url)
            found = {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": parts.path[1:],
                "USER": parts.username or "",
                "PASSWORD": parts.password or "",
                "HOST": parts.hostname,
                "PORT": parts.port,
            }
        connections.settings |= connections.configure_settings({"default": {}, alias: found})
    return connections[alias]
