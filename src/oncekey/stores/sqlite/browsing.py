"""Looking through the records of a SQLite file, beside whatever is being written."""

from __future__ import annotations

import sqlite3
import time
from typing import Any

from oncekey.abc import AsyncBrowsable, Browsable
from oncekey.models import Entry, Page
from oncekey.stores._browsing import after_digest, bounded, entry_of, page_by_digest
from oncekey.stores.sqlite.database import SQL, Database
from oncekey.stores.sqlite.files import patiently

__all__ = ["AsyncBrowsing", "Browsing"]


def _rows(database: Database, name: str, *args: Any) -> list[Any]:
    def read() -> list[Any]:
        with database.read_lock:
            return database.reader().execute(SQL[name], args).fetchall()

    try:
        return patiently(read, time.monotonic() + database.busy_timeout)
    except sqlite3.Error as error:
        raise database.named(error) from error


def _page(database: Database, cursor: str, limit: int) -> Page:
    most = bounded(limit)
    return page_by_digest(_rows(database, "browse", after_digest(cursor), most), most)


def _found(database: Database, digest: bytes) -> Entry | None:
    rows = _rows(database, "find", digest)
    return entry_of(rows[0]) if rows else None


class Browsing(Browsable):
    """For the sync store."""

    _database: Database

    def browse(self, cursor: str = "", limit: int = 1000) -> Page:
        """See ``Browsable``. In the order of the digests."""
        return _page(self._database, cursor, limit)

    def find(self, digest: bytes) -> Entry | None:
        """See ``Browsable``."""
        return _found(self._database, digest)


class AsyncBrowsing(AsyncBrowsable):
    """For the async store, which reads in place too."""

    _database: Database

    async def browse(self, cursor: str = "", limit: int = 1000) -> Page:
        """See ``AsyncBrowsable``. In the order of the digests."""
        return _page(self._database, cursor, limit)

    async def find(self, digest: bytes) -> Entry | None:
        """See ``AsyncBrowsable``."""
        return _found(self._database, digest)
