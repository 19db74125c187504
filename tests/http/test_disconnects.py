"""Clients that hang up on a real server: there is a grace, then the application is told."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from tests.adapters.sites import listening, serve_asgi
from tests.http.doors import AsgiDoor, Calls, Door, WsgiDoor
from tests.http.test_asgi_streams import Client

from oncekey import MemoryBackend, MemoryStore
from oncekey.http.asgi import IdempotencyMiddleware

PATIENCE = 60  # seconds; only a hang lasts as long
POLLS = 50


class Alive:
    """Counts the handlers that run, and lets a test wait for a number of them."""

    def __init__(self) -> None:
        self.count = 0
        self.begun = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self.count += 1
            self.begun += 1
            self._changed.notify_all()

    def __exit__(self, *exc: object) -> None:
        with self._changed:
            self.count -= 1
            self._changed.notify_all()

    def reaches(self, count: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.count == count, PATIENCE)


@pytest.fixture
def alive() -> Alive:
    return Alive()


def long_polls(alive: Alive) -> Starlette:
    """Handlers that end when their client hangs up, and not before."""

    async def polling(request: Request) -> Response:
        with alive:
            while not await request.is_disconnected():
                await asyncio.sleep(0.01)
        return Response(status_code=204)

    async def waiting(request: Request) -> Response:
        with alive:
            await request.body()
            while (await request.receive())["type"] != "http.disconnect":
                pass
        return Response(status_code=204)

    async def streaming(request: Request) -> Response:
        async def parts() -> Any:
            with alive:
                while True:
                    yield b"."
                    await asyncio.sleep(0.01)

        return StreamingResponse(parts(), media_type="text/plain")

    views = (polling, waiting, streaming)
    return Starlette(routes=[Route(f"/{v.__name__}", v, methods=["POST"]) for v in views])


@pytest.fixture
def ask(alive: Alive) -> Iterator[Callable[[str, str], socket.socket]]:
    """Sends a keyed request to a real server, and gives the connection."""
    app = IdempotencyMiddleware(long_polls(alive), MemoryBackend(), disconnect_grace=0.2)
    opened: list[socket.socket] = []
    with listening() as sock:
        where = sock.getsockname()

        def ask(path: str, key: str) -> socket.socket:
            connection = socket.create_connection(where, timeout=PATIENCE)
            opened.append(connection)
            head = f"POST /{path} HTTP/1.1\r\nHost: shop\r\nIdempotency-Key: {key}\r\n"
            connection.sendall(f"{head}Authorization: me\r\nContent-Length: 0\r\n\r\n".encode())
            return connection

        with serve_asgi(app, sock, timeout_graceful_shutdown=1):  # a failure must not hang
            yield ask
            for connection in opened:
                connection.close()


@pytest.mark.parametrize("kind", ["polling", "waiting", "streaming"])
def test_long_polls_end_when_their_clients_have_hung_up(
    kind: str, alive: Alive, ask: Callable[[str, str], socket.socket]
) -> None:
    """However an application learns of it: after the grace no handler is left."""
    connections = [ask(kind, f"{kind}-{number}") for number in range(POLLS)]
    assert alive.reaches(POLLS)
    for connection in connections:
        connection.close()
    assert alive.reaches(0)
    assert alive.begun == POLLS


async def test_an_answer_within_the_grace_is_kept_for_the_retry() -> None:
    """The grace holds the news back from all who ask; an answer that comes meanwhile is whole."""
    asked = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        client.gone.set()
        listeners = [asyncio.create_task(receive()) for _ in range(2)]
        await asyncio.sleep(0)
        asked.set()
        assert not any(listener.done() for listener in listeners)
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"made"})
        # Told as soon as the answer is recorded, every one of them.
        assert [(await listener)["type"] for listener in listeners] == ["http.disconnect"] * 2

    client = Client(IdempotencyMiddleware(app, MemoryBackend(), disconnect_grace=3600))
    assert await asyncio.wait_for(client.post(), PATIENCE) == (201, b"made", False)
    assert asked.is_set()
    assert await Client(client.app).post() == (201, b"made", True)


async def test_without_a_grace_it_is_told_at_once() -> None:
    """``disconnect_grace=0`` passes the news on before there is an answer."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        client.gone.set()
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    client = Client(IdempotencyMiddleware(app, MemoryBackend(), disconnect_grace=0))
    assert (await asyncio.wait_for(client.post(), PATIENCE))[0] == 204


@pytest.mark.parametrize("grace", [0, None])
async def test_a_server_that_fails_to_send_tells_it_too(grace: int | None) -> None:
    """Some servers fail instead: without a grace the stream ends, else it goes on."""
    sent = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(3):
            await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})
            sent.append(number)
            client.gone.set()
        await send({"type": "http.response.body"})

    client = Client(IdempotencyMiddleware(app, MemoryBackend(), disconnect_grace=grace))
    client.breaks = True
    with pytest.raises(OSError, match="gone"):
        await client.post()
    _, body, replayed = await Client(client.app).post()
    assert replayed
    if grace is None:
        assert (sent, body) == ([0, 1, 2], b"012")
    else:
        assert sent == [0]
        assert json.loads(body)["type"] == "urn:oncekey:problem:body-unavailable"


@pytest.mark.parametrize("door", [AsgiDoor, WsgiDoor])
def test_a_handler_that_hangs_frees_its_key_in_the_end(door: Any) -> None:
    """Past ``max_run`` the key is renewed no more, and a retry runs."""
    hangs, told = threading.Event(), threading.Event()

    def answer(body: bytes) -> Any:
        if calls.count == 1:
            told.set()
            assert hangs.wait(PATIENCE)
        return 201, [], b"%d" % calls.count

    calls = Calls(answer)
    store = MemoryBackend() if door is AsgiDoor else MemoryStore()
    site = Door(door(calls, store, lease=0.1, max_run=0.1, wait=PATIENCE))
    first: list[Any] = []
    thread = threading.Thread(target=lambda: first.append(site.post()))
    thread.start()
    assert told.wait(PATIENCE)
    assert site.post().body == b"2"
    hangs.set()
    thread.join()
    assert first[0].body == b"2"  # the first one is told the outcome that counts
