"""A body that never ends is given up, in every form of the guard."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from oncekey.adapters.asgi import IdempotencyMiddleware
from oncekey.adapters.flask import idempotent
from oncekey.adapters.wsgi import IdempotencyMiddleware as WsgiMiddleware

SOON = 0.05  # seconds; the body below never ends, however long that is
OPTIONS: dict[str, Any] = {"anonymous": "shared", "body_timeout": SOON}


class Drip:
    """A body of one byte at a time, without an end."""

    def read(self, size: int = -1) -> bytes:
        return b" "

    read1 = read


async def test_a_slow_body_is_a_408_under_asgi() -> None:
    """The client is told, and the application is not called."""

    async def app(*_: Any) -> None:
        raise AssertionError("a request without its body")

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"", "more_body": True}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "raw_path": b"/",
        "query_string": b"",
        "headers": [(b"idempotency-key", b"k")],
    }
    async with asyncio.timeout(60):
        await IdempotencyMiddleware(app, "memory://", **OPTIONS)(scope, receive, send)
    assert sent[0]["status"] == 408
    assert json.loads(sent[1]["body"])["type"] == "urn:oncekey:problem:body-slow"


def _environ() -> dict[str, Any]:
    return {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/",
        "QUERY_STRING": "",
        "SERVER_NAME": "localhost",
        "SERVER_PORT": "80",
        "wsgi.url_scheme": "http",
        "wsgi.input": Drip(),
        "HTTP_IDEMPOTENCY_KEY": "k",
        "CONTENT_LENGTH": "1000000",
    }


@pytest.mark.parametrize("form", ["middleware", "flask route"])
def test_a_slow_body_is_a_408_under_wsgi(form: str) -> None:
    """A thread is not held for as long as the client likes."""

    def view(*_: Any) -> Any:
        raise AssertionError("a request without its body")

    app: Any
    if form == "middleware":
        app = WsgiMiddleware(view, "memory://", **OPTIONS)
    else:
        flask = pytest.importorskip("flask")
        app = flask.Flask("slow")
        app.post("/")(idempotent("memory://", **OPTIONS)(view))
    statuses: list[str] = []
    body = b"".join(app(_environ(), lambda status, headers, error=None: statuses.append(status)))
    assert statuses[0].startswith("408")
    assert json.loads(body)["type"] == "urn:oncekey:problem:body-slow"
