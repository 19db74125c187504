"""``WebhookDedup`` and ``AsyncWebhookDedup``: which deliveries were seen, claimed and handled.

Two ways to use it. ``check_and_record`` marks a delivery in one step: the cheapest, but a crash
after the mark and before the work loses the event. ``claim``, then ``complete`` or ``release``,
loses nothing: only a handled event counts as one.

``WebhookDedupStore`` and ``SyncWebhookDedupStore`` are older names of the async and the sync form.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, overload

from oncekey._core.deliveries import (
    B,
    Deliveries,
    Sender,
    VerifiedSender,
    WebhookClaimStatus,
    WebhookDedupClaim,
)
from oncekey._core.tasks import in_background
from oncekey._core.transact import AsyncTransaction, Transaction
from oncekey.abc import IdempotencyBackend, Store
from oncekey.canonical import sha256_hex
from oncekey.errors import BackendMismatchError, OncekeyError
from oncekey.instrument import events
from oncekey.instrument.events import EventKind
from oncekey.policy import JournalPath, OnOutage
from oncekey.stores.legacy import as_async_store
from oncekey.stores.urls import what_is

if TYPE_CHECKING:
    from oncekey._core.sources import AsyncSource, C, Source

__all__ = [
    "AsyncWebhookDedup",
    "Sender",
    "SyncWebhookDedupStore",
    "VerifiedSender",
    "WebhookClaimStatus",
    "WebhookDedup",
    "WebhookDedupClaim",
    "WebhookDedupStore",
]


def _payload_hash(payload: Any) -> str:
    if isinstance(payload, (bytes, bytearray, memoryview)):
        return hashlib.sha256(payload).hexdigest()
    return sha256_hex(payload)


class _Dedup(Deliveries[B]):
    """What both forms have of what lies above the core."""

    def _seen(self, on_outage: OnOutage | None, journal: JournalPath | None) -> Any:
        from oncekey.resilience.outage import seen_by

        return seen_by(self._store, on_outage, journal)


class AsyncWebhookDedup(_Dedup[IdempotencyBackend]):
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
        on_outage: What becomes of a delivery whose store can't answer. ``closed``: an error, also
            from ``check_and_record``. ``open``: it counts as new and goes into the journal, from
            which the store is made whole later. ``None``: as the store says, but that
            ``check_and_record`` counts it as new, with a warning and no trace.
        journal: The journal's directory, for ``open``.

    Raises:
        ValueError: A TTL is out of bounds, or the namespace is empty.
        BackendMismatchError: The backend is synchronous: use ``WebhookDedup``.

    Example:
        >>> import asyncio
        >>> from oncekey import AsyncWebhookDedup, aconnect
        >>> dedup = AsyncWebhookDedup(aconnect("memory://"))
        >>> async def receive():
        ...     first = await dedup.check_and_record("key-1", "evt_1")
        ...     again = await dedup.check_and_record("key-1", "evt_1")
        ...     return first, again
        >>> asyncio.run(receive())
        (True, False)
    """

    def _fit(self, backend: IdempotencyBackend) -> Any:
        return as_async_store(backend, "AsyncWebhookDedup")

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
            except Exception as error:  # noqa: BLE001 - logged, or raised again
                return self._unrecorded(sender_id, idempotency_key, error)
        key = self._key(sender_id, idempotency_key)
        store = self._asked() if events._timers else self._store
        try:
            first = await store.first_seen(key, self._terms)
        except Exception as error:  # noqa: BLE001 - the same
            return self._unrecorded(sender_id, idempotency_key, error)
        return self._recorded(key, first)

    async def claim(
        self, sender_id: Sender, idempotency_key: str, payload_hash: str
    ) -> WebhookDedupClaim:
        """Claim a delivery for handling, or learn what became of it.

        Raises:
            ValueError: An argument is empty, too long or holds a NUL.
            StoreError: The store failed; answer so that the sender retries.
        """
        key, owner, mark, terms = self._claim(sender_id, idempotency_key, payload_hash)
        store = self._asked() if events._timers else self._store
        try:
            reply = await store.claim(key, owner, mark, terms)
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
        key, owner, fence = self._held(sender_id, idempotency_key, claim_token, payload_hash)
        store = self._asked() if events._timers else self._store
        if await store.complete(key, owner, fence, b"j", self._terms):
            return self._told(EventKind.COMPLETED, key, fence)
        return self._fenced(key, payload_hash, await self._store.read(key))

    async def release(
        self, sender_id: Sender, idempotency_key: str, payload_hash: str, claim_token: str
    ) -> bool:
        """Give a claimed delivery back after a failure, so that the next copy is handled.

        Its payload stays bound to the key. False: another worker had handled it already.

        Raises:
            WebhookDedupOwnershipError: The claim is somebody else's by now.
        """
        key, owner, fence = self._held(sender_id, idempotency_key, claim_token, payload_hash)
        store = self._asked() if events._timers else self._store
        if await store.release(key, owner, fence):
            return self._told(EventKind.RELEASED, key, fence)
        return self._fenced(key, payload_hash, await self._store.read(key))

    @overload
    def transaction(
        self,
        sender_id: Sender,
        idempotency_key: str,
        payload_hash: str,
        *,
        on: AsyncSource[C],
        wait_seconds: float = 5,
    ) -> AsyncTransaction[C]: ...
    @overload
    def transaction(
        self,
        sender_id: Sender,
        idempotency_key: str,
        payload_hash: str,
        *,
        on: C | None = None,
        wait_seconds: float = 5,
    ) -> AsyncTransaction[C]: ...
    def transaction(
        self,
        sender_id: Sender,
        idempotency_key: str,
        payload_hash: str,
        *,
        on: Any = None,
        wait_seconds: float = 5,
    ) -> AsyncTransaction[Any]:
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
        job = self._job(sender_id, idempotency_key, payload_hash, wait_seconds)
        return AsyncTransaction(self._store, on, job, None)

    @overload
    def wrap(
        self, handler: Callable[..., Awaitable[Any]], *, on: Any = None
    ) -> Callable[..., Coroutine[Any, Any, bool]]: ...
    @overload
    def wrap(
        self, handler: None = None, *, on: Any = None
    ) -> Callable[[Callable[..., Awaitable[Any]]], Callable[..., Coroutine[Any, Any, bool]]]: ...
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
        key, owner, fence = self._held(sender_id, idempotency_key, claim_token)
        store = self._asked() if events._timers else self._store
        held: bool = await store.renew(key, owner, fence, self._terms)
        return held


class WebhookDedup(_Dedup[Store]):
    """``AsyncWebhookDedup`` for synchronous code: the same arguments and methods, no ``await``.

    It also has ``complete_on``, which commits the mark together with your own writes.

    Raises:
        ValueError: A TTL is out of bounds, or the namespace is empty.
        BackendMismatchError: The backend is asynchronous: use ``AsyncWebhookDedup``.

    Example:
        >>> from oncekey import WebhookDedup, connect
        >>> dedup = WebhookDedup(connect("memory://"))
        >>> dedup.check_and_record("key-1", "evt_1"), dedup.check_and_record("key-1", "evt_1")
        (True, False)
    """

    def _fit(self, backend: Store) -> Any:
        if not isinstance(backend, Store):
            raise BackendMismatchError(
                f"WebhookDedup needs a sync backend, got {what_is(backend)}: pass "
                "MemoryStore(), SQLiteStore('file.db') or connect(url)"
            )
        return backend

    def check_and_record(self, sender_id: Sender, idempotency_key: str) -> bool:
        """Mark a delivery. See ``AsyncWebhookDedup.check_and_record``."""
        marker = self._markers.get(sender_id)
        if marker is not None and not events._listeners:
            try:
                return marker(idempotency_key)
            except Exception as error:  # noqa: BLE001 - logged, or raised again
                return self._unrecorded(sender_id, idempotency_key, error)
        key = self._key(sender_id, idempotency_key)
        store = self._asked() if events._timers else self._store
        try:
            first = store.first_seen(key, self._terms)
        except Exception as error:  # noqa: BLE001 - the same
            return self._unrecorded(sender_id, idempotency_key, error)
        return self._recorded(key, first)

    def claim(
        self, sender_id: Sender, idempotency_key: str, payload_hash: str
    ) -> WebhookDedupClaim:
        """Claim a delivery. See ``AsyncWebhookDedup.claim``."""
        key, owner, mark, terms = self._claim(sender_id, idempotency_key, payload_hash)
        store = self._asked() if events._timers else self._store
        return self._claimed(key, owner, mark, store.claim(key, owner, mark, terms))

    def complete(
        self, sender_id: Sender, idempotency_key: str, payload_hash: str, claim_token: str
    ) -> bool:
        """Mark a claimed delivery as handled. See ``AsyncWebhookDedup.complete``."""
        key, owner, fence = self._held(sender_id, idempotency_key, claim_token, payload_hash)
        store = self._asked() if events._timers else self._store
        if store.complete(key, owner, fence, b"j", self._terms):
            return self._told(EventKind.COMPLETED, key, fence)
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
        key, owner, fence = self._held(sender_id, idempotency_key, claim_token, payload_hash)
        if complete_on(connection, key, owner, fence, b"j", self._terms):
            return self._told(EventKind.COMPLETED, key, fence)
        return self._fenced(key, payload_hash, None)

    def release(
        self, sender_id: Sender, idempotency_key: str, payload_hash: str, claim_token: str
    ) -> bool:
        """Give a claimed delivery back. See ``AsyncWebhookDedup.release``."""
        key, owner, fence = self._held(sender_id, idempotency_key, claim_token, payload_hash)
        store = self._asked() if events._timers else self._store
        if store.release(key, owner, fence):
            return self._told(EventKind.RELEASED, key, fence)
        return self._fenced(key, payload_hash, self._store.read(key))

    def renew(self, sender_id: Sender, idempotency_key: str, claim_token: str) -> bool:
        """Keep a claim. See ``AsyncWebhookDedup.renew``."""
        key, owner, fence = self._held(sender_id, idempotency_key, claim_token)
        store = self._asked() if events._timers else self._store
        held: bool = store.renew(key, owner, fence, self._terms)
        return held

    @overload
    def transaction(
        self,
        sender_id: Sender,
        idempotency_key: str,
        payload_hash: str,
        *,
        on: Source[C],
        wait_seconds: float = 5,
    ) -> Transaction[C]: ...
    @overload
    def transaction(
        self,
        sender_id: Sender,
        idempotency_key: str,
        payload_hash: str,
        *,
        on: C | None = None,
        wait_seconds: float = 5,
    ) -> Transaction[C]: ...
    def transaction(
        self,
        sender_id: Sender,
        idempotency_key: str,
        payload_hash: str,
        *,
        on: Any = None,
        wait_seconds: float = 5,
    ) -> Transaction[Any]:
        """Handle a delivery exactly once, with ``with``. See ``AsyncWebhookDedup.transaction``."""
        job = self._job(sender_id, idempotency_key, payload_hash, wait_seconds)
        return Transaction(self._store, on, job, None)

    @overload
    def wrap(self, handler: Callable[..., Any], *, on: Any = None) -> Callable[..., bool]: ...
    @overload
    def wrap(
        self, handler: None = None, *, on: Any = None
    ) -> Callable[[Callable[..., Any]], Callable[..., bool]]: ...
    def wrap(
        self, handler: Callable[..., Any] | None = None, *, on: Any = None
    ) -> Callable[..., Any]:
        """Decorate ``handler(sender_id, idempotency_key, payload, ..., tx)``.

        See ``AsyncWebhookDedup.wrap``.
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


WebhookDedupStore = AsyncWebhookDedup
SyncWebhookDedupStore = WebhookDedup
