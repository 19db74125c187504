"""A call that is cancelled at each step of the event loop in turn, under many orders of tasks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.core.seeded_loop import SeededLoop, virtual_plans

from oncekey import AsyncMemoryStore, AsyncOnce, AsyncSQLiteStore
from oncekey.abc import AsyncStore
from oncekey.models import Key, Scope, State

SEEDS = 8
LEASE = 30.0


class CancellingLoop(SeededLoop):
    """Cancels one task after so many steps."""

    def __init__(self, seed: int, after: int) -> None:
        super().__init__(seed)
        self._left = after
        self.victim: asyncio.Task[Any] | None = None
        self.struck = False

    def _step(self) -> None:
        if self.victim is not None and not self.struck:
            if self._left == 0:
                self.struck = self.victim.cancel()
            self._left -= 1
        super()._step()


class GivingWay(AsyncMemoryStore):
    """A store in memory that waits before and after each call, as one on a server does."""

    never_waits = False

    async def claim(self, *args: Any) -> Any:
        return await self._between(super().claim(*args))

    async def complete(self, *args: Any) -> Any:
        return await self._between(super().complete(*args))

    async def release(self, *args: Any) -> Any:
        return await self._between(super().release(*args))

    async def renew(self, *args: Any) -> Any:
        return await self._between(super().renew(*args))

    @staticmethod
    async def _between(call: Any) -> Any:
        try:
            await asyncio.sleep(0)
        except BaseException:
            call.close()
            raise
        found = await call
        await asyncio.sleep(0)
        return found


def _run(make: Any, seed: int, after: int) -> bool:
    """One victim and two copies. Gives whether the victim was still there to be cancelled."""
    loop = CancellingLoop(seed, after)
    running, overlaps, runs = 0, 0, 0

    async def main() -> None:
        nonlocal running, overlaps, runs
        store: AsyncStore = make(loop)
        once = AsyncOnce(store, scope="await", lease=LEASE, wait=100)

        @once(key="name", name=None)
        async def work(name: str) -> int:
            nonlocal running, overlaps, runs
            running += 1
            overlaps += running > 1
            try:
                await asyncio.sleep(0)
                runs += 1
                mine = runs
                await asyncio.sleep(0)
                return mine
            finally:
                running -= 1

        victim = loop.create_task(work("k"))
        copies = [loop.create_task(work("k")) for _ in range(2)]
        loop.victim = victim
        told = await asyncio.gather(victim, *copies, return_exceptions=True)
        where = f"seed {seed}, cancelled after {after} steps: {told}"
        if not isinstance(told[0], asyncio.CancelledError):
            assert told[0] == told[1], where
        assert isinstance(told[1], int), where  # copies get an answer, all the same one
        assert told[1] == told[2], where
        assert not overlaps, where
        await asyncio.wait([loop.create_task(asyncio.sleep(1))])  # what was left behind ends
        record = await store.read(Key(Scope("once", "await"), "k"))
        assert record is not None, where
        assert record.state is State.COMPLETED, where
        assert await work("k") == told[1], where  # the key is neither lost nor stuck
        await store.aclose()

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    assert not loop.errors, loop.errors
    return loop.struck


def _every_step(make: Any, seeds: int) -> int:
    """Cancel at every step until the call is over; gives how many there were."""
    steps = 0
    for seed in range(seeds):
        after = 0
        while _run(make, seed, after):
            after += 1
        steps += after
    return steps


def test_a_call_may_be_cancelled_at_every_await(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a store that gives way: copies get one answer, and the key is never lost."""
    virtual_plans(monkeypatch)
    assert _every_step(lambda loop: GivingWay(clock=loop.epoch), SEEDS) > 10 * SEEDS


def test_a_call_on_sqlite_may_be_cancelled_at_every_await(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same with commits in the loop."""
    virtual_plans(monkeypatch)
    numbers = iter(range(10**6))

    def make(loop: SeededLoop) -> AsyncStore:
        path = tmp_path / f"{next(numbers)}.db"
        return AsyncSQLiteStore(path, commit="inline", clock=loop.epoch)

    assert _every_step(make, 2) > 10
