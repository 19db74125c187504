"""A durable inbox: each event is kept once, and delivered to its targets until they have it.

``open_inbox`` opens one on a SQLite file or on PostgreSQL; ``ingest`` keeps an event and says
whether it is new; ``fetch`` and ``finish`` are how workers deliver. It needs no server.
"""

from __future__ import annotations

from oncekey.inbox.abc import AsyncInbox
from oncekey.inbox.filters import Filter
from oncekey.inbox.models import (
    Arrival,
    Attempt,
    AuditEntry,
    BulkReplay,
    BulkState,
    Count,
    DeadLetter,
    Delivery,
    DeliveryRow,
    DeliveryState,
    Depth,
    Duplicate,
    Event,
    EventDetail,
    EventRow,
    Ingested,
    InHand,
    Issue,
    Outcome,
    Page,
    Rejected,
    Result,
    Route,
    TargetState,
    TargetStatus,
    event_key,
)
from oncekey.inbox.policy import TargetPolicy
from oncekey.inbox.urls import open_inbox

__all__ = [
    "Arrival",
    "AsyncInbox",
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
    "Filter",
    "InHand",
    "Ingested",
    "Issue",
    "Outcome",
    "Page",
    "Rejected",
    "Result",
    "Route",
    "TargetPolicy",
    "TargetState",
    "TargetStatus",
    "event_key",
    "open_inbox",
]
