"""The two ends of a gateway under load: a provider's request, and an app that counts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator
from typing import Self
from urllib.parse import urlsplit

from oncekey.testing import SignedDelivery

PATIENCE = 60.0


def request_bytes(one: SignedDelivery) -> bytes:
    """A delivery as it stands on the wire."""
    parts = urlsplit(one.url)
    fields = {name.lower(): value for name, value in dict(one.headers).items()}
    fields |= {"host": parts.netloc, "content-length": str(len(one.body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {parts.path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + one.body


async def read_answer(reader: asyncio.StreamReader) -> int:
    """The status of the next answer; its body is read and dropped."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = head.partition("content-length:")[2].partition("\r\n")[0]
    if length:
        await reader.readexactly(int(length))
    return int(head.split(" ", 2)[1])


async def post(one: SignedDelivery) -> int:
    """Send a delivery on a connection of its own; its status.

    Raises:
        OSError: Nobody is there, or they went away.
    """
    parts = urlsplit(one.url)
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(request_bytes(one))
            return await read_answer(reader)
        finally:
            writer.close()


class Line:
    """A connection that stays open, request after request."""

    def __init__(self, address: str) -> None:
        self._address = urlsplit(address)

    async def __aenter__(self) -> Self:
        where = self._address
        self._reader, self._writer = await asyncio.open_connection(where.hostname, where.port)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._writer.close()

    async def post(self, one: SignedDelivery) -> int:
        """Send a delivery; its status."""
        return await self._exchange(request_bytes(one))

    async def get(self, path: str, token: str) -> int:
        """Ask for a page; its status."""
        head = f"GET {path} HTTP/1.1\r\nhost: {self._address.netloc}\r\n"
        return await self._exchange(f"{head}authorization: Bearer {token}\r\n\r\n".encode())

    async def _exchange(self, request: bytes) -> int:
        async with asyncio.timeout(PATIENCE):
            self._writer.write(request)
            return await read_answer(self._reader)


class Sink:
    """An idempotent app: an event has its effect once, however often it comes.

    Args:
        fails: Which part of the first attempts is answered with 503.

    Attributes:
        came: How many requests there were.
        effects: The provider's id of each event, by the gateway's.
        at: When each event came first, on the monotonic clock, by the provider's id.
    """

    def __init__(self, fails: float = 0.0) -> None:
        self._fails = fails
        self.url = ""
        self.came = 0
        self.effects: dict[str, str] = {}
        self.at: dict[str, float] = {}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Sink]:
        """Listen on a free port."""
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        try:
            yield self
        finally:
            server.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
                body = await reader.readexactly(int(fields["content-length"]))
                self.came += 1
                if fields["oncekey-attempt"] == "1" and random.random() < self._fails:
                    writer.write(b"HTTP/1.1 503 Not Now\r\ncontent-length: 0\r\n\r\n")
                    continue
                name = json.loads(body)["id"]
                self.effects.setdefault(fields["idempotency-key"], name)
                self.at.setdefault(name, time.monotonic())
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                await writer.drain()
        writer.close()
