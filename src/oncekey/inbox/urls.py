"""``open_inbox``: an inbox from a URL, found by its scheme."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from oncekey.errors import StoreConfigError
from oncekey.inbox.abc import AsyncInbox
from oncekey.policy import Duration

__all__ = ["open_inbox"]

_ROOMS: Final = {"sqlite": "sqlite", "postgresql": "postgres", "postgres": "postgres"}
WEEK: Final = 604_800


async def open_inbox(url: str, *, remember: Duration = WEEK, **options: Any) -> AsyncInbox:
    """Open an inbox, and check that its tables are what this oncekey knows.

    Args:
        url: ``sqlite:///inbox.db``, which is made if it is not there, or
            ``postgresql://user@host/database``, whose tables ``oncekey migrate`` makes.
        remember: How long the key of an event is known, so that a copy is told from it. Longer than
            any sender retries.
        **options: What the inbox's class takes, such as ``node="a"``. ``create=True`` makes the
            tables, or brings older ones up to date.

    Raises:
        StoreConfigError: The URL or an option is wrong, or the tables are missing, older or newer.
        StoreCorruptError: The file is damaged.
    """
    scheme = url.partition("://")[0].lower() if isinstance(url, str) else ""
    room = _ROOMS.get(scheme)
    if room is None:
        raise StoreConfigError(
            "an inbox is in a SQLite file or in PostgreSQL: write sqlite:///inbox.db or "
            "postgresql://user@host/database"
        )
    module: Any = import_module(f"oncekey.inbox.{room}")
    try:
        inbox: AsyncInbox = await module.open_url(url, remember=remember, **options)
    except TypeError as error:
        raise StoreConfigError(f"{scheme}:// does not take these options: {error}") from error
    return inbox
