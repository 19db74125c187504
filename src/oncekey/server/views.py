"""What the API says of each thing, as JSON. The types are the schemas of the OpenAPI document."""

from __future__ import annotations

import base64
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import TypedDict

from oncekey.inbox.models import (
    Attempt,
    AuditEntry,
    BulkReplay,
    Count,
    DeadLetter,
    DeliveryRow,
    Depth,
    Duplicate,
    EventDetail,
    EventRow,
    Issue,
    Rejected,
)
from oncekey.server.percentiles import ATTEMPTS, LATE, PERCENTS, percentile

__all__ = [
    "AuditView",
    "BulkReplayView",
    "DeadLetterView",
    "EventDetailView",
    "EventView",
    "IssueView",
    "KeyView",
    "QueuedView",
    "RejectedView",
    "SecretView",
    "SentView",
    "SourceView",
    "SpanView",
    "StatsView",
    "TargetView",
    "audit_view",
    "body_text",
    "bulk_view",
    "dead_view",
    "detail_view",
    "event_view",
    "hint",
    "issue_view",
    "rejected_view",
    "span_view",
    "stats_view",
    "when",
]


def when(ms: int | None) -> str | None:
    """A time as ISO 8601 in UTC, with milliseconds."""
    if ms is None:
        return None
    moment = datetime.fromtimestamp(ms / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class EventView(TypedDict):
    """An event in a list."""

    id: str
    at: str | None
    source: str
    type: str
    key: str
    size: int
    state: str | None
    deliveries: int
    attempts: int
    duplicates: int


class DeliveryView(TypedDict):
    """An event on its way to one target."""

    target: str
    state: str
    due_at: str | None
    attempts: int
    status: int
    error: str
    node: str
    order_key: str | None


class AttemptView(TypedDict):
    """One attempt."""

    target: str
    number: int
    at: str | None
    ms: int
    outcome: str
    status: int
    error: str
    note: str
    actor: str


class DuplicateView(TypedDict):
    """The arrival of a copy."""

    at: str | None
    same: bool


class AuditView(TypedDict):
    """An action of somebody's."""

    id: int
    at: str | None
    actor: str
    action: str
    subject: str
    detail: str


class EventDetailView(TypedDict):
    """All of an event."""

    id: str
    at: str | None
    source: str
    type: str
    key: str
    size: int
    headers: list[list[str]]
    body: str
    body_encoding: str
    deliveries: list[DeliveryView]
    attempts: list[AttemptView]
    duplicates: list[DuplicateView]
    actions: list[AuditView]


class DeadLetterView(TypedDict):
    """A delivery that was given up."""

    id: str
    at: str | None
    source: str
    type: str
    target: str
    attempts: int
    status: int
    error: str
    note: str


class IssueView(TypedDict):
    """Failures that are alike."""

    target: str
    status: int
    error: str
    dead: int
    failing: int
    first_at: str | None
    last_at: str | None
    sample: str
    query: str
    hint: str


class RejectedView(TypedDict):
    """A request that became no event."""

    id: int
    at: str | None
    source: str
    cause: str
    detail: str


class BulkReplayView(TypedDict):
    """A replay by filter; a dry run has no id."""

    id: int | None
    at: str | None
    actor: str
    query: str
    rate: float
    total: int
    done: int
    state: str


class SpanView(TypedDict):
    """How long things took in the last hour, in milliseconds; null: there were none."""

    count: int
    p50: int | None
    p95: int | None
    p99: int | None


class TargetView(TypedDict):
    """A target and how it stands."""

    name: str
    url: str
    allow_private: bool
    secret_from: str
    status: str
    breaker: str
    running: int
    waiting: int
    dead: int
    oldest_at: str | None
    tries: int
    concurrency: int
    types: list[str]
    took: SpanView
    late: SpanView


class SourceView(TypedDict):
    """A source and where it is taken."""

    name: str
    provider: str
    path: str
    url: str
    secret_from: str
    targets: list[str]
    last_at: str | None


class KeyView(TypedDict):
    """Whether copies of an event are known."""

    source: str
    key: str
    known: bool
    event: str | None


class QueuedView(TypedDict):
    """How many deliveries were changed."""

    queued: int


class ReplayedView(TypedDict):
    """How many deliveries were queued, and how those stand that were left as they are."""

    queued: int
    left_out: dict[str, str]


class SecretView(TypedDict):
    """A signing secret."""

    secret: str


class SentView(TypedDict):
    """The event that was made."""

    id: str


class MinuteView(TypedDict):
    """How often something happened in a minute."""

    at: str | None
    kind: str
    name: str
    count: int


class StatsView(TypedDict):
    """What happened lately, and what waits."""

    since: str | None
    totals: dict[str, int]
    minutes: list[MinuteView]
    targets: list[DepthView]
    took: SpanView
    late: SpanView


class DepthView(TypedDict):
    """What waits for a target."""

    target: str
    waiting: int
    dead: int
    oldest_at: str | None


def event_view(row: EventRow) -> EventView:
    """An event in a list."""
    return {
        "id": row.id,
        "at": when(row.at),
        "source": row.source,
        "type": row.type,
        "key": row.key,
        "size": row.size,
        "state": None if row.state is None else str(row.state),
        "deliveries": row.deliveries,
        "attempts": row.attempts,
        "duplicates": row.duplicates,
    }


def body_text(body: bytes) -> tuple[str, str]:
    """A body as JSON has it, and how: ``utf-8``, or ``base64`` where it is no text."""
    try:
        return body.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        return base64.b64encode(body).decode("ascii"), "base64"


def detail_view(found: EventDetail) -> EventDetailView:
    """All of an event. A body that is no text is in base64, and says so."""
    event = found.event
    body, encoding = body_text(event.body)
    return {
        "id": event.id,
        "at": when(event.at),
        "source": event.source,
        "type": event.type,
        "key": event.key,
        "size": len(event.body),
        "headers": [list(pair) for pair in event.headers],
        "body": body,
        "body_encoding": encoding,
        "deliveries": [_delivery(one) for one in found.deliveries],
        "attempts": [_attempt(one) for one in found.attempts],
        "duplicates": [_duplicate(one) for one in found.duplicates],
        "actions": [audit_view(one) for one in found.actions],
    }


def _delivery(one: DeliveryRow) -> DeliveryView:
    return {
        "target": one.target,
        "state": str(one.state),
        "due_at": when(one.due_at),
        "attempts": one.attempts,
        "status": one.status,
        "error": one.error,
        "node": one.node,
        "order_key": one.order_key,
    }


def _attempt(one: Attempt) -> AttemptView:
    return {
        "target": one.target,
        "number": one.number,
        "at": when(one.at),
        "ms": one.ms,
        "outcome": str(one.outcome),
        "status": one.status,
        "error": one.error,
        "note": one.note,
        "actor": one.actor,
    }


def _duplicate(one: Duplicate) -> DuplicateView:
    return {"at": when(one.at), "same": one.same}


def audit_view(one: AuditEntry) -> AuditView:
    """An action of somebody's."""
    return {
        "id": one.id,
        "at": when(one.at),
        "actor": one.actor,
        "action": one.action,
        "subject": one.subject,
        "detail": one.detail,
    }


def dead_view(one: DeadLetter) -> DeadLetterView:
    """A delivery that was given up."""
    return {
        "id": one.id,
        "at": when(one.at),
        "source": one.source,
        "type": one.type,
        "target": one.target,
        "attempts": one.attempts,
        "status": one.status,
        "error": one.error,
        "note": one.note,
    }


def issue_view(one: Issue, query: str) -> IssueView:
    """Failures that are alike, with the search that finds their events."""
    return {
        "target": one.target,
        "status": one.status,
        "error": one.error,
        "dead": one.dead,
        "failing": one.failing,
        "first_at": when(one.first_at),
        "last_at": when(one.last_at),
        "sample": one.sample,
        "query": query,
        "hint": hint(one.status, one.target),
    }


def hint(status: int, target: str) -> str:
    """What to look at first when a target answers so; empty, if nothing can be said."""
    if status != 401:
        return ""
    where = f"POST /_oncekey/api/v1/targets/{target}/secret"
    return f"does your app have the target's secret? That of its config, or {where} (an admin)"


def rejected_view(one: Rejected) -> RejectedView:
    """A request that became no event."""
    return {
        "id": one.id,
        "at": when(one.at),
        "source": one.source,
        "cause": one.cause,
        "detail": one.detail,
    }


def bulk_view(one: BulkReplay) -> BulkReplayView:
    """A replay by filter."""
    return {
        "id": one.id,
        "at": when(one.at),
        "actor": one.actor,
        "query": one.query,
        "rate": one.rate,
        "total": one.total,
        "done": one.done,
        "state": str(one.state),
    }


def span_view(counts: Sequence[Count], kinds: Collection[str], name: str = "") -> SpanView:
    """How long things of these kinds took, for one target or for all."""
    found = [one for one in counts if one.kind in kinds and name in ("", one.name)]
    p50, p95, p99 = (percentile(found, percent) for percent in PERCENTS)
    return {"count": sum(one.n for one in found), "p50": p50, "p95": p95, "p99": p99}


def stats_view(since: int, counts: list[Count], depths: list[Depth]) -> StatsView:
    """What happened in each minute, and what waits."""
    totals: dict[str, int] = {}
    minutes: dict[tuple[int, str, str], int] = {}
    for one in counts:
        if one.kind in LATE:  # each was counted when it was delivered
            continue
        totals[one.kind] = totals.get(one.kind, 0) + one.n
        place = (one.minute, one.kind, one.name)
        minutes[place] = minutes.get(place, 0) + one.n
    return {
        "since": when(since),
        "totals": totals,
        "minutes": [
            {"at": when(minute), "kind": kind, "name": name, "count": count}
            for (minute, kind, name), count in sorted(minutes.items())
        ],
        "targets": [depth_view(one) for one in depths],
        "took": span_view(counts, ATTEMPTS),
        "late": span_view(counts, LATE),
    }


def depth_view(one: Depth) -> DepthView:
    """What waits for a target."""
    return {
        "target": one.target,
        "waiting": one.waiting,
        "dead": one.dead,
        "oldest_at": when(one.oldest_at),
    }
