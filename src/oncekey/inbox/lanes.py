"""One target in the eyes of the worker: how much it may get now, and whether it is well.

Each target has a lane of its own, so that a sick one takes nobody else's slots.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from oncekey.inbox.models import Delivery, Outcome, Result
from oncekey.inbox.policy import TargetPolicy
from oncekey.inbox.targets.base import Answer, Target
from oncekey.policy import milliseconds

__all__ = ["BreakerState", "Destination", "Lane", "LaneReport"]

_MANY = 100  # that are fetched together: more make none of them cheaper
_LONGEST_PAUSES = 16  # times the policy's, at most


class BreakerState(StrEnum):
    """Whether a target is left alone for a while."""

    CLOSED = "closed"
    OPEN = "open"
    TRYING = "trying"
    """One attempt at a time, to see whether it is well again."""


@dataclass(frozen=True, slots=True)
class Destination:
    """A target and how it is treated."""

    target: Target
    policy: TargetPolicy = field(default_factory=TargetPolicy)


@dataclass(frozen=True, slots=True)
class LaneReport:
    """How a target stands on this node.

    Attributes:
        in_flight: Attempts under way.
        slots: The most that may be.
        failures: How many sick failures came in a row.
        resumes_in: Seconds until an open breaker tries again.
    """

    target: str
    in_flight: int
    slots: int
    breaker: BreakerState
    failures: int
    resumes_in: float


class Running(NamedTuple):
    """An attempt under way, and until when it may take, on the monotonic clock."""

    delivery: Delivery
    ends: float


class Lane:
    """A target's slots, tokens and breaker. ``clock`` is monotonic, in seconds."""

    def __init__(self, name: str, to: Destination, clock: Callable[[], float]) -> None:
        self.name = name
        self.to = to
        self.timeout_ms = to.policy.timeout_ms
        self.lease_ms = to.policy.lease_ms
        self._longest = 1.5 * self.timeout_ms / 1000
        self.running: dict[asyncio.Task[None], Running] = {}  # the one that began first is first
        self._clock = clock
        self._failures = 0
        self._pauses = 0
        self._open_until = 0.0
        self._tokens = self._burst
        self._filled_at = clock()

    @property
    def _burst(self) -> float:
        rate = self.to.policy.rate
        return math.inf if rate is None else max(1.0, rate)

    @property
    def breaker(self) -> BreakerState:
        """Whether the target is left alone."""
        if not self._pauses:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._open_until else BreakerState.TRYING

    def free(self) -> int:
        """How many attempts may begin now."""
        policy = self.to.policy
        most = policy.concurrency
        if self._pauses:
            most = 0 if self.breaker is BreakerState.OPEN else 1
        free = most - len(self.running)
        rate = policy.rate
        if rate is not None and free > 0:
            now = self._clock()
            self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * rate)
            self._filled_at = now
            free = min(free, int(self._tokens))
        return max(0, free)

    def is_worth_a_look(self) -> bool:
        """Whether half of what may be under way at a time may begin now."""
        free = self.free()
        return free > 0 and 2 * free >= min(self.to.policy.concurrency, _MANY)

    def begun(self, task: asyncio.Task[None], delivery: Delivery) -> None:
        """An attempt begins."""
        self._tokens -= 1
        self.running[task] = Running(delivery, self._clock() + self._longest)

    def overdue(self) -> list[asyncio.Task[None]]:
        """Attempts of a plug-in that does not keep its time; those that began first come first."""
        late = []
        now = self._clock()
        for task, one in self.running.items():
            if one.ends > now:
                break
            late.append(task)
        return late

    def waits(self) -> float:
        """Seconds until time alone changes something: a slot, or an attempt that takes too long."""
        wait = math.inf
        if self.running:
            wait = next(iter(self.running.values())).ends - self._clock()
        if self._pauses and self.breaker is BreakerState.OPEN:
            return min(wait, self._open_until - self._clock())
        rate = self.to.policy.rate
        if rate is not None and self._tokens < 1:
            return min(wait, (1 - self._tokens) / rate)
        return wait

    def learn(self, answer: Answer) -> None:
        """What an attempt says about the target: evidence for or against the whole of it."""
        policy = self.to.policy
        if answer.ok or not answer.sick:  # it answers: whatever is wrong is this event's
            self._failures = 0
            self._pauses = 0
            return
        self._failures += 1
        if not policy.breaker_after:
            return
        trying = self.breaker is BreakerState.TRYING
        if trying or (not self._pauses and self._failures >= policy.breaker_after):
            self._pauses = min(self._pauses * 2 or 1, _LONGEST_PAUSES)
            pause = milliseconds(policy.breaker_pause, "breaker_pause") / 1000
            self._open_until = self._clock() + pause * self._pauses

    def judged(self, delivery: Delivery, answer: Answer, ms: int) -> Result:
        """What becomes of a delivery, by the policy."""
        policy = self.to.policy
        outcome = Outcome.RETRY
        if answer.ok:
            outcome = Outcome.DELIVERED
        elif answer.permanent or delivery.attempt >= policy.tries:
            outcome = Outcome.DEAD
        wait = 0
        if outcome is Outcome.RETRY:
            wait = policy.delay_ms(delivery.attempt, answer.retry_after_ms)
        return Result(
            delivery,
            outcome,
            ms,
            answer.status,
            "" if answer.ok else answer.error,
            answer.note,
            wait,
        )

    def report(self) -> LaneReport:
        """How it stands."""
        return LaneReport(
            target=self.name,
            in_flight=len(self.running),
            slots=self.to.policy.concurrency,
            breaker=self.breaker,
            failures=self._failures,
            resumes_in=max(0.0, self._open_until - self._clock()) if self._pauses else 0.0,
        )
