"""``sweep``: remove records past their time now, instead of a few with every new one."""

from __future__ import annotations

from typing import NamedTuple

from oncekey.abc import AsyncStore, AsyncSweepable, Store, Sweepable

__all__ = ["Swept", "asweep", "sweep"]


class Swept(NamedTuple):
    """What was swept.

    Attributes:
        removed: How many records.
        by_itself: The store removes them without being told, and this was for nothing.
    """

    removed: int
    by_itself: bool = False


def sweep(store: Store, limit: int = 100_000) -> Swept:
    """Remove at most about ``limit`` records that are past their time."""
    return Swept(store.sweep(limit)) if isinstance(store, Sweepable) else Swept(0, True)


async def asweep(store: AsyncStore, limit: int = 100_000) -> Swept:
    """``sweep`` on an asynchronous store."""
    if isinstance(store, AsyncSweepable):
        return Swept(await store.sweep(limit))
    return Swept(0, True)
