"""What happens to a delivery before and after its handlers: all that never waits.

In this order: size and type, signature, the provider's own test of the endpoint, events and their
keys, rate limits; then the handlers, elsewhere; then one answer for all of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from oncekey._core.call import CURRENT, Job, Result
from oncekey._core.codec import Codec
from oncekey._core.flows import Plan
from oncekey._core.limiter import InsertLimiter
from oncekey.canonical import canonicalize_json
from oncekey.errors import (
    IdempotencyConflictError,
    IdempotencyInFlightError,
    InvalidKeyError,
    OncekeyError,
    PermanentError,
    PolicyError,
    StoreError,
)
from oncekey.models import Key, Scope, Terms, check_text
from oncekey.policy import milliseconds
from oncekey.receiver.audit import AuditEntry
from oncekey.receiver.events import DeadLetter, WebhookEvent, WebhookResponse
from oncekey.receiver.settings import Handler, Settings
from oncekey.signatures.base import Item, Provider
from oncekey.signatures.delivery import Delivery
from oncekey.signatures.verdict import Verdict, VerifiedWebhookSender

__all__ = ["Intake", "Outcome", "Work", "malformed"]

logger = logging.getLogger("oncekey")

MAX_ANSWER_BYTES: Final = 65_536
IN_FLIGHT_RETRY: Final = 5  # seconds: a sender need not wait for a whole lease
UNAVAILABLE_RETRY: Final = 30
MAX_ITEMS: Final = 10_000

# What a sender is told about each outcome. 2xx: done with; 5xx and 429: send it again.
STATUS: Final = {
    "in_flight": 503,
    "conflict": 409,
    "failed": 500,
    "limited": 429,
    "unavailable": 503,
}
_WORST: Final = ("unavailable", "failed", "in_flight", "limited", "conflict")


class Outcome(NamedTuple):
    """What became of one event."""

    name: str
    code: str = ""
    retry_after: int | None = None
    late: bool = False


class Work(NamedTuple):
    """One event that a handler is to see."""

    job: Job
    event: WebhookEvent
    handler: Handler


class Intake:
    """The rules of one receiver."""

    def __init__(self, provider: Provider, settings: Settings) -> None:
        for name in ("verify", "items", "retention_seconds", "ack"):
            if not hasattr(provider, name):
                raise PolicyError(
                    f"{type(provider).__name__} is no provider: pass oncekey.signatures.provider"
                    "('stripe', secret=...) or one made with hmac_provider(...)"
                )
        self.provider = provider
        self.settings = settings
        self.namespace = check_text(settings.namespace, "namespace")
        self.terms = settings.terms(provider.retention_seconds)
        self.wait = milliseconds(settings.wait, "wait") / 1000
        self.handlers: dict[str, Handler] = {}
        self.fallback: Handler | None = None
        self.codec = Codec()
        changed = settings.on_changed
        if changed is None:
            changed = "reject" if provider.name.startswith("adcp") else "first-wins"
        self.compares = changed == "reject"
        self._types = tuple(kind.lower() for kind in settings.content_types)
        self._per_key = _limiter(settings.per_key)
        self._per_sender = _limiter(settings.per_sender)
        if settings.replay_guard and provider.tolerance is not None and provider.id_is_signed:
            raise PolicyError(
                f"replay_guard is for providers whose ids are not signed; {provider.name} signs its"
                " own, and a timestamp with it"
            )

    # Before the signature

    def refuse_unread(self, delivery: Delivery) -> WebhookResponse | None:
        """The answer to what is too large or of another type; nothing of it is looked at."""
        if len(delivery.body) > self.settings.max_body_bytes:
            most = self.settings.max_body_bytes
            return _rejected(413, "body_too_large", f"at most {most} bytes are taken")
        if self._types:
            given = (delivery.headers.one("content-type") or "").partition(";")[0].strip().lower()
            if not any(_is_type(given, wanted) for wanted in self._types):
                wanted = ", ".join(self._types)
                return _rejected(415, "content_type", f"send one of {wanted}")
        return None

    def refuse_verdict(self, verdict: Verdict) -> WebhookResponse:
        """The answer to a delivery that is not genuine."""
        if verdict.code in ("body_malformed", "id_missing", "webhook_body_malformed"):
            return _rejected(400, verdict.code, verdict.message)
        headers = {"WWW-Authenticate": f'Signature error="{verdict.code}"'}
        return _rejected(401, verdict.code, verdict.message, headers)

    # Events

    def works(self, delivery: Delivery, verdict: Verdict) -> list[Work | Outcome]:
        """The events of a genuine delivery; an outcome for those that no handler is to see.

        Raises:
            InvalidKeyError: An event has no key.
        """
        sender = self._sender(verdict)
        items = self.provider.items(delivery.headers, delivery.body)
        if len(items) > MAX_ITEMS:
            raise InvalidKeyError(f"a batch of {len(items)} events: at most {MAX_ITEMS} are taken")
        return [self._work(delivery, verdict, sender, item) for item in items]

    def _sender(self, verdict: Verdict) -> VerifiedWebhookSender:
        sender = verdict.sender
        if sender is None:  # no verifier of ours says ok without one
            raise OncekeyError("the provider gave a verdict without a sender")
        publisher = (self.settings.publishers or {}).get(sender.key_id)
        return dataclasses.replace(sender, publisher=publisher) if publisher else sender

    def _work(
        self, delivery: Delivery, verdict: Verdict, sender: VerifiedWebhookSender, item: Item
    ) -> Work | Outcome:
        kind = item.event_type or ""
        handler = self.handlers.get(kind, self.fallback)
        if handler is None:
            return Outcome("ignored", code=kind[:64])
        payload = item.payload if item.payload is not None else delivery.body
        name = self._name(verdict, item, payload)
        identity = sender.as_sender_identity()
        for limiter, scope in ((self._per_sender, identity), (self._per_key, identity + name)):
            if limiter is not None:
                wait = limiter.retry_after(scope)
                if wait is not None:
                    return Outcome("limited", retry_after=wait)
                limiter.count(scope)
        event = WebhookEvent(name, kind, payload, sender, delivery.body, delivery.headers)
        mark = _fingerprint(item, delivery.body) if self.compares else b""
        key = Key(Scope("webhook", self.namespace, identity), name)
        return Work(self.job(key, mark, self.terms), event, handler)

    def job(self, key: Key, mark: bytes, terms: Terms) -> Job:
        """A delivery as the engine knows it."""
        plan = Plan(terms, self.wait, None, MAX_ANSWER_BYTES, False)
        return Job(key, mark, plan, self.codec, f"webhook {self.provider.name}")

    def _name(self, verdict: Verdict, item: Item, payload: Any) -> str:
        """The key of an event."""
        if self.settings.key is not None:
            return check_text(self.settings.key(payload), "the key of a webhook")
        guarded = self.settings.replay_guard and not verdict.id_is_signed
        name = item.event_id
        if guarded or (name is None and self.provider.batch is None and not self.provider.event_id):
            # One body, one signature: whatever id it comes under.
            digest = hashlib.sha256(verdict.signature.encode()).hexdigest()
            return f"signature:{digest}"
        if name is None:
            raise InvalidKeyError(
                f"this {self.provider.title} delivery has no event id: pass key= to the receiver, "
                "a function of the payload"
            )
        return check_text(name, "the event id")

    # Handlers

    def call(self, work: Work, late: bool, arguments: tuple[Any, ...]) -> Any:
        """Call the handler with its event, which now knows which attempt this is."""
        claim = CURRENT.get(None)
        event = dataclasses.replace(
            work.event,
            attempt=claim.attempts if claim is not None else 1,
            takeover=claim.takeover if claim is not None else False,
            late=late,
        )
        return work.handler(event, *arguments)

    def bury(self, work: Work, error: Exception) -> Any:
        """The stored answer for an event that was given up for good; ``None`` for other errors."""
        if not isinstance(error, PermanentError):
            return None
        reason = f"{type(error).__name__}: {error}"[:1000]
        if self.settings.dead_letters is not None:
            self.settings.dead_letters(DeadLetter(work.event, reason))
        else:
            logger.error("a webhook handler gave up for good (%s): %s", work.job.operation, reason)
        return {"dead": reason}

    def forgotten(self, work: Work) -> Job:
        """The same work for an event whose window is over: as a new one."""
        terms = dataclasses.replace(work.job.plan.terms, remember_ms=0)
        return self.job(work.job.key, work.job.fingerprint, terms)

    def outcome(self, result: Result | None, error: Exception | None, late: bool) -> Outcome:
        """What a call's end means."""
        if error is None:
            if result is not None and result.replayed:
                return Outcome("duplicate")
            dead = isinstance(result.value, dict) and "dead" in result.value if result else False
            return Outcome("dead" if dead else "handled", late=late)
        if isinstance(error, IdempotencyConflictError):
            return Outcome("conflict", code=error.code)
        if isinstance(error, IdempotencyInFlightError):
            seconds = min(error.retry_after or IN_FLIGHT_RETRY, IN_FLIGHT_RETRY)
            return Outcome("in_flight", code=error.code, retry_after=seconds)
        if isinstance(error, StoreError):
            logger.warning(
                "a webhook could not be recorded, its sender is told to retry: %s", error
            )
            return Outcome("unavailable", code=error.code, retry_after=UNAVAILABLE_RETRY)
        logger.warning("a webhook handler failed, its sender may retry", exc_info=error)
        return Outcome("failed", code=type(error).__name__)

    # Answer

    def answer(self, outcomes: list[Outcome]) -> WebhookResponse:
        """One answer for a delivery: the sender is told to retry if any event of it needs that."""
        names = tuple(outcome.name for outcome in outcomes)
        worst = next((name for name in _WORST if name in names), None)
        several = names if len(names) > 1 else ()
        if worst is None:
            ack = self.provider.ack
            name = next(
                (one for one in ("handled", "dead", "duplicate") if one in names), "ignored"
            )
            headers = {"Content-Type": ack.content_type} if ack.body else {}
            return WebhookResponse(ack.status, headers, ack.body, name, outcomes=several)
        which = next(outcome for outcome in outcomes if outcome.name == worst)
        waits = [outcome.retry_after for outcome in outcomes if outcome.retry_after is not None]
        headers = {"Content-Type": "application/json"}
        if waits and worst != "conflict":
            headers["Retry-After"] = str(max(waits))
        body = json.dumps({"error": worst, "code": which.code}).encode()
        return WebhookResponse(STATUS[worst], headers, body, worst, which.code, several)

    def audit(
        self,
        begun: float,
        response: WebhookResponse,
        works: list[Work | Outcome],
        outcomes: list[Outcome],
    ) -> None:
        """Tell the audit sink of each event, or of a delivery that had none."""
        sink = self.settings.audit
        if sink is None:
            return
        seconds = time.monotonic() - begun
        rows: list[tuple[Any, Outcome | None]] = list(zip(works, outcomes, strict=True))
        for work, outcome in rows or [(None, None)]:
            sender = key_hash = ""
            if isinstance(work, Work):
                sender = work.event.sender.as_sender_identity()
                key_hash = hashlib.sha256(work.event.id.encode()).hexdigest()[:16]
            name = response.outcome if outcome is None else outcome.name
            if outcome is not None and outcome.name == "handled":
                name = "late" if outcome.late else "first"
            code = response.code if outcome is None else outcome.code
            entry = AuditEntry(
                time.time(),
                self.provider.name,
                sender,
                key_hash,
                name,
                response.status,
                code,
                seconds,
            )
            try:
                sink(entry)
            except Exception:
                logger.exception("the audit sink failed")


def _limiter(limit: tuple[int, int] | None) -> InsertLimiter | None:
    return None if limit is None else InsertLimiter((limit,), time.monotonic)


def _is_type(given: str, wanted: str) -> bool:
    if "*" not in wanted:
        return given == wanted
    before, _, after = wanted.partition("*")
    return given.startswith(before) and given.endswith(after) and len(given) >= len(wanted) - 1


def _fingerprint(item: Item, body: bytes) -> bytes:
    if item.payload is None:
        return hashlib.sha256(body).hexdigest().encode()
    return hashlib.sha256(canonicalize_json(json.dumps(item.payload))).hexdigest().encode()


def _rejected(
    status: int, code: str, message: str, headers: Mapping[str, str] | None = None
) -> WebhookResponse:
    body = json.dumps({"error": code, "message": message}).encode()
    fields = {"Content-Type": "application/json", **(headers or {})}
    return WebhookResponse(status, fields, body, "rejected", code)


def malformed(error: OncekeyError) -> WebhookResponse:
    """The answer to a genuine delivery that can't be handled: without a key, say."""
    return _rejected(400, "id_missing", str(error))
