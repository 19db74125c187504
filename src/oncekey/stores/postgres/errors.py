"""PostgreSQL's errors with names, reasons and fixes. Decided by SQLSTATE, never by text."""

from __future__ import annotations

import socket
import ssl
from typing import Final

from oncekey.drivers import aborted_refused, autocommit_refused
from oncekey.errors import (
    StoreConfigError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    StoreTimeoutError,
    StoreUnavailableError,
)

__all__ = ["Contention", "bad_address", "bad_certificate", "named", "unreadable"]

_DRIVERS: Final = ("psycopg", "asyncpg")
_NOT_SENT: Final = "Nothing was sent"
_MISSING: Final = ("42P01", "42703", "42883", "3F000", "42P10")


class Contention(StoreUnavailableError):
    """Calls of one batch got in another's way: each may succeed alone."""


def _about_certificates(error: BaseException | None) -> bool:
    """Whether TLS failed. That is decided on our side, so that there is no SQLSTATE for it."""
    while error is not None:
        if isinstance(error, ssl.SSLError) or "certificate" in str(error):
            return not getattr(error, "sqlstate", None)
        error = error.__cause__ or error.__context__
    return False


def unreadable(error: BaseException) -> bool:
    """Whether a driver could make nothing of the address it was given."""
    if _about_certificates(error):
        return False
    return isinstance(error, ValueError) or type(error).__name__ in (
        "ProgrammingError",
        "ClientConfigurationError",
    )


def bad_address() -> StoreConfigError:
    """The error for that. Raise it from ``None``: the driver's own shows the password."""
    return StoreConfigError(
        "the address of PostgreSQL can't be read: write postgresql://user:password@host:5432/"
        "database, with special characters in the password written as %XX"
    )


def bad_certificate() -> StoreConfigError:
    """The error for TLS that failed."""
    return StoreConfigError(
        "the TLS certificate of PostgreSQL, or our own, was not accepted or not found: check "
        "sslrootcert, sslcert and sslkey in the URL, that the certificate is for this host, and "
        "that it has not expired"
    )


def _pool_is_empty(error: BaseException) -> bool:
    kind = type(error)
    package = kind.__module__.partition(".")[0]
    return (package, kind.__name__) in (
        ("psycopg_pool", "PoolTimeout"),
        ("sqlalchemy", "TimeoutError"),
    )


def _at_login(error: BaseException) -> str:
    """What a driver says of a connection that was never made: host, user and database are in it.

    libpq has no SQLSTATE for that, and psycopg hands its text on; asyncpg's is that of the system.
    Neither names a password, nor a row: there was no statement yet. Empty: it was made.
    """
    said = " ".join(str(error).split())[:300]
    if isinstance(error, OSError):  # others than these may come in the middle of a call
        never = isinstance(error, (ConnectionRefusedError, socket.gaierror))
        return said if never or said.startswith("Multiple exceptions") else ""
    from_libpq = type(error).__module__.startswith("psycopg")
    made = not said.startswith(("connection failed:", "connection to server", "connection is bad:"))
    return "" if made or not from_libpq else said


def _server_says(error: BaseException) -> str:
    """The server's reason to refuse a login, which comes before any statement, so before any row.

    psycopg's errors hold the whole report; asyncpg's text is the message alone.
    """
    report = getattr(error, "diag", None)
    said = getattr(report, "message_primary", None) if report is not None else str(error)
    return " ".join(str(said or "").split())[:300]


def named(error: BaseException, place: str = "") -> StoreError:
    """The error to raise for what a driver raised; ``place`` says of which server, where known."""
    # Long: a line or two for each thing that PostgreSQL may say, in the order in which they count.
    if isinstance(error, StoreError):
        return error
    if _pool_is_empty(error):
        return StoreTimeoutError(
            "no connection of the pool became free in time: make the pool larger, hold "
            "connections for a shorter time, or raise timeout=. Nothing was sent",
            outcome_known=True,
        )
    state = getattr(error, "sqlstate", None) or ""
    if state in _MISSING:
        return StoreConfigError(
            "the tables of oncekey are missing or too old in this database and search_path: run "
            "'oncekey migrate URL', or call create_schema() on the store"
        )
    if state == "42501":
        return StoreConfigError(
            "this role may not use the tables of oncekey: GRANT USAGE ON their schema; GRANT "
            "SELECT, INSERT, UPDATE, DELETE ON oncekey_records, oncekey_waiters; GRANT SELECT, "
            "UPDATE (page) ON oncekey_state; GRANT SELECT ON oncekey_schema. With row-level "
            "security the store's tenant must be the name of the role"
        )
    if state in ("26000", "42P05"):
        return StoreConfigError(
            "PostgreSQL does not know a prepared statement of this connection, or has it already: "
            "a pooler lends each transaction another one. Pass prepare=False to the store (asyncpg "
            "pools: statement_cache_size=0)"
        )
    if state in ("25P03", "25P04"):
        return StoreUnavailableError(
            "PostgreSQL ended the transaction, which was open or idle for too long "
            "(idle_in_transaction_session_timeout or transaction_timeout): nothing of it was "
            "committed. Try again, and do long work before the transaction"
        )
    if state == "25P02":
        return aborted_refused()
    if state == "25P01":
        return autocommit_refused("connection")
    if state == "25006":
        return StoreReadOnlyError(
            "this PostgreSQL server or session is read-only: connect to the primary, for example "
            "with target_session_attrs=read-write in the URL"
        )
    if state.startswith("53") and state != "53300":
        return StoreFullError(
            "PostgreSQL has no room: free disk space or memory on the server. Nothing that was "
            "acknowledged is lost"
        )
    if state.startswith("28"):
        return StoreConfigError(
            f"PostgreSQL{place} refused the login ({_server_says(error)}): check user, password "
            "and pg_hba.conf"
        )
    if state == "3D000":
        return StoreConfigError(
            f"PostgreSQL{place} says: {_server_says(error)}. Create that database, or correct the "
            "URL"
        )
    if state.startswith("40") or state in ("55P03", "57014"):
        return Contention(
            "PostgreSQL gave up this change in favour of another (deadlock, serialization, lock or "
            "statement timeout): try again"
        )
    if not state and _about_certificates(error):
        return bad_certificate()
    lost = isinstance(error, OSError) or type(error).__module__.startswith(_DRIVERS)
    if (lost and not state) or state.startswith(("08", "57", "53")):
        reason = _at_login(error)
        return StoreUnavailableError(
            f"PostgreSQL{place} can't be reached, or refused the login ({type(error).__name__}"
            f"{': ' if reason else ''}{reason}): check that the server runs, its address and the "
            "network; then check user, password and database. "
            + (_NOT_SENT if reason else "The call may or may not have been carried out")
        )
    # Never the server's own text: it may show the row, and so an answer.
    diagnosis = getattr(error, "diag", error)
    constraint = getattr(diagnosis, "constraint_name", None)
    what = f"{state or type(error).__name__}" + (f", constraint {constraint}" if constraint else "")
    return StoreError(
        f"PostgreSQL refused a statement of oncekey ({what}): look at the server's log. No "
        "constraint or trigger but oncekey's own may stand on its tables"
    )
