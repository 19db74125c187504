"""``WebhookDedupStore``: which deliveries were seen, claimed and handled, by verified sender.

Two ways to use it. ``check_and_record`` marks a delivery in one step: the cheapest, but a crash
after the mark and before the work loses the event. ``claim``, then ``complete`` or ``release``,
loses nothing: only a handled event counts as one.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable
from zlib import crc32

from oncekey._core.call import Job, in_background
from oncekey._core.codec import Codec
from oncekey._core.flows import Plan, new_owner
from oncekey._core.transact import AsyncTransaction, Transaction, check_transactional
from oncekey.abc import Clock, ClockInjectable, IdempotencyBackend, Markable, Store
from oncekey.canonical import sha256_hex
from oncekey.errors import (
    BackendMismatchError,
    InvalidKeyError,
    InvalidRequestError,
    OncekeyError,
    PolicyError,
    WebhookDedupOwnershipError,
)
from oncekey.instrument import events
from oncekey.instrument.events import EventKind, emit, listening
from oncekey.models import ClaimReply, Key, Record, Scope, State, Terms, Verdict, check_text
from oncekey.stores.legacy import as_async_store

__all__ = [
    "Sender",
    "SyncWebhookDedupStore",
    "VerifiedSender",
    "WebhookClaimStatus",
    "WebhookDedupClaim",
    "WebhookDedupStore",
]

logger = logging.getLogger("oncekey")

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

_WON = Verdict.WON
_STATUS: dict[Verdict, WebhookClaimStatus] = {
    Verdict.REPLAY: "handled",
    Verdict.IN_FLIGHT: "in_progress",
    Verdict.CONFLICT: "conflict",
}
_KINDS = {
    Verdict.REPLAY: EventKind.REPLAY,
    Verdict.IN_FLIGHT: EventKind.IN_FLIGHT,
    Verdict.CONFLICT: EventKind.CONFLICT,
}


class _Dedup:
    """Arguments, keys and tokens: all that does not wait for a store."""

    def __init__(
        self,
        ttl_seconds: int,
        namespace: str,
        processing_ttl_seconds: int | None,
        require_verified: bool,
    ) -> None:
        self._store: Any
        self.require_verified = require_verified
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

    def _claimed(self, key: Key, owner: bytes, mark: bytes, reply: ClaimReply) -> WebhookDedupClaim:
        verdict = reply.verdict
        if listening():
            won = EventKind.TAKEOVER if reply.takeover else EventKind.FIRST
            kind = _KINDS.get(verdict, won)
            emit(kind, key, "webhook", fence=reply.fence, attempts=reply.attempts)
        if verdict is _WON:
            token = f"{owner.hex()}.{reply.fence:x}.{crc32(mark):x}"
            # Made without the keyword machinery of named tuples, as every delivery gets one.
            return tuple.__new__(WebhookDedupClaim, ("claimed", token, reply.takeover, None))
        status = _STATUS[verdict]
        if status == "in_progress":
            seconds = max(1, -(-reply.lease_ms // 1000))
            return WebhookDedupClaim(status, retry_after=seconds)
        return WebhookDedupClaim(status)

    @staticmethod
    def _owner(claim_token: str | None, payload_hash: str | None = None) -> tuple[bytes, int]:
        """What a token says. It knows which payload was claimed, and says if another is meant."""
        if claim_token is None:
            raise WebhookDedupOwnershipError(
                "claim_token is None: only a claim with status 'claimed' has one, so look at "
                "claim.status first"
            )
        try:
            owner, fence, mark = claim_token.split(".")
            found = bytes.fromhex(owner), int(fence, 16)
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
        """A delivery as the engine knows it; its record is the one that ``claim`` uses."""
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

    def _told(self, kind: EventKind, key: Key) -> bool:
        if listening():
            emit(kind, key, "webhook")
        return True

    def _unrecorded(self, key: Key, error: Exception) -> bool:
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


def _payload_hash(payload: Any) -> str:
    if isinstance(payload, (bytes, bytearray, memoryview)):
        return hashlib.sha256(payload).hexdigest()
    return sha256_hex(payload)


def _marks(store: Any) -> Markable | None:
    """The store if its ``marker`` says the same as its ``first_seen``: a subclass may differ."""
    for kind in type(store).__mro__:
        if "marker" in vars(kind):
            return cast("Markable", store)
        if "first_seen" in vars(kind):
            return None
    return None


def _with_clock(store: Any, clock: Clock) -> Any:
    """The store on the injected clock; a server's own clock is never replaced."""
    if clock is not time.time and isinstance(store, ClockInjectable):
        return store.with_clock(clock)
    return store


class WebhookDedupStore(_Dedup):
    """Which webhook deliveries were seen, by verified sender and key.

    ``sender_id`` must come from the verified signature, never from the payload: whoever may choose
    it may also silence another sender's events.

    Args:
        backend: An async store, or any ``IdempotencyBackend``.
        ttl_seconds: How long a delivery is remembered, from its first copy: one to seven days.
        namespace: Sets uses of one backend apart. Request-side keys are always apart.
        clock: Seconds since 1970, for stores without a server's clock.
        processing_ttl_seconds: How long a claimed delivery is held by a worker that died.
        require_verified: Take a sender only as a verifier gave it (``verdict.sender``), never as
            text, which could come from a payload by accident.

    Raises:
        ValueError: A TTL is out of bounds, or the namespace is empty.
        BackendMismatchError: The backend is synchronous: use ``SyncWebhookDedupStore``.

    Example:
        >>> import asyncio
        >>> from oncekey import MemoryBackend, WebhookDedupStore
        >>> dedup = WebhookDedupStore(MemoryBackend())
        >>> async def receive():
        ...     first = await dedup.check_and_record("key-1", "evt_1")
        ...     again = await dedup.check_and_record("key-1", "evt_1")
        ...     return first, again
        >>> asyncio.run(receive())
        (True, False)
    """

    def __init__(
        self,
        backend: IdempotencyBackend,
        ttl_seconds: int = MIN_TTL_SECONDS,
        *,
        namespace: str = "webhook",
        clock: Clock = time.time,
        processing_ttl_seconds: int | None = None,
        require_verified: bool = False,
    ) -> None:
        super().__init__(ttl_seconds, namespace, processing_ttl_seconds, require_verified)
        self.backend = backend
        self._store = _with_clock(as_async_store(backend, "WebhookDedupStore"), clock)

    async def check_and_record(self, sender_id: Sender, idempotency_key: str) -> bool:
        """Mark a delivery. True exactly once in the window, whoever else asks at the same time.

        False: a copy; answer 2xx all the same, or the sender goes on retrying. If the store
        fails, a warning is logged and the event counts as new: rather twice than never.

        Raises:
            ValueError: ``sender_id`` or ``idempotency_key`` is empty, too long or holds a NUL.
        """
        marker = self._markers.get(sender_id)
        if marker is not None and not events._listeners:
            try:
                return marker(idempotency_key)
            except InvalidKeyError:
                raise
            except Exception as error:  # noqa: BLE001 - logged: rather twice than never
                return self._unrecorded(self._key(sender_id, idempotency_key), error)
        key = self._key(sender_id, idempotency_key)
        try:
            first: bool = await self._store.first_seen(key, self._terms)
        except Exception as error:  # noqa: BLE001 - logged: rather twice than never
            return self._unrecorded(key, error)
        if listening():
            emit(EventKind.FIRST if first else EventKind.REPLAY, key, "check_and_record")
        return first

    async def claim(
        self, sender_id: Sender, idempotency_key: str, payload_hash: str
    ) -> WebhookDedupClaim:
        """Claim a delivery for handling, or learn what became of it.

        Raises:
            ValueError: An argument is empty, too long or holds a NUL.
            StoreError: The store failed; answer so that the sender retries.
        """
        key = self._key(sender_id, idempotency_key)
        owner = new_owner()
        mark = check_text(payload_hash, "payload_hash").encode()
        try:
            reply = await self._store.claim(key, owner, mark, self._terms)
        except asyncio.CancelledError:
            in_background(self._store.release(key, owner, None))  # it may have been won
            raise
        return self._claimed(key, owner, mark, reply)

    async def complete(
        self, sender_id: Sender, idempotency_key: str, payload_hash: str, claim_token: str
    ) -> bool:
        """Mark a claimed delivery as handled. False: another worker had handled it already.

        Raises:
            WebhookDedupOwnershipError: The claim is somebody else's by now.
        """
        key = self._key(sender_id, idempotency_key)
        owner, fence = self._owner(claim_token, payload_hash)
        if await self._store.complete(key, owner, fence, b"j", self._terms):
            return self._told(EventKind.COMPLETED, key)
        return self._fenced(key, payload_hash, await self._store.read(key))

    async def release(
        self, sender_id: Sender, idempotency_key: str, payload_hash: str, claim_token: str
    ) -> bool:
        """Give a claimed delivery back after a failure, so that the next copy is handled.

        Its payload stays bound to the key. False: another worker had handled it already.

        Raises:
            WebhookDedupOwnershipError: The claim is somebody else's by now.
        """
        key = self._key(sender_id, idempotency_key)
        owner, fence = self._owner(claim_token, payload_hash)
        if await self._store.release(key, owner, fence):
            return self._told(EventKind.RELEASED, key)
        return self._fenced(key, payload_hash, await self._store.read(key))

    def transaction(
        self,
        sender_id: Sender,
        idempotency_key: str,
        payload_hash: str,
        *,
        on: Any = None,
        wait_seconds: float = 5,
    ) -> AsyncTransaction:
        """Handle a delivery exactly once: your writes and the mark commit together.

        ``async with dedup.transaction(...) as tx``: if ``tx.replayed``, it was handled before, and
        there is nothing to do; else write on ``tx.connection``. An error rolls all of it back.

        Args:
            sender_id: The verified sender.
            idempotency_key: The delivery's key.
            payload_hash: What must not change under one key.
            on: Your connection or session, or a pool, engine or sessionmaker to take one from.
                Default: the backend's own.
            wait_seconds: How long to wait for another copy that is being handled.

        Raises:
            IdempotencyConflictError: The key came before with another payload.
            IdempotencyInFlightError: Another copy is being handled still: answer so that the
                sender retries.
            TransactionRefusedError: The backend has no transactions, or the connection can't be
                safe.
        """
        check_transactional(self._store)
        job = self._job(sender_id, idempotency_key, payload_hash, wait_seconds)
        return AsyncTransaction(self._store, on, job, None)

    def wrap(
        self, handler: Callable[..., Awaitable[Any]] | None = None, *, on: Any = None
    ) -> Callable[..., Any]:
        """Decorate ``handler(sender_id, idempotency_key, payload, ..., tx)``: it runs once.

        The decorated function takes the same arguments but ``tx`` and gives True if it handled the
        delivery, False if that had been done before. Copies are compared by the payload: bytes, or
        anything that is JSON.

        Args:
            handler: The function. It writes on ``tx.connection``.
            on: Where the transaction is. See ``transaction``.
        """
        if handler is None:
            return lambda function: self.wrap(function, on=on)

        @functools.wraps(handler)
        async def handled(
            sender_id: Sender, idempotency_key: str, payload: Any, *args: Any, **kwargs: Any
        ) -> bool:
            mark = _payload_hash(payload)
            async with self.transaction(sender_id, idempotency_key, mark, on=on) as tx:
                if not tx.replayed:
                    await handler(sender_id, idempotency_key, payload, *args, tx=tx, **kwargs)
                return not tx.replayed

        return handled

    async def renew(self, sender_id: Sender, idempotency_key: str, claim_token: str) -> bool:
        """Keep a claim for another ``processing_ttl_seconds``. False: it is lost, stop."""
        owner, fence = self._owner(claim_token)
        key = self._key(sender_id, idempotency_key)
        held: bool = await self._store.renew(key, owner, fence, self._terms)
        return held


class SyncWebhookDedupStore(_Dedup):
    """``WebhookDedupStore`` for synchronous code: the same arguments and methods, no ``await``.

    It also has ``complete_on``, which commits the mark together with your own writes.

    Raises:
        ValueError: A TTL is out of bounds, or the namespace is empty.
        BackendMismatchError: The backend is asynchronous: use ``WebhookDedupStore``.

    Example:
        >>> from oncekey import SyncWebhookDedupStore, connect
        >>> dedup = SyncWebhookDedupStore(connect("memory://"))
        >>> dedup.check_and_record("key-1", "evt_1"), dedup.check_and_record("key-1", "evt_1")
        (True, False)
    """

    def __init__(
        self,
        backend: Store,
        ttl_seconds: int = MIN_TTL_SECONDS,
        *,
        namespace: str = "webhook",
        clock: Clock = time.time,
        processing_ttl_seconds: int | None = None,
        require_verified: bool = False,
    ) -> None:
        super().__init__(ttl_seconds, namespace, processing_ttl_seconds, require_verified)
        if not isinstance(backend, Store):
            raise BackendMismatchError(
                f"SyncWebhookDedupStore needs a sync backend, got {type(backend).__name__}: pass "
                "MemoryStore(), SQLiteStore('file.db') or connect(url)"
            )
        self.backend = backend
        self._store = _with_clock(backend, clock)

    def check_and_record(self, sender_id: Sender, idempotency_key: str) -> bool:
        """Mark a delivery. See ``WebhookDedupStore.check_and_record``."""
        marker = self._markers.get(sender_id)
        if marker is not None and not events._listeners:
            try:
                return marker(idempotency_key)
            except InvalidKeyError:
                raise
            except Exception as error:  # noqa: BLE001 - logged: rather twice than never
                return self._unrecorded(self._key(sender_id, idempotency_key), error)
        key = self._key(sender_id, idempotency_key)
        try:
            first: bool = self._store.first_seen(key, self._terms)
        except Exception as error:  # noqa: BLE001 - logged: rather twice than never
            return self._unrecorded(key, error)
        if listening():
            emit(EventKind.FIRST if first else EventKind.REPLAY, key, "check_and_record")
        return first

    def claim(
        self, sender_id: Sender, idempotency_key: str, payload_hash: str
    ) -> WebhookDedupClaim:
        """Claim a delivery. See ``WebhookDedupStore.claim``."""
        key = self._key(sender_id, idempotency_key)
        owner = new_owner()
        mark = check_text(payload_hash, "payload_hash").encode()
        return self._claimed(key, owner, mark, self._store.claim(key, owner, mark, self._terms))

    def complete(
        self, sender_id: Sender, idempotency_key: str, payload_hash: str, claim_token: str
    ) -> bool:
        """Mark a claimed delivery as handled. See ``WebhookDedupStore.complete``."""
        key = self._key(sender_id, idempotency_key)
        owner, fence = self._owner(claim_token, payload_hash)
        if self._store.complete(key, owner, fence, b"j", self._terms):
            return self._told(EventKind.COMPLETED, key)
        return self._fenced(key, payload_hash, self._store.read(key))

    def complete_on(
        self,
        connection: Any,
        sender_id: Sender,
        idempotency_key: str,
        payload_hash: str,
        claim_token: str,
    ) -> bool:
        """Mark a delivery as handled inside your own open transaction on the store's database.

        The mark and your writes commit together, or not at all: exactly once, through any crash.
        SQLite stores only.

        Raises:
            WebhookDedupOwnershipError: The claim is somebody else's by now: roll back.
            StoreConfigError: No transaction is open, or the connection is to another database.
            OncekeyError: This store has no transactions to share.
        """
        complete_on = getattr(self._store, "complete_on", None)
        if complete_on is None:
            raise OncekeyError(
                f"{type(self._store).__name__} can't share your transaction: use a SQLiteStore on "
                "the file that your own tables are in"
            )
        key = self._key(sender_id, idempotency_key)
        owner, fence = self._owner(claim_token, payload_hash)
        if complete_on(connection, key, owner, fence, b"j", self._terms):
            return self._told(EventKind.COMPLETED, key)
        return self._fenced(key, payload_hash, None)

    def release(
        self, sender_id: Sender, idempotency_key: str, payload_hash: str, claim_token: str
    ) -> bool:
        """Give a claimed delivery back. See ``WebhookDedupStore.release``."""
        key = self._key(sender_id, idempotency_key)
        owner, fence = self._owner(claim_token, payload_hash)
        if self._store.release(key, owner, fence):
            return self._told(EventKind.RELEASED, key)
        return self._fenced(key, payload_hash, self._store.read(key))

    def renew(self, sender_id: Sender, idempotency_key: str, claim_token: str) -> bool:
        """Keep a claim. See ``WebhookDedupStore.renew``."""
        owner, fence = self._owner(claim_token)
        key = self._key(sender_id, idempotency_key)
        held: bool = self._store.renew(key, owner, fence, self._terms)
        return held

    def transaction(
        self,
        sender_id: Sender,
        idempotency_key: str,
        payload_hash: str,
        *,
        on: Any = None,
        wait_seconds: float = 5,
    ) -> Transaction:
        """Handle a delivery exactly once, with ``with``. See ``WebhookDedupStore.transaction``."""
        check_transactional(self._store)
        job = self._job(sender_id, idempotency_key, payload_hash, wait_seconds)
        return Transaction(self._store, on, job, None)

    def wrap(
        self, handler: Callable[..., Any] | None = None, *, on: Any = None
    ) -> Callable[..., Any]:
        """Decorate ``handler(sender_id, idempotency_key, payload, ..., tx)``.

        See ``WebhookDedupStore.wrap``.
        """
        if handler is None:
            return lambda function: self.wrap(function, on=on)

        @functools.wraps(handler)
        def handled(
            sender_id: Sender, idempotency_key: str, payload: Any, *args: Any, **kwargs: Any
        ) -> bool:
            mark = _payload_hash(payload)
            with self.transaction(sender_id, idempotency_key, mark, on=on) as tx:
                if not tx.replayed:
                    handler(sender_id, idempotency_key, payload, *args, tx=tx, **kwargs)
                return not tx.replayed

        return handled
