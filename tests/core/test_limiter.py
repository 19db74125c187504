"""The limit on new keys: sliding windows for each scope."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oncekey._core.limiter import InsertLimiter
from oncekey.testing import ManualClock


@given(st.lists(st.floats(0, 3), min_size=1, max_size=200))
def test_no_window_ever_holds_more_than_its_limit(steps: list[float]) -> None:
    """Whatever the arrivals, at most ten counted events lie in any nine seconds."""
    clock = ManualClock(1000.0)
    limiter = InsertLimiter(((10, 10),), clock)
    counted: list[float] = []
    for step in steps:
        clock.advance(step)
        if limiter.retry_after("s") is None:
            limiter.count("s")
            counted.append(clock())
    for start in counted:
        assert sum(start <= at < start + 9 for at in counted) <= 10


@given(st.lists(st.floats(0, 3), min_size=1, max_size=100))
def test_retry_after_is_long_enough(steps: list[float]) -> None:
    """After the wait that was told, a key may be made."""
    clock = ManualClock(1000.0)
    limiter = InsertLimiter(((5, 10), (8, 60)), clock)
    for step in steps:
        clock.advance(step)
        wait = limiter.retry_after("s")
        if wait is not None:
            assert 1 <= wait <= 60
            clock.advance(wait)
            assert limiter.retry_after("s") is None
        limiter.count("s")


def test_scopes_are_counted_apart() -> None:
    """One caller's keys don't hold up another's."""
    limiter = InsertLimiter(((1, 10),), ManualClock())
    limiter.count("a")
    assert limiter.retry_after("a") is not None
    assert limiter.retry_after("b") is None


def test_scopes_that_count_no_more_are_forgotten() -> None:
    """A scope for each event keeps the memory of one window, not of all events."""
    clock = ManualClock()
    limiter = InsertLimiter(((5, 10), (8, 60)), clock)
    for number in range(2_000):
        limiter.admit(f"event {number}")
        clock.advance(1)
    assert len(limiter._counts) <= 80


def test_a_scope_that_still_counts_is_not_forgotten() -> None:
    """Others that come and go make nobody's count start over."""
    clock = ManualClock()
    limiter = InsertLimiter(((1, 60),), clock)
    limiter.count("a")
    for number in range(50):
        limiter.admit(f"event {number}")
        clock.advance(1)
    assert limiter.retry_after("a") is not None
