"""Where the decisions of a receiver may go: a log, a table, or one whose entries are chained."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from oncekey._core.forks import Forking, watch_forks
from oncekey.errors import StoreClosedError
from oncekey.instrument.audit import (
    START,
    AuditEntry,
    AuditError,
    AuditFile,
    AuditReport,
    AuditSink,
    Chain,
    Head,
    read_rows,
    verify_chain,
)
from oncekey.stores.sqlite.files import create_private

__all__ = ["AuditEntry", "AuditFile", "AuditSink", "AuditTable", "LogAudit", "TableAudit"]

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS oncekey_audit (
    at REAL NOT NULL, provider TEXT NOT NULL, sender TEXT NOT NULL, key_hash TEXT NOT NULL,
    outcome TEXT NOT NULL, status INTEGER NOT NULL, code TEXT NOT NULL, seconds REAL NOT NULL
)
"""
_INSERT: Final = "INSERT INTO oncekey_audit VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_CHAIN: Final = """
CREATE TABLE IF NOT EXISTS oncekey_audit_chain (
    n BIGINT PRIMARY KEY, entry TEXT NOT NULL, before TEXT NOT NULL, hash TEXT NOT NULL
)
"""
_HEADS: Final = """
CREATE TABLE IF NOT EXISTS oncekey_audit_head (only_one INTEGER PRIMARY KEY, head TEXT NOT NULL)
"""
_LAST: Final = "SELECT n, hash FROM oncekey_audit_chain ORDER BY n DESC LIMIT 1"
_ADD: Final = "INSERT INTO oncekey_audit_chain VALUES (?, ?, ?, ?)"
_HEAD: Final = (
    "INSERT INTO oncekey_audit_head VALUES (1, ?) "
    "ON CONFLICT (only_one) DO UPDATE SET head = excluded.head"
)
_ATTEMPTS: Final = 100  # that others may come first at one number


class LogAudit:
    """Writes each entry to a logger, as one line of JSON.

    Args:
        logger: The logger, or the name of one.
        level: The level.
    """

    def __init__(
        self, logger: logging.Logger | str = "oncekey.audit", level: int = logging.INFO
    ) -> None:
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        self._level = level

    def __call__(self, entry: AuditEntry) -> None:
        """Write one entry."""
        self._logger.log(self._level, "%s", json.dumps(asdict(entry), sort_keys=True))


class TableAudit(Forking):
    """Writes each entry to a table ``oncekey_audit``, made if it is not there. Works after a fork.

    Args:
        connect: Gives a new DB-API connection each time it is called, as it is after a fork or when
            a connection was lost; or the path of a SQLite file, made for its owner only.
        placeholder: How that driver marks arguments: ``?``, or ``%s`` for psycopg.
    """

    def __init__(self, connect: Callable[[], Any] | str, placeholder: str = "?") -> None:
        self._connect = functools.partial(_sqlite, connect) if isinstance(connect, str) else connect
        self._insert = _INSERT.replace("?", placeholder)
        self._connection: Any = None
        self._lock = threading.Lock()
        self._prepare()
        watch_forks(self)

    def _prepare(self) -> None:
        self._do((_TABLE, ()))

    def before_fork(self) -> None:
        """Let an entry under way be written, then close: no child may inherit the connection."""
        self._lock.acquire()
        self._drop()

    def after_fork_in_parent(self) -> None:
        """Connect again at the next entry."""
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Connect at the next entry, with a lock of our own."""
        self._lock = threading.Lock()

    def __call__(self, entry: AuditEntry) -> None:
        """Write one entry."""
        self._do((self._insert, tuple(asdict(entry).values())))

    def _do(self, *statements: tuple[str, tuple[Any, ...]]) -> Any:
        """Run statements in one transaction. Gives the first row of the last, if it has rows."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                cursor = self._connection.cursor()
                for sql, values in statements:
                    cursor.execute(sql, values)
                row = cursor.fetchone() if cursor.description is not None else None
                self._connection.commit()
                return row
            except BaseException:
                try:
                    if self._connection is not None:
                        self._connection.rollback()  # else PostgreSQL refuses whatever comes after
                except Exception:  # noqa: BLE001 - it is lost: the next entry connects anew
                    self._drop()
                raise

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()

    def close(self) -> None:
        """Close the connection. What comes after is refused."""
        with self._lock:
            self._connect = _refuse
            self._drop()


class AuditTable(TableAudit):
    """Adds entries to a table ``oncekey_audit_chain``, each bound to the one before it.

    Several processes may: each number is given once. Takes what ``TableAudit`` takes; the
    database is SQLite or PostgreSQL.

    Args:
        secret: Makes hashes that nobody can make without it. At least 16 bytes.
        create: Make the tables if they are not there.

    Raises:
        PolicyError: The secret is too short.
    """

    def __init__(
        self,
        connect: Callable[[], Any] | str,
        placeholder: str = "?",
        *,
        secret: bytes | None = None,
        create: bool = True,
    ) -> None:
        self._creates = create
        self._chain = Chain(secret)
        self._add, self._head = (sql.replace("?", placeholder) for sql in (_ADD, _HEAD))
        super().__init__(connect, placeholder)

    def _prepare(self) -> None:
        if self._creates:
            self._do((_CHAIN, ()), (_HEADS, ()))

    def __call__(self, entry: AuditEntry) -> None:
        """Add one entry.

        Raises:
            AuditError: Others kept coming first.
        """
        for _ in range(_ATTEMPTS):
            row = self._do((_LAST, ()))
            head = START if row is None else Head(int(row[0]), str(row[1]))
            link = self._chain.link(head, entry)
            sealed = self._chain.seal(Head(link.number, link.hash))
            try:
                self._do((self._add, tuple(link)), (self._head, (sealed,)))
                return
            except Exception as error:
                if type(error).__name__ not in ("IntegrityError", "UniqueViolation"):
                    raise
        raise AuditError("an audit entry found no place: too many write at once")

    def verify(self, expected: Head | None = None) -> AuditReport:
        """Look at every entry. See ``oncekey.instrument.audit.verify_chain``."""
        with self._lock:
            if self._connection is None:
                self._connection = self._connect()
            cursor = self._connection.cursor()
            cursor.execute("SELECT head FROM oncekey_audit_head")
            row = cursor.fetchone()
            cursor.execute("SELECT n, entry, before, hash FROM oncekey_audit_chain ORDER BY n")
            kept = None if row is None else str(row[0])
            report = verify_chain(read_rows(cursor), self._chain, kept, expected)
            self._connection.rollback()
            return report


def _sqlite(path: str) -> sqlite3.Connection:
    if path != ":memory:":
        create_private(path)
    return sqlite3.connect(path, timeout=60, check_same_thread=False)


def _refuse() -> Any:
    raise StoreClosedError("this audit is closed: make another TableAudit")
