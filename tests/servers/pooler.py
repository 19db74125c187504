"""A transaction pooler: many clients over two connections, another one after each transaction.

What a session has (prepared statements, settings) stays with the server's connection, where the
client's next transaction may not find it. That is what PgBouncer does in transaction mode.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any

from tests.servers.wire import CANCEL_REQUEST, Hangup, Relay, message, read_message, read_startup


class _Upstream:
    """A connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.greeting = b""  # parameters and key, as a client is told on its start


class TransactionPooler(Relay):
    """Lends a server's connection for one transaction at a time, in turn.

    Attributes:
        switches: How often a client got another connection than for its transaction before.
        transactions: How many transactions went through.
    """

    def __init__(self, url: str, size: int = 2) -> None:
        self.size = size
        self.switches = 0
        self.transactions = 0
        self._startup: bytes | None = None
        self._made = 0
        self._idle: asyncio.Queue[_Upstream] = asyncio.Queue()
        super().__init__(url)

    async def _connect(self) -> _Upstream:
        assert self._startup is not None
        upstream = _Upstream(*await self.reach())
        upstream.writer.write(self._startup)
        while True:
            kind, data = await read_message(upstream.reader)
            if kind == b"E":
                raise Hangup
            if kind in (b"S", b"K"):
                upstream.greeting += data
            if kind == b"Z":
                return upstream

    async def _borrow(self) -> _Upstream:
        while self._made < self.size:  # all at once, so that the first client is moved about too
            self._made += 1
            try:
                self._idle.put_nowait(await self._connect())
            except BaseException:
                self._made -= 1
                raise
        return await self._idle.get()

    def _drop(self, upstream: _Upstream) -> None:
        upstream.writer.close()
        self._made -= 1

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client."""
        startup = await read_startup(reader, writer)
        if struct.unpack("!i", startup[4:8])[0] == CANCEL_REQUEST:
            raise Hangup  # like any pooler we would have to know whose query that was
        self._startup = self._startup or startup
        greeter = await self._borrow()
        self._idle.put_nowait(greeter)
        writer.write(message(b"R", struct.pack("!i", 0)) + greeter.greeting + message(b"Z", b"I"))
        await _Client(self, reader, writer).run()


class _Client:
    """A client, and the connection that it has for the transaction under way."""

    def __init__(self, pooler: TransactionPooler, reader: Any, writer: Any) -> None:
        self.pooler = pooler
        self.reader = reader
        self.writer = writer
        self.server: _Upstream | None = None
        self.before: _Upstream | None = None
        self.pending = 0  # answers that are still to come
        self.halfway = False  # something was sent since the last Sync
        self.pump: asyncio.Task[None] | None = None

    async def run(self) -> None:
        try:
            while True:
                kind, data = await read_message(self.reader)
                if kind == b"X":
                    return
                if self.server is None:
                    await self._attach()
                assert self.server is not None
                if kind in (b"Q", b"S"):
                    self.pending += 1
                self.halfway = kind not in (b"Q", b"S")
                self.server.writer.write(data)
                await self.server.writer.drain()
        finally:
            if self.pump is not None:
                self.pump.cancel()
                await asyncio.gather(self.pump, return_exceptions=True)
            if self.server is not None:  # gone within a transaction: nobody else may have that
                self.pooler._drop(self.server)

    async def _attach(self) -> None:
        self.server = await self.pooler._borrow()
        if self.before is not None and self.before is not self.server:
            self.pooler.switches += 1
        self.before = self.server
        self.pump = asyncio.ensure_future(self._back(self.server))

    async def _back(self, server: _Upstream) -> None:
        try:
            while True:
                kind, data = await read_message(server.reader)
                self.writer.write(data)
                if kind == b"Z":
                    self.pending -= 1
                    if data[5:6] == b"I" and not self.pending and not self.halfway:
                        self.pooler.transactions += 1
                        self.server = None
                        self.pooler._idle.put_nowait(server)
                        return
                await self.writer.drain()
        except Hangup:
            self.writer.close()
            raise
