"""The options of a receiver, checked once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from oncekey._core.transact import check_on
from oncekey.errors import PolicyError
from oncekey.models import Terms
from oncekey.policy import Duration, JournalPath, OnOutage, check_on_outage, milliseconds
from oncekey.receiver.audit import AuditSink
from oncekey.receiver.events import DeadLetter

if TYPE_CHECKING:
    from oncekey.resilience.findings import Findings

__all__ = ["Handler", "Limit", "ReceiverSettings", "RetentionWarning"]

Handler = Callable[..., Any]
Limit = tuple[int, int]
"""So many in so many seconds."""

DAY = 86_400
USUAL_TYPES: Final = (
    "application/json",
    "application/*+json",
    "application/x-www-form-urlencoded",
)


class RetentionWarning(UserWarning):
    """Events are forgotten while their provider may still send them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverSettings:
    """How a receiver treats deliveries.

    Attributes:
        retention: How long an event is remembered, from its first copy, at least a day. ``None``:
            a day longer than the provider retries it or lets somebody send it again by hand. Less
            than that is a ``RetentionWarning``.
        lease: How long an event is held by a worker that died. A live one renews it.
        wait: How long a copy waits for another that is being handled, before it is told to retry.
        max_body_bytes: Larger bodies are refused unread.
        body_timeout: How long a body may take to come in before its sender gets a 408. ``None``:
            as long as the server lets it. Servers of WSGI need a limit of their own too.
        content_types: What is taken. Empty: anything. ``None``: JSON, forms, and what the provider
            sends beside them.
        on_changed: The same key with another payload: ``first-wins`` answers 2xx as to any copy,
            ``reject`` answers 409. ``None``: as the provider's rules say.
        key: Which event a payload is: a function of the payload, for providers without an id, or
            to use another one. Without it, such a provider's event is known by the message that
            was signed; where two events may be alike in it (Dropbox, Plaid), each delivery is
            handled. Never derive it from a timestamp or a retry counter.
        replay_guard: A signed message is taken under one id only, so that a captured delivery under
            a fresh id is a duplicate. ``None``: wherever the signature does not cover the id.
            ``"per-type"``: once for each type that has a handler of its own, for providers that
            send one body as several types (Shopify). ``False``: under every id.
        transactional: Run handlers in a transaction of the store's database: their writes and the
            mark commit together.
        on: Where that transaction is, if not on the store's own connections. Only with
            ``transactional``.
        namespace: Sets receivers that share a store apart.
        per_key: At most so many deliveries of one key in so many seconds. ``None``: any number.
        per_sender: The same for one sender.
        limits: Where these are counted: in each ``process`` by itself; or ``shared``, by the store
            for all that use it, which costs a round trip for each. PostgreSQL and Redis can.
        publishers: A stable identity for each key id, so that a rotated key stays one sender.
        strict_types: Refuse an event of a type without a handler with a 503, so that its sender
            sends it again and none is lost. ``False``: it gets a 2xx, the header
            ``Oncekey-Outcome: ignored``, and a warning is logged once a type.
        dead_letters: Called with what a handler gave up by ``PermanentError``.
        audit: Called with every decision.
        findings: The queue for events that came after their window: a ``Findings`` of
            ``oncekey.resilience``, or the path of its SQLite file. ``None``: they are told in the
            stream and to ``audit`` only.
        on_outage: What becomes of a delivery while the store can't answer. ``closed``: its sender
            gets a 503 and sends it again. ``open``: it is handled without the store, which is made
            whole from the journal later. Nonces of signatures are never taken without the store.
            ``None``: as the store says, which is ``closed`` unless ``resilient`` was told
            otherwise.
        journal: The journal's directory, for ``open``.
    """

    retention: Duration | None = None
    lease: Duration = 300
    wait: Duration = 5
    max_body_bytes: int = 1_048_576
    body_timeout: Duration | None = 10
    content_types: Iterable[str] | None = None
    on_changed: Literal["first-wins", "reject"] | None = None
    key: Callable[[Any], str] | None = None
    replay_guard: Literal["per-type"] | bool | None = None
    transactional: bool = False
    on: Any = None
    namespace: str = "webhook"
    per_key: Limit | None = (60, 60)
    per_sender: Limit | None = None
    limits: Literal["process", "shared"] = "process"
    publishers: dict[str, str] | None = None
    strict_types: bool = False
    dead_letters: Callable[[DeadLetter], Any] | None = None
    audit: AuditSink | None = None
    findings: Findings | str | None = None
    on_outage: OnOutage | None = None
    journal: JournalPath | None = None
    body_seconds: float | None = field(init=False, repr=False, compare=False)
    """``body_timeout`` in seconds."""

    def __post_init__(self) -> None:
        if self.on_changed not in (None, "first-wins", "reject"):
            raise PolicyError(
                f"on_changed must be 'first-wins' or 'reject', got {self.on_changed!r}"
            )
        if self.replay_guard not in (None, True, False, "per-type"):
            raise PolicyError(
                "replay_guard must be None (where ids are not signed), True, False or 'per-type', "
                f"got {self.replay_guard!r}"
            )
        check_on_outage(self.on_outage)
        if self.max_body_bytes < 1:
            raise PolicyError(f"max_body_bytes must be positive, got {self.max_body_bytes}")
        check_on(self.on, self.transactional)
        milliseconds(self.lease, "lease", least=20)
        milliseconds(self.wait, "wait")
        seconds = None
        if self.body_timeout is not None:
            seconds = milliseconds(self.body_timeout, "body_timeout", least=1) / 1000
        object.__setattr__(self, "body_seconds", seconds)
        for name in ("per_key", "per_sender"):
            limit = getattr(self, name)
            if limit is not None and (limit[0] < 1 or limit[1] < 1):
                raise PolicyError(f"{name} must be (deliveries, seconds), both positive")

    def terms(self, title: str, provider_retention: int) -> Terms:
        """What the store is told. Seen events are remembered as late for another such time.

        Args:
            title: The provider's.
            provider_retention: How many seconds it takes until nobody sends an event again.
        """
        seconds = self.retention if self.retention is not None else provider_retention
        lasts = max(milliseconds(seconds, "retention", least=1), DAY * 1000)
        if lasts < provider_retention * 1000:
            warnings.warn(
                f"retention={self.retention!r} keeps events for {lasts / 1000 / DAY:g} days. As "
                f"long as {title} may send one again, and a day more for what is late, is "
                f"{provider_retention / DAY:g} days: a copy that comes later is handled again. "
                f"Leave retention= out, or pass {provider_retention}",
                RetentionWarning,
                stacklevel=4,  # where the receiver is made
            )
        return Terms(
            lease_ms=milliseconds(self.lease, "lease", least=20),
            ttl_ms=lasts,
            remember_ms=lasts,
            sticky=True,
        )
