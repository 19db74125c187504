"""When a provider sends a failed delivery again: what it publishes, or a guess that says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from oncekey.signatures.base import Facts

__all__ = ["Schedule", "schedule_of"]

FIRST: Final = 60.0
LONGEST: Final = 43_200.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """The waits between attempts.

    Attributes:
        waits: Seconds, one for each retry.
        published: Whether the steps are known; if not, only how many or how long.
        about: Where they come from, in words.
    """

    waits: tuple[float, ...]
    published: bool
    about: str


def schedule_of(facts: Facts) -> Schedule:
    """The schedule of a provider."""
    known = facts.retry_schedule
    if "steps" in known:
        steps = [float(one) for one in known["steps"]]
        while steps and sum(steps) + steps[-1] <= facts.retry_seconds:
            steps.append(steps[-1])
        return Schedule(tuple(steps), True, known["source"])
    about = f"unpublished: an approximation of: {facts.retries}"
    times = known.get("times")
    waits = _doubling(facts.retry_seconds) if times is None else _growing(times, facts)
    return Schedule(waits, False, about)


def _doubling(seconds: float) -> tuple[float, ...]:
    """From a minute, twice as long each time up to half a day, for so long in all."""
    waits: list[float] = []
    wait = FIRST
    while sum(waits) + wait <= seconds:
        waits.append(wait)
        wait = min(wait * 2, LONGEST)
    return tuple(waits)


def _growing(times: int, facts: Facts) -> tuple[float, ...]:
    """So many waits that grow by one factor from at most a minute, and fill the time."""
    first = min(FIRST, facts.retry_seconds / times)
    low, high = 1.0, facts.retry_seconds / first
    for _ in range(100):
        factor = (low + high) / 2
        if sum(first * factor**place for place in range(times)) < facts.retry_seconds:
            low = factor
        else:
            high = factor
    return tuple(first * low**place for place in range(times))
