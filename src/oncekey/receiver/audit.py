"""Who decided what, and when: one entry for every decision of a receiver."""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

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


class TableAudit:
    """Writes each entry to a table ``oncekey_audit``, made if it is not there.

    Args:
        connect: Gives a DB-API connection, or the path of a SQLite file.
        placeholder: How that driver marks arguments: ``?``, or ``%s`` for psycopg.
    """

    def __init__(self, connect: Callable[[], Any] | str, placeholder: str = "?") -> None:
        if isinstance(connect, str):
            path = connect
            connect = lambda: sqlite3.connect(path, check_same_thread=False)  # noqa: E731
        self._lock = threading.Lock()
        self._connection = connect()
        self._insert = _INSERT.replace("?", placeholder)
        with self._lock:
            self._connection.cursor().execute(_TABLE)
            self._connection.commit()

    def __call__(self, entry: AuditEntry) -> None:
        """Write one entry."""
        values = tuple(asdict(entry).values())
        with self._lock:
            try:
                self._connection.cursor().execute(self._insert, values)
                self._connection.commit()
            except Exception:
                self._connection.rollback()  # else PostgreSQL refuses whatever comes after
                raise

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._connection.close()
