"""How long an answer is kept, by its own word; and answers that a process has at hand."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from oncekey import (
    AsyncMemoryStore,
    AsyncOnce,
    IdempotencyConflictError,
    IdempotencyStore,
    MemoryStore,
    Once,
    PolicyError,
    SQLiteStore,
    ToolContext,
    current_claim,
)
from oncekey._core import at_hand
from oncekey.instrument import EventKind, subscribe
from oncekey.testing import ManualClock


class Counting(MemoryStore):
    """A store that counts its claims."""

    claims = 0

    def claim(self, *args: Any) -> Any:
        self.claims += 1
        return super().claim(*args)


class AsyncCounting(AsyncMemoryStore):
    """The same, awaited."""

    claims = 0

    async def claim(self, *args: Any) -> Any:
        self.claims += 1
        return await super().claim(*args)


def test_an_answer_has_a_ttl_of_its_own(clock: ManualClock) -> None:
    """A function, and a block, set how long their answer is replayed: shorter or longer."""
    once = Once(MemoryStore(clock=clock), ttl=60)
    runs = []

    @once(key="k")
    def work(k: str) -> int:
        runs.append(k)
        current_claim().ttl = timedelta(seconds=10) if k == "short" else 600
        return len(runs)

    for k in ("short", "long"):
        work(k)
    clock.advance(11)
    for k in ("short", "long"):
        work(k)
    assert runs == ["short", "long", "short"]
    with once.guard("block") as claim:
        claim.answer, claim.ttl = 1, 5
        assert claim.ttl == 5
    clock.advance(6)
    with once.guard("block") as claim:
        assert not claim.replayed


async def test_an_async_answer_and_one_of_a_request(clock: ManualClock) -> None:
    """The same for async functions; a request's answer is kept for at least what was declared."""
    store = AsyncMemoryStore(clock=clock)
    runs = []

    @AsyncOnce(store)(key="k")
    async def work(k: str) -> int:
        current_claim().ttl = 10
        runs.append(k)
        return len(runs)

    await work("a")
    clock.advance(11)
    await work("a")
    assert len(runs) == 2

    @IdempotencyStore(store, ttl_seconds=3600, clock=clock).wrap
    async def buy(params: dict[str, Any], context: Any = None) -> dict[str, Any]:
        current_claim().ttl = params["ttl"]
        runs.append("buy")
        return {}

    caller = ToolContext(caller_identity="acme")
    for wrong in (3599, 604_801):
        with pytest.raises(PolicyError, match="ttl must be at"):
            await buy({"idempotency_key": "w", "ttl": wrong}, caller)
    await buy({"idempotency_key": "k", "ttl": 7200}, caller)
    clock.advance(3700)
    await buy({"idempotency_key": "k", "ttl": 7200}, caller)
    assert runs.count("buy") == 1


def test_a_transaction_keeps_it_too(tmp_path: Any, clock: ManualClock) -> None:
    """The answer of a transaction ends when its handler said."""
    with SQLiteStore(tmp_path / "a.db", clock=clock) as store:
        for replayed in (False, True):
            with store.transaction("k", ttl=60) as tx:
                assert tx.replayed is replayed
                if tx.claim is not None:
                    tx.claim.ttl = 10
        clock.advance(11)
        with store.transaction("k") as tx:
            assert not tx.replayed


def test_when_it_can_not_be_set() -> None:
    """Once recorded, on a replay, for a sticky guard, or out of bounds: each says so."""
    once = Once("memory://")
    with once.guard("k") as claim:
        for wrong in (0, -1, 1e12, True):
            with pytest.raises(PolicyError, match="ttl must be"):
                claim.ttl = wrong
        held = claim.claim
    assert held is not None
    with pytest.raises(PolicyError, match="it is recorded"):
        held.ttl = 5
    with once.guard("k") as claim, pytest.raises(LookupError, match="replayed first"):
        claim.ttl = 5
    with (
        once.guard("other", sticky=True) as claim,
        pytest.raises(PolicyError, match="first claim"),
    ):
        claim.ttl = 5


def made(sync: bool, **options: Any) -> tuple[Any, Any]:
    """A function guarded in either form, and its store."""
    if sync:
        store = Counting()

        @Once(store)(key="k", cache_entries=2, **options)
        def work(k: str, n: int = 1) -> dict[str, Any]:
            return {"n": n, "list": [k]}

        return work, store
    astore = AsyncCounting()

    @AsyncOnce(astore)(key="k", cache_entries=2, **options)
    async def awork(k: str, n: int = 1) -> dict[str, Any]:
        return {"n": n, "list": [k]}

    return lambda *args: asyncio.run(awork(*args)), astore


@pytest.fixture(params=[True, False], ids=["sync", "async"])
def sync(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_replays_don_t_ask_the_store(sync: bool) -> None:
    """The first call claims; later ones get copies of their own, and are told as replays."""
    work, store = made(sync)
    seen: list[EventKind] = []
    first = work("a")
    with subscribe(lambda event: seen.append(event.kind)):
        again = work("a")
        again["list"].append("poison")
        assert work("a") == {"n": 1, "list": ["a"]} == first
    assert store.claims == 1
    assert seen == [EventKind.REPLAY] * 2


def test_another_payload_is_still_refused(sync: bool) -> None:
    """What is at hand is for the same arguments only: the store refuses others."""
    work, _ = made(sync)
    work("a")
    with pytest.raises(IdempotencyConflictError, match="other arguments"):
        work("a", 2)


def test_the_table_is_bounded(sync: bool) -> None:
    """The oldest answer goes first, and is asked for again."""
    work, store = made(sync)
    for k in "abc":
        work(k)
    work("c")
    assert store.claims == 3
    work("a")
    assert store.claims == 4


def test_answers_leave_with_their_time(sync: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After ``cache_seconds``, or half of the ttl, the store is asked."""
    now = 100.0

    class Time:
        @staticmethod
        def monotonic() -> float:
            return now

    monkeypatch.setattr(at_hand, "time", Time)
    for options, lasts in (({"cache_seconds": 5}, 5.0), ({"ttl": 6}, 3.0)):
        work, store = made(sync, **options)
        work("a")
        now += lasts - 0.1
        work("a")
        assert store.claims == 1
        now += 0.2
        work("a")
        assert store.claims == 2


def test_a_shorter_ttl_of_its_own_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that its handler keeps for a moment is at hand for half of it."""
    now = [100.0]
    monkeypatch.setattr(
        at_hand, "time", type("Time", (), {"monotonic": staticmethod(lambda: now[0])})
    )
    store = Counting()

    @Once(store)(key="k", cache_entries=9)
    def work(k: str) -> int:
        current_claim().ttl = 4
        return 1

    work("a")
    now[0] += 2.1
    work("a")
    assert store.claims == 2


def test_not_for_transactions_and_not_negative(tmp_path: Any) -> None:
    """An answer counts when its transaction commits: none is at hand before."""
    with SQLiteStore(tmp_path / "a.db") as store:
        with pytest.raises(PolicyError, match="cache_entries is not for transactions"):
            Once(store)(key="k", transactional=True, cache_entries=5)
        with pytest.raises(PolicyError, match="cache_entries"):
            Once(store, cache_entries=-1)


def test_a_replay_from_the_store_is_not_at_hand(clock: ManualClock) -> None:
    """When its record ends is not known: at hand, it would outlive it."""
    store = Counting(clock=clock)
    runs = []

    def made() -> Any:
        @Once(store, ttl=2)(key="k", name="work", cache_entries=9)
        def work(k: str) -> int:
            runs.append(k)
            return len(runs)

        return work

    first, other = made(), made()
    assert first("a") == 1
    clock.advance(1.9)
    assert other("a") == other("a") == 1
    clock.advance(0.2)
    assert other("a") == 2


def test_a_sticky_record_is_at_hand_for_half_of_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its time runs from the first claim: the work may have used it up, or an earlier attempt."""
    now = [100.0]
    monkeypatch.setattr(
        at_hand, "time", type("Time", (), {"monotonic": staticmethod(lambda: now[0])})
    )
    store = Counting()
    slow = [8.0]

    @Once(store, ttl=10, sticky=True)(key="k", cache_entries=9)
    def work(k: str) -> int:
        claim = current_claim()
        monotonic = claim.monotonic
        claim.monotonic = lambda: monotonic() + slow[0]
        if k == "again" and claim.attempts == 1:
            raise ValueError("first")
        return 1

    work("a")
    now[0] += 0.9
    work("a")
    assert store.claims == 1
    now[0] += 0.2
    work("a")
    assert store.claims == 2
    slow[0] = 10.0
    for _ in range(2):
        work("b")
    assert store.claims == 4
    slow[0] = 0.0
    with pytest.raises(ValueError, match="first"):
        work("again")
    for _ in range(2):
        work("again")
    assert store.claims == 7


def test_what_is_at_hand_is_what_was_recorded() -> None:
    """An answer that is changed while it is recorded is not encoded again."""
    shared = {"total": 1}

    class Slow(AsyncCounting):
        async def complete(self, *args: Any) -> Any:
            held = await super().complete(*args)
            shared["total"] = 999
            return held

    @AsyncOnce(Slow())(key="k", cache_entries=9)
    async def work(k: str) -> dict[str, int]:
        return shared

    async def twice() -> Any:
        await work("a")
        return await work("a")

    assert asyncio.run(twice()) == {"total": 1}


def test_a_long_answer_is_left_to_the_store() -> None:
    """What is at hand has at most 64 KiB, so that a number of them bounds the memory."""
    store = Counting()

    @Once(store)(key="length", cache_entries=9)
    def work(length: int) -> str:
        return "x" * length

    for length, claims in ((65_533, 1), (65_534, 2)):  # and two quotes, and how it is encoded
        store.claims = 0
        for _ in range(2):
            assert len(work(length)) == length
        assert store.claims == claims
