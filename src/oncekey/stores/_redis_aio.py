"""The connections of an async store in one event loop, and the calls that share them.

Driven by what arrives, not by tasks: a call that comes alone is written at once and its future is
resolved by the bytes of its reply. Calls that come while others are under way, or in the same tick,
go together. redis-py makes the connections; then its transport is ours.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

from oncekey.errors import StoreClosedError
from oncekey.stores._batching import MAX_BATCH, Job
from oncekey.stores._redis_engine import Engine
from oncekey.stores._redis_errors import driver
from oncekey.stores._redis_layout import Address, Replies, Send
from oncekey.stores._redis_ops import Op
from oncekey.stores._redis_reader import new_reader
from oncekey.stores._redis_target import Target

__all__ = ["AsyncLink"]

LANES: Final = 2  # batches under way at once: the server works on one while we unpack the other
SPLIT: Final = 32  # calls that are worth a lane of their own

_Place = tuple[bool, Address]
_Batch = list[tuple[Job, "asyncio.Future[Any]"]]


class _Pipe(asyncio.Protocol):
    """One open connection: requests in order, replies in order."""

    def __init__(self, writer: asyncio.StreamWriter, lost: Callable[[_Pipe], None]) -> None:
        self._writer = writer  # kept: one that is collected closes its transport
        self._transport = writer.transport
        self._lost = lost
        self._reader = new_reader()
        self._pending: deque[tuple[int, list[Any], Callable[[Replies], None]]] = deque()
        self.closed = asyncio.get_running_loop().create_future()
        self._transport.set_protocol(self)

    @property
    def waiting(self) -> bool:
        """Whether replies are due."""
        return bool(self._pending)

    def send(self, send: Send, done: Callable[[Replies], None]) -> None:
        """Write, and call ``done`` when all replies are there or none will come."""
        self._pending.append((send.expect, [], done))
        self._transport.write(send.payload[0])

    def data_received(self, data: bytes) -> None:
        """Take what came, for those who wait for it."""
        gets = self._reader.gets
        pending = self._pending
        try:
            self._reader.feed(data)
            while pending:
                expect, replies, done = pending[0]
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

    def fail(self, error: Exception) -> None:
        """Give up: no reply may be taken for another's."""
        self._lost(self)
        self._transport.abort()
        pending, self._pending = self._pending, deque()
        for _, _, done in pending:
            done(error)

    def close(self) -> None:
        """Close quietly."""
        self._transport.close()


class AsyncLink:
    """Sends the calls of one event loop and hands out the replies."""

    def __init__(self, target: Target, engine: Engine, patience: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._target = target
        self._engine = engine
        self._patience = patience
        self._pipes: dict[_Place, _Pipe] = {}
        self._opening: dict[_Place, asyncio.Lock] = {}
        self._queue: _Batch = []
        self._flying = 0  # batches under way
        self._planned = False  # whether _start is about to be called
        self._alone = True  # whether the last batch was one call
        self._deadline = 0.0
        self._watching = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle: asyncio.Future[None] | None = None
        self._farewell: AsyncGenerator[None, None] | None = None
        self._closing: list[Callable[[], Awaitable[None]]] = [self._close_pipes]
        self._closed = False
        exceptions = driver().exceptions
        self._slow = (exceptions.TimeoutError, TimeoutError)
        self._broken = (exceptions.RedisError, OSError, TimeoutError)

    def before_close(self, action: Callable[[], Awaitable[None]]) -> None:
        """Do ``action`` when the link is closed, or its loop ends."""
        self._closing.insert(0, action)

    # Calls

    def submit(self, op: Op, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Run a call in the next batch; the future is done when that is."""
        if self._closed:
            raise StoreClosedError("this Redis store is closed: connect again")
        future: asyncio.Future[Any] = self._loop.create_future()
        self._queue.append((Job(op, args), future))
        if not self._planned and (not self._flying or len(self._queue) >= SPLIT):
            if self._alone and not self._flying:
                self._start()
            elif self._flying < LANES:  # take along who else comes in this tick
                self._planned = True
                self._loop.call_soon(self._start)
        return future

    def _start(self) -> None:
        self._planned = False
        while self._queue and self._flying < LANES:
            size = len(self._queue)
            if self._flying and size < SPLIT:
                return
            if not self._flying and size >= 2 * SPLIT:
                size //= 2
            size = min(size, MAX_BATCH)
            batch, self._queue = self._queue[:size], self._queue[size:]
            self._alone = size == 1
            self._flying += 1
            self._deadline = self._loop.time() + self._patience
            flow = self._engine.batch([job for job, _ in batch])
            self._advance(batch, flow, None)

    def _advance(self, batch: _Batch, flow: Any, outcomes: list[Replies] | None) -> None:
        """Hand the flow what came and do what it wants next."""
        problem: Exception | None = None
        try:
            sends = flow.send(outcomes)
        except StopIteration:
            pass
        except Exception as error:  # noqa: BLE001 - nobody may be left waiting
            problem = error
        else:
            self._dispatch(batch, flow, sends)
            return
        for job, future in batch:
            if future.done():
                continue  # cancelled; what it asked for was done nevertheless
            failure = job.error or problem
            if failure is not None:
                future.set_exception(failure)
            else:
                future.set_result(job.result)
        self._flying -= 1
        if self._queue and not self._planned:
            # Behind those just woken, so that what they ask for next goes along.
            self._planned = True
            self._loop.call_soon(self._start)
        if self._idle is not None and not self._busy:
            self._idle.set_result(None)
            self._idle = None

    @property
    def _busy(self) -> bool:
        return bool(self._flying or self._planned or self._queue)

    # Connections

    def _dispatch(self, batch: _Batch, flow: Any, sends: Sequence[Send]) -> None:
        pipes: list[_Pipe | Exception] = []
        for send in sends:
            pipe = self._pipes.get((send.sentinel, send.address))
            if pipe is None:
                task = self._loop.create_task(self._connect(batch, flow, sends))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                return
            pipes.append(pipe)
        self._send(batch, flow, sends, pipes)

    async def _connect(self, batch: _Batch, flow: Any, sends: Sequence[Send]) -> None:
        """Open what is not open, then send."""
        try:
            if self._farewell is None:
                # Event loops end their asynchronous generators before they close: the one moment
                # at which connections that nobody closed can still be closed.
                self._farewell = self._until_the_end()
                await anext(self._farewell)
            pipes = await asyncio.gather(*map(self._pipe, sends))
        except BaseException:  # the loop is being shut down
            for _, future in batch:
                future.cancel()
            raise
        self._deadline = self._loop.time() + self._patience
        self._send(batch, flow, sends, pipes)

    async def _pipe(self, send: Send) -> _Pipe | Exception:
        place = (send.sentinel, send.address)
        async with self._opening.setdefault(place, asyncio.Lock()):
            return self._pipes.get(place) or await self._open(send, place)

    async def _open(self, send: Send, place: _Place) -> _Pipe | Exception:
        connection = self._target.connection(send.address, send.sentinel, None)
        try:
            async with asyncio.timeout(self._target.timeout):
                await connection.connect()
        except self._broken as error:
            await connection.disconnect(nowait=True)
            return self._named(error)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        writer, connection._writer, connection._reader = connection._writer, None, None
        pipe = self._pipes[place] = _Pipe(writer, self._forget)
        return pipe

    def _forget(self, pipe: _Pipe) -> None:
        for place, known in list(self._pipes.items()):
            if known is pipe:
                del self._pipes[place]

    def _named(self, error: Exception) -> Exception:
        if isinstance(error, self._slow):
            return TimeoutError(f"no answer within {self._target.timeout:g} s")
        return error

    def _send(
        self, batch: _Batch, flow: Any, sends: Sequence[Send], pipes: Sequence[_Pipe | Exception]
    ) -> None:
        if not self._watching:
            self._watching = True
            self._loop.call_at(self._deadline, self._watch)
        outcomes: list[Any] = [None] * len(sends)
        due = len(sends)

        def done(number: int, replies: Replies) -> None:
            nonlocal due
            outcomes[number] = replies
            due -= 1
            if not due:
                self._advance(batch, flow, outcomes)

        for number, (send, pipe) in enumerate(zip(sends, pipes, strict=True)):
            if isinstance(pipe, Exception):
                done(number, pipe)
            else:
                pipe.send(send, partial(done, number))

    def _watch(self) -> None:
        """One timer for all: it looks whether what is under way takes too long."""
        if self._loop.time() < self._deadline:
            if self._busy:
                self._loop.call_at(self._deadline, self._watch)
            else:
                self._watching = False
            return
        self._watching = False
        for pipe in list(self._pipes.values()):
            if pipe.waiting:
                pipe.fail(TimeoutError(f"no answer within {self._patience:g} s"))

    # The end

    async def _until_the_end(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            for action in self._closing:
                await action()

    async def _close_pipes(self) -> None:
        pipes = list(self._pipes.values())
        for pipe in pipes:
            pipe.close()
        if pipes:
            await asyncio.wait([pipe.closed for pipe in pipes], timeout=self._target.timeout)

    async def aclose(self) -> None:
        """Finish what is queued, then close the connections."""
        self._closed = True
        while self._busy:
            self._idle = self._idle or self._loop.create_future()
            await asyncio.shield(self._idle)
        farewell, self._farewell = self._farewell, None
        if farewell is not None:
            await farewell.aclose()
