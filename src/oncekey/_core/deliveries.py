"""Webhook deliveries as their dedup knows them: arguments, keys, tokens, what replies mean.

All of it that does not wait for a store; ``oncekey.webhook`` has the two forms that do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, cast, runtime_checkable
from zlib import crc32

from oncekey._core.call import Job
from oncekey._core.codec import Codec
from oncekey._core.flows import Plan, new_owner, tell_claimed
from oncekey._core.switch import switched
from oncekey._core.transact import check_transactional
from oncekey.abc import Clock, ClockInjectable, Markable
from oncekey.errors import (
    InvalidKeyError,
    InvalidRequestError,
    PolicyError,
    WebhookDedupOwnershipError,
)
from oncekey.instrument.events import EventKind, emit, listening
from oncekey.instrument.timings import Timed
from oncekey.models import ClaimReply, ClaimVerdict, Key, Record, Scope, State, Terms, check_text
from oncekey.policy import JournalPath, OnOutage, check_on_outage, check_seconds

__all__ = [
    "MIN_TTL_SECONDS",
    "Deliveries",
    "Sender",
    "VerifiedSender",
    "WebhookClaimStatus",
    "WebhookDedupClaim",
]

logger = logging.getLogger("oncekey")

B = TypeVar("B")

MIN_TTL_SECONDS = 86_400
MAX_TTL_SECONDS = 604_800
DEFAULT_PROCESSING_TTL_SECONDS = 300
MAX_ANSWER_BYTES = 1_048_576
_SCOPES_KEPT = 10_000

WebhookClaimStatus = Literal["claimed", "handled", "in_progress", "conflict"]


class WebhookDedupClaim(NamedTuple):
    """What a claim of a delivery gave.

    Attributes:
        status: ``claimed``: handle it, then ``complete`` or ``release``. ``handled``: answer 2xx.
            ``in_progress``: another copy is being handled; answer so that the sender retries.
            ``conflict``: the key came before with another payload.
        claim_token: The owner's token, with ``claimed`` only. A secret: don't log it.
        takeover: An earlier worker died or hung with this delivery in hand.
        retry_after: Whole seconds until the other copy's lease ends, with ``in_progress``.
    """

    status: WebhookClaimStatus
    claim_token: str | None = None
    takeover: bool = False
    retry_after: int | None = None

    def __repr__(self) -> str:
        """All but the token, which is a secret."""
        return f"WebhookDedupClaim({self.status!r}, takeover={self.takeover})"


@runtime_checkable
class VerifiedSender(Protocol):
    """A sender whose signature was verified: ``verdict.sender``, or any object that says so."""

    def as_sender_identity(self) -> str:
        """The name to dedup under."""
        ...


Sender = str | VerifiedSender
"""Who a delivery is from: a verified sender, or the name of one."""

_WON, _REPLAY, _CONFLICT = ClaimVerdict.WON, ClaimVerdict.REPLAY, ClaimVerdict.CONFLICT
_HANDLED = WebhookDedupClaim("handled")


class Deliveries(Generic[B]):
    """The deliveries of one namespace.

    Attributes:
        backend: What they are kept in, as it was given.
    """

    def __init__(
        self,
        backend: B,
        ttl_seconds: int = MIN_TTL_SECONDS,
        *,
        namespace: str = "webhook",
        clock: Clock = time.time,
        processing_ttl_seconds: int | None = None,
        require_verified: bool = False,
        on_outage: OnOutage | None = None,
        journal: JournalPath | None = None,
    ) -> None:
        self.require_verified = require_verified
        check_on_outage(on_outage)
        self._raises = on_outage == "closed"
        check_seconds(ttl_seconds=ttl_seconds, processing_ttl_seconds=processing_ttl_seconds)
        if not MIN_TTL_SECONDS <= ttl_seconds <= MAX_TTL_SECONDS:
            raise PolicyError(
                f"ttl_seconds must be in [{MIN_TTL_SECONDS}, {MAX_TTL_SECONDS}] (one to seven "
                f"days), got {ttl_seconds}"
            )
        lease = (
            DEFAULT_PROCESSING_TTL_SECONDS
            if processing_ttl_seconds is None
            else processing_ttl_seconds
        )
        if not 0 < lease <= ttl_seconds:
            raise PolicyError(
                "processing_ttl_seconds must be positive and no longer than ttl_seconds, got "
                f"{lease}"
            )
        self.ttl_seconds = ttl_seconds
        self.processing_ttl_seconds = lease
        self.namespace = check_text(namespace, "namespace")
        self._terms = Terms(
            lease_ms=round(lease * 1000), ttl_ms=round(ttl_seconds * 1000), sticky=True
        )
        self._scopes: dict[Sender, Scope] = {}
        self._markers: dict[Sender, Callable[[str], bool]] = {}
        self.backend = backend
        self._store: Any = self._fit(backend)
        if clock is not time.time and isinstance(self._store, ClockInjectable):
            self._store = self._store.with_clock(clock)  # a server's own is never replaced
        if on_outage is not None or journal is not None:
            self._store = self._seen(on_outage, journal)
        self._store = switched(self._store)

    def _fit(self, backend: B) -> Any:
        """The backend as a store of this form."""
        raise NotImplementedError

    def _seen(self, on_outage: OnOutage | None, journal: JournalPath | None) -> Any:
        """The store as this word for outages says."""
        raise NotImplementedError

    def _key(self, sender_id: Sender, idempotency_key: str) -> Key:
        scope = self._scopes.get(sender_id)
        if scope is None:
            identity = check_text(self._identity(sender_id), "sender_id")
            scope = Scope("webhook", self.namespace, identity)
            if len(self._scopes) >= _SCOPES_KEPT:
                self._scopes.clear()
                self._markers.clear()
            self._scopes[sender_id] = scope
            marks = _marks(self._store)
            if marks is not None:
                self._markers[sender_id] = marks.marker(scope, self._terms)
        check_text(idempotency_key, "idempotency_key")
        return Key(scope, idempotency_key)

    def _identity(self, sender: Sender) -> str:
        """Who a delivery is from: a verified sender says so itself."""
        if isinstance(sender, VerifiedSender):
            return sender.as_sender_identity()
        if self.require_verified:
            raise InvalidRequestError(
                "sender_id must be what a verifier gave, not text that a payload could hold: pass "
                "verdict.sender"
            )
        return sender

    def _claim(
        self, sender_id: Sender, idempotency_key: str, payload_hash: str
    ) -> tuple[Key, bytes, bytes, Terms]:
        """What to claim, and for whom."""
        mark = check_text(payload_hash, "payload_hash").encode()
        return self._key(sender_id, idempotency_key), new_owner(), mark, self._terms

    def _claimed(self, key: Key, owner: bytes, mark: bytes, reply: ClaimReply) -> WebhookDedupClaim:
        verdict = reply.verdict
        if listening():
            tell_claimed(key, "webhook", reply)
        if verdict is _WON:
            token = f"{owner.hex()}.{reply.fence:x}.{crc32(mark):x}"
            # Made without the keyword machinery of named tuples, as every delivery gets one.
            return tuple.__new__(WebhookDedupClaim, ("claimed", token, reply.takeover, None))
        if verdict is _REPLAY:
            return _HANDLED
        if verdict is _CONFLICT:
            return WebhookDedupClaim("conflict")
        return WebhookDedupClaim("in_progress", retry_after=max(1, -(-reply.lease_ms // 1000)))

    def _held(
        self,
        sender_id: Sender,
        idempotency_key: str,
        claim_token: str | None,
        payload_hash: str | None = None,
    ) -> tuple[Key, bytes, int]:
        """What is held by a token. It knows which payload was claimed, if another is meant."""
        key = self._key(sender_id, idempotency_key)
        if claim_token is None:
            raise WebhookDedupOwnershipError(
                "claim_token is None: only a claim with status 'claimed' has one, so look at "
                "claim.status first"
            )
        try:
            owner, fence, mark = claim_token.split(".")
            found = key, bytes.fromhex(owner), int(fence, 16)
            same = payload_hash is None or int(mark, 16) == crc32(payload_hash.encode())
        except (ValueError, AttributeError):
            raise WebhookDedupOwnershipError(
                "that is not a claim token: pass the claim_token that claim() gave"
            ) from None
        if not same:
            raise WebhookDedupOwnershipError(
                "this token was given for another payload: pass the payload_hash that was claimed"
            )
        return found

    def _job(
        self, sender_id: Sender, idempotency_key: str, payload_hash: str, wait_seconds: float
    ) -> Job:
        """A delivery for a transaction; its record is the one that ``claim`` uses."""
        check_transactional(self._store)
        mark = check_text(payload_hash, "payload_hash").encode()
        plan = Plan(self._terms, wait_seconds, None, MAX_ANSWER_BYTES, False)
        return Job(self._key(sender_id, idempotency_key), mark, plan, Codec(), "webhook")

    def _fenced(self, key: Key, payload_hash: str, found: Record | None) -> bool:
        """A settle that did not hold: False if the delivery is handled all the same."""
        if (
            found is not None
            and found.state is State.COMPLETED
            and found.fingerprint in (b"", payload_hash.encode())
        ):
            return False
        emit(EventKind.FENCED, key, "webhook")
        raise WebhookDedupOwnershipError(
            "this delivery is not claimed under that token: its lease ran out and another worker "
            "took it over, or the token is another delivery's. Undo or ignore this attempt's work"
        )

    def _told(self, kind: EventKind, key: Key, fence: int) -> bool:
        if listening():
            emit(kind, key, "webhook", fence=fence)
        return True

    def _asked(self) -> Any:
        """The store, which tells how long its calls take."""
        return Timed(self._store)

    def _recorded(self, key: Key, first: bool) -> bool:
        if listening():
            emit(EventKind.FIRST if first else EventKind.REPLAY, key, "check_and_record")
        return first

    def _unrecorded(self, sender_id: Sender, idempotency_key: str, error: Exception) -> bool:
        """Rather twice than never, if the store failed; a key that is none is the caller's."""
        if self._raises or isinstance(error, InvalidKeyError):
            raise error
        key = self._key(sender_id, idempotency_key)
        emit(EventKind.STORE_ERROR, key, "check_and_record", error=type(error).__name__)
        logger.warning(
            "webhook dedup failed (scope=%s key=%s), the event is processed and a copy of it "
            "may be too: %s",
            key.scope.hash,
            key.shown,
            error,
            exc_info=error,
        )
        return True


def _marks(store: Any) -> Markable | None:
    """The store if its ``marker`` says the same as its ``first_seen``: a subclass may differ."""
    for kind in type(store).__mro__:
        if "marker" in vars(kind):
            return cast("Markable", store)
        if "first_seen" in vars(kind):
            return None
    return None
