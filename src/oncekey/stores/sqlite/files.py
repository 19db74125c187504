"""A SQLite file: made for its owner only, its errors with names, and rows that can't be ours."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from oncekey.errors import (
    StoreClosedError,
    StoreConfigError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    StoreTimeoutError,
)
from oncekey.models import State

__all__ = [
    "busy",
    "check_row",
    "create_private",
    "is_busy",
    "migrate",
    "named",
    "patiently",
    "undo",
]

T = TypeVar("T")


def is_busy(error: sqlite3.Error) -> bool:
    """Whether somebody else has the file."""
    code = getattr(error, "sqlite_errorcode", -1) & 0xFF
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def busy(path: str, busy_timeout: float) -> StoreTimeoutError:
    """The error for a file that others had for all of the time that there was."""
    return StoreTimeoutError(
        f"{path} was locked by another process or transaction for {busy_timeout:g} s, and nothing "
        "was changed: look for a transaction that is held open, or raise busy_timeout",
        outcome_known=True,
    )


def patiently(action: Callable[[], T], until: float) -> T:
    """Do ``action``, again and again while another process holds the file.

    SQLite itself waits in small slices, and we between them: it would not look for interrupts.
    """
    while True:
        try:
            return action()
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() >= until:
                raise
            time.sleep(0.001)


def create_private(path: str) -> None:
    """Make the file for its owner only; SQLite gives the files beside it the same mode."""
    # One that is there keeps the mode it has. What is wrong with the path SQLite says.
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def undo(connection: sqlite3.Connection) -> None:
    """Roll back what is open; if that fails too, whoever writes next does it."""
    if connection.in_transaction:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")


def migrate(
    connection: sqlite3.Connection,
    sql: Mapping[str, str],
    migrations: Sequence[tuple[int, str]],
    version_of: Callable[[], int],
) -> None:
    """Make tables, or bring them up to date, in one transaction.

    Args:
        connection: Of the file.
        sql: Statements ``create_versions`` and ``add_version``.
        migrations: Versions and their scripts.
        version_of: Which version there is, asked once nobody else can change it.
    """
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(sql["create_versions"])
        found = version_of()
        for version, script in migrations:
            if version > found:
                for statement in script.split(";\n"):
                    if statement.strip():
                        connection.execute(statement)
                connection.execute(sql["add_version"], (version, int(time.time() * 1000)))
        connection.execute("COMMIT")
    except BaseException:
        undo(connection)
        raise


def named(error: sqlite3.Error, path: str, busy_timeout: float, closed: bool) -> StoreError:
    """The error with a name, a reason and a fix. Decided by code, never by text."""
    code = getattr(error, "sqlite_errorcode", -1) & 0xFF
    if is_busy(error):
        return busy(path, busy_timeout)
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
        return StoreReadOnlyError(
            f"{path} can't be written: give this user write permission to the file and its "
            "directory (WAL mode makes files beside it)"
        )
    # Without a code of SQLite's own it is a text of a row that Python can't decode.
    undecodable = isinstance(error, sqlite3.OperationalError) and code == 0xFF
    if undecodable or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreCorruptError(
            f"{path} is damaged or is not a SQLite database: nothing was changed. Restore it "
            "from a backup or try 'sqlite3 FILE .recover', and meanwhile use another file"
        )
    if code == sqlite3.SQLITE_FULL:
        return StoreFullError(
            f"no room to write to {path}: free disk space. Nothing acknowledged is lost"
        )
    if code == sqlite3.SQLITE_CANTOPEN:
        return StoreConfigError(
            f"{path} can't be opened: make sure that its directory exists and may be written"
        )
    if isinstance(error, sqlite3.ProgrammingError) and closed:
        return StoreClosedError(f"the store on {path} is closed: connect again")
    return StoreError(f"SQLite failed on {path}: {error}. Check the disk and the system's log")


_FIVE_INTEGERS: Final = (int, int, int, int, int)


def check_row(row: tuple[Any, ...]) -> None:
    """Refuse a row that no oncekey writes, so that damage never lets the work run again.

    Raises:
        StoreCorruptError: Says what is wrong, and what to do.
    """
    state, owner, fence, fingerprint, lease_until, expires_at, purge_at, attempts, answer = row
    kinds = type(state), type(fence), type(lease_until), type(expires_at), type(purge_at)
    if kinds != _FIVE_INTEGERS or type(attempts) is not int or not 0 <= state <= 2:
        wrong = f"its state is {state!r}" if state not in (0, 1, 2) else "a number of it is none"
    elif not type(owner) is type(fingerprint) is bytes or type(answer) not in (bytes, type(None)):
        wrong = "its bytes are none"
    elif state != State.COMPLETED and (answer is not None or not owner):
        wrong = "it is not completed, and has an answer or no owner"
    elif lease_until if state == State.COMPLETED else (state == State.PENDING and not lease_until):
        wrong = "its lease does not go with its state"
    elif state == State.COMPLETED and purge_at < expires_at:
        wrong = "it would be removed before it ends"
    else:
        return
    raise StoreCorruptError(
        f"a record in the SQLite file is damaged: {wrong}. Nothing was run again. Restore the file "
        "from a backup, or delete that row of oncekey_records if its work may run once more"
    )
