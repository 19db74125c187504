"""Looking through the records of a memory store, a few of its dicts at a time."""

from __future__ import annotations

from oncekey.abc import AsyncBrowsable, Browsable
from oncekey.models import Entry, Key, Page, Scope
from oncekey.stores._browsing import bounded, wrong_cursor
from oncekey.stores._memory_table import SHARDS, Slot, Table, unpack

__all__ = ["AsyncBrowsing", "Browsing"]


def _scope(prefix: bytes) -> Scope:
    """The scope that a prefix is of: the number of parts, then each with its length."""
    number, _, rest = prefix.partition(b":")
    parts = []
    for _ in range(int(number)):
        size, _, rest = rest.partition(b":")
        parts.append(rest[: int(size)].decode())
        rest = rest[int(size) + 1 :]
    return Scope(*parts)


def _entry(known: dict[str, Scope], name: str, slot: Slot) -> Entry:
    short, bar, rest = name.partition("|")
    scope = known.get(short + bar)
    if scope is None:  # a long one, by its full name: its parts may have bars in them
        scope, rest = _long_scope(name)
    record = unpack(slot)
    answer = record.answer
    size = None if answer is None else len(answer)
    return Entry(Key(scope, rest), record._replace(answer=None), size)


def _long_scope(name: str) -> tuple[Scope, str]:
    raw = name.encode()
    place = raw.index(b":")
    for _ in range(int(raw[:place])):
        end = raw.index(b":", place + 1)
        place = end + 1 + int(raw[place + 1 : end])
    return _scope(raw[:place]), raw[place + 1 :].decode()


def _known(table: Table) -> dict[str, Scope]:
    return {short: _scope(prefix) for prefix, short in list(table.scopes.items())}


def _page(table: Table, cursor: str, limit: int) -> Page:
    if cursor and not (cursor.isdecimal() and int(cursor) < SHARDS):
        raise wrong_cursor()
    most, place = bounded(limit), int(cursor or 0)
    known = _known(table)
    entries: list[Entry] = []
    while place < SHARDS and len(entries) < most:
        found = list(table.shards[place].items())  # one step for all threads
        entries += [_entry(known, name, slot) for name, slot in found]
        place += 1
    return Page(entries, None if place == SHARDS else str(place), place / SHARDS)


def _found(table: Table, digest: bytes) -> Entry | None:
    """Looks at every record: they lie by their names."""
    cursor: str | None = ""
    while cursor is not None:
        entries, cursor, _ = _page(table, cursor, 1000)
        for entry in entries:
            if entry.key.digest == digest:
                return entry
    return None


class Browsing(Browsable):
    """For the sync store."""

    _table: Table

    def browse(self, cursor: str = "", limit: int = 1000) -> Page:
        """See ``Browsable``."""
        return _page(self._table, cursor, limit)

    def find(self, digest: bytes) -> Entry | None:
        """See ``Browsable``. Looks at every record."""
        return _found(self._table, digest)


class AsyncBrowsing(AsyncBrowsable):
    """For the async store."""

    _table: Table

    async def browse(self, cursor: str = "", limit: int = 1000) -> Page:
        """See ``AsyncBrowsable``."""
        return _page(self._table, cursor, limit)

    async def find(self, digest: bytes) -> Entry | None:
        """See ``AsyncBrowsable``. Looks at every record."""
        return _found(self._table, digest)
