"""Run as a program: the kit on Django's own WSGI and ASGI handlers, set up once a process."""

from __future__ import annotations

import asyncio
from typing import Any

import django
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt, csrf_protect
from tests.testing.apps import sync_receiver

from oncekey.testing import (
    adeliver_twice,
    assert_handled_once,
    deliver,
    deliver_concurrently,
    deliver_twice,
    sample,
    sample_provider,
)

PROVIDER = sample_provider("stripe")
CHARGED: list[str] = []
RECEIVER = sync_receiver(PROVIDER, CHARGED)


def view(request: HttpRequest) -> HttpResponse:
    answer = RECEIVER.receive(
        request.method or "", request.build_absolute_uri(), dict(request.headers), request.body
    )
    return HttpResponse(answer.body, status=answer.status, headers=dict(answer.headers))


urlpatterns = [path("hooks", csrf_exempt(view)), path("protected", csrf_protect(view))]


def main() -> None:
    settings.configure(
        ROOT_URLCONF=__name__, ALLOWED_HOSTS=["testserver"], SECRET_KEY="x", MIDDLEWARE=[]
    )
    django.setup()
    from django.core.asgi import get_asgi_application
    from django.core.wsgi import get_wsgi_application

    wsgi: Any = get_wsgi_application()
    assert_handled_once(deliver_twice(wsgi, sample(PROVIDER, url="/hooks"), effects=CHARGED))
    many = deliver_concurrently(wsgi, sample(PROVIDER, url="/hooks"), effects=CHARGED)
    assert assert_handled_once(many).duplicates == 7
    asgi: Any = get_asgi_application()
    found = asyncio.run(adeliver_twice(asgi, sample(PROVIDER, url="/hooks"), effects=CHARGED))
    assert_handled_once(found)
    try:
        assert_handled_once(deliver(wsgi, sample(PROVIDER, url="/protected")))
    except AssertionError as error:
        print(error)


if __name__ == "__main__":
    main()
