"""What listings of every store have in common: cursors by digest, and rows as entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from oncekey.errors import StoreConfigError
from oncekey.models import Entry, Key, Page, Record, State

__all__ = ["MOST", "after_digest", "bounded", "entry_of", "page_by_digest", "wrong_cursor"]

MOST: Final = 10_000
"""The most records that one page looks at."""
_WHOLE: Final = 1 << 64


def bounded(limit: int) -> int:
    """A page's size within its bounds."""
    return max(1, min(limit, MOST))


def wrong_cursor() -> StoreConfigError:
    """The error for a cursor that is none of this store's."""
    return StoreConfigError("that cursor is not from a page of this store: start without one")


def after_digest(cursor: str) -> bytes:
    """The digest that a page starts after."""
    try:
        return bytes.fromhex(cursor)
    except ValueError:
        raise wrong_cursor() from None


def page_by_digest(rows: Sequence[Sequence[Any]], limit: int) -> Page:
    """A page of rows in the order of their digests. Those are spread evenly: so is the share."""
    entries = [entry_of(row) for row in rows]
    if len(entries) < limit:
        return Page(entries, None, 1.0)
    last = entries[-1].key.digest
    return Page(entries, last.hex(), int.from_bytes(last[:8]) / _WHOLE)


def entry_of(row: Sequence[Any]) -> Entry:
    """An entry from a row: key, scope, the record up to its attempts, the answer's length."""
    key, scope, state, owner, fence, fingerprint, lease, expires, purge, attempts, answer_bytes = (
        row
    )
    label = scope.decode() if isinstance(scope, bytes) else scope
    marks = (bytes(fingerprint), lease, expires, purge, attempts)
    record = Record(State(state), bytes(owner), fence, *marks, None)
    return Entry(Key.stored(bytes(key), label), record, answer_bytes)
