"""Servers that answer HTTP in any way at all, and targets that post to them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from oncekey.inbox import Delivery, Event
from oncekey.inbox.targets import HttpTarget

SECRET = "whsec_" + "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
BODY = b'{"a": 1,\n "b": "\xc3\xa9"}\x00\xff'

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def delivery(body: bytes = BODY, **headers: str) -> Delivery:
    fields = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    event = Event("msg_00000000000000ab", 1, "shop", "k", "paid", fields, body)
    return Delivery(event, "app", attempt=3, fence=7, lease_until=2)


@contextlib.asynccontextmanager
async def serving(handle: Handle, **options: Any) -> AsyncIterator[int]:
    """A server that does what ``handle`` does with a connection; gives its port."""
    writers: list[asyncio.StreamWriter] = []
    tasks: list[asyncio.Task[Any]] = []

    async def noted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        await handle(reader, writer)

    server = await asyncio.start_server(noted, options.pop("host", "127.0.0.1"), 0, **options)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)


async def read_request(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {}
    for line in lines[1:-2]:
        name, _, value = line.partition(": ")
        assert name.lower() not in headers
        headers[name.lower()] = value
    return lines[0], headers, await reader.readexactly(int(headers["content-length"]))


def answering(raw: bytes, seen: list[Any] | None = None) -> Handle:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_request(reader)
        if seen is not None:
            seen.append(request)
        writer.write(raw)
        await writer.drain()
        writer.close()

    return handle


@contextlib.asynccontextmanager
async def target_at(port: int, path: str = "/in", **options: Any) -> AsyncIterator[HttpTarget]:
    target = HttpTarget(f"http://127.0.0.1:{port}{path}", allow_private=True, **options)
    try:
        yield target
    finally:
        await target.aclose()


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
