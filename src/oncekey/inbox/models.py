"""The values that go in and out of an inbox. Frozen, and nothing here does I/O.

Times are milliseconds since 1970 on the inbox's own clock.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from math import log2
from typing import Any, Final, Generic, TypeVar

from oncekey.errors import InvalidKeyError
from oncekey.models import Key, Scope

__all__ = [
    "Arrival",
    "Attempt",
    "AuditEntry",
    "BulkReplay",
    "BulkState",
    "Count",
    "DeadLetter",
    "Delivery",
    "DeliveryRow",
    "DeliveryState",
    "Depth",
    "Duplicate",
    "Event",
    "EventDetail",
    "EventRow",
    "Ingested",
    "Issue",
    "Outcome",
    "Page",
    "Rejected",
    "Result",
    "Route",
    "TargetState",
    "TargetStatus",
    "bucket_ms",
    "bucket_of",
    "event_id",
    "event_key",
    "event_number",
    "event_time",
]

T = TypeVar("T")

_DIGITS: Final = re.compile("[0-9a-f]{16}").fullmatch
ID_SHIFT: Final = 20  # an id is the millisecond of arrival, then these bits of a sequence


def event_id(number: int) -> str:
    """The id that people and targets see: ``msg_`` and 16 hex digits, in the order of arrival."""
    return f"msg_{number:016x}"


def event_number(text: str) -> int:
    """The number behind an id.

    Raises:
        InvalidKeyError: It is no id of an event.
    """
    if len(text) == 20 and text[:4] == "msg_" and _DIGITS(text, 4):
        number = int(text[4:], 16)
        if number < 2**63:
            return number
    raise InvalidKeyError("an event's id is msg_ and 16 hex digits, as the inbox gave it")


def event_time(number: int) -> int:
    """When the event of this number arrived."""
    return number >> ID_SHIFT


def event_key(source: str, key: str) -> Key:
    """The record by which copies of an event are known: what to inspect, and what to evict."""
    return Key(_scope(source), key)


@lru_cache(maxsize=1000)
def _scope(source: str) -> Scope:
    return Scope("webhook", "inbox", source)


def bucket_of(ms: int) -> int:
    """Which bucket of a histogram a duration falls in: four for each doubling."""
    return round(4 * log2(max(ms, 0) + 1))


def bucket_ms(bucket: int) -> int:
    """The duration in the middle of a bucket, in milliseconds."""
    return round(2 ** (bucket / 4) - 1)


class Outcome(StrEnum):
    """How an attempt ended. What comes next was decided by whoever made it."""

    DELIVERED = "delivered"
    RETRY = "retry"
    DEAD = "dead"
    DISCARDED = "discarded"

    LOST = "lost"
    """No end is on record: its worker was killed, or stopped while it was under way."""


class DeliveryState(StrEnum):
    """Where a delivery stands."""

    WAITING = "waiting"
    """It is due now or later."""

    RUNNING = "running"
    """A node has it in hand."""

    PARKED = "parked"
    """Ordered: an earlier event of the same entity is not finished yet."""

    DELIVERED = "delivered"
    DEAD = "dead"
    DISCARDED = "discarded"


class TargetStatus(StrEnum):
    """Whether a target gets anything."""

    ACTIVE = "active"
    PAUSED = "paused"
    """Nothing is sent, what is queued included; new events queue up."""

    DISABLED = "disabled"
    """Nothing is sent, what is queued included; new events are not queued for it."""


class BulkState(StrEnum):
    """How far a bulk replay is."""

    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Route:
    """One target that an event goes to.

    Attributes:
        target: Its name.
        order_key: Events with the same one reach the target one after another, in the order of
            their arrival. ``None``: in any order.
    """

    target: str
    order_key: str | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """An event as it came, verified, with the targets that it goes to.

    Attributes:
        source: Which source it came to.
        key: What copies of it have in common, such as the provider's id of the event.
        type: Its type in the provider's words; may be empty.
        body: The bytes as they came.
        headers: Those worth keeping, names in lower case. Never signatures or credentials.
        routes: Where it goes; each target at most once.
    """

    source: str
    key: str
    type: str
    body: bytes = field(repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    routes: tuple[Route, ...] = ()


@dataclass(frozen=True, slots=True)
class Ingested:
    """What became of an arrival, once that is durable.

    Attributes:
        id: The event's id; of a copy, that of the event it is a copy of.
        new: False: a copy came before; its arrival is on record.
        same: False: the copy that came before had another body.
    """

    id: str
    new: bool
    same: bool = True


@dataclass(frozen=True, slots=True)
class Event:
    """An event as it is kept."""

    id: str
    at: int
    source: str
    key: str
    type: str
    headers: tuple[tuple[str, str], ...] = field(repr=False)
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Delivery:
    """An event in the hand of a worker, for one target.

    Attributes:
        event: What to deliver.
        target: To whom.
        attempt: Which try this is, from 1; a replay counts from 1 again.
        fence: Rises with each fetch of this delivery, over replays too. Whoever finishes must have
            the last one.
        lease_until: Until then nobody else gets it.
        order_key: See ``Route``.
    """

    event: Event
    target: str
    attempt: int
    fence: int
    lease_until: int
    order_key: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """How an attempt ended, for ``finish``.

    Attributes:
        delivery: What was attempted.
        outcome: ``DELIVERED``, ``RETRY`` or ``DEAD``.
        ms: How long it took.
        status: The target's own word for it, such as an HTTP status; 0: there was none.
        error: A short cause of a failure, the same for failures that are alike. No payload.
        note: More for people: the beginning of the answer, say.
        retry_in_ms: With ``RETRY``: when to try again, from now.
    """

    delivery: Delivery
    outcome: Outcome
    ms: int = 0
    status: int = 0
    error: str = ""
    note: str = field(default="", repr=False)
    retry_in_ms: int = 0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt in an event's history. It stays when the delivery is replayed.

    Attributes:
        number: The fence under which it was made: rises by one.
        at: When it ended; of a ``LOST`` one, a time between those before and after it.
        actor: Who asked for it, if it is an action of a person's (``DISCARDED``).
    """

    target: str
    number: int
    at: int
    ms: int
    outcome: Outcome
    status: int
    error: str
    note: str
    actor: str = ""


@dataclass(frozen=True, slots=True)
class DeliveryRow:
    """One delivery on an event's page.

    Attributes:
        due_at: When it is tried next, or the lease ends; ``None`` where nothing is to come.
        attempts: How many tries there were since it was queued or replayed.
        node: Who has it in hand.
    """

    target: str
    state: DeliveryState
    due_at: int | None = None
    attempts: int = 0
    status: int = 0
    error: str = ""
    node: str = ""
    order_key: str | None = None


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The arrival of a copy.

    Attributes:
        body: The copy's own body, where it was another and is one of the last 20 of those.
    """

    at: int
    same: bool
    body: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class EventRow:
    """An event in a list: all but headers and body, and what became of it."""

    id: str
    at: int
    source: str
    key: str
    type: str
    size: int
    state: DeliveryState | None
    """The worst of its deliveries; ``None``: it went to no target."""

    deliveries: int
    attempts: int
    duplicates: int


@dataclass(frozen=True, slots=True)
class EventDetail:
    """All that is known of an event, oldest first."""

    event: Event
    deliveries: tuple[DeliveryRow, ...]
    attempts: tuple[Attempt, ...]
    duplicates: tuple[Duplicate, ...]
    actions: tuple[AuditEntry, ...]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A delivery that was given up, with the cause."""

    id: str
    at: int
    source: str
    type: str
    target: str
    attempts: int
    status: int
    error: str
    note: str


@dataclass(frozen=True, slots=True)
class Issue:
    """Failures that are alike.

    Attributes:
        dead: How many deliveries were given up for this reason.
        failing: How many failed so and will be tried again.
        first_at: When the oldest of their events arrived.
        last_at: When the newest of their events arrived.
        sample: One of them.
    """

    target: str
    status: int
    error: str
    dead: int
    failing: int
    first_at: int
    last_at: int
    sample: str


@dataclass(frozen=True, slots=True)
class Count:
    """How often something happened in a minute.

    Attributes:
        minute: Its start, in milliseconds since 1970.
        kind: ``received``, ``duplicate`` and ``rejected`` by source; ``delivered``, ``failed`` and
            ``dead`` by target; ``late`` by target, once for each that was delivered.
        name: Which source or target.
        n: How often.
        bucket: Of attempts, how long they took: about ``bucket_ms(bucket)``. Of ``late``, how long
            after the event's arrival it was delivered. 0 otherwise.
    """

    minute: int
    kind: str
    name: str
    n: int
    bucket: int = 0


@dataclass(frozen=True, slots=True)
class Depth:
    """What waits for a target.

    Attributes:
        waiting: How many deliveries are unfinished, to the limit that was asked for.
        dead: How many were given up.
        oldest_at: When the oldest unfinished event arrived; ``None``: nothing waits.
    """

    target: str
    waiting: int
    dead: int
    oldest_at: int | None


@dataclass(frozen=True, slots=True)
class InHand:
    """A delivery that a worker has taken. Past its lease another may, and soon does."""

    id: str
    at: int
    target: str
    node: str
    lease_until: int
    attempt: int


@dataclass(frozen=True, slots=True)
class TargetState:
    """A target that somebody paused or disabled, or made active again."""

    name: str
    status: TargetStatus
    at: int
    actor: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """A request that became no event, and why."""

    id: int
    at: int
    source: str
    cause: str
    detail: str


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """An action of somebody's, with what it was about."""

    id: int
    at: int
    actor: str
    action: str
    subject: str
    detail: str


@dataclass(frozen=True, slots=True)
class BulkReplay:
    """A replay by filter, under way or done.

    Attributes:
        query: What it was asked for, as it is written in a search.
        rate: Replays a second.
        total: How many deliveries matched when it began.
        done: How many were replayed so far.
    """

    id: int
    at: int
    actor: str
    query: str
    rate: float
    total: int
    done: int
    state: BulkState


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some of many, newest first.

    Attributes:
        next: What to pass as ``after`` for those that follow; ``None``: there are none. A page may
            hold fewer than were asked for and still have a next one, so that a rare match in a long
            history costs many short calls and not a long one.
    """

    items: tuple[T, ...]
    next: str | None = None

    def __iter__(self) -> Any:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)
