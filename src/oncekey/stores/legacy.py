"""A third party's ``get``/``put`` backend as a store: replays from it, claims in this process.

Such a backend can't claim. Concurrent duplicates are held apart by a table in memory, so only
within one process; after a crash there is nothing that says work was under way.
"""

from __future__ import annotations

import asyncio
import functools
import time
import warnings
import weakref
from typing import Any
from uuid import UUID

from oncekey._core.codec import decode_json, is_plain, json_answer
from oncekey._core.flows import new_owner
from oncekey._core.packing import unpacked
from oncekey.abc import AsyncStore, Clock, ClockInjectable, IdempotencyBackend
from oncekey.errors import BackendMismatchError, StoreError
from oncekey.models import (
    CachedResponse,
    ClaimReply,
    ClaimVerdict,
    Key,
    Record,
    State,
    Terms,
    identity_text,
)
from oncekey.stores._answers import Answers
from oncekey.stores.memory import MemoryStore
from oncekey.stores.urls import what_is

__all__ = ["LegacyStore", "as_async_store", "join_scope"]

_SEPARATOR, _ESCAPE = "\x1e", "\x1f"
_WRAPPED = "__oncekey_answer__"
_LEASE = Terms(lease_ms=60_000, ttl_ms=60_000)


def join_scope(*parts: str | int | UUID) -> str:
    """One string for a list of parts, different for every different list.

    A single ordinary text stays as it is; ordinary texts are joined with U+001E. Numbers and UUIDs
    begin with an escape that no text has: ``1`` and ``"1"`` are different.
    """
    return _SEPARATOR.join(
        part.replace(_ESCAPE, _ESCAPE + "1").replace(_SEPARATOR, _ESCAPE + "0")
        if isinstance(part, str)
        else _ESCAPE + identity_text(part, "scope")
        for part in parts
    )


def as_async_store(backend: object, user: str) -> AsyncStore:
    """``backend`` as an async store; one with only ``get`` and ``put`` is wrapped, with a warning.

    Raises:
        BackendMismatchError: It is neither.
    """
    if isinstance(backend, AsyncStore) and not _overrides_answers(backend):
        return backend
    is_legacy = isinstance(backend, IdempotencyBackend) or (
        asyncio.iscoroutinefunction(getattr(backend, "get", None))
        and asyncio.iscoroutinefunction(getattr(backend, "put", None))
    )
    if not is_legacy:
        raise BackendMismatchError(
            f"{user} needs a store, got {what_is(backend)}: pass AsyncMemoryStore(), "
            "AsyncSQLiteStore('file.db') or aconnect(url), or for sync code their sync twins"
        )
    warnings.warn(
        f"{type(backend).__name__} has only get and put: concurrent duplicates are held apart "
        "within this process only, not between processes, and a crash leaves no trace of work "
        "that was under way. Subclass oncekey.AsyncStore too for the full guarantee.",
        UserWarning,
        stacklevel=3,
    )
    return LegacyStore(backend)


@functools.cache
def _brief(terms: Terms) -> Terms:
    """The same lease, but nothing is kept after it: the answer is the backend's to keep."""
    return Terms(lease_ms=terms.lease_ms, ttl_ms=1)


def _overrides_answers(backend: AsyncStore) -> bool:
    """A subclass of a full store with its own ``get`` or ``put`` wants those to be used."""
    return isinstance(backend, Answers) and (
        type(backend).get is not Answers.get or type(backend).put is not Answers.put
    )


# Stores on one backend share its claims, so that they hold duplicates apart together.
_claims: weakref.WeakKeyDictionary[Any, MemoryStore] = weakref.WeakKeyDictionary()


def _claims_of(backend: Any, clock: Clock) -> MemoryStore:
    try:
        return _claims.setdefault(backend, MemoryStore()).with_clock(clock)
    except TypeError:  # can't be hashed or weakly referred to
        return MemoryStore(clock=clock)


def _answer(entry: CachedResponse) -> bytes:
    """The stored bytes of an entry."""
    wrapped = entry.response.get(_WRAPPED)
    return wrapped.encode() if isinstance(wrapped, str) else json_answer(entry.response)


class LegacyStore(AsyncStore, ClockInjectable):
    """Claims live in memory, answers in the backend."""

    poll_seconds = 1.0

    def __init__(self, backend: Any, clock: Clock = time.time) -> None:
        self._backend = backend
        self._clock = clock
        self._pending = _claims_of(backend, clock)

    def with_clock(self, clock: Clock) -> LegacyStore:
        """The same claims and answers, seen by another clock."""
        view = LegacyStore(self._backend, clock)
        view._pending = self._pending.with_clock(clock)  # also where it could not be shared
        return view

    @staticmethod
    def _address(key: Key) -> tuple[str, str]:
        scope = key.scope
        if scope.kind == "request":
            return scope.parts[0], key.name
        # Three parts, the first one empty: no request scope is made that way.
        return join_scope("", f"{scope.kind}:{scope.parts[0]}", *scope.parts[1:]), key.name

    async def _get(self, key: Key) -> CachedResponse | None:
        found: CachedResponse | None = await self._backend.get(*self._address(key))
        return found

    async def _put(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> None:
        answer = unpacked(answer)  # what this backend keeps is text
        response = decode_json(answer) if is_plain(answer) else None
        if not isinstance(response, dict):
            response = {_WRAPPED: answer.decode()}  # typed, omitted, or not an object
        entry = CachedResponse(fingerprint.decode(), response, expires_at / 1000)
        try:
            await self._backend.put(*self._address(key), entry)
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(
                f"{type(self._backend).__name__}.put failed: {error}. Check that backend"
            ) from error

    async def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        """Look, claim in memory, look again: who finished in between has put its answer."""
        entry = await self._get(key)
        if entry is not None:
            return self._settled(entry, fingerprint)
        reply = self._pending.claim(key, owner, fingerprint, _brief(terms))
        won = reply.verdict is ClaimVerdict.WON
        try:
            # Lost to a claim that will itself find an answer here? Then that answer counts too.
            entry = await self._get(key)
        except BaseException:
            if won:
                self._pending.release(key, owner, reply.fence)
            raise
        if entry is None:
            return reply
        if won:
            self._pending.release(key, owner, reply.fence)
        return self._settled(entry, fingerprint)

    @staticmethod
    def _settled(entry: CachedResponse, fingerprint: bytes) -> ClaimReply:
        """A stored answer as the reply to a claim."""
        same = entry.payload_hash.encode() == fingerprint or not fingerprint
        verdict = ClaimVerdict.REPLAY if same else ClaimVerdict.CONFLICT
        return ClaimReply(verdict, 0, 0, 1, _answer(entry) if same else None)

    async def complete(
        self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> bool:
        """Put the answer, then let others look for it."""
        record = self._pending.read(key)
        if record is None or record.owner != owner or record.fence != fence:
            return False
        if record.state is State.RELEASED:
            return True  # completed before; its reply was lost
        expires_at = int(self._clock() * 1000) + terms.ttl_ms
        try:
            await self._put(key, record.fingerprint, answer, expires_at)
        except StoreError:
            self._pending.release(key, owner, fence)  # nothing is kept: a retry may run at once
            raise
        return self._pending.release(key, owner, fence)

    async def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        """See ``AsyncStore``."""
        return self._pending.renew(key, owner, fence, _brief(terms))

    async def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        """See ``AsyncStore``."""
        return self._pending.release(key, owner, fence)

    async def first_seen(self, key: Key, terms: Terms) -> bool:
        """See ``AsyncStore``; atomic in this process."""
        owner = new_owner()
        reply = await self.claim(key, owner, b"", _LEASE)
        if reply.verdict is not ClaimVerdict.WON:
            return False
        try:
            expires_at = int(self._clock() * 1000) + terms.ttl_ms
            await self._put(key, b"first-seen", b"j{}", expires_at)
        finally:
            self._pending.release(key, owner, reply.fence)
        return True

    async def read(self, key: Key) -> Record | None:
        """See ``AsyncStore``."""
        entry = await self._get(key)
        if entry is None:
            return self._pending.read(key)
        expires_at = round(entry.expires_at_epoch * 1000)
        return Record(
            State.COMPLETED,
            b"",
            0,
            entry.payload_hash.encode(),
            0,
            expires_at,
            expires_at,
            1,
            _answer(entry),
        )

    async def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> None:
        """See ``AsyncStore``."""
        await self._put(key, fingerprint, answer, expires_at)

    async def now(self) -> int:
        """See ``AsyncStore``."""
        return int(self._clock() * 1000)

    async def wait(self, key: Key, seconds: float) -> None:
        """See ``AsyncStore``."""
        table = self._pending._table
        await table.waiters.wait_async(table.name(key), seconds, lambda: table.settled(key))

    async def clear(self) -> None:
        """Forget the claims; the answers are the backend's."""
        self._pending.clear()

    async def aclose(self) -> None:
        """Forget the claims. The backend was not opened here, and is not closed here."""
        self._pending.close()
