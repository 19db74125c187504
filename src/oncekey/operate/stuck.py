"""``stuck``: claims whose lease is over, or that have been running for long."""

from __future__ import annotations

from typing import Final

from oncekey._core.drive import Flow, arun, run
from oncekey.abc import AsyncBrowsable, AsyncStore, Browsable, Store
from oncekey.models import Entry, State
from oncekey.operate.listing import Listing, check_browsable, listed

__all__ = ["astuck", "stuck"]

_BINDINGS: Final = ":signed messages"
"""The end of scopes in which receivers bind a message to its id: claims that nobody ever ends."""


def stuck(
    store: Store,
    *,
    longer_than: float = 300.0,
    scope: str | None = None,
    cursor: str = "",
    limit: int = 100,
    most: int = 1_000_000,
) -> Listing:
    """Find claims past their lease, and those that have been running for long.

    A claim past its lease is no fault by itself: the next retry takes it over. That it is still
    there says that no retry came.

    Args:
        store: The store.
        longer_than: Seconds after which a claim with a running lease counts too.
        scope: Only records whose scope the store calls so, such as ``once:orders``.
        cursor: Where an earlier listing ended.
        limit: About how many to find.
        most: How many records to look at.

    Raises:
        StoreConfigError: The store can't be looked through.
    """
    check_browsable(isinstance(store, Browsable))
    return run(_stuck(longer_than, scope, cursor, limit, most), store)


async def astuck(
    store: AsyncStore,
    *,
    longer_than: float = 300.0,
    scope: str | None = None,
    cursor: str = "",
    limit: int = 100,
    most: int = 1_000_000,
) -> Listing:
    """``stuck`` on an asynchronous store."""
    check_browsable(isinstance(store, AsyncBrowsable))
    return await arun(_stuck(longer_than, scope, cursor, limit, most), store)


def _stuck(
    longer_than: float, scope: str | None, cursor: str, limit: int, most: int
) -> Flow[Listing]:
    def wanted(entry: Entry, now: int) -> bool:
        record = entry.record
        if entry.key.scope.label.endswith(_BINDINGS):
            return False
        if record.state is not State.PENDING or scope not in (None, entry.key.scope.label):
            return False
        running = now - record.fence // 1000
        return now >= record.lease_until or running >= longer_than * 1000

    return (yield from listed(wanted, cursor, limit, most))
