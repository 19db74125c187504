"""The calls of one event loop, and the connections that they share.

Driven by what arrives, not by tasks: a call that comes alone is written at once and its future is
resolved by the bytes of its reply. Calls to one server that come while others are under way, or in
the same tick, go together; calls to different servers never wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any, Final

from oncekey.stores._batching import MAX_BATCH, Job
from oncekey.stores.redis.address import Target
from oncekey.stores.redis.batch import Batch, Batches
from oncekey.stores.redis.errors import UnsentError, driver
from oncekey.stores.redis.operations import CLAIM, RELEASE, Op
from oncekey.stores.redis.topology import Address, Asks, Replies, Send
from oncekey.stores.redis.wire import Wire, open_wire

__all__ = ["LoopLanes"]

ABREAST: Final = 2  # batches of a lane at once: the server works on one while we unpack the other
SPLIT: Final = 32  # calls that are worth a batch of their own


class _Call(Job):
    """A call that somebody in this loop waits for."""

    __slots__ = ("future",)

    def __init__(self, op: Op, args: tuple[Any, ...], future: asyncio.Future[Any]) -> None:
        self.method = op
        self.args = args
        self.error = None
        self.future = future


class _Lane:
    """The calls to one server."""

    __slots__ = ("alone", "flying", "planned", "queue")

    def __init__(self) -> None:
        self.queue: list[_Call] = []
        self.flying = 0  # batches under way
        self.planned = False  # whether _start is about to be called
        self.alone = True  # whether the last batch was one call


class _Batch(Batch):
    """Calls under way, and the replies that are there already."""

    flow: Asks
    outcomes: Any = None
    due = 0  # replies that are to come

    def __init__(self, lane: _Lane, calls: list[_Call], deadline: float) -> None:
        self.jobs = [*calls]
        self.calls = calls
        self.lane = lane
        self.deadline = deadline


class LoopLanes:
    """Sends the calls of one event loop and hands out the replies."""

    def __init__(self, target: Target, batches: Batches, patience: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._target = target
        self._batches = batches
        self._patience = patience
        self._wires: dict[Address, Wire] = {}
        self._opening: dict[Address, asyncio.Lock] = {}
        self._lanes: dict[Address | None, _Lane] = {None: _Lane()}
        self._watch_at: float | None = None  # when the timer looks at what is under way
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle: asyncio.Future[None] | None = None
        self._farewell: AsyncGenerator[None, None] | None = None
        self._closing: list[Callable[[], Awaitable[None]]] = [self._close_wires]
        exceptions = driver().exceptions
        self._slow = (exceptions.TimeoutError, TimeoutError)
        self._broken = (exceptions.RedisError, OSError, TimeoutError)

    def before_close(self, action: Callable[[], Awaitable[None]]) -> None:
        """Do ``action`` when the lanes are closed, or their loop ends."""
        self._closing.insert(0, action)

    # Calls

    def submit(self, op: Op, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Run a call in the next batch of its lane; the future is done when that is."""
        future: asyncio.Future[Any] = self._loop.create_future()
        name = self._batches.lane(args[0]) if self._batches.topology.sharded else None
        lane = self._lanes.get(name) or self._lanes.setdefault(name, _Lane())
        lane.queue.append(_Call(op, args, future))
        if not lane.planned and (not lane.flying or len(lane.queue) >= SPLIT):
            if lane.alone and not lane.flying:
                self._start(lane)
            elif lane.flying < ABREAST:  # take along who else comes in this tick
                lane.planned = True
                self._loop.call_soon(self._start, lane)
        return future

    def _start(self, lane: _Lane) -> None:
        """Send what is queued."""
        lane.planned = False
        while lane.queue and lane.flying < ABREAST:
            size = len(lane.queue)
            if lane.flying and size < SPLIT:
                return
            if size >= 2 * SPLIT:
                size = min(size if lane.flying else size // 2, MAX_BATCH)
            calls, lane.queue = lane.queue[:size], lane.queue[size:]
            lane.alone = size == 1
            lane.flying += 1
            until = self._loop.time() + self._patience
            if size > 1 or not self._sent_alone(lane, calls, until):
                batch = _Batch(lane, calls, until)
                batch.flow = self._batches.run(batch)
                self._advance(batch)

    def _sent_alone(self, lane: _Lane, calls: list[_Call], until: float) -> bool:
        """Send one call by itself. False: there is more to it than that."""
        send = self._batches.alone(calls[0])
        wire = None if send is None else self._wires.get(send.address)
        if send is None or wire is None:
            return False
        if self._watch_at is None or until < self._watch_at:
            self._watch_from(until)
        wire.send(send, partial(self._answered, lane, calls, until, send), until)
        return True

    def _answered(
        self, lane: _Lane, calls: list[_Call], until: float, send: Send, replies: Replies
    ) -> None:
        """Take the reply to a call that was sent by itself."""
        try:
            took = self._batches.took(calls[0], replies)
        except Exception as error:  # noqa: BLE001 - nobody may be left waiting
            self._finish(lane, calls, error)
            return
        if took:
            self._finish(lane, calls, None)
            return
        batch = _Batch(lane, calls, until)
        batch.flow = self._batches.go_on(batch, send, replies)
        self._advance(batch)

    def _advance(self, batch: _Batch, number: int = 0, replies: Replies | None = None) -> None:
        """Take replies; when all are there, hand them to the flow and send what it wants next."""
        if batch.due:
            batch.outcomes[number] = replies
            batch.due -= 1
            if batch.due:
                return
        try:
            sends = batch.flow.send(batch.outcomes)
        except StopIteration:
            self._finish(batch.lane, batch.calls, None)
            return
        except Exception as error:  # noqa: BLE001 - nobody may be left waiting
            self._finish(batch.lane, batch.calls, error)
            return
        batch.outcomes = [None] * len(sends)
        batch.due = len(sends)
        for number, send in enumerate(sends):
            wire = self._wires.get(send.address)
            if wire is not None:
                until = batch.deadline if send.share == 1 else self._until(batch, send)
                if self._watch_at is None or until < self._watch_at:
                    self._watch_from(until)
                wire.send(send, partial(self._advance, batch, number), until)
            else:
                task = self._loop.create_task(self._connect(batch, number, send))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _finish(self, lane: _Lane, calls: list[_Call], problem: Exception | None) -> None:
        """Hand out what came of calls that went together, and plan the next."""
        for call in calls:
            failure = call.error or problem
            if call.future.done():
                if failure is None:
                    self._give_back(call)
            elif failure is not None:
                call.future.set_exception(failure)
            else:
                call.future.set_result(call.result)
        lane.flying -= 1
        if lane.queue and not lane.planned:
            # Behind those just woken, so that what they ask for next goes along.
            lane.planned = True
            self._loop.call_soon(self._start, lane)
        if self._idle is not None and not self._busy:
            self._idle.set_result(None)
            self._idle = None

    def _give_back(self, call: _Call) -> None:
        """Release what a call won that was cancelled meanwhile.

        Only here is it sure that the claim comes first: a release that the caller sends may
        overtake it, in a batch or on a connection that is made anew.
        """
        if call.method is CLAIM and CLAIM.changed(call):
            digest, _, owner, _ = call.args
            released = self.submit(RELEASE, (digest, None, owner, call.result.fence))
            released.add_done_callback(lambda future: future.cancelled() or future.exception())

    @property
    def _busy(self) -> bool:
        return any(lane.flying or lane.planned or lane.queue for lane in self._lanes.values())

    # Connections

    async def _connect(self, batch: _Batch, number: int, send: Send) -> None:
        """Open what is not open, then send."""
        try:
            if self._farewell is None:
                # Event loops end their asynchronous generators before they close: the one moment
                # at which connections that nobody closed can still be closed.
                self._farewell = self._until_the_end()
                await anext(self._farewell)
            opening = self._opening.setdefault(send.address, asyncio.Lock())
            async with asyncio.timeout_at(self._until(batch, send)), opening:
                wire = self._wires.get(send.address)
                if wire is None:
                    connection = self._target.connection(send.address, send.sentinel, None)
                    wire = self._wires[send.address] = await open_wire(connection, self._forget)
        except self._slow:
            self._advance(batch, number, UnsentError(f"no connection within {self._patience:g} s"))
        except self._broken as error:
            self._advance(batch, number, error)
        except BaseException:  # the loop is being shut down
            for call in batch.calls:
                call.future.cancel()
            raise
        else:
            until = self._until(batch, send)
            self._watch_from(until)
            wire.send(send, partial(self._advance, batch, number), until)

    def _forget(self, wire: Wire) -> None:
        for address, known in list(self._wires.items()):
            if known is wire:
                del self._wires[address]

    def _until(self, batch: _Batch, send: Send) -> float:
        """When a send must be answered."""
        return batch.deadline - (1 - send.share) * max(0.0, batch.deadline - self._loop.time())

    def _watch_from(self, until: float) -> None:
        if self._watch_at is None or until < self._watch_at:
            self._watch_at = until
            self._loop.call_at(until, self._watch)

    def _watch(self) -> None:
        """One timer for all: it gives up the servers whose replies are overdue."""
        now = self._loop.time() + 0.001  # timers may fire a tick of the clock early
        if self._watch_at is None or now < self._watch_at:
            return  # another look is due, earlier or later than this one
        self._watch_at = None
        for wire in list(self._wires.values()):
            if wire.deadline is not None and wire.deadline <= now:
                wire.fail(TimeoutError(f"no answer within {self._patience:g} s"))
        due = [wire.deadline for wire in self._wires.values() if wire.deadline is not None]
        if due:
            self._watch_from(min(due))

    # The end

    async def _until_the_end(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            for action in self._closing:
                await action()

    async def _close_wires(self) -> None:
        wires = list(self._wires.values())
        for wire in wires:
            wire.close()
        if wires:
            await asyncio.wait([wire.closed for wire in wires], timeout=self._target.timeout)

    async def aclose(self) -> None:
        """Finish what is queued, then close the connections."""
        while self._busy:
            self._idle = self._idle or self._loop.create_future()
            await asyncio.shield(self._idle)
        farewell, self._farewell = self._farewell, None
        if farewell is not None:
            await farewell.aclose()
