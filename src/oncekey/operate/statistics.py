"""``stats``: what is in a store, counted or, where there is much of it, estimated."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from oncekey._core.drive import Flow, Op, arun, run
from oncekey.abc import AsyncBrowsable, AsyncStore, Browsable, Store
from oncekey.models import Entry, State
from oncekey.operate.inspecting import situation_of
from oncekey.operate.listing import PAGE, check_browsable

__all__ = ["Stats", "astats", "stats"]


@dataclass(frozen=True, slots=True)
class Stats:
    """What is in a store.

    Attributes:
        records: How many records there are.
        exact: Every one was looked at. Else the numbers are what those that were stand for.
        looked_at: How many were.
        situations: How many are in flight, lapsed, done, released and ended.
        scopes: The scopes with the most records, and how many; empty where a store keeps none.
        answer_bytes: How long answers are on average; 0 where there are none.
        oldest_pending: Seconds since the oldest claim without an outcome, of those looked at.
        sweep_lag: How many seconds the oldest record that is past its time is, of those looked at.
    """

    records: int
    exact: bool
    looked_at: int
    situations: dict[str, int]
    scopes: dict[str, int]
    answer_bytes: float
    oldest_pending: float | None
    sweep_lag: float | None


def stats(store: Store, *, most: int = 10_000) -> Stats:
    """Count what is in a store.

    Args:
        store: The store.
        most: How many records to look at. With more in the store, the numbers are estimates.

    Raises:
        StoreConfigError: The store can't be looked through.
    """
    check_browsable(isinstance(store, Browsable))
    return run(_stats(most), store)


async def astats(store: AsyncStore, *, most: int = 10_000) -> Stats:
    """``stats`` on an asynchronous store."""
    check_browsable(isinstance(store, AsyncBrowsable))
    return await arun(_stats(most), store)


def _stats(most: int) -> Flow[Stats]:
    now: int = yield Op("now", ())
    seen: dict[bytes, Entry] = {}  # a record may be in two pages
    cursor: str | None = ""
    share = 0.0
    while cursor is not None and len(seen) < most:
        page = yield Op("browse", (cursor, min(PAGE, most - len(seen))))
        seen |= {entry.key.digest: entry for entry in page.entries}
        cursor, share = page.cursor, page.share
    times = 1 / share if share else 1.0
    entries = list(seen.values())
    situations = Counter(situation_of(entry, now) for entry in entries)
    scopes = Counter(entry.key.scope.label for entry in entries if entry.key.scope.label)
    sizes = [one.answer_bytes for one in entries if one.answer_bytes is not None]
    pending = [
        now - one.record.fence // 1000 for one in entries if one.record.state is State.PENDING
    ]
    overdue = [now - one.record.purge_at for one in entries if one.record.purge_at <= now]
    return Stats(
        round(len(entries) * times),
        cursor is None,
        len(entries),
        {name: round(number * times) for name, number in situations.most_common()},
        {name: round(number * times) for name, number in scopes.most_common(10)},
        sum(sizes) / len(sizes) if sizes else 0.0,
        max(pending) / 1000 if pending else None,
        max(overdue) / 1000 if overdue else None,
    )
