"""What is decided of a delivery before and after its handlers: all that never waits.

In this order: size and type, signature, the provider's own test of the endpoint, events and their
keys, rate limits; then the handlers, elsewhere; then one answer for all of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
import uuid
from typing import Any, Final, NamedTuple

from oncekey._core.call import CURRENT, Job, Result
from oncekey._core.codec import Codec
from oncekey._core.flows import Claim, Plan, new_owner
from oncekey.errors import (
    InvalidKeyError,
    OncekeyError,
    PermanentError,
    PolicyError,
    StoreError,
)
from oncekey.instrument.events import EventKind, emit
from oncekey.models import Key, Record, Scope, Terms, check_text
from oncekey.policy import milliseconds
from oncekey.receiver.answers import (
    STATUS,
    UNAVAILABLE_RETRY,
    Outcome,
    answer_to,
    greeted,
    rejected,
    taken,
)
from oncekey.receiver.attention import Attention
from oncekey.receiver.audit import AuditEntry
from oncekey.receiver.events import DeadLetter, WebhookEvent, WebhookResponse
from oncekey.receiver.limits import Limits
from oncekey.receiver.naming import fingerprint, key_of, signed_name, veiled
from oncekey.receiver.settings import USUAL_TYPES, Handler, ReceiverSettings
from oncekey.receiver.unhandled_types import TypesSeen
from oncekey.signatures.base import Provider
from oncekey.signatures.delivery import Delivery
from oncekey.signatures.verdict import CODES, Item, Verdict, VerifiedWebhookSender

__all__ = ["Decisions", "Registered", "Work", "is_ours"]

logger = logging.getLogger("oncekey")

MAX_ANSWER_BYTES: Final = 65_536
MAX_ITEMS: Final = 10_000
SENDERS_KEPT: Final = 1000
_REPLAYED: Final = "replayed"
_GUARD_LEASE_MS: Final = 1000  # nobody works under it: who comes again with the same id goes on
_NOTHING: Final = b"jnull"


class Registered(NamedTuple):
    """A handler as it is called."""

    function: Handler
    takes_tx: bool


class Work(NamedTuple):
    """One event that a handler is to see, unless somebody saw it before."""

    job: Job
    handler: Registered
    sender: VerifiedWebhookSender
    item: Item
    delivery: Delivery
    guard: Key | None = None  # the signed message, where its id is not signed
    renamed: bool = False  # it goes by the id that its message first came under
    late: bool = False  # it came after its window

    def event(self, claim: Claim | None = None) -> WebhookEvent:
        """The event as its handler gets it. A duplicate never needs one."""
        item, delivery = self.item, self.delivery
        return WebhookEvent(
            self.job.key.name,
            item.event_type or "",
            item.payload if item.payload is not None else delivery.body,
            self.sender,
            delivery.body,
            delivery.headers,
            claim.attempts if claim is not None else 1,
            claim.takeover if claim is not None else False,
            self.late,
        )


_HANDLED: Final = Outcome("handled")
_DUPLICATE: Final = Outcome("duplicate")


class _NoAnswer(Codec):
    """What handlers return is not kept. Only what became of an event that was given up is."""

    def check(self) -> None:
        """Nothing can be wrong with it."""

    def encode(self, value: Any) -> bytes:
        return _NOTHING if value is None else super().encode(value)

    def decode(self, raw: bytes) -> Any:
        return None if raw == _NOTHING else super().decode(raw)


class Decisions:
    """The rules of one receiver."""

    def __init__(self, provider: Provider, settings: ReceiverSettings) -> None:
        for name in ("verify", "items", "retention_seconds", "ack"):
            if not hasattr(provider, name):
                raise PolicyError(
                    f"{type(provider).__name__} is no provider: pass oncekey.signatures.provider"
                    "('stripe', secret=...) or one made with hmac_provider(...)"
                )
        if settings.replay_guard and provider.tolerance is not None and provider.id_is_signed:
            raise PolicyError(
                f"replay_guard is for providers whose ids are not signed; {provider.name} signs its"
                " own, and a timestamp with it"
            )
        self.provider = provider
        self.settings = settings
        self.namespace = check_text(settings.namespace, "namespace")
        terms = settings.terms(provider.title, provider.retention_seconds)
        wait = milliseconds(settings.wait, "wait") / 1000
        self.plan = Plan(terms, wait, None, MAX_ANSWER_BYTES, False)
        # As long as the id is known, late or not: then both are forgotten.
        self._guard_terms = Terms(
            lease_ms=_GUARD_LEASE_MS, ttl_ms=terms.ttl_ms + terms.remember_ms, sticky=True
        )
        self.operation = f"webhook {provider.name}"
        self.handlers: dict[str, Registered] = {}
        self.fallback: Registered | None = None
        self._types_seen = TypesSeen(provider.title, self.operation, strict=settings.strict_types)
        self._senders: dict[VerifiedWebhookSender, tuple[str, Scope, Scope]] = {}
        self._codec = _NoAnswer()
        changed = settings.on_changed or getattr(provider, "on_changed", "first-wins")
        self._compares = changed == "reject"
        self._repeats = bool(getattr(provider, "repeats", False)) and settings.key is None
        if self._repeats:
            logger.warning(
                "%s: its deliveries have no id, and two that are alike may be two events, so each "
                "is handled, a retry too. Let the handler be safe to repeat, or pass key=",
                self.operation,
            )
        types = settings.content_types
        if types is None:
            types = (*USUAL_TYPES, *getattr(provider, "content_types", ()))
        self.types = tuple(kind.lower() for kind in types)
        self.limits = Limits(self.namespace, settings)
        self.attention = Attention(self.operation, settings.findings)
        self._usual: dict[Outcome, tuple[int, dict[str, str], bytes, str]] = {}
        self._events = provider.events if is_ours(provider, "items") else self._listed
        self._tests_are_ours = is_ours(provider, "handshake")
        self._greets = bool(getattr(getattr(provider, "facts", None), "greeting", None))
        self.has_tests = bool(
            provider.facts.handshake if self._tests_are_ours else hasattr(provider, "handshake")
        )

    # Before the signature

    def refuse_unread(self, delivery: Delivery) -> WebhookResponse | None:
        """The answer to what is too large or of another type; nothing of it is looked at.

        And to a GET, by which some providers check an endpoint.
        """
        if delivery.method == "GET" and self._greets:
            return greeted(self.provider.greeting(delivery.url))
        if len(delivery.body) > self.settings.max_body_bytes:
            most = self.settings.max_body_bytes
            return rejected(413, "body_too_large", f"at most {most} bytes are taken")
        given = delivery.headers.one("content-type") or ""
        if given not in self.types and not self._takes(given):
            return rejected(415, "content_type", f"send one of {', '.join(self.types)}")
        return None

    def _takes(self, content_type: str) -> bool:
        """Whether a type is taken that is not written just as in the settings."""
        given = content_type.partition(";")[0].strip().lower()
        return not self.types or any(_is_type(given, wanted) for wanted in self.types)

    def greeting(self, delivery: Delivery, verdict: Verdict) -> WebhookResponse | None:
        """The answer to the provider's own test of the endpoint, if the delivery is one."""
        known = (verdict.payload,) if self._tests_are_ours else ()
        ack = self.provider.handshake(delivery.body, *known)
        if ack is None:
            return None
        headers = {"Content-Type": ack.content_type} if ack.body else {}
        return WebhookResponse(ack.status, headers, ack.body, "ignored", "handshake")

    # Events

    def works(self, delivery: Delivery, verdict: Verdict) -> list[Work | Outcome]:
        """The events of a genuine delivery; an outcome for those that no handler is to see.

        Raises:
            InvalidKeyError: An event has no key.
        """
        sender = verdict.sender
        if sender is None:  # no verifier of ours says ok without one
            raise OncekeyError("the provider gave a verdict without a sender")
        if self.settings.publishers and sender.key_id in self.settings.publishers:
            sender = dataclasses.replace(
                sender, publisher=self.settings.publishers[sender.key_id] or sender.publisher
            )
        items = self._events(delivery, verdict)
        if len(items) > MAX_ITEMS:
            raise InvalidKeyError(f"a batch of {len(items)} events: at most {MAX_ITEMS} are taken")
        works: list[Work | Outcome] = []
        for position, item in enumerate(items):
            works.append(self._work(delivery, verdict, sender, item, position))
        return works

    def _listed(self, delivery: Delivery, verdict: Verdict) -> list[Item]:
        """The events as somebody else's provider lists them."""
        items = self.provider.items(delivery.headers, delivery.body, verdict.payload)
        for item in items:
            if item.event_id is not None:
                check_text(item.event_id, "the event id")
        return items

    def _scope(self, sender: VerifiedWebhookSender) -> tuple[str, Scope, Scope]:
        """The sender's name, the scope of its keys and of its signed messages.

        Most receivers ever see one sender.
        """
        if len(self._senders) >= SENDERS_KEPT:
            self._senders.clear()
        identity = sender.as_sender_identity()
        parts = ("webhook", self.namespace, identity)
        known = (identity, Scope(*parts), Scope(*parts, "signed messages"))
        self._senders[sender] = known
        return known

    def key_named(self, sender: VerifiedWebhookSender, name: str) -> Key:
        """The key of an event that has this id.

        Raises:
            ValueError: It can't be an id.
        """
        known = self._senders.get(sender) or self._scope(sender)
        return Key(known[1], check_text(name, "the event id"))

    def _work(
        self,
        delivery: Delivery,
        verdict: Verdict,
        sender: VerifiedWebhookSender,
        item: Item,
        position: int,
    ) -> Work | Outcome:
        kind = item.event_type or ""
        handler = self.handlers.get(kind, self.fallback)
        if handler is None:
            name = self._types_seen.unhandled(kind, self.handlers)
            return Outcome(name, kind[:64], UNAVAILABLE_RETRY if name == "unhandled" else None)
        if self.settings.key is None and item.event_id is not None:
            name = item.event_id
        else:
            name = self._name(delivery, verdict, item)
        identity, scope, messages = self._senders.get(sender) or self._scope(sender)
        guard = None
        if not verdict.id_is_signed or self.settings.key is not None:
            guard = self._guard(verdict, messages, kind, position)
        wait = self.limits.here(identity, name, guard)
        if wait is not None:
            emit(EventKind.LIMITED, Key(scope, name), self.operation)
            return Outcome("limited", retry_after=wait)
        mark = fingerprint(item, delivery.body) if self._compares else b""
        job = Job(Key(scope, name), mark, self.plan, self._codec, self.operation)
        return Work(job, handler, sender, item, delivery, guard)

    def _name(self, delivery: Delivery, verdict: Verdict, item: Item) -> str:
        """The key of an event whose provider gives it none, or whose user wants another."""
        if self.settings.key is not None:
            payload = item.payload if item.payload is not None else delivery.body
            return key_of(self.settings.key, payload)
        if self._repeats:  # a retry is not known from another event: a lost one is worse
            return f"delivery:{uuid.uuid4()}"
        if self.provider.batch is None and not self.provider.event_id:
            return signed_name(verdict)
        logger.warning(
            "%s: a delivery has no event id, and its sender is told so. If its kind never has "
            "one, pass key= to the receiver, a function of the payload",
            self.operation,
        )
        raise InvalidKeyError(CODES["id_missing"])

    def _guard(self, verdict: Verdict, scope: Scope, kind: str, position: int) -> Key | None:
        """The key of what was signed, where what names the event is not."""
        mode = self.settings.replay_guard
        signed = verdict.id_is_signed
        if self.settings.key is not None:  # made of the payload
            signed = getattr(self.provider, "body_is_signed", True)
        if signed or mode is False:
            return None
        name = signed_name(verdict)
        if self.provider.batch:
            name += f":{position}"
        if mode == "per-type" and kind in self.handlers:  # a bounded number: nobody signs the type
            name += f":{kind}"
        return Key(scope, name)

    def binding(self, work: Work, guard: Key) -> tuple[Key, bytes, bytes, Terms]:
        """What to claim, so that a signed message stays with the id that it first came under."""
        name = veiled(work.job.key.name.encode(), guard).hex().encode()
        return guard, new_owner(), name, self._guard_terms

    def as_first_named(self, work: Work, guard: Key, bound: Record | None) -> Work:
        """The work of a signed message that came before under another id: under that one.

        Whether it was handled is known there. A duplicate for its own sake would lose the event,
        if whoever sent it first, under an id of their choice, made the handler fail.
        """
        try:
            name = (
                veiled(bytes.fromhex(bound.fingerprint.decode()), guard).decode() if bound else ""
            )
        except ValueError:
            name = ""
        if not name:  # forgotten this very moment
            raise StoreError("what a signed message was bound to can't be read")
        return work._replace(job=work.job._replace(key=Key(work.job.key.scope, name)), renamed=True)

    def replayed(self, work: Work) -> Outcome:
        """What becomes of a signed message that was handled before under another id."""
        emit(EventKind.CONFLICT, work.guard, self.operation, error=_REPLAYED)
        logger.warning(
            "%s: a signed message came again under another id, and was not handled again. If its "
            "sender does that, see replay_guard=",
            self.operation,
        )
        return Outcome("duplicate", code=_REPLAYED)

    # Handlers

    def bury(self, work: Work, error: Exception) -> Any:
        """The stored answer for an event that was given up for good; ``None`` for other errors."""
        if not isinstance(error, PermanentError):
            return None
        reason = f"{type(error).__name__}: {error}"[:1000]
        event = work.event(CURRENT.get(None))
        if self.settings.dead_letters is not None:
            self.settings.dead_letters(DeadLetter(event, reason))
        else:
            logger.error(
                "a webhook handler gave up for good (%s, type %.64r, event %s…, attempt %d): %s",
                work.job.operation,
                event.type,
                work.job.key.shown,
                event.attempt,
                reason,
            )
        return {"dead": reason}

    def forgotten(self, work: Work) -> Work:
        """The same work for an event whose window is over: as a new one, recorded as late."""
        terms = self.plan.terms._replace(remember_ms=0)
        plan = dataclasses.replace(self.plan, terms=terms)
        return work._replace(job=work.job._replace(plan=plan), late=True)

    def outcome(self, work: Work, result: Result) -> Outcome:
        """What the end of a call means."""
        if result.replayed:
            return self.replayed(work) if work.renamed else _DUPLICATE
        if isinstance(result.value, dict) and "dead" in result.value:
            return Outcome("dead", late=work.late)
        return Outcome("handled", late=True) if work.late else _HANDLED

    # Events of the stream

    def tell_effect(
        self, work: Work, outcome: Outcome, begun: float, verdict: Verdict, now: float | None
    ) -> None:
        """Tell that an event was handled, or given up for good, and that this is recorded."""
        if outcome.name in ("handled", "dead"):
            self._tell(EventKind.EFFECT, work.job.key, outcome.name, begun, verdict, now)

    def tell_delivery(
        self, response: WebhookResponse, begun: float, verdict: Verdict | None, now: float | None
    ) -> None:
        """Tell how a delivery was answered."""
        self._tell(EventKind.DELIVERY, None, response.outcome, begun, verdict, now)

    def _tell(
        self,
        kind: EventKind,
        key: Key | None,
        state: str,
        begun: float,
        verdict: Verdict | None,
        now: float | None,
    ) -> None:
        lateness = None
        if verdict is not None and verdict.ok and verdict.timestamp is not None:
            lateness = (time.time() if now is None else now) - verdict.timestamp
        emit(
            kind,
            key,
            self.operation,
            duration=time.monotonic() - begun,
            state=state,
            lateness=lateness,
        )

    # Answer

    def answer(self, outcomes: list[Outcome]) -> WebhookResponse:
        """One answer for a delivery."""
        if len(outcomes) == 1:
            usual = self._usual.get(outcomes[0])
            if usual is None and outcomes[0] in (_HANDLED, _DUPLICATE):
                made = taken(self.provider, outcomes[0].name)
                usual = made.status, dict(made.headers), made.body, made.outcome
                self._usual[outcomes[0]] = usual
            if usual is not None:  # most of them
                status, headers, body, name = usual
                # Whoever sends it may add fields to its headers, and only to its own.
                return WebhookResponse(status, headers.copy(), body, name)
            name, code = outcomes[0][:2]
            if name not in STATUS:
                return taken(self.provider, name, code if name == "duplicate" else "")
        return answer_to(self.provider, outcomes)

    def audit(
        self,
        begun: float,
        response: WebhookResponse,
        works: list[Work | Outcome],
        outcomes: list[Outcome],
    ) -> None:
        """Tell the audit sink, if there is one, of each event, or of a delivery that had none."""
        sink = self.settings.audit
        if sink is None:
            return
        seconds = time.monotonic() - begun
        rows: list[tuple[Any, Outcome | None]] = list(zip(works, outcomes, strict=True))
        for work, outcome in rows or [(None, None)]:
            sender = key_hash = ""
            if isinstance(work, Work):
                sender = work.sender.as_sender_identity()
                key_hash = hashlib.sha256(work.job.key.name.encode()).hexdigest()[:16]
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


def is_ours(provider: Provider, method: str) -> bool:
    """Whether a provider's method is that of ``Provider``, so that what it is made of may be used.

    What somebody's own class says in its place is what counts.
    """
    found = getattr(provider, method, None)
    return getattr(found, "__func__", None) is getattr(Provider, method)


def _is_type(given: str, wanted: str) -> bool:
    if "*" not in wanted:
        return given == wanted
    before, _, after = wanted.partition("*")
    return given.startswith(before) and given.endswith(after) and len(given) >= len(wanted) - 1
