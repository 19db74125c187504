"""What a connection may cost before anybody signed anything: bytes and seconds."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn

from oncekey.server.wire import MOST_HEAD, BoundedProtocol

PATIENCE = 60.0
LINE = b"POST /hooks/shop HTTP/1.1\r\nHost: x\r\n"
CHUNKED = LINE + b"Transfer-Encoding: chunked\r\n\r\n"
Start = Callable[[float], Any]


class Doors:
    """A server with the gateway's protocol, and an app that notes what it was asked."""

    def __init__(self) -> None:
        self.seen: list[dict[bytes, bytes]] = []
        self.port = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while scope["path"] != "/early":
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.seen.append(dict(scope["headers"]))
        length = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": body})

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts it with so many seconds for a head."""
    running: list[tuple[Any, Any]] = []

    async def begin(seconds: float = PATIENCE) -> Doors:
        doors = Doors()
        listening = socket.create_server(("127.0.0.1", 0))
        doors.port = listening.getsockname()[1]

        class Protocol(BoundedProtocol):
            head_seconds = seconds

        server = uvicorn.Server(
            uvicorn.Config(doors, http=Protocol, ws="none", lifespan="off", log_config=None)
        )
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup(sockets=[listening])
        running.append((server, listening))
        return doors

    yield begin
    for server, listening in running:
        await server.shutdown(sockets=[listening])


async def flood(doors: Doors, first: bytes, piece: bytes) -> bytes:
    """Send without end; what was answered when the other side hung up."""
    reader, writer = await doors.connect()
    writer.write(first)
    sent = 0
    try:
        while sent < 100 * MOST_HEAD:
            writer.write(piece)
            sent += len(piece)
            await writer.drain()
        pytest.fail("nobody stopped it")
    except ConnectionError:
        pass
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "first, piece",
    [
        (LINE, b"x-more: " + b"a" * 1000 + b"\r\n"),
        (LINE + b"x-one: ", b"a" * 1000),
        (b"GET /", b"a" * 1000),
        (CHUNKED + b"0\r\n", b"x-trailer: " + b"a" * 1000 + b"\r\n"),
        (CHUNKED + b"1;x=", b"a" * 1000),
    ],
    ids=["headers", "a header", "the address", "trailers", "a chunk's extension"],
)
async def test_what_is_no_body_is_bounded(start: Start, first: bytes, piece: bytes) -> None:
    """Headers, addresses and trailers without end are cut off, and no app hears of them."""
    doors = await start(PATIENCE)
    async with asyncio.timeout(PATIENCE):
        await flood(doors, first, piece)
    assert doors.seen == []


async def test_a_head_must_come_in_time(start: Start) -> None:
    """Who says nothing, half a head, or half a second one, is hung up on."""
    doors = await start(0.2)
    whole = LINE + b"Content-Length: 0\r\n\r\n"
    async with asyncio.timeout(PATIENCE):
        for said in (b"", LINE, whole + LINE):
            reader, writer = await doors.connect()
            writer.write(said)
            assert (await reader.read()).count(b"200 OK") == said.count(whole)
            writer.close()


async def test_what_goes_on_after_its_answer_is_cut(start: Start) -> None:
    """Who was answered early may read that, and then can't send for ever."""
    doors = await start(0.2)
    async with asyncio.timeout(PATIENCE):
        reader, writer = await doors.connect()
        writer.write(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc")
        assert b"200 OK" in await reader.read()
        writer.close()


async def test_slow_and_large_bodies_are_the_apps_own_matter(start: Start) -> None:
    """Bounds are for heads: a body of many pieces arrives, and trailers become no headers."""
    doors = await start(0.2)
    async with asyncio.timeout(PATIENCE):
        reader, writer = await doors.connect()
        writer.write(CHUNKED)
        for _ in range(4):
            writer.write(b"%x\r\n" % MOST_HEAD + b"a" * MOST_HEAD + b"\r\n")
            await asyncio.sleep(0.1)
        writer.write(b"0\r\nstripe-signature: forged\r\n\r\n")
        assert b"200 OK" in await reader.readline()
        writer.close()
    assert b"stripe-signature" not in doors.seen[0]
