"""The options of ``ReceiverSettings`` for type checkers, where they are given singly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from oncekey.policy import Duration, JournalPath, OnOutage
from oncekey.receiver.audit import AuditSink
from oncekey.receiver.events import DeadLetter
from oncekey.receiver.settings import Limit

if TYPE_CHECKING:
    from oncekey.resilience.findings import Findings

__all__ = ["ReceiverOptions"]


class ReceiverOptions(TypedDict, total=False):
    """What a receiver takes beside a provider and a store."""

    retention: Duration | None
    lease: Duration
    wait: Duration
    max_body_bytes: int
    body_timeout: Duration | None
    content_types: Iterable[str] | None
    on_changed: Literal["first-wins", "reject"] | None
    key: Callable[[Any], str] | None
    replay_guard: Literal["per-type"] | bool | None
    transactional: bool
    on: Any
    namespace: str
    per_key: Limit | None
    per_sender: Limit | None
    limits: Literal["process", "shared"]
    publishers: dict[str, str] | None
    strict_types: bool
    dead_letters: Callable[[DeadLetter], Any] | None
    audit: AuditSink | None
    findings: Findings | str | None
    on_outage: OnOutage | None
    journal: JournalPath | None
