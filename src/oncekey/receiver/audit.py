"""Who decided what, and when: one entry for every decision of a receiver."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from oncekey._core.forks import Forking, watch_forks
from oncekey.errors import StoreClosedError
from oncekey.stores.sqlite.files import create_private

__all__ = ["AuditEntry", "AuditSink", "LogAudit", "TableAudit"]

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS oncekey_audit (
    at REAL NOT NULL, provider TEXT NOT NULL, sender TEXT NOT NULL, key_hash TEXT NOT NULL,
    outcome TEXT NOT NULL, status INTEGER NOT NULL, code TEXT NOT NULL, seconds REAL NOT NULL
)
"""
_INSERT: Final = "INSERT INTO oncekey_audit VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One decision. Holds no secret, no payload, and a key only as its hash.

    Attributes:
        at: Seconds since 1970.
        provider: The provider's name.
        sender: The verified sender, empty for what was rejected.
        key_hash: The first 16 hex digits of the key's SHA-256, empty where none was found.
        outcome: ``first``, ``duplicate``, ``in_flight``, ``conflict``, ``late``, ``dead``,
            ``failed``, ``rejected``, ``limited``, ``ignored``, ``unhandled``, ``bypass`` or
            ``unavailable``.
        status: The HTTP status that was answered.
        code: Why, where there is a reason.
        seconds: How long it took.
    """

    at: float
    provider: str
    sender: str
    key_hash: str
    outcome: str
    status: int
    code: str
    seconds: float


AuditSink = Callable[[AuditEntry], None]


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
        self._do(_TABLE, ())
        watch_forks(self)

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
        self._do(self._insert, tuple(asdict(entry).values()))

    def _do(self, sql: str, values: tuple[Any, ...]) -> None:
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                self._connection.cursor().execute(sql, values)
                self._connection.commit()
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


def _sqlite(path: str) -> sqlite3.Connection:
    if path != ":memory:":
        create_private(path)
    return sqlite3.connect(path, timeout=60, check_same_thread=False)


def _refuse() -> Any:
    raise StoreClosedError("this audit is closed: make another TableAudit")
