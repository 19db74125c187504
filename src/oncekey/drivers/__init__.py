"""The libraries that a connection may come from: each is known here once, and has one file.

A new one is a line in ``LIBRARIES`` and a file with ``connect``, which makes a
``DriverConnection`` of whatever of that library a caller may pass.

All of it is generators: each yields a call with its arguments and gets the result. So sync and
async of one library are one class, and who runs them calls, or calls and awaits. What can't be safe
is refused with the reason.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator
from importlib import import_module
from typing import Any, Final, TypeAlias, TypeVar

from oncekey.drivers._deadlines import to_driver
from oncekey.errors import StoreTimeoutError, StoreUnavailableError, TransactionRefusedError

__all__ = [
    "Calls",
    "DriverConnection",
    "aborted_refused",
    "autocommit_refused",
    "check_world",
    "connection_of",
    "driver_error",
    "ended_refused",
    "in_one_transaction",
    "is_drivers",
    "named",
    "named_args",
    "pyformat",
    "wrong_world",
]

T = TypeVar("T")
Calls: TypeAlias = Generator[tuple[Any, ...], Any, T]

LIBRARIES: Final = {
    "aiosqlite": "sqlite",
    "asyncpg": "asyncpg",
    "django": "django",
    "psycopg": "psycopg",
    "psycopg_pool": "psycopg",
    "sqlalchemy": "sqlalchemy",
    "sqlite3": "sqlite",
}


class DriverConnection:
    """One transaction on one connection, which is the caller's or was taken for it.

    A transaction is begun where none is open, and a savepoint where the caller has one open, which
    is then left to the caller to commit.

    Attributes:
        target: What the caller writes on: a connection or a session.
        raw: The driver's own connection, where it is known, else ``None``.
        joined: The transaction was open before, and is the caller's to commit.
        flavour: ``postgresql`` or ``sqlite``.
        close: Takes back what was taken for this transaction; ``None``: it is the caller's.
        elsewhere: Why it may be to another database than its user thinks.
        begins_to_write: How its users begin a transaction of SQLite that is to write.
        never_cancels: No call of it cancels the task that waits for it, as time limits do.
        watch: Ends it if a call is late, which does not cancel anybody. ``None``: it has none.
    """

    flavour: str
    raw: Any = None
    elsewhere = ""
    begins_to_write = "execute 'BEGIN IMMEDIATE' before its first statement"
    never_cancels = False
    watch: Any = None
    joined = False

    def __init__(self, target: Any, close: Callable[[Any], Any] | None, awaits: bool) -> None:
        self.target = target
        self.close = close
        self.awaits = awaits
        self._stack: list[Any] = []  # of transaction and savepoints

    def begin(self) -> Calls[None]:
        """Begin a transaction, or a savepoint in the one that is open."""
        raise NotImplementedError

    def execute(self, sql: str, args: list[Any]) -> Calls[list[Any]]:
        """The rows that a statement gives."""
        raise NotImplementedError

    def execute_last(self, sql: str, args: list[Any]) -> Calls[list[Any]]:
        """The same for the last one of a transaction: if it gives a row, it may be committed."""
        return (yield from self.execute(sql, args))

    def explained(self, failed: Exception, error: BaseException) -> Exception:
        """What to raise in place of ``failed``, on a connection of a caller's.

        How long it waits for a SQLite file is the caller's to say, not the store's.
        """
        code = getattr(driver_error(error), "sqlite_errorcode", -1)
        if code & 0xFF not in (5, 6):  # busy or locked
            return failed
        if not self.joined:
            return StoreTimeoutError(
                "the SQLite file was locked by another process or transaction for longer than "
                "your connection waits, and nothing was changed: look for a transaction that is "
                "held open, or raise the busy timeout of the connection (timeout=)",
                outcome_known=True,
            )
        return StoreUnavailableError(
            "another connection writes to the SQLite file, or has written to it since the "
            "transaction began that is open on yours. One that begins by reading can't become a "
            f"writer then, and does not wait: roll it back, {self.begins_to_write}, and try again"
        )

    def must_be_open(self) -> None:
        """Raise if the transaction was ended by somebody else, as far as the driver knows."""

    def flush(self) -> Calls[None]:
        """Send what a session still holds back. Its errors are the caller's."""
        yield from ()

    def savepoint(self) -> Calls[None]:
        """Remember this point."""
        raise NotImplementedError

    def undo(self) -> Calls[None]:
        """Roll back to the last point."""
        raise NotImplementedError

    def commit(self) -> Calls[None]:
        """Commit, or end the savepoint; give back what was taken."""
        raise NotImplementedError

    def rollback(self) -> Calls[None]:
        """Undo what is still open since ``begin``, and give back what was taken.

        Rolling back twice does nothing.
        """
        try:
            while self._stack:
                yield from self.undo()
        finally:
            yield from self._give_back()

    def _give_back(self) -> Calls[None]:
        close, self.close = self.close, None
        if close is None:
            return
        if to_driver(self.raw) == "psycopg":
            # Its deadline is set on the connection itself, which is another's before this call
            # ends. Nothing is asked of the server here.
            self.raw = None
        yield close, self.target


def connection_of(
    on: Any, close: Callable[[Any], Any] | None, timeout: float | None, awaits: bool
) -> Calls[DriverConnection]:
    """The connection for what a caller passes: a connection, session, engine, pool, or a factory.

    Args:
        on: What was passed.
        close: What takes it back at the end, where it was taken for this transaction.
        timeout: The seconds to wait for a connection of a pool or engine.
        awaits: Whether whoever runs the calls awaits them.

    Raises:
        TransactionRefusedError: It is nothing of the kind, or sync where async is needed.
    """
    kind = type(on)
    library = LIBRARIES.get(kind.__module__.partition(".")[0]) or _library(kind)
    if library:
        connect = import_module(f"oncekey.drivers.{library}").connect
        made: DriverConnection | None = yield from connect(on, close, timeout, awaits)
        if made is not None:
            return made
    elif callable(on):
        return (yield from connection_of(on(), None, timeout, awaits))
    known = (
        "an asyncpg Connection, a psycopg AsyncConnection, a SQLAlchemy AsyncSession or "
        "AsyncConnection, an aiosqlite Connection"
        if awaits
        else "a psycopg Connection, a SQLAlchemy Session or Connection, django.db.connection or a "
        "sqlite3.Connection"
    )
    raise TransactionRefusedError(
        f"{type(on).__name__} is no connection that oncekey knows: pass {known}, or a pool, "
        "engine or sessionmaker of those"
    )


def in_one_transaction(
    loan: Any, timeout: float | None, awaits: bool, statements: Generator[Any, Any, T]
) -> Calls[T]:
    """Run the statements that a generator asks for on what a store lent, in one transaction."""
    on = yield from connection_of(loan.source, loan.close, timeout, awaits)
    try:
        yield from on.begin()
        try:
            sql, args = next(statements)
            while True:
                sql, args = statements.send((yield from on.execute(sql, args)))
        except StopIteration as stop:
            done: T = stop.value
        yield from on.commit()
    except BaseException:
        yield from on.rollback()
        raise
    return done


def is_begun(on: Any) -> bool | None:
    """Whether a connection or session of a caller has a transaction open.

    ``None``: it can't be told, or there is no ``rollback`` that ends what begins on it by itself.
    """
    if on is None or not hasattr(on, "rollback"):
        return None
    state = getattr(on, "in_transaction", None)
    if state is None:
        status = getattr(getattr(on, "info", None), "transaction_status", None)
        return None if status is None else bool(status)
    return bool(state() if callable(state) else state)


def _library(kind: type) -> str:
    """The file for objects of this type, or of one derived from it."""
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        if package in LIBRARIES:
            return LIBRARIES[package]
    return ""


def is_drivers(error: BaseException) -> bool:
    """Whether a driver raised it. A signal's handler may raise anything, at any moment."""
    return bool(_library(type(error)))


def driver_error(error: BaseException) -> BaseException:
    """What the driver raised, out of what SQLAlchemy or Django made of it."""
    inner = getattr(error, "orig", None)
    if inner is not None:
        error = inner
    if type(error).__module__.startswith(("django.", "sqlalchemy.")):
        error = error.__cause__ or error
    return error


def named(error: Exception, name: Callable[[BaseException], Exception]) -> Exception:
    """What to raise for an error of a library; ``name`` gives a driver's error its name.

    A caller's own mistake stays as it is.
    """
    cause = driver_error(error)
    if str(getattr(cause, "sqlstate", None) or "").startswith("23"):
        return error  # a constraint of the caller's, checked at the commit
    foreign = type(cause).__module__.startswith(("django.", "sqlalchemy."))
    if foreign and type(cause).__name__ != "TimeoutError":
        return TransactionRefusedError(f"this can't be used for a transaction: {cause}")
    return name(cause)


@functools.lru_cache(maxsize=64)
def pyformat(sql: str) -> str:
    """``$1`` as ``%(p1)s``, for drivers that want it so."""
    return re.sub(r"\$(\d+)", r"%(p\1)s", sql.replace("%", "%%"))


_NAMES: Final = tuple(f"p{number}" for number in range(1, 33))


def named_args(args: list[Any]) -> dict[str, Any]:
    """Arguments for ``pyformat``."""
    return dict(zip(_NAMES, args, strict=False))


_TWINS: Final = (  # sync, async
    ("a sessionmaker", "an async_sessionmaker"),
    ("a scoped_session", "an async_scoped_session"),
    ("a Session", "an AsyncSession"),
    ("an Engine", "an AsyncEngine"),
    ("a ConnectionPool", "an AsyncConnectionPool"),
    ("a NullConnectionPool", "an AsyncNullConnectionPool"),
)


def wrong_world(on: Any, awaits: bool) -> TransactionRefusedError:
    """The refusal of a sync connection by an async store, or the other way round."""
    its, here = ("sync", "async") if awaits else ("async", "sync")
    name = type(on).__name__
    pairs = {pair[not awaits].partition(" ")[2]: pair[awaits] for pair in _TWINS}
    twin = pairs.get(name, f"what is {here}")
    classes = "WebhookReceiver, Once, connect(url)"
    if not awaits:
        classes = "AsyncWebhookReceiver, AsyncOnce, aconnect(url)"
    return TransactionRefusedError(
        f"{name} is {its}, this store is {here}: pass {twin} as on=, or use the {its} store with "
        f"it, and what goes with that ({classes})"
    )


def check_world(on: Any, awaits: bool) -> None:
    """Raise if ``on`` is known to be sync where async is needed, or the other way round.

    Of a function nothing is known before it is called.
    """
    kind = type(on)
    its: bool | None = None
    match _library(kind):
        case "sqlalchemy":
            its = import_module("oncekey.drivers.sqlalchemy").is_async(on)
        case "psycopg" if hasattr(on, "getconn") or hasattr(on, "pgconn"):
            its = hasattr(on, "__aenter__")
        case "asyncpg":
            its = True
        case "sqlite":
            its = kind.__module__.startswith("aiosqlite")
        case "django":
            its = False
    if its is not None and its is not awaits:
        raise wrong_world(on, awaits)


def autocommit_refused(what: str) -> TransactionRefusedError:
    """The refusal of a connection whose every statement commits alone."""
    return TransactionRefusedError(
        f"this {what} is in autocommit: the claim would be committed before your writes. Turn "
        "autocommit off, or open a transaction on it first"
    )


_SAVEPOINT: Final = (
    "let its error out, or put the statement into a savepoint (SQLAlchemy: session.begin_nested(); "
    "psycopg and asyncpg: connection.transaction(); Django: transaction.atomic())"
)


def aborted_refused() -> TransactionRefusedError:
    """The refusal of a transaction that has failed already."""
    return TransactionRefusedError(
        "the transaction on this connection has failed already: a statement in it raised an error. "
        f"If it was one of the handler or block, {_SAVEPOINT}. If it came before, roll it back "
        "first"
    )


def ended_refused(what: str) -> TransactionRefusedError:
    """The refusal to complete in another transaction than the one that claimed."""
    return TransactionRefusedError(
        f"the block or handler ended the transaction of its {what} itself. If it committed, its "
        "writes are there, and the next retry makes them again: leave commit and rollback to "
        "oncekey, or to the transaction around it. If it rolled back for a statement that failed, "
        f"{_SAVEPOINT}"
    )
