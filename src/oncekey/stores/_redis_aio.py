"""The connections of an async store in one event loop, and the calls that share them.

Driven by what arrives, not by tasks: a call that comes alone is written at once and its future is
resolved by the bytes of its reply. Calls to one server that come while others are under way, or in
the same tick, go together; calls to different servers never wait for each other. redis-py makes
the connections; then its transport is ours.
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
from oncekey.stores._redis_errors import UnsentError, driver
from oncekey.stores._redis_layout import Address, Replies, Send
from oncekey.stores._redis_ops import CLAIM, RELEASE, Op
from oncekey.stores._redis_reader import new_reader
from oncekey.stores._redis_target import Target

__all__ = ["AsyncLink"]

ABREAST: Final = 2  # batches of a lane at once: the server works on one while we unpack the other
SPLIT: Final = 32  # calls that are worth a batch of their own

_Place = tuple[bool, Address]
_Calls = list[tuple[Job, "asyncio.Future[Any]"]]


class _Lane:
    """The calls to one server."""

    __slots__ = ("alone", "flying", "planned", "queue")

    def __init__(self) -> None:
        self.queue: _Calls = []
        self.flying = 0  # batches under way
        self.planned = False  # whether _start is about to be called
        self.alone = True  # whether the last batch was one call


class _Batch:
    """Calls under way, and what becomes of them."""

    __slots__ = ("calls", "deadline", "flow", "lane")

    def __init__(self, lane: _Lane, calls: _Calls, flow: Any, deadline: float) -> None:
        self.lane = lane
        self.calls = calls
        self.flow = flow
        self.deadline = deadline


class _Pipe(asyncio.Protocol):
    """One open connection: requests in order, replies in order."""

    def __init__(self, writer: asyncio.StreamWriter, lost: Callable[[_Pipe], None]) -> None:
        self._writer = writer  # kept: one that is collected closes its transport
        self._transport = writer.transport
        self._lost = lost
        self._reader = new_reader()
        self._pending: deque[tuple[int, list[Any], Callable[[Replies], None], float]] = deque()
        self.closed = asyncio.get_running_loop().create_future()
        self._transport.set_protocol(self)

    @property
    def deadline(self) -> float | None:
        """When the replies are due that come next."""
        return self._pending[0][3] if self._pending else None

    def send(self, send: Send, done: Callable[[Replies], None], deadline: float) -> None:
        """Write, and call ``done`` when all replies are there or none will come."""
        self._pending.append((send.expect, [], done, deadline))
        self._transport.write(send.payload[0])

    def data_received(self, data: bytes) -> None:
        """Take what came, for those who wait for it."""
        gets = self._reader.gets
        pending = self._pending
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

    def fail(self, error: Exception) -> None:
        """Give up: no reply may be taken for another's."""
        self._lost(self)
        self._transport.abort()
        pending, self._pending = self._pending, deque()
        for _, _, done, _ in pending:
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
        self._lanes: dict[Address | None, _Lane] = {None: _Lane()}
        self._watch_at: float | None = None  # when the timer looks at what is under way
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
        """Run a call in the next batch of its lane; the future is done when that is."""
        if self._closed:
            raise StoreClosedError("this Redis store is closed: connect again")
        return self._add(op, args)

    def _add(self, op: Op, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        name = self._engine.lane(args[0])
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _Lane()
        lane.queue.append((Job(op, args), future))
        if not lane.planned and (not lane.flying or len(lane.queue) >= SPLIT):
            if lane.alone and not lane.flying:
                self._start(lane)
            elif lane.flying < ABREAST:  # take along who else comes in this tick
                lane.planned = True
                self._loop.call_soon(self._start, lane)
        return future

    def _start(self, lane: _Lane) -> None:
        lane.planned = False
        while lane.queue and lane.flying < ABREAST:
            size = len(lane.queue)
            if lane.flying and size < SPLIT:
                return
            if not lane.flying and size >= 2 * SPLIT:
                size //= 2
            size = min(size, MAX_BATCH)
            calls, lane.queue = lane.queue[:size], lane.queue[size:]
            lane.alone = size == 1
            lane.flying += 1
            flow = self._engine.batch([job for job, _ in calls])
            self._advance(_Batch(lane, calls, flow, self._loop.time() + self._patience), None)

    def _advance(self, batch: _Batch, outcomes: list[Replies] | None) -> None:
        """Hand the flow what came and do what it wants next."""
        problem: Exception | None = None
        try:
            sends = batch.flow.send(outcomes)
        except StopIteration:
            pass
        except Exception as error:  # noqa: BLE001 - nobody may be left waiting
            problem = error
        else:
            self._dispatch(batch, sends)
            return
        for job, future in batch.calls:
            failure = job.error or problem
            if future.done():
                if failure is None:
                    self._give_back(job)
            elif failure is not None:
                future.set_exception(failure)
            else:
                future.set_result(job.result)
        lane = batch.lane
        lane.flying -= 1
        if lane.queue and not lane.planned:
            # Behind those just woken, so that what they ask for next goes along.
            lane.planned = True
            self._loop.call_soon(self._start, lane)
        if self._idle is not None and not self._busy:
            self._idle.set_result(None)
            self._idle = None

    def _give_back(self, job: Job) -> None:
        """Release what a call won that was cancelled meanwhile.

        Only here is it sure that the claim comes first: a release that the caller sends may
        overtake it, in a batch or on a connection that is made anew.
        """
        if job.method is CLAIM and job.method.changed(job):
            digest, _, owner, _ = job.args
            released = self._add(RELEASE, (digest, None, owner, job.result.fence))
            released.add_done_callback(lambda future: future.cancelled() or future.exception())

    @property
    def _busy(self) -> bool:
        return any(lane.flying or lane.planned or lane.queue for lane in self._lanes.values())

    # Connections

    def _dispatch(self, batch: _Batch, sends: Sequence[Send]) -> None:
        pipes: list[_Pipe | Exception] = []
        for send in sends:
            pipe = self._pipes.get((send.sentinel, send.address))
            if pipe is None:
                task = self._loop.create_task(self._connect(batch, sends))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                return
            pipes.append(pipe)
        self._send(batch, sends, pipes)

    async def _connect(self, batch: _Batch, sends: Sequence[Send]) -> None:
        """Open what is not open, then send."""
        try:
            if self._farewell is None:
                # Event loops end their asynchronous generators before they close: the one moment
                # at which connections that nobody closed can still be closed.
                self._farewell = self._until_the_end()
                await anext(self._farewell)
            pipes = await asyncio.gather(*(self._pipe(batch, send) for send in sends))
        except BaseException:  # the loop is being shut down
            for _, future in batch.calls:
                future.cancel()
            raise
        self._send(batch, sends, pipes)

    def _until(self, batch: _Batch, send: Send) -> float:
        """When a send must be answered."""
        return batch.deadline - (1 - send.share) * max(0.0, batch.deadline - self._loop.time())

    async def _pipe(self, batch: _Batch, send: Send) -> _Pipe | Exception:
        place = (send.sentinel, send.address)
        try:
            async with (
                asyncio.timeout_at(self._until(batch, send)),
                self._opening.setdefault(place, asyncio.Lock()),
            ):
                return self._pipes.get(place) or await self._open(send, place)
        except self._slow:
            return UnsentError(f"no connection within {self._patience:g} s")
        except self._broken as error:
            return error

    async def _open(self, send: Send, place: _Place) -> _Pipe:
        connection = self._target.connection(send.address, send.sentinel, None)
        try:
            await connection.connect()
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

    def _send(
        self, batch: _Batch, sends: Sequence[Send], pipes: Sequence[_Pipe | Exception]
    ) -> None:
        outcomes: list[Any] = [None] * len(sends)
        due = len(sends)

        def done(number: int, replies: Replies) -> None:
            nonlocal due
            outcomes[number] = replies
            due -= 1
            if not due:
                self._advance(batch, outcomes)

        for number, (send, pipe) in enumerate(zip(sends, pipes, strict=True)):
            if isinstance(pipe, Exception):
                done(number, pipe)
            else:
                until = batch.deadline if send.share == 1 else self._until(batch, send)
                if self._watch_at is None or until < self._watch_at:
                    self._watch_at = until
                    self._loop.call_at(until, self._watch)
                pipe.send(send, partial(done, number), until)

    def _watch(self) -> None:
        """One timer for all: it gives up the servers whose replies are overdue."""
        now = self._loop.time() + 0.001  # timers may fire a tick of the clock early
        if self._watch_at is None or now < self._watch_at:
            return  # another look is due, earlier or later than this one
        self._watch_at = None
        for pipe in list(self._pipes.values()):
            if pipe.deadline is not None and pipe.deadline <= now:
                pipe.fail(TimeoutError(f"no answer within {self._patience:g} s"))
        due = [pipe.deadline for pipe in self._pipes.values() if pipe.deadline is not None]
        if due:
            self._watch_at = min(due)
            self._loop.call_at(self._watch_at, self._watch)

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
