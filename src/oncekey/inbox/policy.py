"""How a target is treated: what goes to it, how fast, how often it is tried."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from oncekey.errors import PolicyError
from oncekey.policy import Duration, milliseconds

__all__ = ["TargetPolicy"]

_LONGEST: Final = 30 * 86_400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPolicy:
    """How one target is treated.

    Attributes:
        tries: How often a delivery is tried before it is given up.
        first_delay: How long after the first failure it is tried again.
        factor: By how much each delay is longer than the one before.
        max_delay: The longest delay, and the longest ``Retry-After`` that is honoured.
        jitter: Which part of a delay is left to chance: 0.2 is 20 % more or less.
        timeout: How long an attempt may take, all of it.
        concurrency: How many attempts one node makes at a time.
        rate: How many attempts one node begins in a second. ``None``: any number.
        order_by: A JSON path, such as ``$.data.object.customer``: events with the same value there
            reach the target one after another. ``None``: in any order.
        types: Which types of event it gets; a ``*`` at the end stands for anything. Empty: all.
        where: What the body must hold, as ``$.path == value`` or ``!=``. All of them must hold.
        breaker_after: After how many failures in a row, with no success between, the target is left
            alone for a while. 0: never.
        breaker_pause: For how long; then one attempt is made to see.
    """

    tries: int = 12
    first_delay: Duration = 5
    factor: float = 3.0
    max_delay: Duration = 6 * 3600
    jitter: float = 0.2
    timeout: Duration = 30
    concurrency: int = 16
    rate: float | None = None
    order_by: str | None = None
    types: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    breaker_after: int = 10
    breaker_pause: Duration = 30

    def __post_init__(self) -> None:
        if not 1 <= self.tries <= 1000:
            raise PolicyError(f"tries must be 1 to 1000, got {self.tries}")
        if not 1 <= self.concurrency <= 10_000:
            raise PolicyError(f"concurrency must be 1 to 10000, got {self.concurrency}")
        if not 1 <= self.factor <= 100:
            raise PolicyError(f"factor must be 1 to 100, got {self.factor}")
        if not 0 <= self.jitter <= 1:
            raise PolicyError(f"jitter must be 0 to 1, got {self.jitter}")
        if self.rate is not None and not 0 < self.rate <= 1_000_000:
            raise PolicyError(f"rate must be more than 0 a second, got {self.rate}")
        if self.breaker_after < 0:
            raise PolicyError(f"breaker_after can't be negative, got {self.breaker_after}")
        for name in ("first_delay", "max_delay", "breaker_pause"):
            if milliseconds(getattr(self, name), name, least=1) > _LONGEST:
                raise PolicyError(f"{name} must be at most 30 days")
        milliseconds(self.timeout, "timeout", least=10)

    @property
    def timeout_ms(self) -> int:
        """How long an attempt may take."""
        return milliseconds(self.timeout, "timeout", least=10)

    @property
    def lease_ms(self) -> int:
        """How long a delivery is held: the longest attempt, and as long to say how it ended."""
        return 2 * self.timeout_ms + 1_000

    def delay_ms(
        self, attempt: int, retry_after_ms: int | None = None, chance: float | None = None
    ) -> int:
        """How long to wait after a failure.

        Args:
            attempt: Which try failed, from 1.
            retry_after_ms: What the target asked for. It is not shortened, but for ``max_delay``.
            chance: 0 to 1, in place of a random number.
        """
        longest = milliseconds(self.max_delay, "max_delay")
        first = milliseconds(self.first_delay, "first_delay")
        grown = min(first * self.factor ** min(attempt - 1, 64), longest)
        roll = random.random() if chance is None else chance  # noqa: S311 - no secret
        spread = grown * (1 + self.jitter * (2 * roll - 1))
        asked = min(retry_after_ms or 0, longest)
        return max(round(spread), asked + round(asked * self.jitter * roll), 1)
