"""Claims of running handlers: kept alive, lost, started late, and fenced off at the end.

Async handlers run on virtual time. Sync ones have a heartbeat thread on the machine's clock, so
the store's own clock stands still there: a slow machine delays those tests and decides nothing.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.core.seeded_loop import SeededLoop, run_seeded, virtual_plans

from oncekey import (
    AsyncOnce,
    ClaimLostError,
    IdempotencyInFlightError,
    MemoryBackend,
    MemoryStore,
    Once,
    SQLiteStore,
    StoreError,
)
from oncekey._core import transitions
from oncekey._core.flows import Plan, won
from oncekey._core.heartbeat import AsyncBeat
from oncekey.abc import Store
from oncekey.errors import StoreUnavailableError
from oncekey.guard import current_claim
from oncekey.instrument import Event, subscribe
from oncekey.models import ClaimReply, ClaimVerdict, Key, Scope, State, Terms
from oncekey.policy import Policy
from oncekey.stores._batching import Job
from oncekey.testing import ManualClock

KEY = Key(Scope("once", "beat"), "k")
TERMS = Terms(lease_ms=30_000, ttl_ms=86_400_000)
LEASE = 30.0
SEEDS = range(10)


class Watched(MemoryBackend):
    """Notes when each method is called, on virtual time, and can make renewals fail or crawl."""

    def __init__(self, loop: SeededLoop, clock: Callable[[], float] | None = None) -> None:
        super().__init__(clock=clock or loop.epoch)
        self.loop = loop
        self.calls: list[tuple[str, float]] = []
        self.renewal_errors: list[Exception] = []
        self.claim_takes: list[float] = []
        self.renewal_takes: list[float] = []

    def times(self, method: str) -> list[float]:
        return [round(when, 3) for name, when in self.calls if name == method]

    async def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        self.calls.append(("claim", self.loop.time()))
        reply = await super().claim(key, owner, fingerprint, terms)
        if self.claim_takes:
            await asyncio.sleep(self.claim_takes.pop(0))
        return reply

    async def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        self.calls.append(("renew", self.loop.time()))
        if self.renewal_errors:
            raise self.renewal_errors.pop(0)
        held = await super().renew(key, owner, fence, terms)
        if self.renewal_takes:
            await asyncio.sleep(self.renewal_takes.pop(0))
        return held

    async def takeover(self, fingerprint: bytes = b"") -> ClaimReply:
        """Become the owner, as another worker would; the lease must be over."""
        reply = await super().claim(KEY, b"usurper", fingerprint, TERMS)
        assert reply.verdict == "won"
        return reply


@pytest.fixture
def _virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    virtual_plans(monkeypatch)


virtual = pytest.mark.usefixtures("_virtual")


def sleeper(store: MemoryBackend, seconds: float, **options: Any) -> Callable[[str], Any]:
    """A guarded handler that takes its time."""

    @AsyncOnce(store, scope="beat", lease=LEASE, **options)(key="name", name=None)
    async def work(name: str) -> str:
        await asyncio.sleep(seconds)
        return "mine"

    return work


# Alive


@virtual
def test_a_slow_live_handler_keeps_its_lease() -> None:
    """Renewals come every third of the lease, and no copy gets in however long it takes."""

    async def main(loop: SeededLoop) -> None:
        store = Watched(loop)
        work = sleeper(store, 95, wait=0)
        task = loop.create_task(work("k"))
        for _ in range(18):
            await asyncio.sleep(5)
            with pytest.raises(IdempotencyInFlightError):
                await work("k")
        assert await task == "mine"
        assert store.times("renew") == [10, 20, 30, 40, 50, 60, 70, 80, 90]
        await asyncio.sleep(100)
        assert len(store.times("renew")) == 9, "nothing is renewed after the handler"

    for seed in SEEDS:
        run_seeded(seed, main)


@virtual
def test_a_guarded_block_keeps_its_lease() -> None:
    """The context manager renews like the decorator."""

    async def main(loop: SeededLoop) -> None:
        store = Watched(loop)
        async with AsyncOnce(store, scope="beat", lease=LEASE).guard("k") as claim:
            await asyncio.sleep(45)
            claim.answer = 1
        assert store.times("renew") == [10, 20, 30, 40]

    run_seeded(1, main)


@virtual
@pytest.mark.parametrize("took", [5.0, 15.0, 26.0])
def test_a_slow_claim_is_renewed_before_its_lease_ends(took: float) -> None:
    """The lease runs from when the claim was sent, so the first renewal is counted from there."""

    async def main(loop: SeededLoop) -> None:
        store = Watched(loop)
        store.claim_takes = [took]
        copies: list[str] = []

        async def copy() -> None:
            await asyncio.sleep(LEASE + 0.5)
            reply = await MemoryBackend.claim(store, KEY, b"copy", b"", TERMS)
            copies.append(reply.verdict.value)

        other = loop.create_task(copy())
        assert await sleeper(store, 40)("k") == "mine"
        await other
        assert copies == ["in_flight"], "a copy took over from a worker that lives"
        assert store.times("renew")[0] < LEASE

    for seed in SEEDS:
        run_seeded(seed, main)


@virtual
def test_failed_renewals_are_tried_again() -> None:
    """A store that fails for a while costs nothing: renewals are retried within the lease."""

    async def main(loop: SeededLoop) -> None:
        store = Watched(loop)
        store.renewal_errors = [StoreUnavailableError("busy"), StoreError("odd")]
        events: list[Event] = []
        with subscribe(events.append):
            assert await sleeper(store, 60, wait=0)("k") == "mine"
        times = store.times("renew")
        assert times[0] == 10
        assert times[2] < LEASE, "both retries come before the lease ends"
        failures = [event for event in events if event.kind == "store_error"]
        assert [event.error for event in failures] == ["StoreUnavailableError", "StoreError"]
        assert len(times) >= 6, "and it goes on as before"

    for seed in SEEDS:
        run_seeded(seed, main)


@virtual
def test_an_unnamed_renewal_error_is_tried_again_too() -> None:
    """A store that fails without a StoreError does not end the heartbeat, nor is it silent."""

    async def main(loop: SeededLoop) -> None:
        store = Watched(loop)
        store.renewal_errors = [OSError("the network")]
        events: list[Event] = []
        with subscribe(events.append):
            assert await sleeper(store, 60)("k") == "mine"
        assert len(store.times("renew")) >= 5
        assert [event.error for event in events if event.kind == "store_error"] == ["OSError"]

    run_seeded(1, main)


@virtual
def test_renewals_that_fail_through_the_lease_lose_the_claim() -> None:
    """When the store could not be asked for a whole lease, the handler is stopped."""

    async def main(loop: SeededLoop) -> None:
        store = Watched(loop)
        store.renewal_errors = [StoreUnavailableError("gone") for _ in range(1000)]
        with pytest.raises(ClaimLostError):
            await sleeper(store, 1000)("k")
        assert loop.time() <= LEASE + 1

    for seed in SEEDS:
        run_seeded(seed, main)


@virtual
def test_max_run_stops_the_renewals() -> None:
    """A handler that runs past max_run is protected no more: a copy takes over after the lease."""

    async def main(loop: SeededLoop) -> None:
        store = Watched(loop)
        runs: list[float] = []

        @AsyncOnce(store, scope="beat", lease=LEASE, max_run=25, wait=100)(key="name", name=None)
        async def work(name: str) -> int:
            runs.append(loop.time())
            mine = len(runs)
            await asyncio.sleep(70 if mine == 1 else 1)
            return mine

        first = loop.create_task(work("k"))
        await asyncio.sleep(1)
        assert await work("k") == 2
        assert store.times("renew") == [10, 20]
        assert 50 <= runs[1] < 52, "the last renewal was at 20, its lease ended at 50"
        assert await first == 2, "the first one is fenced off and gives the official answer"

    for seed in SEEDS:
        run_seeded(seed, main)


# Lost


@virtual
@pytest.mark.parametrize("form", ["decorator", "guard"])
def test_a_lost_claim_cancels_the_handler(form: str) -> None:
    """The handler is cancelled at the next renewal, and the caller gets ClaimLostError."""

    async def main(loop: SeededLoop) -> None:
        clock = ManualClock()
        store = Watched(loop, clock)
        once = AsyncOnce(store, scope="beat", lease=LEASE)
        ended: list[str] = []

        async def handler() -> None:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                ended.append("cancelled")
                assert current_claim().lost
                raise

        async def call() -> None:
            if form == "decorator":

                @once(key="name", name=None)
                async def work(name: str) -> None:
                    await handler()

                await work("k")
            else:
                async with once.guard("k"):
                    await handler()

        task = loop.create_task(call())
        await asyncio.sleep(5)
        clock.advance(31)  # this worker was stopped, say, and the store's time went on
        usurper = await store.takeover()
        with pytest.raises(ClaimLostError):
            await task
        assert task.cancelling() == 0, "the cancellation was ours, and is taken back"
        assert ended == ["cancelled"]
        assert loop.time() == 10
        record = await store.read(KEY)
        assert record is not None
        assert (record.state, record.fence) == (State.PENDING, usurper.fence)

    for seed in SEEDS:
        run_seeded(seed, main)


@virtual
@pytest.mark.parametrize("handlers_way", ["swallows", "translates"])
def test_a_lost_claim_leaves_no_cancellation_behind(handlers_way: str) -> None:
    """However the handler takes its cancellation, the caller's task is not left half cancelled."""

    async def main(loop: SeededLoop) -> None:
        clock = ManualClock()
        store = Watched(loop, clock)

        @AsyncOnce(store, scope="beat", lease=LEASE)(key="name", name=None)
        async def work(name: str) -> str:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                if handlers_way == "translates":
                    raise LookupError("stopped") from None
            return "too late"

        async def caller() -> int:
            with pytest.raises((ClaimLostError, LookupError)):
                await work("k")
            task = asyncio.current_task()
            assert task is not None
            return task.cancelling()

        task = loop.create_task(caller())
        await asyncio.sleep(5)
        clock.advance(31)
        await store.takeover()
        assert await task == 0

    run_seeded(1, main)


@virtual
def test_a_lost_claim_is_told_in_a_task_that_was_cancelled_before() -> None:
    """In the clean-up of a cancelled task a lost claim is still ClaimLostError, as a timeout is."""

    async def main(loop: SeededLoop) -> None:
        clock = ManualClock()
        store = Watched(loop, clock)
        work = sleeper(store, 1000)
        inside = asyncio.Event()
        told: list[type[BaseException]] = []

        async def caller() -> None:
            try:
                inside.set()
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                try:
                    await work("k")
                except BaseException as error:
                    told.append(type(error))
                raise

        task = loop.create_task(caller())
        await inside.wait()
        task.cancel()
        await asyncio.sleep(5)
        clock.advance(31)
        await store.takeover()
        await asyncio.wait([task])
        assert told == [ClaimLostError]

    run_seeded(1, main)


@virtual
def test_a_lost_claim_in_a_task_group_is_one_error_of_it() -> None:
    """The group sees ClaimLostError, not a cancellation of its own."""

    async def main(loop: SeededLoop) -> None:
        clock = ManualClock()
        store = Watched(loop, clock)
        work = sleeper(store, 1000)

        async def usurp() -> None:
            await asyncio.sleep(5)
            clock.advance(31)
            await store.takeover()

        async def both() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(work("k"))
                group.create_task(usurp())

        with pytest.raises(ExceptionGroup) as caught:
            await both()
        assert [type(error) for error in caught.value.exceptions] == [ClaimLostError]

    for seed in SEEDS:
        run_seeded(seed, main)


@virtual
def test_a_cancellation_from_outside_stays_one() -> None:
    """A caller cancelled in the moment in which its claim is lost is cancelled all the same."""
    endings: list[bool] = []

    async def main(loop: SeededLoop) -> None:
        clock = ManualClock()
        store = Watched(loop, clock)
        task = loop.create_task(sleeper(store, 1000)("k"))
        await asyncio.sleep(5)
        clock.advance(31)
        await store.takeover()
        await asyncio.sleep(5)  # the renewal that finds out is due now
        for _ in range(loop_seed % 7):
            await asyncio.sleep(0)
        asked = task.cancel()
        with pytest.raises((asyncio.CancelledError, ClaimLostError)):
            await task
        assert task.cancelled() == asked
        endings.append(asked)

    for loop_seed in range(100):
        run_seeded(loop_seed, main)
    assert set(endings) == {True, False}, "both orders must be among the seeds"


# Out of order


class Told(MemoryBackend):
    """Fails a test in which a renewal comes when its lease is over; its replies take their time."""

    def __init__(self, loop: SeededLoop, takes: list[float]) -> None:
        super().__init__(clock=loop.epoch)
        self.loop = loop
        self.takes = itertools.cycle(takes)
        self.ends: dict[bytes, float] = {}  # by owner: when its lease ends
        self.renewals = 0

    async def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        now = self.loop.time()
        assert now < self.ends[owner], "a copy may have taken over from a worker that lives"
        self.ends[owner] = now + LEASE
        self.renewals += 1
        await asyncio.sleep(next(self.takes))
        return True


async def hold(
    store: Told, plan: Plan, owner: bytes, sent: float, took: float, runs: float
) -> None:
    """Claim, and run for a while."""
    await asyncio.sleep(sent)
    claim = won(KEY, owner, WON, plan, "", store.loop.time(), store)
    store.ends[owner] = store.loop.time() + LEASE
    await asyncio.sleep(took)
    beat = AsyncBeat(store, claim, plan)
    beat.start()
    await asyncio.sleep(runs)
    beat.stop()
    assert store.loop.time() < store.ends.pop(owner), "its lease ended while it ran"
    assert not claim.lost


WON = ClaimReply(ClaimVerdict.WON, 1, 30_000, 1, None)
REPLIES = st.floats(0, LEASE * 0.9)  # a claim whose reply took longer is renewed before it starts


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 1000),
    claims=st.lists(
        st.tuples(st.floats(0, 2 * LEASE), REPLIES, st.floats(0, 4 * LEASE)), min_size=1, max_size=8
    ),
    takes=st.lists(st.floats(0, LEASE * 0.3), min_size=1, max_size=4),
)
@example(seed=0, claims=[(0.0, 24.0, 45.0), (23.4, 0.0, 45.0)], takes=[0.0])
def test_claims_in_any_order_are_renewed_in_time(
    seed: int, claims: list[tuple[float, float, float]], takes: list[float]
) -> None:
    """However long replies take, each lease is renewed before it ends."""

    async def main(loop: SeededLoop) -> None:
        store = Told(loop, takes)
        plan = replace(Plan.of(Policy(lease=LEASE)), monotonic=loop.time)
        holders = [hold(store, plan, b"%d" % n, *one) for n, one in enumerate(claims)]
        await asyncio.gather(*holders)
        seen = store.renewals
        await asyncio.sleep(LEASE)
        assert store.renewals == seen, "nothing is renewed after its handler"

    run_seeded(seed, main)


def test_claims_in_order_share_one_timer() -> None:
    """Also if their replies pass each other by a moment: a call then costs no timer of its own."""

    async def main(loop: SeededLoop) -> None:
        store = Told(loop, [0.0])
        plan = replace(Plan.of(Policy(lease=LEASE)), monotonic=loop.time)
        took = [0.9, 0.0, 0.5, 0.3, 0.2, 0.8, 0.0, 0.1]
        holders = [hold(store, plan, b"%d" % n, n / 10, t, 9) for n, t in enumerate(took)]
        tasks = [loop.create_task(holder) for holder in holders]
        await asyncio.sleep(2)
        timers = [timer for _, _, timer in loop._timers if not timer.cancelled()]
        assert len(timers) == len(tasks) + 1, "one beside those that the handlers sleep with"
        await asyncio.gather(*tasks)

    run_seeded(1, main)


def test_a_closed_loop_is_not_kept_alive_by_calls_that_nobody_ended() -> None:
    """They were thrown away with it: the next loop lets go of all."""
    store = MemoryBackend()
    work = sleeper(store, 1000)

    async def leave() -> None:
        asyncio.get_running_loop().create_task(work("k"))
        await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)  # "destroyed but it is pending"
    loop.run_until_complete(leave())
    loop.close()
    gone = weakref.ref(loop)
    del loop
    asyncio.run(sleeper(store, 0)("other"))
    gc.collect()
    assert gone() is None


@virtual
def test_a_handler_that_outlives_its_cancellation_keeps_its_lease() -> None:
    """Cancelling every task of a loop, as a shutdown does, cuts a renewal off but not the rest."""

    async def main(loop: SeededLoop) -> None:
        store = Watched(loop)
        store.renewal_takes = [1.0]

        @AsyncOnce(store, scope="beat", lease=LEASE)(key="name", name=None)
        async def work(name: str) -> str:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                await asyncio.sleep(3 * LEASE)  # puts things in order
            return "mine"

        task = loop.create_task(work("k"))
        await asyncio.sleep(10.5)  # a renewal is under way
        for other in asyncio.all_tasks() - {asyncio.current_task()}:
            other.cancel()
        for _ in range(8):
            await asyncio.sleep(LEASE / 3)
            assert (await MemoryBackend.claim(store, KEY, b"copy", b"", TERMS)).verdict != "won"
        await asyncio.wait([task])

    for seed in SEEDS:
        run_seeded(seed, main)


# Late


def late_plans(monkeypatch: pytest.MonkeyPatch, monotonic: Callable[[], float]) -> None:
    """Guards made from now on read ``monotonic``."""
    real = Plan.of.__func__  # type: ignore[attr-defined]
    of = classmethod(lambda cls, policy: replace(real(cls, policy), monotonic=monotonic))
    monkeypatch.setattr(Plan, "of", of)


@virtual
def test_a_reply_after_the_lease_is_renewed_before_the_handler_starts() -> None:
    """A worker that was stopped while it claimed makes sure that the key is still its own."""

    async def main(loop: SeededLoop) -> None:
        store = Watched(loop)
        store.claim_takes = [LEASE + 5]
        order: list[str] = []

        @AsyncOnce(store, scope="beat", lease=LEASE)(key="name", name=None)
        async def work(name: str) -> str:
            order.extend(name for name, _ in store.calls)
            return "mine"

        assert await work("k") == "mine"
        assert order == ["claim", "renew"]

    run_seeded(1, main)


@virtual
@pytest.mark.parametrize("took, renewals", [(26.0, 0), (27.5, 1), (29.9, 1), (31.0, 1)])
def test_a_reply_near_the_end_of_the_lease_counts_as_late(took: float, renewals: int) -> None:
    """A tenth of the lease is kept as a margin for the start."""

    async def main(loop: SeededLoop) -> None:
        store = Watched(loop)
        store.claim_takes = [took]
        seen: list[int] = []

        @AsyncOnce(store, scope="beat", lease=LEASE)(key="name", name=None)
        async def work(name: str) -> None:
            seen.append(len(store.times("renew")))

        await work("k")
        assert seen == [renewals]

    run_seeded(1, main)


@virtual
def test_a_late_renewal_does_not_start_the_handler_either() -> None:
    """A renewal whose reply comes after the lease too proves nothing: another one is needed."""

    async def main(loop: SeededLoop) -> None:
        store = Watched(loop)
        store.claim_takes = [LEASE + 5]
        store.renewal_takes = [LEASE + 5]
        left: list[int] = []

        @AsyncOnce(store, scope="beat", lease=LEASE)(key="name", name=None)
        async def work(name: str) -> str:
            record = await store.read(KEY)
            assert record is not None
            left.append(record.lease_until - await store.now())
            return "mine"

        assert await work("k") == "mine"
        assert left[0] > 0, "the handler started when its lease was over"

    run_seeded(1, main)


@virtual
@pytest.mark.parametrize("finished", [True, False])
def test_a_late_worker_that_lost_its_key_claims_again(finished: bool) -> None:
    """If the renewal fails the handler does not run: the worker claims again, as a duplicate."""

    async def main(loop: SeededLoop) -> None:
        store = Watched(loop)
        store.claim_takes = [LEASE + 5]
        runs: list[str] = []

        @AsyncOnce(store, scope="beat", lease=LEASE, wait=1)(key="name", name=None)
        async def work(name: str) -> str:
            runs.append(name)
            return "mine"

        task = loop.create_task(work("k"))
        await asyncio.sleep(LEASE + 1)
        usurper = await store.takeover()
        if finished:
            assert await store.complete(KEY, b"usurper", usurper.fence, b'j"theirs"', TERMS)
            assert await task == "theirs"
        else:
            with pytest.raises(IdempotencyInFlightError):
                await task
        assert runs == []
        assert [name for name, _ in store.calls[:3]] == ["claim", "renew", "claim"]

    run_seeded(1, main)


def test_a_late_sync_worker_renews_or_claims_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sync form checks for a late start too."""
    clock, monotonic = ManualClock(), ManualClock(1000.0)
    late_plans(monkeypatch, monotonic)
    calls: list[str] = []
    usurp = False

    class Late(MemoryStore):
        def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
            calls.append("claim")
            reply = super().claim(key, owner, fingerprint, terms)
            if calls.count("claim") == 1:  # the process was stopped here
                clock.advance(31)
                monotonic.advance(31)
                if usurp:
                    theirs = super().claim(key, b"usurper", b"", terms)
                    assert self.complete(key, b"usurper", theirs.fence, b'j"theirs"', terms)
            return reply

        def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
            calls.append("renew")
            return super().renew(key, owner, fence, terms)

    def attempt() -> str:
        calls.clear()
        work = Once(Late(clock=clock), scope="beat", lease=LEASE)(key="name", name=None)
        return work(lambda name: (calls.append("handler"), "mine")[1])("k")

    assert attempt() == "mine"
    assert calls == ["claim", "renew", "handler"]
    usurp = True
    assert attempt() == "theirs"
    assert calls == ["claim", "renew", "claim"]


# Fenced off at the end


@virtual
@pytest.mark.parametrize("form", ["decorator", "sync"])
@pytest.mark.parametrize("recorded", ["done", "running", "released", "other-payload"])
def test_a_worker_that_finishes_too_late_gets_the_official_outcome(
    form: str, recorded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fenced off, it returns what was recorded for its payload, else raises ClaimLostError."""
    clock = ManualClock()
    late = "other" if recorded == "other-payload" else "same"

    def usurp(store: MemoryStore) -> None:
        mine = store.read(KEY)
        assert mine is not None
        clock.advance(31)
        if late == "other":  # given back in between, then used for something else
            assert store.release(KEY, mine.owner, mine.fence)
        mark = mine.fingerprint if late == "same" else b"other"
        theirs = store.claim(KEY, b"usurper", mark, TERMS)
        assert theirs.verdict == "won"
        if recorded in ("done", "other-payload"):
            assert store.complete(KEY, b"usurper", theirs.fence, b'j"theirs"', TERMS)
        elif recorded == "released":
            assert store.release(KEY, b"usurper", theirs.fence)

    store = MemoryStore(f"fenced-{form}-{recorded}", clock=clock)

    def call() -> str:
        if form == "sync":
            monotonic = ManualClock(1000.0)
            late_plans(monkeypatch, monotonic)
            once = Once(store, scope="beat", lease=LEASE)
            return once(key="name", name=None)(lambda name: (usurp(store), "mine")[1])("k")

        async def main(loop: SeededLoop) -> str:
            backend = MemoryBackend(f"fenced-{form}-{recorded}", clock=clock)

            @AsyncOnce(backend, scope="beat", lease=LEASE)(key="name", name=None)
            async def work(name: str) -> str:
                usurp(store)
                return "mine"

            return await work("k")

        return run_seeded(1, main)

    with store:
        events: list[Event] = []
        with subscribe(events.append):
            if recorded == "done":
                assert call() == "theirs"
            else:
                with pytest.raises(ClaimLostError):
                    call()
        assert [event.kind for event in events].count("fenced") == 1
        record = store.read(KEY)
        assert record is not None
        assert record.owner == b"usurper"
        assert record.answer in (None, b'j"theirs"'), "a fenced answer is never recorded"


# Threads


class Beating(MemoryStore):
    """Counts renewals; a test waits for the one that it wants to see."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self._seen = threading.Condition()
        self.renewals = 0
        self.errors: list[BaseException] = []
        self.refused = threading.Event()

    def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        try:
            if self.errors:
                raise self.errors.pop(0)
            held = super().renew(key, owner, fence, terms)
            if not held:
                self.refused.set()
            return held
        finally:
            with self._seen:
                self.renewals += 1
                self._seen.notify_all()

    def wait_for(self, number: int) -> None:
        with self._seen:
            assert self._seen.wait_for(lambda: self.renewals >= number, timeout=60)


SHORT = 0.06


def test_a_slow_live_sync_handler_keeps_its_lease() -> None:
    """The heartbeat thread renews while the handler runs, and the lease is counted anew."""
    clock = ManualClock()
    store = Beating(clock)

    @Once(store, scope="beat", lease=SHORT)(key="name", name=None)
    def work(name: str) -> str:
        for number in range(1, 6):
            clock.advance(0.05)  # by now the lease would be over without the renewals
            store.wait_for(store.renewals + 2)  # one that began after the clock had moved
            record = store.read(KEY)
            assert record is not None
            assert record.lease_until - store.now() == 60, f"renewal {number}"
        assert not current_claim().lost
        return "mine"

    assert work("k") == "mine"


HANDLERS = 128


def run_many(store: Store, lease: float, until: Callable[[], bool]) -> list[bool]:
    """Run handlers at once until ``until`` is true. Gives of each whether its claim was lost."""
    once = Once(store, scope="beat", lease=lease)
    over = threading.Event()
    lost: list[bool] = []

    @once(key="name")
    def work(name: str) -> None:
        assert over.wait(60)
        lost.append(current_claim().lost)

    threads = [threading.Thread(target=work, args=(str(n),)) for n in range(HANDLERS)]
    for thread in threads:
        thread.start()
    for _ in range(60_000):
        if until():
            break
        threading.Event().wait(0.001)
    over.set()
    for thread in threads:
        thread.join(60)
    return lost


def test_renewals_of_a_slow_store_are_all_under_way_at_once() -> None:
    """A renewal that takes its time holds up no other: here each waits for all of the others."""

    class Slow(MemoryStore):
        together = threading.Barrier(HANDLERS)
        rounds = 0

        def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
            if Slow.together.wait(60) == 0:
                Slow.rounds += 1
            return super().renew(key, owner, fence, terms)

    # Two rounds: the threads of the first have ended, or are used again.
    try:
        lost = run_many(Slow(clock=ManualClock()), 1.5, lambda: Slow.rounds >= 2)
    finally:
        Slow.together.abort()  # some wait for a third
    assert lost == [False] * HANDLERS
    assert Slow.rounds >= 2


@pytest.mark.parametrize("trip, lease", [(0.04, 2), (0.6, 6)], ids=["40ms", "600ms"])
def test_renewals_share_round_trips(trip: float, lease: float, tmp_path: Path) -> None:
    """The claims of many handlers are renewed in a few trips, however long one takes."""
    with SQLiteStore(tmp_path / "x.db", durability="normal", clock=ManualClock()) as store:
        trips: list[set[bytes]] = []
        commit = store._commit._run

        def slow(jobs: Sequence[Job]) -> None:
            threading.Event().wait(trip)
            commit(jobs)
            renewals = {job.args[0] for job in jobs if transitions.Event.RENEW in job.args}
            if renewals:
                trips.append(renewals)

        store._commit._run = slow  # type: ignore[method-assign]
        lost = run_many(store, lease, lambda: len(set().union(*trips)) == HANDLERS)
        assert lost == [False] * HANDLERS
        assert len(set().union(*trips)) == HANDLERS
        # One to find the store slow, and one for those who were late then; claims that came a
        # little apart are due a little apart.
        assert len(trips) <= HANDLERS / 8


def test_a_quick_store_is_renewed_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads are started only for renewals that are late; here no time goes by."""
    monotonic = ManualClock(1000.0)
    late_plans(monkeypatch, monotonic)
    renewers: list[int] = []

    class Quick(MemoryStore):
        def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
            renewers.append(threading.get_ident())
            return super().renew(key, owner, fence, terms)

        def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
            reply = super().claim(key, owner, fingerprint, terms)
            if self._table.count == HANDLERS:
                started.set()
            return reply

    def all_renewed() -> bool:
        if started.is_set() and monotonic() == 1000.0:
            monotonic.advance(0.101)  # due, and not late yet
        return len(renewers) == HANDLERS

    started = threading.Event()
    assert run_many(Quick(clock=ManualClock()), 0.3, all_renewed) == [False] * HANDLERS
    assert len(set(renewers)) == 1


def test_a_sync_handler_that_ended_is_not_renewed() -> None:
    """After the handler the heartbeat leaves its claim alone, and goes on with the others."""
    store = Beating(ManualClock())
    renewed: list[bytes] = []
    real = store.renew

    def renew(key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        renewed.append(key.name.encode())
        return real(key, owner, fence, terms)

    store.renew = renew  # type: ignore[method-assign]

    @Once(store, scope="beat", lease=SHORT)(key="name", name=None)
    def work(name: str) -> str:
        store.wait_for(store.renewals + 2)
        return name

    assert work("first") == "first"
    renewed.clear()
    assert work("second") == "second"
    # One renewal of the first may have been under way when it ended, never a second one.
    assert renewed.count(b"first") <= 1


def test_failed_sync_renewals_are_tried_again() -> None:
    """Store errors in the heartbeat thread are told as events and retried."""
    store = Beating(ManualClock())
    store.errors = [StoreUnavailableError("busy"), OSError("odd")]
    events: list[Event] = []

    # The machine's clock decides how long failures are borne, so the lease is long enough for
    # two of them on any machine, and the first renewal is due after a third of it.
    @Once(store, scope="beat", lease=1.5)(key="name", name=None)
    def work(name: str) -> str:
        store.wait_for(3)
        return "mine"

    with subscribe(events.append):
        assert work("k") == "mine"
    failures = [event.error for event in events if event.kind == "store_error"]
    assert failures == ["StoreUnavailableError", "OSError"]


def test_nothing_that_a_store_raises_ends_the_heartbeat() -> None:
    """A store that would end its thread, with ``SystemExit`` say, is asked again."""

    class Killed(BaseException):
        """No ``Exception``."""

    store = Beating(ManualClock())
    store.errors = [SystemExit(1), Killed()]

    @Once(store, scope="beat", lease=1.5)(key="name", name=None)
    def work(name: str) -> str:
        store.wait_for(4)
        return "mine"

    assert work("k") == "mine"
    assert not store.errors


@pytest.mark.parametrize("form", ["decorator", "guard"])
def test_a_lost_claim_is_told_to_a_sync_handler(form: str) -> None:
    """A thread can't be cancelled: ``lost`` is set, ``check()`` raises, nothing is recorded."""
    clock = ManualClock()
    store = Beating(clock)
    once = Once(store, scope="beat", lease=SHORT)
    reached: list[str] = []

    def usurp_and_wait() -> None:
        clock.advance(1)
        # The handler's own renewals race with this claim, and may come first: try until it holds.
        while store.claim(KEY, b"usurper", b"", TERMS).verdict != "won":
            clock.advance(1)
        store.refused.wait(60)

    def until_told(claim: Any) -> None:
        """The refusal was seen by the store; the thread that got it tells the claim next."""
        for _ in range(60_000):
            if claim.lost:
                return
            threading.Event().wait(0.001)

    def call() -> None:
        if form == "decorator":

            @once(key="name", name=None)
            def work(name: str) -> None:
                current_claim().check()
                usurp_and_wait()
                until_told(current_claim())
                assert current_claim().lost
                reached.append("before")
                current_claim().check()
                reached.append("after")

            work("k")
        else:
            with once.guard("k") as claim:
                claim.check()
                usurp_and_wait()
                until_told(claim)
                assert claim.lost
                reached.append("before")
                claim.check()
                reached.append("after")

    with pytest.raises(ClaimLostError):
        call()
    assert reached == ["before"]
    record = store.read(KEY)
    assert record is not None
    assert (record.owner, record.state) == (b"usurper", State.PENDING)


def test_max_run_stops_the_sync_renewals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past max_run the heartbeat thread no longer renews."""
    store = Beating(ManualClock())
    offset = 0.0
    import time

    late_plans(monkeypatch, lambda: time.monotonic() + offset)
    once = Once(store, scope="beat", lease=SHORT)

    @once(key="name", name=None, max_run=3600)
    def limited(name: str) -> int:
        nonlocal offset
        store.wait_for(store.renewals + 1)
        offset = 3601.0  # an hour later
        seen = store.renewals
        # Another claim of the same store goes on being renewed by the same thread.
        other("o")
        return store.renewals - seen

    renewed: list[str] = []
    real = store.renew

    def renew(key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        renewed.append(key.name)
        return real(key, owner, fence, terms)

    store.renew = renew  # type: ignore[method-assign]

    @once(key="name", name=None)
    def other(name: str) -> None:
        renewed.clear()
        store.wait_for(store.renewals + 4)

    limited("k")
    assert renewed.count("o") >= 3
    # One may have been under way when the hour was over.
    assert renewed.count("k") <= 1
