"""The records of a SQLite file on a connection of a caller's, inside its transaction."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator
from typing import Any, Final

from oncekey._core import transitions
from oncekey._core.transitions import Event
from oncekey.abc import Clock, TransactionRecords
from oncekey.errors import StoreError, TransactionRefusedError
from oncekey.models import ClaimReply, Key, Record, Terms
from oncekey.stores.sqlite.database import SQL, Database

__all__ = ["SQLiteTransactionRecords"]

_INSERT: Final = SQL["insert"] + " RETURNING 1"
_UPDATE_OWN: Final = SQL["update"] + " AND state = 0 AND owner = ? AND fence = ? RETURNING 1"


class SQLiteTransactionRecords(TransactionRecords):
    """A file has one writer at a time, so that nothing can come between."""

    flavour = "sqlite"

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._claimed: Record | None = None

    def claim(
        self, on: Any, key: Key, owner: bytes, fingerprint: bytes, terms: Terms
    ) -> Generator[Any, Any, ClaimReply]:
        database = self._database
        if on.target is not database.lent and on.target is not database.lent_async:
            yield from self._check_file(on)
        # The insert comes first: it takes the file's lock before anything is read, so that the
        # decision can't be made on what another writer is about to change.
        now_us = int(self._clock() * 1_000_000)
        reply, record = transitions.claim(None, owner, fingerprint, terms, now_us)
        values = [key.digest, key.scope.label, *record]  # type: ignore[misc]
        if (yield from on.execute(_INSERT, values)):
            self._claimed = record
            return reply
        rows = yield from on.execute(SQL["read"], [key.digest])
        now_us = int(self._clock() * 1_000_000)
        found = Database.record(tuple(rows[0]))
        reply, record = transitions.claim(found, owner, fingerprint, terms, now_us)
        if record is not None:
            yield from on.execute(SQL["update"], [*record, key.digest])
        return reply

    def _check_file(self, on: Any) -> Generator[Any, Any, None]:
        rows = yield from on.execute("PRAGMA database_list", [])
        files = [row[2] for row in rows if row[1] == "main"]
        if not files or not files[0] or not os.path.samefile(files[0], self._database.path):
            raise TransactionRefusedError(
                f"this connection is not to {self._database.path}, where the store is: only what "
                f"lies in one file commits together{on.elsewhere}"
            )

    def complete(
        self, on: Any, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> Generator[Any, Any, bool]:
        now = int(self._clock() * 1000)
        if self._claimed is not None:  # as nobody else can have touched it since, it is as it was
            event = Event.COMPLETE
            _, record = transitions.settle(self._claimed, event, owner, fence, terms, now, answer)
            if record is not None:
                values = [*record, key.digest, owner, fence]
                if (yield from on.execute_last(_UPDATE_OWN, values)):
                    return True
        rows = yield from on.execute(SQL["read"], [key.digest])
        if not rows:
            return False
        found = Database.record(tuple(rows[0]))
        held, record = transitions.settle(found, Event.COMPLETE, owner, fence, terms, now, answer)
        if record is not None:
            yield from on.execute(SQL["update"], [*record, key.digest])
        return held

    def named(self, error: BaseException) -> StoreError:
        if not isinstance(error, sqlite3.Error):
            return StoreError(f"SQLite failed ({type(error).__name__}): {error}")
        return self._database.named(error)
