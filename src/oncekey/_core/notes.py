"""What a claim offers to code that calls other systems: a key for them, and notes of the calls.

A note is written before its call. Nobody can tell from outside whether a call that was under way
when a worker died took effect; whoever takes the key over finds the note, and can ask.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import os
import threading
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from oncekey._core.codec import DONE
from oncekey._core.drive import Flow, Op, arun, run
from oncekey.abc import AsyncStore, Store
from oncekey.errors import (
    BackendMismatchError,
    PolicyError,
    StoreCorruptError,
    TransactionRefusedError,
)
from oncekey.models import Key, Record, Scope, check_text

if TYPE_CHECKING:
    from oncekey._core.flows import Claim

__all__ = [
    "PendingCall",
    "abefore_call",
    "apending_calls",
    "before_call",
    "derived_key",
    "noted",
    "pending_calls",
]

T = TypeVar("T")

_DOMAIN: Final = b"oncekey downstream key 1"
_UNKEYED: Final = b"oncekey downstream key without a secret"


def derived_key(key: Key, tenant: str, provider: str, secret: bytes | str | None) -> str:
    """One key for each (tenant, scope, key, provider): 43 characters out of A-Za-z0-9_-."""
    if secret is None:
        mac = _UNKEYED
    elif secret:
        mac = secret.encode() if isinstance(secret, str) else bytes(secret)
    else:
        raise PolicyError("the secret is empty: pass one of 32 random bytes, or none at all")
    parts = (tenant.encode(), key.scope.prefix, key.name.encode(), check_text(provider, "provider"))
    message = _DOMAIN + b"".join(_prefixed(part) for part in parts)
    digest = hmac.digest(mac, message, "sha256")
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _prefixed(part: bytes | str) -> bytes:
    raw = part.encode() if isinstance(part, str) else part
    return len(raw).to_bytes(8, "big") + raw


class PendingCall(NamedTuple):
    """A call that an earlier attempt was about to make. Whether it took effect is not known here.

    Attributes:
        provider: Who was called.
        request_id: What the call can be found by, there.
        attempt: Which attempt made it, counted from 1.
        at: When it was noted, in seconds since 1970 on the store's clock.
    """

    provider: str
    request_id: str
    attempt: int
    at: float


class Note(NamedTuple):
    """A call as it is kept."""

    provider: str
    request_id: str
    attempt: int
    at: int  # milliseconds
    owner: str  # which claim made it; a fence may come again after a transaction rolled back


def _note_key(key: Key) -> Key:
    """The record that holds the notes of ``key``."""
    return Key(Scope("calls", key.scope.kind, *key.scope.parts), key.name)


def _encoded(notes: list[Note]) -> bytes:
    return DONE + json.dumps({"calls": notes}, separators=(",", ":")).encode()


def _decoded(answer: bytes) -> list[Note]:
    try:
        return [Note(*note) for note in json.loads(answer[1:])["calls"]]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreCorruptError(
            f"the notes of earlier calls can't be read ({error}): look at the provider's side "
            "before this key is run again"
        ) from error


def _kept(key: Key) -> Flow[list[Note]]:
    found: Record | None = yield Op("read", (_note_key(key),))
    if found is not None and found.answer:
        now: int = yield Op("now", ())
        if now < found.expires_at:  # else it is only not swept yet
            return _decoded(found.answer)
    return []


def noted(key: Key) -> Flow[tuple[PendingCall, ...]]:
    """The calls of all attempts of a key, for whoever has no claim of it."""
    notes = yield from _kept(key)
    return tuple(
        PendingCall(note.provider, note.request_id, note.attempt, note.at / 1000) for note in notes
    )


def _load(claim: Claim) -> Flow[list[Note]]:
    """The notes of all attempts, read once a claim."""
    if claim.notes is None:
        claim.notes = yield from _kept(claim.key)
    known: list[Note] = claim.notes
    return known


def _write(claim: Claim, provider: str, request_id: str) -> Flow[None]:
    check_text(provider, "provider")
    check_text(request_id, "request_id")
    claim.check()
    in_transaction = claim.leased_at == inf
    if in_transaction and getattr(claim.home(), "one_writer", False):
        raise TransactionRefusedError(
            "a note must be on disk before its call, and this transaction holds the only writer of "
            "the database: call other systems outside of it, or keep the records in PostgreSQL"
        )
    if claim.attempts == 1 and not in_transaction and claim.notes is None:
        claim.notes = []  # the first: nobody can have made a note before
    notes = yield from _load(claim)
    if any(note[:2] == (provider, request_id) for note in notes):
        return
    now: int = yield Op("now", ())
    notes = [*notes, Note(provider, request_id, claim.attempts, now, claim.owner.hex())]
    # As long as somebody may take the key over, or try it again.
    expires_at = now + claim.terms.lease_ms + claim.terms.ttl_ms
    yield Op("write", (_note_key(claim.key), b"", _encoded(notes), expires_at))
    claim.notes = notes
    claim.check()  # it may have taken long


def _pending(claim: Claim) -> Flow[list[PendingCall]]:
    notes = yield from _load(claim)
    return [
        PendingCall(note.provider, note.request_id, note.attempt, note.at / 1000)
        for note in notes
        if note.owner != claim.owner.hex()
    ]


# What is done at the same time in one claim waits for its turn: each note is written together with
# those before it.
_making = threading.Lock()


def _fresh_making() -> None:
    global _making
    _making = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fresh_making)


def _lock(claim: Claim, make: Callable[[], T]) -> T:
    with _making:
        if claim.lock is None:
            claim.lock = make()
        lock: T = claim.lock
    return lock


def _store_of(claim: Claim, kind: type[Any], fix: str) -> Any:
    store = claim.home()
    if isinstance(store, kind):
        return store
    if store is None:
        raise LookupError("this claim knows no store: use the one that current_claim() gives")
    raise BackendMismatchError(f"this claim's store is a {type(store).__name__}: {fix}")


def before_call(claim: Claim, provider: str, request_id: str) -> None:
    """See ``Claim.before_call``."""
    store = _store_of(claim, Store, "await claim.abefore_call(...)")
    with _lock(claim, threading.Lock):
        run(_write(claim, provider, request_id), store)


async def abefore_call(claim: Claim, provider: str, request_id: str) -> None:
    """See ``Claim.abefore_call``."""
    store = _store_of(claim, AsyncStore, "call claim.before_call(...), without await")
    async with _lock(claim, asyncio.Lock):
        await arun(_write(claim, provider, request_id), store)


def pending_calls(claim: Claim) -> list[PendingCall]:
    """See ``Claim.pending_calls``."""
    store = _store_of(claim, Store, "await claim.apending_calls()")
    with _lock(claim, threading.Lock):
        return run(_pending(claim), store)


async def apending_calls(claim: Claim) -> list[PendingCall]:
    """See ``Claim.apending_calls``."""
    store = _store_of(claim, AsyncStore, "call claim.pending_calls(), without await")
    async with _lock(claim, asyncio.Lock):
        return await arun(_pending(claim), store)
