"""The breaker: what opens it, what closes it, and that nothing else does."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.resilience.conftest import TERMS, Away, key

from oncekey import AsyncOnce, MemoryStore, Once
from oncekey.errors import (
    IdempotencyConflictError,
    PolicyError,
    StoreCircuitOpenError,
    StoreConfigError,
    StoreTimeoutError,
    StoreUnavailableError,
    TransactionRefusedError,
)
from oncekey.instrument import Event, EventKind, subscribe
from oncekey.resilience import Breaker, BreakerState, resilient
from oncekey.testing import ManualClock

GONE = StoreUnavailableError("gone")


def opened_breaker(clock: ManualClock, **options: Any) -> Breaker:
    """A breaker that has just opened."""
    breaker = Breaker(failures=2, clock=clock, **options)
    for _ in range(2):
        breaker.failed(breaker.admit(), GONE)
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_it_opens_on_failures_in_a_row_only() -> None:
    """An answer between two failures starts the count anew."""
    breaker = Breaker(failures=2)
    breaker.failed(breaker.admit(), GONE)
    breaker.succeeded(breaker.admit())
    breaker.failed(breaker.admit(), GONE)
    assert breaker.state is BreakerState.CLOSED
    breaker.failed(breaker.admit(), GONE)
    assert breaker.state is BreakerState.OPEN


def test_time_alone_never_closes_it() -> None:
    """However long it was open, only answered calls close it, and as many as it needs."""
    clock = ManualClock(1000.0)
    breaker = opened_breaker(clock, retry_after=5, successes=2)
    with pytest.raises(StoreCircuitOpenError) as refused:
        breaker.admit()
    assert refused.value.retry_after == 5
    assert refused.value.retryable
    clock.advance(3600)
    assert breaker.state is BreakerState.OPEN
    first = breaker.admit()
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.succeeded(first)
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.succeeded(breaker.admit())
    assert breaker.state is BreakerState.CLOSED


def test_one_call_at_a_time_tries_the_store() -> None:
    """While a probe is under way all others are refused; when it fails the pause begins anew."""
    clock = ManualClock(1000.0)
    breaker = opened_breaker(clock, retry_after=5)
    clock.advance(5)
    probe = breaker.admit()
    with pytest.raises(StoreCircuitOpenError):
        breaker.admit()
    breaker.failed(probe, GONE)
    assert breaker.state is BreakerState.OPEN
    with pytest.raises(StoreCircuitOpenError):
        breaker.admit()
    clock.advance(5)
    breaker.admit()


def test_a_probe_that_was_cancelled_makes_room_for_the_next() -> None:
    """A cancelled call says nothing of the store, and a lost one holds nobody up for ever."""
    clock = ManualClock(1000.0)
    breaker = opened_breaker(clock)
    clock.advance(5)
    breaker.abandoned(breaker.admit())
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.admit()  # and never comes back
    clock.advance(61)
    breaker.admit()


def test_calls_from_before_a_change_are_not_counted() -> None:
    """A call that was sent before it opened can neither close it nor open it again."""
    clock = ManualClock(1000.0)
    breaker = Breaker(failures=1, successes=1, clock=clock)
    early, other = breaker.admit(), breaker.admit()
    breaker.failed(breaker.admit(), GONE)
    breaker.succeeded(early)
    assert breaker.state is BreakerState.OPEN
    clock.advance(5)
    breaker.succeeded(breaker.admit())
    assert breaker.state is BreakerState.CLOSED
    breaker.failed(other, GONE)
    assert breaker.state is BreakerState.CLOSED


def test_each_change_is_an_event() -> None:
    """The stream tells of each state once, and why it opened."""
    clock = ManualClock(1000.0)
    seen: list[Event] = []
    with subscribe(seen.append):
        breaker = opened_breaker(clock, successes=1)
        clock.advance(5)
        breaker.succeeded(breaker.admit())
    assert [(one.kind, one.state, one.error) for one in seen] == [
        (EventKind.BREAKER, "open", "StoreUnavailableError"),
        (EventKind.BREAKER, "half_open", ""),
        (EventKind.BREAKER, "closed", ""),
    ]


def test_threads_agree_on_who_probes() -> None:
    """Of many threads that come at once, exactly one may try the store."""
    clock = ManualClock(1000.0)
    breaker = opened_breaker(clock)
    clock.advance(5)
    together = threading.Barrier(16)

    def come() -> bool:
        together.wait()
        try:
            breaker.admit()
        except StoreCircuitOpenError:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(lambda _: come(), range(16))) == 1


def test_a_child_has_a_lock_of_its_own() -> None:
    """A fork while another thread has the breaker's lock leaves the child able to go on."""
    breaker = opened_breaker(ManualClock(1000.0))
    with breaker._lock:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                breaker.abandoned(0)
                code = 0
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_numbers_that_cannot_work_are_refused() -> None:
    """Each says what it must be."""
    for options in ({"failures": 0}, {"successes": 0}, {"retry_after": 0}):
        with pytest.raises(PolicyError):
            Breaker(**options)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="on_outage"):
        resilient(MemoryStore(), on_outage="opened")  # type: ignore[call-overload]
    with pytest.raises(PolicyError, match="journal"):
        resilient(MemoryStore(), on_outage="open")


def test_the_error_survives_a_process_pool() -> None:
    """It is pickled with its seconds."""
    error = pickle.loads(pickle.dumps(StoreCircuitOpenError("no", retry_after=7)))
    assert error.retry_after == 7


def test_an_open_breaker_fails_at_once(opened: Any, away: Away) -> None:
    """After failures in a row a call no longer waits for the store's deadline."""
    clock = ManualClock(1000.0)
    store = resilient(opened, breaker=Breaker(failures=2, successes=1, clock=clock))
    once = Once(store, wait=0)
    work = once(key="name", name="work")(lambda name: name)
    away.begin()
    with pytest.raises(StoreTimeoutError):
        work("a")
    with pytest.raises(StoreUnavailableError):
        work("a")
    assert store.breaker.state is BreakerState.OPEN
    with pytest.raises(StoreCircuitOpenError):
        work("a")
    away.end()
    with pytest.raises(StoreCircuitOpenError):
        work("a")  # the store is back, and nobody has seen that yet
    clock.advance(5)
    assert work("a") == "a"
    assert store.breaker.state is BreakerState.CLOSED


def test_the_async_form_does_the_same(aopened: Any, away: Away) -> None:
    """Tasks share one breaker, and the first that may tries the store."""

    async def main() -> None:
        clock = ManualClock(1000.0)
        store = resilient(aopened, breaker=Breaker(failures=2, successes=1, clock=clock))
        once = AsyncOnce(store, wait=0)

        @once(key="name")
        async def work(name: str) -> str:
            return name

        assert await work("first") == "first"
        away.begin()
        failed = await asyncio.gather(*(work(f"k{n}") for n in range(8)), return_exceptions=True)
        assert all(isinstance(one, StoreUnavailableError) for one in failed)
        with pytest.raises(StoreCircuitOpenError):
            await work("late")
        away.end()
        clock.advance(5)
        assert await work("late") == "late"
        assert store.breaker.state is BreakerState.CLOSED
        await store.aclose()

    asyncio.run(main())


def test_conflicts_and_wrong_calls_never_open_it(opened: Any) -> None:
    """What the store answers, or refuses by its own rules, is no failure of the store."""
    store = resilient(opened, breaker=Breaker(failures=1))
    once = Once(store, wait=0)
    work = once(key="name", name="work")(lambda name, amount: amount)
    work("a", 1)
    for _ in range(3):
        with pytest.raises(IdempotencyConflictError):
            work("a", 2)
    opened.close()
    from oncekey.errors import StoreClosedError

    for _ in range(3):
        with pytest.raises((StoreClosedError, StoreConfigError)):
            store.read(key("a"))
    assert store.breaker.state is BreakerState.CLOSED


def test_it_can_do_what_its_store_can(opened: Any) -> None:
    """Sweeps, marks, transactions and the calls of the contract pass through."""
    store = resilient(opened)
    assert store.sweep() == 0  # type: ignore[attr-defined]
    with store.transaction("t-1") as tx:  # type: ignore[attr-defined]
        assert not tx.replayed
        tx.answer = 1
    with store.transaction("t-1") as tx:  # type: ignore[attr-defined]
        assert tx.replayed
        assert tx.answer == 1
    assert store.first_seen(key("m"), TERMS)
    assert not store.first_seen(key("m"), TERMS)
    assert not hasattr(resilient(MemoryStore()), "transaction")


def test_transactions_meet_the_breaker_too(opened: Any, away: Away) -> None:
    """An open breaker refuses a transaction before it asks for a connection."""
    store: Any = resilient(opened, breaker=Breaker(failures=1))
    away.begin()
    with pytest.raises(StoreUnavailableError), store.transaction("t-1") as tx:
        tx.answer = 1
    assert store.breaker.state is BreakerState.OPEN
    with pytest.raises(StoreCircuitOpenError), store.transaction("t-1") as tx:
        tx.answer = 1


def test_a_transaction_never_goes_on_without_its_database(opened: Any, tmp_path: Any) -> None:
    """``open`` is refused for what commits with its effects, with the reason."""
    once = Once(opened, on_outage="open", journal=tmp_path / "journal")
    with pytest.raises(TransactionRefusedError, match="can't go on without its database"):
        once(key="name", transactional=True)
