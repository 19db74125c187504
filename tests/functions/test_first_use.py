"""A store on a server is opened by the first call: a module that makes a guard can be imported."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from oncekey import AsyncOnce, IdempotencyStore, Once, aconnect
from oncekey.adapters import asgi, wsgi
from oncekey.errors import StoreError
from oncekey.receiver import AsyncWebhookReceiver, WebhookReceiver
from oncekey.testing import sample_provider

stripe = sample_provider("stripe")
URLS = [
    "postgresql://u@127.0.0.1:{}/d?timeout=0.2",
    "redis://127.0.0.1:{}/0?timeout=0.2",
]


class Server:
    """A place that somebody may call, where nobody answers."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]

    def called(self) -> bool:
        """Whether somebody has."""
        self.socket.settimeout(0)
        try:
            self.socket.accept()[0].close()
        except BlockingIOError:
            return False
        return True


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.socket.close()


async def app(scope: Any, receive: Any, send: Any) -> None: ...


def wsgi_app(environ: Any, start_response: Any) -> list[bytes]:
    return []


@pytest.mark.parametrize("url", URLS, ids=["postgresql", "redis"])
def test_guards_are_made_without_a_server(url: str, server: Server) -> None:
    """``Once``, ``wrap``, the header and receivers call nobody before they are called."""
    url = url.format(server.port)
    once, aonce = Once(url), AsyncOnce(url)

    @once(key="k")
    def work(k: str) -> None: ...

    @aonce(key="k")
    async def awork(k: str) -> None: ...

    @IdempotencyStore(aconnect(url)).wrap
    async def buy(params: Any, context: Any = None) -> None: ...

    asgi.IdempotencyMiddleware(app, url)
    wsgi.IdempotencyMiddleware(wsgi_app, url)
    WebhookReceiver(stripe, url).on("invoice.paid")(lambda event: None)
    AsyncWebhookReceiver(stripe, url)
    assert not server.called()
    with pytest.raises(StoreError):
        work("a")
    assert server.called()
    while server.called():  # it may have tried more than once
        pass
    with pytest.raises(StoreError):
        asyncio.run(awork("a"))
    assert server.called()
