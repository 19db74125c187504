"""``evict``: make a store forget a key, so that a retry runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from oncekey._core.drive import Flow, Op, arun, run
from oncekey.abc import AsyncBrowsable, AsyncStore, Browsable, Store
from oncekey.instrument.events import EventKind, emit
from oncekey.models import Key
from oncekey.operate.inspecting import Inspection, found_entry, inspection_of

__all__ = ["Eviction", "aevict", "evict"]

SOON: Final = 10_000
"""A record that ends within so many milliseconds is left to end: a new call may have it by then."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """What became of an eviction.

    Attributes:
        evicted: Whether the store was changed.
        before: What was there, or ``None``.
        outcome: What was done, or why nothing was, and what a retry gets now.
    """

    evicted: bool
    before: Inspection | None
    outcome: str


def evict(store: Store, key: Key | bytes) -> Eviction:
    """Make a store forget a key: the next call of it runs, and may do its work a second time.

    A claim that is in flight is taken from its worker, which can't record its outcome any more. An
    event ``evicted`` says so to whoever listens.

    Args:
        store: The store.
        key: The key, as ``Key(Scope("once", "orders"), "o-1")``, or its digest.

    Raises:
        StoreConfigError: A digest for a store that can't be looked through.
    """
    return run(_evict(key, isinstance(store, Browsable)), store)


async def aevict(store: AsyncStore, key: Key | bytes) -> Eviction:
    """``evict`` on an asynchronous store."""
    return await arun(_evict(key, isinstance(store, AsyncBrowsable)), store)


def _evict(key: Key | bytes, browsable: bool) -> Flow[Eviction]:
    entry = yield from found_entry(key, browsable)
    if entry is None:
        return Eviction(False, None, "there is no record of this key: a call of it runs")
    now: int = yield Op("now", ())
    record, before = entry.record, inspection_of(entry, now)
    if before.situation in ("released", "ended"):
        return Eviction(False, before, f"nothing to do: {before.retry}")
    if before.situation == "done":
        if record.expires_at - now < SOON:
            left = (record.expires_at - now) / 1000
            return Eviction(False, before, f"it ends by itself in {left:.1f} s: nothing was done")
        # A record whose time is long over: the next claim wins it, with a higher fence.
        yield Op("write", (entry.key, b"", b"", 0))
        outcome = "the recorded outcome is gone: the next call of this key runs its work again"
    else:
        held: bool = yield Op("release", (entry.key, record.owner, record.fence))
        if not held:
            return Eviction(False, before, "it changed at this very moment: look again")
        outcome = (
            "the claim was taken from its worker, which can't record an outcome any more: the next "
            "call of this key runs, beside what that worker may still be doing"
        )
    emit(EventKind.EVICTED, entry.key, "evict", fence=record.fence, attempts=record.attempts)
    return Eviction(True, before, outcome)
