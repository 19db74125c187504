"""The tables of an inbox in a SQLite file: made, upgraded, or refused with what to do."""

from __future__ import annotations

import sqlite3
from typing import Final

from oncekey.errors import StoreConfigError, StoreCorruptError
from oncekey.stores._sql import load_migrations, load_statements
from oncekey.stores.sqlite import files

__all__ = ["SQL", "check", "is_large", "make", "migrate"]

SQL: Final = load_statements("statements.sql", "oncekey.inbox.sqlite")
MIGRATIONS: Final = load_migrations("oncekey.inbox.sqlite")
NEWEST: Final = MIGRATIONS[-1][0]
OLDEST_SQLITE: Final = (3, 35, 0)
LOOKED_THROUGH: Final = 256 * 1024 * 1024
"""Bytes of a file that is looked through at each start; a larger one would keep senders waiting."""
_TABLES: Final = {
    f"oncekey_inbox_{name}"
    for name in (
        *("attempt", "audit", "bulk", "dead", "delivery", "duplicate", "event", "head"),
        *("minute", "note", "rejected", "source", "target"),
    )
}


def make(connection: sqlite3.Connection, path: str) -> None:
    """Make the tables of a file that has none; those of an older version stay as they are."""
    if _version(connection, path) == 0:
        migrate(connection, path)


def migrate(connection: sqlite3.Connection, path: str) -> None:
    """Make the tables, or bring them up to date, in one transaction.

    Raises:
        StoreConfigError: They are newer than this oncekey.
    """
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise StoreConfigError(
            f"an inbox needs SQLite 3.35 or newer, this Python has {sqlite3.sqlite_version}: use a "
            "newer Python, or PostgreSQL"
        )
    if _version(connection, path) >= NEWEST:
        return
    files.migrate(connection, SQL, MIGRATIONS, lambda: _version(connection, path))


def _version(connection: sqlite3.Connection, path: str) -> int:
    tables = {row[0] for row in connection.execute(SQL["tables"])}
    if "oncekey_inbox_schema" not in tables:
        if tables & _TABLES:
            raise StoreConfigError(
                f"{path} has tables of an inbox but no oncekey_inbox_schema that says which "
                "version they are: restore it from a backup, or use another file"
            )
        return 0
    found = int(connection.execute(SQL["version"]).fetchone()[0])
    if found > NEWEST:
        raise StoreConfigError(
            f"the inbox in {path} has schema version {found}, this oncekey knows {NEWEST}: upgrade "
            "oncekey, or use another file"
        )
    return found


def is_large(connection: sqlite3.Connection) -> bool:
    """Whether a look through the whole file takes long."""
    pages: int = connection.execute("PRAGMA page_count").fetchone()[0]
    size: int = connection.execute("PRAGMA page_size").fetchone()[0]
    return pages * size > LOOKED_THROUGH


def check(connection: sqlite3.Connection, path: str, *, quick: bool = False) -> None:
    """Raise unless the tables are there, of this version, and, unless it is quick, undamaged.

    Raises:
        StoreConfigError: They are older, newer or missing.
        StoreCorruptError: SQLite finds the file damaged.
    """
    found = _version(connection, path)
    missing = _TABLES - {row[0] for row in connection.execute(SQL["tables"])}
    if found < NEWEST or missing:
        if found < NEWEST:  # whoever still runs the older oncekey on it is to stop first
            raise StoreConfigError(
                f"the inbox in {path} has schema version {found}, this oncekey needs {NEWEST}: "
                "stop what uses it, keep a copy, and run 'oncekey migrate --inbox sqlite:///FILE'"
            )
        raise StoreConfigError(
            f"the inbox in {path} lacks {', '.join(sorted(missing))}: restore it from a backup"
        )
    if quick:
        return
    row = connection.execute("PRAGMA quick_check(1)").fetchone()
    if row[0] != "ok":
        raise StoreCorruptError(
            f"{path} is damaged: restore it from a backup, or save what can be read with "
            "sqlite3 FILE .recover into a new file"
        )
