"""What becomes of a claim when its caller is cancelled, interrupted or fails."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.core.seeded_loop import SeededLoop, run_seeded, virtual_plans

from oncekey import (
    AsyncOnce,
    AsyncSQLiteStore,
    IdempotencyInFlightError,
    MemoryBackend,
    MemoryStore,
    Once,
)
from oncekey.models import ClaimReply, Key, Scope, State, Terms
from oncekey.testing import ManualClock

KEY = Key(Scope("once", "cancel"), "k")


async def others_end() -> None:
    """Let every background task finish."""
    me = asyncio.current_task()
    while others := [task for task in asyncio.all_tasks() if task is not me]:
        await asyncio.wait(others)


async def state_of(store: Any) -> State | None:
    record = await store.read(KEY)
    return None if record is None else record.state


class Held(MemoryBackend):
    """A backend whose chosen method has done its work but keeps its reply until told."""

    def __init__(self, method: str, *, before: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()
        self.method = method
        self.before = before

    async def _hold(self, method: str, before: bool) -> None:
        if method == self.method and before == self.before:
            self.reached.set()
            await self.go_on.wait()

    async def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        await self._hold("claim", True)
        reply = await super().claim(key, owner, fingerprint, terms)
        await self._hold("claim", False)
        return reply

    async def complete(
        self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> bool:
        await self._hold("complete", True)
        held = await super().complete(key, owner, fence, answer, terms)
        await self._hold("complete", False)
        return held

    async def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        await self._hold("release", True)
        held = await super().release(key, owner, fence)
        await self._hold("release", False)
        return held


def counted(once: AsyncOnce, **options: Any) -> tuple[Callable[[str], Any], list[str]]:
    """A guarded function that only counts its runs."""
    runs: list[str] = []

    @once(key="name", name=None, **options)
    async def work(name: str) -> int:
        runs.append(name)
        return len(runs)

    return work, runs


# Cancelled while claiming


async def test_a_claim_cancelled_in_flight_is_given_back() -> None:
    """A caller cancelled before the reply came leaves no live record: the next call runs."""
    store = Held("claim")
    work, runs = counted(AsyncOnce(store, scope="cancel", wait=0))
    task = asyncio.create_task(work("k"))
    await store.reached.wait()
    assert await state_of(store) is State.PENDING
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await others_end()
    assert await state_of(store) is State.RELEASED
    store.go_on.set()
    assert await work("k") == 1
    assert runs == ["k"]


@pytest.mark.parametrize("enter", ["decorator", "guard"])
async def test_a_claim_cancelled_in_the_writers_queue_is_given_back(
    enter: str, tmp_path: Path
) -> None:
    """On SQLite a claim that is committed after its caller was cancelled is released after it."""
    path = tmp_path / "held.db"
    async with AsyncSQLiteStore(path) as store:
        once = AsyncOnce(store, scope="cancel", wait=0)
        work, runs = counted(once)

        async def call() -> Any:
            if enter == "decorator":
                return await work("k")
            async with once.guard("k"):
                runs.append("k")

        blocker = sqlite3.connect(path, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")  # the writer thread waits for this
        task = asyncio.create_task(call())
        await asyncio.sleep(0)  # the claim is in the writer's queue now
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await state_of(store) is None, "the claim must still be on its way"
        blocker.execute("ROLLBACK")
        blocker.close()
        await others_end()
        assert await state_of(store) is State.RELEASED
        assert runs == []
        await call()
        assert runs == ["k"]


async def test_a_cancelled_waiter_leaves_the_holder_alone() -> None:
    """Cancelling a duplicate that waits takes nothing from the call that runs."""
    store = MemoryBackend()
    inside, finish = asyncio.Event(), asyncio.Event()

    @AsyncOnce(store, scope="cancel")(key="name", name=None)
    async def work(name: str) -> str:
        inside.set()
        await finish.wait()
        return "first"

    holder = asyncio.create_task(work("k"))
    await inside.wait()
    waiter = asyncio.create_task(work("k"))
    for _ in range(5):
        await asyncio.sleep(0)  # it has claimed, in vain, and waits
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await asyncio.sleep(0)
    assert await state_of(store) is State.PENDING
    finish.set()
    assert await holder == "first"
    assert await state_of(store) is State.COMPLETED


def test_an_interrupted_sync_claim_is_given_back() -> None:
    """Ctrl-C while the store claims gives the claim back."""

    class Interrupted(MemoryStore):
        def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
            super().claim(key, owner, fingerprint, terms)
            raise KeyboardInterrupt

    store = Interrupted()
    work = Once(store, scope="cancel")(key="name", name=None)(lambda name: 1)
    with pytest.raises(KeyboardInterrupt):
        work("k")
    record = store.read(KEY)
    assert record is not None
    assert record.state is State.RELEASED


# Cancelled while completing


@pytest.mark.parametrize("before", [True, False], ids=["before-the-commit", "after-the-commit"])
@pytest.mark.parametrize("times", [1, 3])
async def test_a_task_cancelled_while_completing_completes_first(before: bool, times: int) -> None:
    """The outcome is recorded whatever happens to the task, which then is cancelled."""
    store = Held("complete", before=before)
    work, runs = counted(AsyncOnce(store, scope="cancel", wait=0))
    task = asyncio.create_task(work("k"))
    await store.reached.wait()
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done(), "it must not give up before the outcome is recorded"
    store.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert await state_of(store) is State.COMPLETED
    assert await work("k") == 1
    assert runs == ["k"], "a retry replays, it does not run"


async def test_a_task_cancelled_while_releasing_releases_first() -> None:
    """A failed handler's key is given back even if the task is cancelled meanwhile."""
    store = Held("release", before=True)

    @AsyncOnce(store, scope="cancel")(key="name", name=None)
    async def work(name: str) -> int:
        raise ValueError(name)

    task = asyncio.create_task(work("k"))
    await store.reached.wait()
    task.cancel()
    await asyncio.sleep(0)
    store.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await state_of(store) is State.RELEASED


# Cancelled in the handler


@pytest.fixture(params=["decorator", "guard"])
def hang(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A guarded call that never ends by itself, in both forms."""

    def make(once: AsyncOnce, inside: asyncio.Event, **options: Any) -> Callable[[], Any]:
        @once(key="name", name=None, **options)
        async def work(name: str) -> None:
            inside.set()
            await asyncio.get_running_loop().create_future()

        async def block() -> None:
            async with once.guard("k", **options):
                inside.set()
                await asyncio.get_running_loop().create_future()

        return (lambda: work("k")) if request.param == "decorator" else block

    return make


async def test_a_cancelled_handler_keeps_its_lease(hang: Callable[..., Any]) -> None:
    """What a cancelled handler did is unknown: a copy is told how long the lease still runs."""
    clock = ManualClock()
    store = MemoryBackend(clock=clock)
    once = AsyncOnce(store, scope="cancel", lease=30, wait=0)
    inside = asyncio.Event()
    call = hang(once, inside)
    task = asyncio.create_task(call())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await others_end()
    assert await state_of(store) is State.PENDING
    clock.advance(12)
    with pytest.raises(IdempotencyInFlightError) as told:
        await call()
    assert told.value.retry_after == 18
    clock.advance(18)
    inside.clear()
    task = asyncio.create_task(call())
    await inside.wait()  # the lease is over: taken over
    record = await store.read(KEY)
    assert record is not None
    assert record.attempts == 2
    task.cancel()
    await asyncio.wait([task])


async def test_a_retry_safe_handler_releases_at_once(hang: Callable[..., Any]) -> None:
    """Declared retry-safe, a cancelled handler's key is free as soon as the task is."""
    store = MemoryBackend()
    once = AsyncOnce(store, scope="cancel", wait=0)
    inside = asyncio.Event()
    task = asyncio.create_task(hang(once, inside, retry_safe=True)())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await state_of(store) is State.RELEASED


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("form", ["decorator", "guard"])
def test_an_interrupted_sync_handler_keeps_its_lease(
    interrupt: type[BaseException], form: str
) -> None:
    """Ctrl-C halfway leaves the outcome unknown; declared retry-safe, the key is free."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    once = Once(store, scope="cancel", lease=30, wait=0)

    def call(**options: Any) -> None:
        if form == "decorator":

            @once(key="name", name=None, **options)
            def work(name: str) -> None:
                raise interrupt

            work("k")
        else:
            with once.guard("k", **options):
                raise interrupt

    with pytest.raises(interrupt):
        call()
    record = store.read(KEY)
    assert record is not None
    assert record.state is State.PENDING
    clock.advance(29.5)
    with pytest.raises(IdempotencyInFlightError) as told:
        call()
    assert told.value.retry_after == 1
    clock.advance(1)
    with pytest.raises(interrupt):
        call(retry_safe=True)
    record = store.read(KEY)
    assert record is not None
    assert (record.state, record.attempts) == (State.RELEASED, 2)


# Failures


def test_a_waiter_takes_over_when_the_winner_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception frees the key at once, and one waiting copy runs; the rest get its answer."""
    virtual_plans(monkeypatch)

    async def main(loop: SeededLoop) -> None:
        store = MemoryBackend(clock=loop.epoch)
        runs: list[int] = []

        @AsyncOnce(store, scope="cancel", lease=30, wait=60)(key="name", name=None)
        async def work(name: str) -> int:
            runs.append(1)
            if len(runs) == 1:
                await asyncio.sleep(7)
                raise ValueError("the first fails")
            return len(runs)

        winner = loop.create_task(work("k"))
        await asyncio.sleep(1)
        waiters = [loop.create_task(work("k")) for _ in range(5)]
        with pytest.raises(ValueError, match="the first fails"):
            await winner
        assert await asyncio.gather(*waiters) == [2] * 5
        assert loop.time() == 7, "the waiters are woken; neither a lease nor a look is waited for"
        assert len(runs) == 2
        record = await store.read(KEY)
        assert record is not None
        assert (record.state, record.attempts) == (State.COMPLETED, 2)

    for seed in range(20):
        run_seeded(seed, main)


def test_a_waiter_wakes_with_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting copy has the answer in the moment in which it is recorded."""
    virtual_plans(monkeypatch)

    async def main(loop: SeededLoop) -> None:
        work, _, runs = guarded_sleep(loop, 10.123)
        holder = loop.create_task(work("k"))
        await asyncio.sleep(1)
        assert await work("k") == await holder == "run 1"
        assert loop.time() == 10.123
        assert runs == ["k"]

    for seed in range(20):
        run_seeded(seed, main)


def test_a_waiting_thread_takes_over_when_the_winner_fails() -> None:
    """The same between threads."""
    inside, waiting = threading.Event(), threading.Event()

    class Watched(MemoryStore):
        def wait(self, key: Key, seconds: float) -> None:
            waiting.set()
            super().wait(key, seconds)

    store = Watched()
    runs: list[int] = []

    @Once(store, scope="cancel", lease=600, wait=60)(key="name", name=None)
    def work(name: str) -> int:
        runs.append(1)
        if len(runs) == 1:
            inside.set()
            assert waiting.wait(60)
            raise ValueError("the first fails")
        return len(runs)

    answers: list[int] = []
    errors: list[Exception] = []

    def first() -> None:
        try:
            work("k")
        except ValueError as error:
            errors.append(error)

    threads = [threading.Thread(target=first)]
    threads[0].start()
    assert inside.wait(60)
    threads.append(threading.Thread(target=lambda: answers.append(work("k"))))
    threads[1].start()
    for thread in threads:
        thread.join()
    assert (answers, len(errors), len(runs)) == ([2], 1, 2)


# asyncio's own cancellers, on virtual time


def guarded_sleep(loop: SeededLoop, seconds: float, **options: Any) -> tuple[Any, Any, list[str]]:
    store = MemoryBackend(clock=loop.epoch)
    runs: list[str] = []

    @AsyncOnce(store, scope="cancel", lease=30, **options)(key="name", name=None)
    async def work(name: str) -> str:
        runs.append(name)
        if len(runs) == 1:
            await asyncio.sleep(seconds)
        return f"run {len(runs)}"

    return work, store, runs


def test_a_timeout_around_a_call_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio.timeout ends the call with TimeoutError; the lease decides when the next one runs."""
    virtual_plans(monkeypatch)

    async def main(loop: SeededLoop) -> None:
        work, store, _ = guarded_sleep(loop, 10, wait=60)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await work("k")
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        assert await state_of(store) is State.PENDING
        assert await work("k") == "run 2"
        assert loop.time() >= 30, "taken over only when the lease was over"

    for seed in range(20):
        run_seeded(seed, main)


def test_a_timeout_while_completing_keeps_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout that strikes during the completion is raised after it; a retry replays."""
    virtual_plans(monkeypatch)

    class SlowToComplete(MemoryBackend):
        async def complete(self, *args: Any) -> bool:
            await asyncio.sleep(10)
            return await super().complete(*args)

    async def main(loop: SeededLoop) -> None:
        store = SlowToComplete(clock=loop.epoch)
        work, runs = counted(AsyncOnce(store, scope="cancel", lease=30))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await work("k")
        assert loop.time() == 10
        assert await work("k") == 1
        assert runs == ["k"]

    for seed in range(20):
        run_seeded(seed, main)


def test_a_timeout_inside_a_handler_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler's own timeout is an exception like any other: the key is free at once."""
    virtual_plans(monkeypatch)

    async def main(loop: SeededLoop) -> None:
        store = MemoryBackend(clock=loop.epoch)

        @AsyncOnce(store, scope="cancel", lease=30)(key="name", name=None)
        async def work(name: str) -> None:
            async with asyncio.timeout(5):
                await asyncio.sleep(10)

        with pytest.raises(TimeoutError):
            await work("k")
        assert await state_of(store) is State.RELEASED

    for seed in range(20):
        run_seeded(seed, main)


@pytest.mark.parametrize("retry_safe", [False, True])
def test_a_failing_sibling_cancels_the_call_in_a_task_group(
    retry_safe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a TaskGroup the sibling's error alone comes out; the key is kept unless retry-safe."""
    virtual_plans(monkeypatch)

    async def main(loop: SeededLoop) -> None:
        work, store, _ = guarded_sleep(loop, 10, retry_safe=retry_safe)

        async def sibling() -> None:
            await asyncio.sleep(5)
            raise LookupError("sibling")

        async def both() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(work("k"))
                group.create_task(sibling())

        with pytest.raises(ExceptionGroup) as caught:
            await both()
        assert [type(error) for error in caught.value.exceptions] == [LookupError]
        expected = State.RELEASED if retry_safe else State.PENDING
        assert await state_of(store) is expected

    for seed in range(20):
        run_seeded(seed, main)


def test_copies_in_a_task_group_get_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of one call in a TaskGroup wait for the one that runs."""
    virtual_plans(monkeypatch)

    async def main(loop: SeededLoop) -> None:
        work, _, runs = guarded_sleep(loop, 10)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work("k")) for _ in range(4)]
        assert [task.result() for task in tasks] == ["run 1"] * 4
        assert runs == ["k"]

    for seed in range(20):
        run_seeded(seed, main)


async def test_a_closed_coroutine_closes_quietly() -> None:
    """Throwing a running call away, as a dying loop does, is neither an error nor a warning."""
    store = MemoryBackend()
    once = AsyncOnce(store, scope="cancel")

    @once(key="name", name=None)
    async def work(name: str) -> None:
        await asyncio.sleep(0)

    call: Any = work("k")
    call.send(None)  # it is inside the handler now
    call.close()
    assert await state_of(store) is State.PENDING
