"""A seeded event loop: the same seed gives the same interleaving, on virtual time.

Whatever is ready to run is picked at random, one callback at a time, so that every order that
tasks could meet in is reached by some seed. When nothing is ready the clock jumps to the next
timer: an hour of waiting costs nothing, and a machine under load changes nothing.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from oncekey._core.flows import Plan

__all__ = ["EPOCH", "DeadlockError", "SeededLoop", "run_seeded", "virtual_plans"]

T = TypeVar("T")
EPOCH = 1_700_000_000.0  # where a store's clock stands when the loop's stands at 0


class DeadlockError(RuntimeError):
    """Nothing is ready and no timer is set, but the main task is not done."""


class SeededLoop(asyncio.AbstractEventLoop):
    """As much of an event loop as tasks, futures, locks and timers need. No I/O, no threads."""

    def __init__(self, seed: int) -> None:
        self.errors: list[dict[str, Any]] = []
        self._random = random.Random(seed)
        self._now = 0.0
        self._ready: list[asyncio.Handle] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()
        self._closed = False
        self._running = False

    # Time

    def time(self) -> float:
        return self._now

    def epoch(self) -> float:
        """Virtual seconds since 1970, for a store's ``clock=``."""
        return EPOCH + self._now

    # What is to run

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Asked for by ``TimerHandle.cancel``; a cancelled timer is dropped when its time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, **options)

    # Running

    def _step(self) -> None:
        """Run one callback: any of those that are ready."""
        while self._timers and (self._timers[0][2].cancelled() or not self._ready):
            when, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled():
                self._now = max(self._now, when)
                self._ready.append(timer)
        while self._timers and self._timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(self._timers)[2])
        if not self._ready:
            raise DeadlockError("every task waits for something that can't happen")
        handle = self._ready.pop(self._random.randrange(len(self._ready)))
        if not handle.cancelled():
            handle._run()

    def run_until_complete(self, future: Any) -> Any:
        task = asyncio.ensure_future(future, loop=self)
        self._running = True
        asyncio._set_running_loop(self)
        try:
            while not task.done():
                self._step()
        finally:
            asyncio._set_running_loop(None)
            self._running = False
        return task.result()

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    async def shutdown_asyncgens(self) -> None:
        """Nothing is kept track of."""


async def _with_leftovers(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main``, then let what it left in the background finish."""
    try:
        return await main
    except GeneratorExit:
        main = None  # type: ignore[assignment] # thrown away with a loop that stood still
        raise
    finally:
        if main is not None:
            me = asyncio.current_task()
            while others := [task for task in asyncio.all_tasks() if task is not me]:
                await asyncio.wait(others)


def run_seeded(seed: int, main: Callable[[SeededLoop], Coroutine[Any, Any, T]]) -> T:
    """Run ``main(loop)`` and its background tasks to their end, in the order that ``seed`` gives.

    Jitter comes from the seed too. An exception that nobody took is a failure.
    """
    loop = SeededLoop(seed)
    state = random.getstate()
    random.seed(seed)
    try:
        result: T = loop.run_until_complete(_with_leftovers(main(loop)))
    finally:
        random.setstate(state)
        loop.close()
    assert not loop.errors, f"seed {seed}: {loop.errors}"
    return result


def virtual_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let guards that are made from now on read the running loop's clock, not the machine's."""
    real = Plan.of.__func__  # type: ignore[attr-defined]

    def of(cls: type[Plan], policy: Any) -> Plan:
        return replace(real(cls, policy), monotonic=lambda: asyncio.get_running_loop().time())

    monkeypatch.setattr(Plan, "of", classmethod(of))
