"""Going through the records of a store, a page at a time, no further than one asks to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from oncekey._core.drive import Flow, Op
from oncekey.errors import StoreConfigError
from oncekey.models import Entry
from oncekey.operate.inspecting import Inspection, inspection_of

__all__ = ["Listing", "check_browsable", "listed"]

PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class Listing:
    """Some of the records of a store.

    Attributes:
        found: Those that were asked for.
        looked_at: How many records were looked at for it.
        cursor: Where to go on. ``None``: all of the store was looked at.
    """

    found: list[Inspection]
    looked_at: int
    cursor: str | None


def check_browsable(browsable: bool) -> None:
    """Refuse a store that can't be looked through.

    Raises:
        StoreConfigError: Says what it lacks.
    """
    if not browsable:
        raise StoreConfigError(
            "this store can't be looked through: it is no Browsable of oncekey.abc"
        )


def listed(
    wanted: Callable[[Entry, int], bool], cursor: str, limit: int, most: int
) -> Flow[Listing]:
    """Up to about ``limit`` records that are wanted, of ``most`` that are looked at."""
    found: list[Inspection] = []
    now: int = yield Op("now", ())
    looked_at, at = 0, cursor
    while True:
        page = yield Op("browse", (at, min(PAGE, most - looked_at)))
        looked_at += len(page.entries)
        found += [inspection_of(entry, now) for entry in page.entries if wanted(entry, now)]
        if page.cursor is None or len(found) >= limit or looked_at >= most:
            return Listing(found, looked_at, page.cursor)
        at = page.cursor
