"""``inspect``: what a store has of one key, and what a retry of it would get."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from oncekey._core.drive import Flow, Op, arun, run
from oncekey._core.notes import PendingCall, noted
from oncekey.abc import AsyncBrowsable, AsyncStore, Browsable, Store
from oncekey.errors import StoreConfigError, StoreCorruptError
from oncekey.models import Entry, Key, State

__all__ = ["Inspection", "ainspect", "found_entry", "inspect", "inspection_of", "situation_of"]

_RETRY: Final = {
    "in flight": "a retry is told that the first call still runs, or waits for it",
    "lapsed": "the worker died or hangs: a retry with the same payload takes over and runs",
    "done": "a retry gets the recorded outcome; another payload is refused",
    "released": "a retry runs: the last attempt failed and gave the key back",
    "ended": "a retry runs as a new call, unless its policy remembers expired keys and refuses it",
    "unknown": "a call runs: there is no record of this key",
}


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a store has of a key, at one moment.

    Attributes:
        digest: The key as the store has it, in hex.
        scope: What the store says of its scope; empty where it keeps none.
        situation: ``in flight``, ``lapsed`` (its lease is over), ``done``, ``released``, ``ended``
            (past its time), or ``unknown`` where there is no record.
        attempts: How many claims were won.
        fence: That of the last of them.
        age: Seconds since the last claim was won, or the mark made; ``None`` where unknown.
        lease_left: Seconds until another may take over; below 0 once it may.
        ends_in: Seconds until the record counts no more; below 0 once it does not.
        answer_bytes: How long the recorded answer is. ``None``: there is none.
        retry: What a retry would get, in a sentence.
        calls: Calls downstream that attempts have noted (``before_call``), unless the key is done.
            Empty where only a digest is known, and in listings.
    """

    digest: str
    scope: str
    situation: str
    attempts: int = 0
    fence: int = 0
    age: float | None = None
    lease_left: float | None = None
    ends_in: float | None = None
    answer_bytes: int | None = None
    retry: str = ""
    calls: tuple[PendingCall, ...] = ()


def inspect(store: Store, key: Key | bytes) -> Inspection:
    """Look at one key. Changes nothing.

    Args:
        store: The store.
        key: The key, as ``Key(Scope("once", "orders"), "o-1")``, or its digest.

    Raises:
        StoreConfigError: A digest for a store that can't be looked through.
    """
    return run(_inspect(key, isinstance(store, Browsable)), store)


async def ainspect(store: AsyncStore, key: Key | bytes) -> Inspection:
    """``inspect`` on an asynchronous store."""
    return await arun(_inspect(key, isinstance(store, AsyncBrowsable)), store)


def _inspect(key: Key | bytes, browsable: bool) -> Flow[Inspection]:
    entry = yield from found_entry(key, browsable)
    now: int = yield Op("now", ())
    if entry is None:
        digest = key if isinstance(key, bytes) else key.digest
        label = "" if isinstance(key, bytes) else key.scope.label
        return Inspection(digest.hex(), label, "unknown", retry=_RETRY["unknown"])
    found = inspection_of(entry, now)
    if isinstance(key, bytes) or found.situation in ("done", "ended"):
        return found
    try:
        calls = yield from noted(key)
    except StoreCorruptError:  # sealed: it needs the application's key
        return found
    return replace(found, calls=calls)


def found_entry(key: Key | bytes, browsable: bool) -> Flow[Entry | None]:
    """The record of a key, by whatever way the store has."""
    if browsable:
        found: Entry | None = yield Op("find", (key if isinstance(key, bytes) else key.digest,))
        # A name that is known is a better key than what the store can tell.
        known = found if isinstance(key, bytes) or found is None else found._replace(key=key)
        return known
    if isinstance(key, bytes):
        raise StoreConfigError("this store can't look for digests: give the key and its scope")
    record = yield Op("read", (key,))
    if record is None:
        return None
    size = None if record.answer is None else len(record.answer)
    return Entry(key, record._replace(answer=None), size)


def situation_of(entry: Entry, now: int) -> str:
    """What a record is to a claimer with the plainest terms, at ``now`` (milliseconds)."""
    record = entry.record
    if record.state is State.PENDING:
        if now < record.lease_until:
            return "in flight"
        return "lapsed" if now < record.expires_at else "ended"
    if now >= record.expires_at:
        return "ended"
    return "done" if record.state is State.COMPLETED else "released"


def inspection_of(entry: Entry, now: int) -> Inspection:
    """What an entry says at ``now``."""
    record, situation = entry.record, situation_of(entry, now)
    pending = record.state is State.PENDING
    # Fences are made from the clock. That of a mark lies at its end instead.
    age = None if not record.owner else max(0, now - record.fence // 1000) / 1000
    return Inspection(
        entry.key.digest.hex(),
        entry.key.scope.label,
        situation,
        record.attempts,
        record.fence,
        age,
        (record.lease_until - now) / 1000 if pending else None,
        (record.expires_at - now) / 1000,
        entry.answer_bytes,
        _RETRY[situation],
    )
