"""One open connection of an event loop: requests in order, replies in order.

redis-py makes the connection: address, TLS, login, database. From then on its transport is ours,
as reading through its streams costs a call twice the CPU. That is the one place where this package
relies on what redis-py does not promise (``_writer``): where that is not as it was, or hiredis is
missing, ``DriverWire`` does the same through ``send_packed_command`` and ``read_response``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any

from oncekey.stores.redis.errors import ReplyError, driver
from oncekey.stores.redis.topology import Replies, Send

__all__ = ["DriverWire", "TransportWire", "Wire", "open_wire"]


class Wire:
    """What is under way on a connection. Whoever sends is called when all replies are there."""

    def __init__(self, lost: Callable[[Wire], None]) -> None:
        self._lost = lost
        self._pending: deque[tuple[int, list[Any], Callable[[Replies], None], float]] = deque()
        self.closed = asyncio.get_running_loop().create_future()

    @property
    def deadline(self) -> float | None:
        """When the replies are due that come next."""
        return self._pending[0][3] if self._pending else None

    def send(self, send: Send, done: Callable[[Replies], None], deadline: float) -> None:
        """Write, and call ``done`` when all replies are there or none will come."""
        raise NotImplementedError

    def fail(self, error: Exception) -> None:
        """Give up: no reply may be taken for another's."""
        self._lost(self)
        self._abort()
        pending, self._pending = self._pending, deque()
        for _, _, done, _ in pending:
            done(error)

    def _abort(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Close quietly; ``closed`` is done when that is."""
        raise NotImplementedError


class TransportWire(Wire, asyncio.Protocol):
    """On the transport of the connection, with hiredis: no task, no stream in between."""

    def __init__(self, writer: asyncio.StreamWriter, lost: Callable[[Wire], None]) -> None:
        super().__init__(lost)
        self._writer = writer  # kept: one that is collected closes its transport
        self._transport = writer.transport
        hiredis: Any = import_module("hiredis")
        self._reader = hiredis.Reader(protocolError=ValueError, replyError=ReplyError)
        self._transport.set_protocol(self)

    def send(self, send: Send, done: Callable[[Replies], None], deadline: float) -> None:
        self._pending.append((send.expect, [], done, deadline))
        self._transport.write(send.payload)

    def data_received(self, data: bytes) -> None:
        """Take what came, for those who wait for it."""
        gets, pending = self._reader.gets, self._pending
        try:
            self._reader.feed(data)
            while pending:
                expect, replies, done, _ = pending[0]
                while len(replies) < expect:
                    reply = gets()
                    if reply is False:
                        return
                    replies.append(reply)
                pending.popleft()
                done(replies)
        except ValueError as error:
            self.fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell those who wait that nothing will come."""
        if not self.closed.done():
            self.closed.set_result(None)
        self.fail(exc or ConnectionResetError("the server closed the connection"))

    def _abort(self) -> None:
        self._transport.abort()

    def close(self) -> None:
        self._transport.close()


class DriverWire(Wire):
    """Through what redis-py promises: a task writes and reads."""

    def __init__(self, connection: Any, lost: Callable[[Wire], None]) -> None:
        super().__init__(lost)
        self._connection = connection
        self._unsent: list[bytes] = []
        self._task: asyncio.Task[None] | None = None

    def send(self, send: Send, done: Callable[[Replies], None], deadline: float) -> None:
        self._pending.append((send.expect, [], done, deadline))
        self._unsent.append(send.payload)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        refused: type[Exception] = driver().exceptions.ResponseError
        try:
            while self._pending:
                expect, replies, done, _ = self._pending[0]
                unsent, self._unsent = self._unsent, []
                await self._connection.send_packed_command(unsent, check_health=False)
                while len(replies) < expect:
                    try:
                        replies.append(await self._connection.read_response())
                    except refused as error:
                        replies.append(error)
                self._pending.popleft()
                done(replies)
        except Exception as error:  # noqa: BLE001 - nobody may be left waiting
            self.fail(error)
        finally:
            self._task = None

    def _abort(self) -> None:
        if self._task not in (None, asyncio.current_task()):
            self._task.cancel()
        self.close()

    def close(self) -> None:
        if not self.closed.done():
            closing = asyncio.ensure_future(self._connection.disconnect(nowait=True))
            closing.add_done_callback(self._is_closed)

    def _is_closed(self, closing: asyncio.Future[None]) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def open_wire(connection: Any, lost: Callable[[Wire], None]) -> Wire:
    """Connect, and take the transport over if it is there to be had."""
    try:
        await connection.connect()
    except BaseException:
        await connection.disconnect(nowait=True)
        raise
    writer = _stream_of(connection)
    if writer is None:
        return DriverWire(connection, lost)
    connection._writer = connection._reader = None  # the stream is ours to end
    return TransportWire(writer, lost)


def _stream_of(connection: Any) -> asyncio.StreamWriter | None:
    """The stream of a connection of redis-py, if it is where it was, and hiredis can read it."""
    writer = getattr(connection, "_writer", None)
    try:
        import_module("hiredis")
    except ModuleNotFoundError:
        return None
    return writer if isinstance(writer, asyncio.StreamWriter) else None
