"""What becomes of a wrapped handler whose caller is cancelled: ``on_cancel``."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.core.seeded_loop import SeededLoop, run_seeded, virtual_plans

from oncekey import (
    AsyncSQLiteStore,
    ClaimLostError,
    IdempotencyInFlightError,
    IdempotencyStore,
    MemoryBackend,
    PolicyError,
    ToolContext,
)
from oncekey.models import Key, Scope, State
from oncekey.testing import ManualClock

ALICE = ToolContext("alice")
REQUEST = {"idempotency_key": "key-0123456789abcdef"}
KEY = Key(Scope("request", "alice"), REQUEST["idempotency_key"])
VAR: contextvars.ContextVar[str] = contextvars.ContextVar("VAR", default="none")


@pytest.fixture(params=["memory", "sqlite"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    if request.param == "memory":
        yield MemoryBackend()
        return
    async with AsyncSQLiteStore(str(tmp_path / "cancel.db")) as sqlite:
        yield sqlite


class Handler:
    """A wrapped handler that waits inside until it is let go."""

    def __init__(self, store: IdempotencyStore, **options: Any) -> None:
        self.inside, self.gate = asyncio.Event(), asyncio.Event()
        self.runs = 0
        self.error: Exception | None = None

        async def create(params: Any, context: Any = None) -> dict[str, int]:
            self.runs += 1
            self.inside.set()
            await self.gate.wait()
            if self.error is not None:
                raise self.error
            return {"n": self.runs}

        self.call: Callable[..., Any] = store.wrap(**options)(create)

    async def cancelled(self) -> None:
        """A call that is cancelled while the handler is inside."""
        task = asyncio.create_task(self.call(REQUEST, ALICE))
        await self.inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 has no eager tasks")
async def test_a_handler_that_never_waits_takes_no_turn_of_the_loop() -> None:
    """It runs in a task of its own all the same, and what it sets is seen by its caller."""
    seen: list[Any] = []

    @IdempotencyStore(MemoryBackend()).wrap
    async def create(params: Any, context: Any = None) -> dict[str, int]:
        seen.append(asyncio.current_task())
        VAR.set("handler")
        return {"n": 1}

    call = create(REQUEST, ALICE)
    with pytest.raises(StopIteration) as ended:
        call.send(None)
    assert ended.value.value == {"n": 1}
    assert (VAR.get(), seen[0] is asyncio.current_task()) == ("handler", False)


async def test_a_cancelled_call_finishes_and_its_retry_replays(backend: Any) -> None:
    """The caller is gone at once; the handler ends once, and the retry gets its answer."""
    handler = Handler(IdempotencyStore(backend))
    await handler.cancelled()
    retry = asyncio.create_task(handler.call(REQUEST, ALICE))
    await asyncio.sleep(0)
    handler.gate.set()
    assert await retry == {"n": 1}
    assert await handler.call(REQUEST, ALICE) == {"n": 1}
    assert handler.runs == 1


async def test_a_copy_is_told_that_a_cancelled_call_is_in_flight(backend: Any) -> None:
    """Without waiting, a retry hears that the first call still runs, then gets its answer."""
    store = IdempotencyStore(backend, on_in_flight="reject")
    handler = Handler(store)
    await handler.cancelled()
    with pytest.raises(IdempotencyInFlightError):
        await handler.call(REQUEST, ALICE)
    handler.gate.set()
    assert await store.drain() == 0
    assert await handler.call(REQUEST, ALICE) == {"n": 1}


async def test_a_handler_that_fails_after_its_caller_has_gone_frees_the_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody gets the error, so that it is logged; a retry runs at once."""
    store = IdempotencyStore(MemoryBackend(), on_in_flight="reject")
    handler = Handler(store)
    await handler.cancelled()
    handler.error = RuntimeError("down")
    handler.gate.set()
    await store.drain()
    assert "create failed after its caller had gone" in caplog.text
    assert REQUEST["idempotency_key"] not in caplog.text
    handler.error = None
    assert await handler.call(REQUEST, ALICE) == {"n": 2}


async def test_lease_cancels_the_handler_and_holds_the_key() -> None:
    """As before: what it did is unknown, so a copy hears how long the lease still runs."""
    clock = ManualClock()
    store = IdempotencyStore(MemoryBackend(clock=clock), on_cancel="lease", on_in_flight="reject")
    handler = Handler(store)
    await handler.cancelled()
    clock.advance(12)
    with pytest.raises(IdempotencyInFlightError) as told:
        await handler.call(REQUEST, ALICE)
    assert told.value.retry_after == 18
    assert await store.drain() == 0


@pytest.mark.parametrize("options", [{"on_cancel": "release"}, {"read_only": True}])
async def test_release_cancels_the_handler_and_frees_the_key(options: dict[str, Any]) -> None:
    """Said of the handler, or by its reading only: the next call runs at once."""
    store = IdempotencyStore(MemoryBackend(), on_in_flight="reject")
    handler = Handler(store, **options)
    await handler.cancelled()
    handler.gate.set()
    assert await handler.call(REQUEST, ALICE) == {"n": 2}


async def test_a_transaction_is_rolled_back_whatever_the_store_says(tmp_path: Path) -> None:
    """A cancelled transactional handler did nothing, so that the next call runs at once."""
    async with AsyncSQLiteStore(str(tmp_path / "tx.db")) as backend:
        store = IdempotencyStore(backend)
        handler = Handler(store, transactional=True)
        await handler.cancelled()
        handler.gate.set()
        assert await handler.call(REQUEST, ALICE) == {"n": 2}
        with pytest.raises(PolicyError, match="rolled back"):
            store.wrap(transactional=True, on_cancel="finish")


async def test_a_call_inside_a_transaction_ends_with_it(tmp_path: Path) -> None:
    """What the caller lends ends with the caller, and so does a handler that works on it."""
    async with AsyncSQLiteStore(str(tmp_path / "tx.db")) as backend:
        inner = Handler(IdempotencyStore(MemoryBackend(), on_in_flight="reject"))
        outer = IdempotencyStore(backend)

        @outer.wrap(transactional=True)
        async def order(params: Any, context: Any = None) -> Any:
            return await inner.call(params, context)

        task = asyncio.create_task(order(REQUEST, ALICE))
        await inner.inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        inner.gate.set()
        with pytest.raises(IdempotencyInFlightError):
            await inner.call(REQUEST, ALICE)
        assert inner.runs == 1


def test_a_timeout_is_told_at_once_and_the_handler_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """asyncio.timeout ends the wait in its time; the retry replays when the handler is done."""
    virtual_plans(monkeypatch)

    async def main(loop: SeededLoop) -> None:
        store = IdempotencyStore(MemoryBackend(clock=loop.epoch))
        runs: list[int] = []

        @store.wrap
        async def create(params: Any, context: Any = None) -> int:
            runs.append(1)
            await asyncio.sleep(40)  # longer than the lease, which is renewed meanwhile
            return len(runs)

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await create(REQUEST, ALICE)
        assert loop.time() == 5
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        assert await create(REQUEST, ALICE) == 1
        assert 40 <= loop.time() < 42
        assert runs == [1]

    for seed in range(20):
        run_seeded(seed, main)


def test_a_handler_without_its_caller_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that hangs is cut off at ``in_flight_max_seconds``, with a warning; then the lease."""
    virtual_plans(monkeypatch)

    async def main(loop: SeededLoop) -> None:
        backend = MemoryBackend(clock=loop.epoch)
        store = IdempotencyStore(backend, lease_seconds=30, in_flight_max_seconds=100)
        ended: list[float] = []

        @store.wrap
        async def create(params: Any, context: Any = None) -> None:
            try:
                await loop.create_future()
            finally:
                ended.append(loop.time())

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await create(REQUEST, ALICE)
        assert await store.drain(50) == 1
        assert await store.drain(50) == 0
        assert ended == [100]
        record = await backend.read(KEY)
        assert record is not None
        assert record.state is State.PENDING

    run_seeded(1, main)
    assert "create was cut off after its caller had gone" in caplog.text


def test_a_loop_that_ends_cuts_the_handler_off(caplog: pytest.LogCaptureFixture) -> None:
    """With the loop its tasks end for real: the key is held until its lease is over."""
    clock = ManualClock()
    backend = MemoryBackend(clock=clock)

    async def first() -> None:
        handler = Handler(IdempotencyStore(backend))
        await handler.cancelled()

    async def second() -> None:
        handler = Handler(IdempotencyStore(backend, on_in_flight="reject"))
        handler.gate.set()
        with pytest.raises(IdempotencyInFlightError):
            await handler.call(REQUEST, ALICE)
        clock.advance(31)
        assert await handler.call(REQUEST, ALICE) == {"n": 1}

    with caplog.at_level(logging.WARNING, logger="oncekey"):
        asyncio.run(first())
    assert "create was cut off after its caller had gone" in caplog.text
    asyncio.run(second())


async def test_a_lost_claim_interrupts_the_handler_and_not_its_caller() -> None:
    """The task that runs the handler is cancelled; the caller gets ClaimLostError."""

    class Lost(MemoryBackend):
        async def renew(self, *args: Any) -> bool:
            return False

    store = IdempotencyStore(Lost(), lease_seconds=0.03, in_flight_max_seconds=1)
    handler = Handler(store)
    with pytest.raises(ClaimLostError):
        await handler.call(REQUEST, ALICE)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize("eager", [False, True])
async def test_the_loops_own_kind_of_task_is_used(eager: bool) -> None:
    """A task factory that knows nothing of contexts, or starts at once, does as well."""
    made: list[Any] = []

    def factory(loop: Any, work: Any, **options: Any) -> Any:
        made.append(work)
        return asyncio.Task(work, loop=loop, **options)

    eagerly = getattr(asyncio, "eager_task_factory", factory)
    loop = asyncio.get_running_loop()
    store = IdempotencyStore(MemoryBackend())
    handler = Handler(store)
    handler.gate.set()
    loop.set_task_factory(eagerly if eager else lambda loop, work: factory(loop, work))
    try:
        assert await handler.call(REQUEST, ALICE) == {"n": 1}
        assert await handler.call(REQUEST, ALICE) == {"n": 1}
    finally:
        loop.set_task_factory(None)
    assert eager or len(made) == 1


async def test_context_variables_go_in_and_come_out() -> None:
    """The handler sees what its caller has set, and the caller what the handler sets."""
    store = IdempotencyStore(MemoryBackend())
    seen: list[str] = []

    @store.wrap
    async def create(params: Any, context: Any = None) -> None:
        seen.append(VAR.get())
        VAR.set("of the handler")
        if params.get("fail"):
            raise LookupError("down")

    VAR.set("of the caller")
    await create(REQUEST, ALICE)
    assert (seen, VAR.get()) == (["of the caller"], "of the handler")
    VAR.set("again")
    with pytest.raises(LookupError):
        await create({"idempotency_key": "k-2", "fail": True}, ALICE)
    assert VAR.get() == "of the handler"


def test_unknown_words_are_refused() -> None:
    """A misspelt ``on_cancel`` is named, at the store and at the handler."""
    with pytest.raises(PolicyError, match="'finish', 'lease' or 'release'"):
        IdempotencyStore(MemoryBackend(), on_cancel="wait")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="'finish', 'lease' or 'release'"):
        IdempotencyStore(MemoryBackend()).wrap(on_cancel="wait")  # type: ignore[call-overload]
