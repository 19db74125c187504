"""What an outage leaves behind decides nothing once the store answers, and fills no table."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.resilience.conftest import TERMS, Away, key

from oncekey import Once, SQLiteStore
from oncekey._core.drive import run
from oncekey.errors import StoreFullError, StoreUnavailableError
from oncekey.models import ClaimVerdict, State
from oncekey.resilience import Breaker, BreakerState, around, fallback, resilient
from oncekey.testing import ManualClock

ONE, TWO = b"o" * 16, b"p" * 16
LEASE = TERMS.lease_ms / 1000


class Left:
    """A store that goes on without the one inside of it, and whose leases a test can end."""

    def __init__(self, opened: Any, journal: Path, **options: Any) -> None:
        self.breaker_clock = ManualClock(1000.0)
        breaker = Breaker(failures=1, successes=1, clock=self.breaker_clock)
        self.store = resilient(
            opened, on_outage="open", journal=journal, breaker=breaker, **options
        )
        self.inside = opened
        self.fallback: Any = self.store._fallback
        self.local = self.fallback._local
        self.ahead = 0.0
        self.local._clock = lambda: time.time() + self.ahead

    def claim(self, name: str, owner: bytes = ONE, mark: bytes = b"f") -> Any:
        return self.store.claim(key(name), owner, mark, TERMS)

    def interrupt(self, name: str) -> None:
        """A call that is cut off while it runs."""
        with pytest.raises(KeyboardInterrupt), Once(self.store, scope="s").guard(name):
            raise KeyboardInterrupt

    def end_leases(self, leases: float = 1) -> None:
        self.ahead += leases * LEASE

    def answers(self) -> None:
        """The store is back, and the breaker knows it."""
        self.inside.away.end()
        self.breaker_clock.advance(60)
        self.store._start = lambda fallback: None  # type: ignore[method-assign]
        self.store.read(key("any"))
        assert self.store.breaker.state is BreakerState.CLOSED
        del self.store._start

    def unfinished(self) -> int:
        """How many such findings there are, once what is due was reconciled."""
        self.store.reconcile()
        assert self.store.findings is not None
        return [one.kind for one in self.store.findings.list()].count("unfinished")


@pytest.fixture
def left(opened: Any, away: Away, tmp_path: Path) -> Iterator[Left]:
    """One whose store is away."""
    made = Left(opened, tmp_path / "journal")
    away.begin()
    return made  # type: ignore[return-value]


def test_a_call_that_was_cut_off_decides_nothing_later(left: Left) -> None:
    """Its lease over, the store decides of its key: nobody runs beside who won it there."""
    left.claim("k")  # and its call is cut off
    left.answers()
    left.end_leases()
    with SQLiteStore(str(left.inside.away.path)) as other:
        assert other.claim(key("k"), TWO, b"f", TERMS).verdict is ClaimVerdict.WON
    assert left.claim("k", b"q" * 16).verdict is ClaimVerdict.IN_FLIGHT
    assert left.unfinished() == 1
    assert left.unfinished() == 1, "told once"


def test_while_its_lease_runs_it_does_decide(left: Left) -> None:
    """A call that runs here when the store is back holds its key, and what it did goes in."""
    fence = left.claim("k").fence
    left.answers()
    assert left.claim("k", TWO).verdict is ClaimVerdict.IN_FLIGHT
    assert left.store.complete(key("k"), ONE, fence, b"j1", TERMS)
    assert left.claim("k", TWO).answer == b"j1"
    assert left.unfinished() == 0


def test_calls_that_were_cut_off_fill_no_table(opened: Any, away: Away, tmp_path: Path) -> None:
    """They make room for new ones when their leases are over, and are told of."""
    left = Left(opened, tmp_path / "journal", entries=5)
    away.begin()
    for number in range(5):
        left.interrupt(str(number))
    with pytest.raises(StoreFullError, match="raise entries="):
        left.claim("new")
    left.end_leases()
    assert left.claim("new").verdict is ClaimVerdict.WON
    left.answers()
    assert left.unfinished() == 5


def test_what_nobody_asks_for_again_is_told_too(left: Left) -> None:
    """Calls of other keys find out that a call was cut off, once a live one had been renewed."""
    fence = left.claim("lives").fence
    left.interrupt("cut off")
    left.answers()
    assert left.unfinished() == 0
    left.end_leases(2)
    assert not left.fallback.due(), "looked for now and then"
    assert left.store.renew(key("lives"), ONE, fence, TERMS)
    left.fallback._sweep_at = 0.0
    assert left.fallback.due()
    assert left.unfinished() == 1
    assert left.fallback.runs(key("lives"), ONE)


def test_who_lost_a_key_here_is_told(left: Left) -> None:
    """A thread that stood still for its lease, in the outage: another took over, and it may not."""
    old = left.claim("k").fence
    left.end_leases()
    new = left.claim("k", TWO)
    assert (new.verdict, new.takeover, new.attempts) == (ClaimVerdict.WON, True, 2)
    assert not left.store.renew(key("k"), ONE, old, TERMS)
    assert not left.store.complete(key("k"), ONE, old, b"j1", TERMS)
    assert left.store.complete(key("k"), TWO, new.fence, b"j2", TERMS)
    assert not left.store.renew(key("k"), ONE, old, TERMS)
    assert not left.store.complete(key("k"), ONE, old, b"j1", TERMS)
    assert left.claim("k").answer == b"j2"
    left.answers()
    assert left.unfinished() == 1, "what it did is not recorded"


def test_who_made_room_may_still_finish(opened: Any, away: Away, tmp_path: Path) -> None:
    """Nobody else has its key, so that what it did is recorded, with its payload."""
    left = Left(opened, tmp_path / "journal", entries=1)
    away.begin()
    fence = left.claim("slow").fence
    left.end_leases()
    left.claim("quick", TWO)
    assert left.store.renew(key("slow"), ONE, fence, TERMS)
    assert left.store.complete(key("slow"), ONE, fence, b"j1", TERMS)
    left.answers()
    assert left.unfinished() == 0
    record = opened.read(key("slow"))
    assert (record.state, record.answer, record.fingerprint) == (State.COMPLETED, b"j1", b"f")


def test_a_mark_past_its_window_decides_nothing(left: Left) -> None:
    """The store may have another one by then."""
    assert left.store.first_seen(key("k"), TERMS)
    left.answers()
    assert not left.store.first_seen(key("k"), TERMS)
    left.ahead += TERMS.ttl_ms / 1000
    assert left.inside.first_seen(key("k"), TERMS)
    assert not left.store.first_seen(key("k"), TERMS)


def test_what_is_decided_here_is_no_answer_of_the_store(left: Left) -> None:
    """A copy of what runs here closes no breaker: nobody has seen the store work."""
    left.claim("k")
    left.store.first_seen(key("mark"), TERMS)
    left.breaker_clock.advance(60)
    assert left.claim("k", TWO).verdict is ClaimVerdict.IN_FLIGHT
    assert not left.store.first_seen(key("mark"), TERMS)
    assert left.store.read(key("k")).owner == ONE
    assert left.store.breaker.state is not BreakerState.CLOSED


def test_what_ran_when_the_store_went_away_holds_its_key_here(left: Left, away: Away) -> None:
    """A copy in the same process does not run beside it, for as long as it is renewed."""
    away.end()
    reply = left.claim("k")
    away.begin()
    assert left.claim("k", TWO).verdict is ClaimVerdict.IN_FLIGHT
    assert left.claim("k", TWO, b"other").verdict is ClaimVerdict.CONFLICT
    left.end_leases(0.5)
    assert left.store.renew(key("k"), ONE, reply.fence, TERMS)
    left.end_leases(0.9)
    assert left.claim("k", TWO).verdict is ClaimVerdict.IN_FLIGHT
    assert left.store.complete(key("k"), ONE, reply.fence, b"j1", TERMS)
    assert left.claim("k", TWO).answer == b"j1"
    left.answers()
    assert left.claim("k", TWO).answer == b"j1"
    assert left.unfinished() == 0


@pytest.mark.parametrize("end", ["released", "cut off", "done"])
def test_and_no_longer(left: Left, away: Away, end: str) -> None:
    """What has ended holds nothing, nor does what is not renewed; what is done is asked of none."""
    away.end()
    reply = left.claim("k")
    if end == "done":
        assert left.store.complete(key("k"), ONE, reply.fence, b"j1", TERMS)
    away.begin()
    if end == "cut off":
        left.end_leases()
    elif end == "released":
        with pytest.raises(StoreUnavailableError):
            left.store.release(key("k"), ONE, reply.fence)
    assert left.claim("k", TWO).verdict is ClaimVerdict.WON


# Reconciliation beside calls


def beside(step: int, call: Callable[[], Any], meanwhile: Callable[[], object]) -> bool:
    """Have ``meanwhile`` done by another thread at one step of ``call``, a bytecode.

    Gives whether there was such a step.
    """
    steps = itertools.count()
    done = False

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal done
        if frame.f_code.co_filename not in (around.__file__, fallback.__file__):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(steps) == step:
            done = True
            thread = threading.Thread(target=meanwhile)
            thread.start()
            thread.join()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return done


@pytest.mark.parametrize("what", ["mark", "done"])
def test_a_copy_slips_past_no_reconciliation(left: Left, what: str) -> None:
    """At whatever step of a copy's call its key goes from here into the store, it is a copy."""
    for step in itertools.count():
        name = str(step)
        left.inside.away.begin()
        if what == "mark":
            assert left.store.first_seen(key(name), TERMS)
        else:
            fence = left.claim(name).fence
            assert left.store.complete(key(name), ONE, fence, b"j1", TERMS)
        left.answers()

        def copy(name: str = name) -> None:
            if what == "mark":
                assert not left.store.first_seen(key(name), TERMS)
            else:
                assert left.claim(name, TWO).verdict is ClaimVerdict.REPLAY

        left.store._start = lambda fallback: None  # type: ignore[method-assign]
        if not beside(step, copy, lambda: run(left.fallback.reconcile_due(), left.inside)):
            break
    assert step > 20


def test_a_reconciliation_that_never_began_holds_up_no_other(
    left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread may not start, or its loop end before its first step: another does it."""
    once = Once(left.store, scope="s", wait=0)
    with once.guard("k") as claim:
        claim.answer = 1
    left.inside.away.end()
    left.breaker_clock.advance(60)

    def refuse(thread: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with once.guard("other") as claim:  # which finds that a reconciliation is due
            claim.answer = 2

    def pause() -> None:
        raise AssertionError("it waits for one that never ends")

    left.fallback._steps.pause = pause
    assert left.store.reconcile().inserted == 1
