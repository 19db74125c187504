"""A proxy before PostgreSQL that counts round trips on the wire, and can lose a reply."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, Self
from urllib.parse import urlsplit, urlunsplit

SSL_REQUEST, GSS_REQUEST, CANCEL_REQUEST = 80877103, 80877104, 80877102
PATIENCE = 30.0


class Hangup(Exception):
    """One side has gone."""


async def read_startup(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The first message of a client; what it asks about encryption is answered with no."""
    while True:
        head = await reader.readexactly(8)
        length, code = struct.unpack("!ii", head)
        body = await reader.readexactly(length - 8)
        if code in (SSL_REQUEST, GSS_REQUEST):
            writer.write(b"N")
            continue
        return head + body


async def read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """One message with a type: the type, and the whole of its bytes."""
    try:
        head = await reader.readexactly(5)
        body = await reader.readexactly(struct.unpack("!i", head[1:])[0] - 4)
    except (asyncio.IncompleteReadError, ConnectionError):
        raise Hangup from None
    return head[:1], head + body


def message(kind: bytes, body: bytes) -> bytes:
    """A message to send."""
    return kind + struct.pack("!i", len(body) + 4) + body


class Relay:
    """Takes connections on a port of its own, in a thread with a loop of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        parts = urlsplit(url)
        self.host, self.upstream = parts.hostname or "127.0.0.1", parts.port or 5432
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._server = self.run(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        """The address of the same database, through here."""
        parts = urlsplit(self._url)
        user = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
        return urlunsplit(parts._replace(netloc=f"{user}127.0.0.1:{self.port}"))

    def run(self, work: Awaitable[Any]) -> Any:
        """Run something in the relay's thread."""

        async def awaited() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result(PATIENCE)

    def call(self, function: Callable[[], Any]) -> Any:
        """Call something in the relay's thread."""

        async def called() -> Any:
            return function()

        return self.run(called())

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A plain function, so that no connection is unknown to us when we end.
        self._writers.append(writer)
        task = self._loop.create_task(self._served(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _served(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self.serve(reader, writer)
        except (Hangup, ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A new connection to the server."""
        reader, writer = await asyncio.open_connection(self.host, self.upstream)
        self._writers.append(writer)
        return reader, writer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client, from its first byte to its last."""
        raise NotImplementedError

    async def _cancel(self, request: bytes) -> NoReturn:
        _, writer = await self.reach()
        writer.write(request)
        await writer.drain()
        writer.close()
        raise Hangup

    async def _end(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=PATIENCE)
        for writer in self._writers:
            writer.close()
        ends = [writer.wait_closed() for writer in self._writers]
        await asyncio.gather(*ends, return_exceptions=True)

    def close(self) -> None:
        """End all connections."""
        self.run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Line:
    """A client's connection: its number, and whether its reply is to be lost."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.doomed = False


class Carrier(Relay):
    """One upstream connection for each client. Whoever derives from it looks at what passes."""

    def __init__(self, url: str) -> None:
        self.connections = 0
        self.lost = 0
        super().__init__(url)

    def asked(self, line: Line, kind: bytes, data: bytes) -> None:
        """A client has sent a message. Raise ``Hangup`` to lose it."""

    async def answered(self, line: Line, kind: bytes, data: bytes) -> bool:
        """The server has sent a message. False: it goes nowhere."""
        if line.doomed and kind == b"Z":  # carried out and committed: now the network fails
            self.lost += 1
            raise Hangup
        return not line.doomed

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass everything on, both ways."""
        startup = await read_startup(reader, writer)
        if struct.unpack("!i", startup[4:8])[0] == CANCEL_REQUEST:
            await self._cancel(startup)
        self.connections += 1
        line = Line(self.connections)
        server_reader, server_writer = await self.reach()
        server_writer.write(startup)

        async def back() -> None:
            while True:
                kind, data = await read_message(server_reader)
                if await self.answered(line, kind, data):
                    writer.write(data)
                    await writer.drain()

        async def there() -> None:
            while True:
                kind, data = await read_message(reader)
                self.asked(line, kind, data)
                server_writer.write(data)
                await server_writer.drain()

        both = [asyncio.ensure_future(back()), asyncio.ensure_future(there())]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            server_writer.close()


class Wire(Carrier):
    """Counts, holds back and loses.

    A round trip is what a client sends up to and with a Sync, a Flush or a Query: then it waits.
    """

    def __init__(self, url: str) -> None:
        self.trips = 0
        self._lose = 0
        self._stranded = 0
        self._open: asyncio.Event | None = None
        super().__init__(url)

    def lose_next_reply(self, count: int = 1) -> None:
        """Let the server carry the next round trip out, then hang up instead of replying."""

        def arm() -> None:
            self._lose += count

        self.call(arm)

    def hold(self) -> None:
        """Keep replies back until ``let_go``."""

        def shut() -> None:
            self._open = asyncio.Event()

        self.call(shut)

    def strand(self) -> None:
        """From now on nothing comes back on the connections that there are; new ones work."""

        def cut() -> None:
            self._stranded = self.connections

        self.call(cut)

    def let_go(self) -> None:
        """Pass on what was held back."""

        def open_again() -> None:
            if self._open is not None:
                self._open.set()
                self._open = None

        self.call(open_again)

    @contextlib.contextmanager
    def counted(self) -> Any:
        """How many round trips the block makes: a list that holds the number at its end."""
        found: list[int] = []
        before = self.trips
        yield found
        found.append(self.trips - before)

    def asked(self, line: Line, kind: bytes, data: bytes) -> None:
        """Count, and note whose reply is lost."""
        if kind in (b"S", b"Q", b"H"):
            self.trips += 1
            if self._lose:
                self._lose -= 1
                line.doomed = True

    async def answered(self, line: Line, kind: bytes, data: bytes) -> bool:
        """Hold it back where that was asked for."""
        if line.number <= self._stranded:
            return False
        if self._open is not None:
            await self._open.wait()
        return await super().answered(line, kind, data)
