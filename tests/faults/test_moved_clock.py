"""What holds when the clock of a store jumps.

Promised: a clock that jumps forward may end leases and answers early; one that goes back prolongs
them. Whatever it does, nobody wins a key while another's lease runs on the store's clock, an owner
that was taken over can't record anything, and the fences of a key never fall while its record is
known.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oncekey import ClaimLostError, MemoryStore, Once, SQLiteStore
from oncekey.abc import Store
from oncekey.models import Key, Scope, State, Terms, Verdict
from oncekey.testing import ManualClock

START = 1_700_000_000.0
TERMS = Terms(lease_ms=30_000, ttl_ms=86_400_000)
SHORT = Terms(lease_ms=1_000, ttl_ms=2_000)
KEY = Key(Scope("once", "clock"), "key")
A, B = b"a" * 16, b"b" * 16


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path) -> Iterator[Store]:
    opened: Store = (
        MemoryStore(clock=clock)
        if request.param == "memory"
        else SQLiteStore(tmp_path / "clock.db", clock=clock)
    )
    with opened:
        yield opened


def test_forward_jump_may_end_a_lease_early_and_fences_the_first_owner(
    store: Store, clock: ManualClock
) -> None:
    """A clock that jumps 60 s ahead lets another win, and the first owner records nothing."""
    first = store.claim(KEY, A, b"p", TERMS)
    assert store.claim(KEY, B, b"p", TERMS).verdict is Verdict.IN_FLIGHT
    clock.advance(60)
    second = store.claim(KEY, B, b"p", TERMS)
    assert (second.verdict, second.takeover) == (Verdict.WON, True)
    assert second.fence > first.fence
    assert store.complete(KEY, A, first.fence, b"late", TERMS) is False
    assert store.renew(KEY, A, first.fence, TERMS) is False
    assert store.release(KEY, A, first.fence) is False
    assert store.complete(KEY, B, second.fence, b"right", TERMS) is True
    record = store.read(KEY)
    assert record is not None
    assert (record.state, record.answer) == (State.COMPLETED, b"right")


def test_forward_jump_leaves_an_owner_alone_that_nobody_took_over_from(
    store: Store, clock: ManualClock
) -> None:
    """After a jump of 60 s the owner may still complete, as long as nobody else has won."""
    first = store.claim(KEY, A, b"p", TERMS)
    clock.advance(60)
    assert store.complete(KEY, A, first.fence, b"right", TERMS) is True
    assert store.claim(KEY, B, b"p", TERMS).answer == b"right"


def test_backward_jump_prolongs_a_lease(store: Store, clock: ManualClock) -> None:
    """A clock set back by an hour keeps the claim for an hour longer: no second win meanwhile."""
    first = store.claim(KEY, A, b"p", TERMS)
    clock.set(START - 3600)
    for passed in (0, 1800, 3599, 3600, 3629):
        clock.set(START - 3600 + passed)
        assert store.claim(KEY, B, b"p", TERMS).verdict is Verdict.IN_FLIGHT
    clock.set(START + 30)
    second = store.claim(KEY, B, b"p", TERMS)
    assert (second.verdict, second.takeover) == (Verdict.WON, True)
    assert second.fence > first.fence


def test_renewing_counts_the_lease_on_the_clock_as_it_is(store: Store, clock: ManualClock) -> None:
    """After a step back a renewal counts from the new time: the claim holds no longer."""
    first = store.claim(KEY, A, b"p", TERMS)
    clock.set(START - 3600)
    assert store.renew(KEY, A, first.fence, TERMS) is True
    clock.advance(29.999)
    assert store.claim(KEY, B, b"p", TERMS).verdict is Verdict.IN_FLIGHT
    clock.advance(0.001)
    second = store.claim(KEY, B, b"p", TERMS)
    assert second.verdict is Verdict.WON
    assert second.fence > first.fence


def test_fences_rise_through_jumps_back(store: Store, clock: ManualClock) -> None:
    """Wins at 0, +60 s, -1 h and -2 h have rising fences, whatever time they are made of."""
    fences = []
    for moved in (0.0, 60.0, -3600.0, -7200.0, 60.0):
        clock.set(START + moved)
        owner = os.urandom(16)
        reply = store.claim(KEY, owner, b"p", TERMS)
        assert reply.verdict is Verdict.WON
        fences.append(reply.fence)
        assert store.release(KEY, owner, reply.fence)
    assert fences == sorted(set(fences))


def test_a_mark_in_between_does_not_lower_the_fence(store: Store, clock: ManualClock) -> None:
    """A first-seen mark on a released key, made by a clock gone back, keeps its fence rising."""
    first = store.claim(KEY, A, b"", TERMS)
    assert store.release(KEY, A, first.fence)
    clock.set(START - 3600)
    assert store.first_seen(KEY, SHORT) is True
    clock.advance(3)
    second = store.claim(KEY, B, b"", TERMS)
    assert second.verdict is Verdict.WON
    assert second.fence > first.fence


def test_an_answer_outlives_a_jump_back_and_is_not_swept(store: Store, clock: ManualClock) -> None:
    """A stored answer replays after the clock went back an hour, and sweeping leaves it there."""
    first = store.claim(KEY, A, b"p", TERMS)
    store.complete(KEY, A, first.fence, b"answer", TERMS)
    clock.set(START - 3600)
    assert store.sweep() == 0  # type: ignore[attr-defined]
    reply = store.claim(KEY, B, b"p", TERMS)
    assert (reply.verdict, reply.answer) == (Verdict.REPLAY, b"answer")


def test_a_jump_past_the_time_to_live_runs_again_with_a_higher_fence(
    store: Store, clock: ManualClock
) -> None:
    """A clock that jumps over the TTL ends the answer early; the next win's fence is higher."""
    first = store.claim(KEY, A, b"p", SHORT)
    store.complete(KEY, A, first.fence, b"answer", SHORT)
    clock.advance(60)
    second = store.claim(KEY, B, b"q", SHORT)
    assert second.verdict is Verdict.WON
    assert second.fence > first.fence
    clock.set(START - 3600)
    assert store.claim(KEY, os.urandom(16), b"q", SHORT).verdict is Verdict.IN_FLIGHT
    assert store.complete(KEY, B, second.fence, b"again", SHORT) is True


def test_a_mark_is_not_forgotten_by_a_jump_back(store: Store, clock: ManualClock) -> None:
    """A first-seen key stays seen after a step back of an hour and a small step forward."""
    assert store.first_seen(KEY, TERMS) is True
    for moved in (-3600.0, 60.0, -7200.0):
        clock.set(START + moved)
        assert store.first_seen(KEY, TERMS) is False


def test_a_handler_that_the_clock_robbed_of_its_key_is_told(
    store: Store, clock: ManualClock
) -> None:
    """A jump while a handler runs lets another call in; the first is fenced and gets its answer."""
    runs: list[str] = []
    once = Once(store, scope="clock", lease=30, wait=0)

    @once(key="name")
    def work(name: str) -> str:
        runs.append(name)
        if len(runs) == 1:
            clock.advance(60)
            assert work(name) == "second"  # another call, as from another worker
            clock.set(START - 3600)
            return "first"
        return "second"

    assert work("k") == "second"
    assert work("k") == "second"
    assert runs == ["k", "k"]


def test_a_handler_that_lost_its_key_to_one_still_running_gets_an_error(
    store: Store, clock: ManualClock
) -> None:
    """While the worker that took over still runs, the fenced one gets ClaimLostError, no answer."""
    once = Once(store, scope="clock", lease=30, wait=0)
    one, other = once.guard("j"), once.guard("j")
    first = one.__enter__()
    clock.advance(60)
    second = other.__enter__()
    assert second.takeover
    assert second.fence > first.fence
    first.answer = "first"
    with pytest.raises(ClaimLostError, match="raise the lease"):
        one.__exit__(None, None, None)
    second.answer = "second"
    other.__exit__(None, None, None)
    with once.guard("j") as replay:
        assert (replay.replayed, replay.answer) == (True, "second")


def jumps(rng: random.Random) -> Callable[[float], float]:
    """Where a restless clock goes next."""

    def step(now: float) -> float:
        return now + rng.choice([0.0, 0.0, 0.5, 1.0, 5.0, 60.0, -0.5, -60.0, -3600.0, 3600.0])

    return step


@pytest.mark.parametrize("seed", range(20))
def test_a_restless_clock_never_makes_two_winners_or_a_lower_fence(
    store: Store, clock: ManualClock, seed: int
) -> None:
    """300 random steps of claims, renewals and settlements between jumps keep every promise."""
    rng = random.Random(seed)
    step = jumps(rng)
    terms = Terms(lease_ms=2_000, ttl_ms=10_000)
    highest = 0
    holder: tuple[bytes, int] | None = None  # the last winner, while it has not settled
    lease_until = 0
    lost: list[tuple[bytes, int]] = []
    for _ in range(300):
        clock.set(step(clock()))
        now = store.now()
        act = rng.choice(["claim", "claim", "claim", "renew", "complete", "release", "zombie"])
        if act == "claim":
            owner = os.urandom(16)
            if store.read(KEY) is None:
                highest = 0  # swept: its fences are not known any more
            reply = store.claim(KEY, owner, b"p", terms)
            if reply.verdict is Verdict.WON:
                assert reply.fence > highest
                if holder is not None:
                    assert now >= lease_until, "won while another's lease ran"
                    lost.append(holder)
                highest = reply.fence
                holder, lease_until = (owner, reply.fence), now + terms.lease_ms
            elif reply.verdict is Verdict.IN_FLIGHT:
                assert holder is not None
                assert now < lease_until
            else:
                assert reply.verdict is Verdict.REPLAY
                assert reply.answer == b"%d" % highest
                assert holder is None
        elif act == "zombie":
            if lost:
                owner, fence = rng.choice(lost)
                assert store.complete(KEY, owner, fence, b"zombie", terms) is False
                assert store.renew(KEY, owner, fence, terms) is False
        elif holder is not None:
            owner, fence = holder
            if act == "renew":
                assert store.renew(KEY, owner, fence, terms) is True
                lease_until = now + terms.lease_ms
            elif act == "complete":
                assert store.complete(KEY, owner, fence, b"%d" % fence, terms) is True
                holder = None
            else:
                assert store.release(KEY, owner, fence) is True
                lost.append(holder)
                holder = None
