"""``plan_gateway``: the cores, slots and disk that a gateway needs, by sums and Little's law.

What an event costs was measured (``benchmarks/bench_gateway.py``, ``benchmarks/bench_inbox.py``,
``scripts/scale.py --bytes``). ``scripts/scale.py`` has a simulation that knows none of this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from oncekey.errors import PolicyError
from oncekey.policy import Duration, milliseconds

__all__ = ["GatewayLoad", "GatewayPlan", "attempts_of", "backlog_after", "plan_gateway"]

BUSY: Final = 0.7
"""Of slots and cores: above it a queue grows long at every gust."""

TRIES: Final = 12
"""Of a delivery, by a target's policy where the config says nothing."""

MEASURED: Final = "2026-11-18"
TAKE_US, SEND_US = 172.0, 104.0  # of the gateway's processor: an event, and each attempt
STORE_TAKE_US, STORE_SEND_US = 67.0, 60.0  # of PostgreSQL's, on a busy machine: an upper bound
EVENT_BYTES: Final = {"sqlite": 434.0, "postgresql": 376.0}  # beside the body, with an attempt
KEY_BYTES: Final = {"sqlite": 172.0, "postgresql": 356.0}  # of a key that is remembered


@dataclass(frozen=True)
class GatewayLoad:
    """What comes in, and who it goes to.

    Attributes:
        rate: Events in a second.
        targets: To how many targets each goes.
        seconds: How long an attempt takes.
        fails: Which part of the attempts fails.
        body: Bytes of an event.
        retention: How long events and their history are kept.
        remember: How long their keys are.
    """

    rate: float
    targets: int = 1
    seconds: float = 0.1
    fails: float = 0.02
    body: int = 1_000
    retention: Duration = 2_592_000
    remember: Duration = 604_800

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise PolicyError(f"rate must be events in a second, above 0, got {self.rate!r}")
        if not 0 <= self.fails <= 1:
            raise PolicyError(f"fails must be a part of all attempts, 0 to 1, got {self.fails!r}")
        if self.targets < 0 or self.body < 0 or not 0 < self.seconds < math.inf:
            raise PolicyError("targets and body can't be below 0, nor an attempt take no time")


@dataclass(frozen=True)
class GatewayPlan:
    """What a load needs.

    Attributes:
        attempts: Of each delivery.
        in_flight: Attempts at a time, for each target.
        slots: What ``concurrency`` times nodes should be, for each target.
        gateway_cores: Of the gateways, one process a core.
        store_cores: Of PostgreSQL; with SQLite its work is the gateway's.
        events_a_day: Bytes of events and their history in a day, in PostgreSQL.
        history: Bytes of all that is kept.
        keys: Bytes of the keys that are remembered.
    """

    attempts: float
    in_flight: float
    slots: int
    gateway_cores: float
    store_cores: float
    events_a_day: float
    history: float
    keys: float


def attempts_of(fails: float, tries: int) -> float:
    """How often a delivery is tried, if each try fails by the same chance."""
    return float(tries) if fails >= 1 else (1 - fails**tries) / (1 - fails)


def plan_gateway(load: GatewayLoad, tries: int = TRIES, store: str = "postgresql") -> GatewayPlan:
    """What a gateway needs for a load.

    Args:
        load: What comes in.
        tries: How often a delivery is tried, as the policy of its target says.
        store: ``postgresql`` or ``sqlite``.

    Raises:
        PolicyError: A number can't be.

    Example:
        >>> plan_gateway(GatewayLoad(100)).slots
        15
    """
    attempts = attempts_of(load.fails, tries)
    in_flight = load.rate * attempts * load.seconds
    sent = load.targets * attempts
    second = load.rate * (load.body + EVENT_BYTES[store] * max(sent, 1))
    stored = 0.0 if store == "sqlite" else STORE_TAKE_US + sent * STORE_SEND_US
    return GatewayPlan(
        attempts,
        in_flight,
        math.ceil(in_flight / BUSY),
        load.rate * (TAKE_US + sent * SEND_US) / 1e6 / BUSY,
        load.rate * stored / 1e6 / BUSY,
        second * 86_400,
        second * milliseconds(load.retention, "retention") / 1000,
        load.rate * KEY_BYTES[store] * milliseconds(load.remember, "remember") / 1000,
    )


def backlog_after(
    load: GatewayLoad, outage: float, slots: int, tries: int = TRIES
) -> tuple[float, float]:
    """What waits when a target comes back, and the seconds until nothing does any more."""
    attempts = attempts_of(load.fails, tries)
    capacity = slots / (load.seconds * attempts)
    waits = load.rate * outage
    return waits, waits / (capacity - load.rate) if capacity > load.rate else math.inf
