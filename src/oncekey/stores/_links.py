"""Callers' connections, one small class a library: begin, execute, savepoint, commit.

Each begins a transaction where none is open, and a savepoint where the caller has one open, which
it then leaves to the caller to commit. What can't be safe is refused with the reason.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sqlite3
from collections.abc import Callable
from typing import Any, Protocol

from oncekey.drivers._deadlines import Deadline, engine_connection
from oncekey.errors import TransactionRefusedError

__all__ = ["Link", "is_drivers", "kind_of", "pyformat", "raw_connection", "sync_link"]


class Link(Protocol):
    """One transaction on one connection. ``flavour`` is postgresql or sqlite."""

    target: Any
    joined: bool
    flavour: str

    def begin(self) -> None: ...
    def execute(self, sql: str, args: list[Any]) -> list[Any]: ...
    def must_be_open(self) -> None: ...
    def flush(self) -> None: ...
    def savepoint(self) -> None: ...
    def undo(self) -> None: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...


_DRIVERS = frozenset({"sqlite3", "psycopg", "psycopg_pool", "sqlalchemy", "django"})


def is_drivers(error: BaseException) -> bool:
    """Whether a sync driver raised it. A signal's handler may raise anything, at any moment."""
    return any(kind.__module__.partition(".")[0] in _DRIVERS for kind in type(error).__mro__)


def kind_of(value: object) -> str:
    """The package that a connection comes from."""
    return type(value).__module__.partition(".")[0].lstrip("_")


@functools.lru_cache(maxsize=64)
def pyformat(sql: str) -> str:
    """``$1`` as ``%(p1)s``, for drivers that want it so."""
    return re.sub(r"\$(\d+)", r"%(p\1)s", sql.replace("%", "%%"))


def named_args(args: list[Any]) -> dict[str, Any]:
    """Arguments for ``pyformat``."""
    return {f"p{number}": value for number, value in enumerate(args, 1)}


def raw_connection(link: Any) -> Any:
    """The driver's connection behind a link, where it is known already; else ``None``."""
    target = link.target
    kind = kind_of(target)
    if kind == "django":
        return target.connection
    if kind != "sqlalchemy":
        return target
    inner = getattr(link, "_link", link)
    if inner.raw is None and inner is link:
        with contextlib.suppress(Exception):  # not connected yet, or no longer
            if target.in_transaction():
                inner.raw = inner._connection().connection.driver_connection
    return inner.raw


def sync_link(
    on: Any, close: Callable[[Any], None] | None = None, timeout: float | None = None
) -> Link:
    """The link for a caller's connection, session, engine, pool or factory of those.

    ``timeout``: the seconds to wait for a connection of a pool or engine.
    """
    kind = kind_of(on)
    if kind == "psycopg" and hasattr(on, "pgconn") and hasattr(on, "cursor"):
        if hasattr(on, "__aenter__"):
            raise _wrong_world(on, "async")
        return PsycopgLink(on, close)
    if kind == "psycopg_pool":
        if hasattr(on, "__aenter__"):
            raise _wrong_world(on, "async")
        return PsycopgLink(on.getconn(timeout), on.putconn)
    if kind == "sqlite3":
        return SQLiteLink(on, close)
    if kind == "django":
        return DjangoLink(on)
    if kind in ("asyncpg", "aiosqlite"):
        raise _wrong_world(on, "async")
    if type(on).__name__ == "scoped_session":
        on = on()
    if kind == "sqlalchemy":
        if hasattr(on, "sync_session") or hasattr(on, "sync_engine") or _makes_async(on):
            raise _wrong_world(on, "async")
        if hasattr(on, "dialect") and hasattr(on, "begin") and not hasattr(on, "exec_driver_sql"):
            if timeout is None:
                return AlchemyLink(on.connect(), _close)
            return AlchemyLink(engine_connection(on, Deadline(timeout)), _close)
        if hasattr(on, "exec_driver_sql") or hasattr(on, "begin_nested"):
            return AlchemyLink(on, close)
        if callable(on):  # a sessionmaker
            session: Any = on()
            if timeout is not None and hasattr(session.get_bind(), "pool"):
                # The session takes its connection itself: see to it that there is one.
                engine_connection(session.get_bind(), Deadline(timeout)).close()
            return AlchemyLink(session, _close)
    elif callable(on):
        return sync_link(on(), timeout=timeout)
    raise TransactionRefusedError(
        f"{type(on).__name__} is no connection that oncekey knows: pass a psycopg Connection, a "
        "SQLAlchemy Session or Connection, django.db.connection or a sqlite3.Connection, or a "
        "pool, engine or sessionmaker of those"
    )


def _makes_async(factory: Any) -> bool:
    return type(factory).__name__ == "async_sessionmaker"


def _wrong_world(on: Any, its: str) -> TransactionRefusedError:
    here = "sync" if its == "async" else "async"
    return TransactionRefusedError(
        f"{type(on).__name__} is {its}, this store is {here}: use the {its} store with it"
    )


def _close(thing: Any) -> None:
    thing.close()


def autocommit_refused(what: str) -> TransactionRefusedError:
    """The refusal of a connection whose every statement commits alone."""
    return TransactionRefusedError(
        f"this {what} is in autocommit: the claim would be committed before your writes. Turn "
        "autocommit off, or open a transaction on it first"
    )


def aborted_refused() -> TransactionRefusedError:
    """The refusal of a transaction that has failed already."""
    return TransactionRefusedError(
        "the transaction on this connection has failed already: roll it back first"
    )


def ended_refused(what: str) -> TransactionRefusedError:
    """The refusal to complete in another transaction than the one that claimed."""
    return TransactionRefusedError(
        f"the block or handler ended the transaction of its {what} itself: leave commit and "
        "rollback to oncekey, or to the transaction around it"
    )


class PsycopgLink:
    """A psycopg 3 connection."""

    flavour = "postgresql"

    def __init__(self, connection: Any, close: Callable[[Any], None] | None = None) -> None:
        self.target = connection
        self.joined = False
        self._close = close
        self._stack: list[Any] = []

    def begin(self) -> None:
        from psycopg.pq import TransactionStatus

        connection = self.target
        status = connection.info.transaction_status
        if status == TransactionStatus.INERROR:
            raise aborted_refused()
        self.joined = status != TransactionStatus.IDLE
        if connection.autocommit and not self.joined and self._close is None:
            raise autocommit_refused("psycopg connection")
        self._push()

    def _push(self) -> None:
        block = self.target.transaction()
        block.__enter__()
        self._stack.append(block)

    def execute(self, sql: str, args: list[Any]) -> list[Any]:
        import psycopg
        from psycopg.rows import tuple_row

        cursor: Any
        with psycopg.RawCursor(self.target, row_factory=tuple_row) as cursor:
            cursor.execute(sql, args, binary=True)
            return cursor.fetchall() if cursor.description else []

    def must_be_open(self) -> None:
        """Psycopg itself refuses to commit inside its block; SQL that does is found later."""

    def flush(self) -> None:
        """Nothing is held back."""

    def savepoint(self) -> None:
        self._push()

    def undo(self) -> None:
        import psycopg

        block = self._stack.pop()
        block.__exit__(psycopg.Rollback, psycopg.Rollback(), None)

    def commit(self) -> None:
        while self._stack:
            self._stack.pop().__exit__(None, None, None)
        self._give_back()

    def rollback(self) -> None:
        try:
            while self._stack:
                self.undo()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        close, self._close = self._close, None
        if close is not None:
            close(self.target)


class SQLiteLink:
    """A ``sqlite3`` connection."""

    flavour = "sqlite"

    def __init__(
        self,
        connection: Any,
        close: Callable[[Any], None] | None = None,
        begin: Callable[[Any], object] = lambda connection: connection.execute("BEGIN IMMEDIATE"),
    ) -> None:
        self.target = connection
        self.joined = False
        self._close = close
        self._begin = begin
        self._begun = False
        self._points = 0

    def begin(self) -> None:
        # Each note before what it tells of, so that an interrupt between leaves nothing open.
        self.joined = self.target.in_transaction
        if not self.joined:
            self._begun = True
            self._begin(self.target)
        self.savepoint()  # if it is gone at the end, somebody else ended the transaction

    def execute(self, sql: str, args: list[Any]) -> list[Any]:
        cursor = self.target.cursor()
        try:
            cursor.row_factory = None
            rows: list[Any] = cursor.execute(sql, args).fetchall()
            return rows
        finally:
            cursor.close()  # a statement that was interrupted can't be rolled back

    def must_be_open(self) -> None:
        if not self.target.in_transaction:
            raise ended_refused("connection")

    def flush(self) -> None:
        """Nothing is held back."""

    def savepoint(self) -> None:
        # One that is set but not counted does no harm: it goes with those around it.
        self.target.execute(f"SAVEPOINT oncekey_{self._points + 1}")
        self._points += 1

    def undo(self) -> None:
        self.target.execute(f"ROLLBACK TO oncekey_{self._points}")
        self.target.execute(f"RELEASE oncekey_{self._points}")
        self._points -= 1

    def commit(self) -> None:
        points, self._points = self._points, 0  # from here on it is the caller's, if we joined
        try:
            self.target.execute("RELEASE oncekey_1")
        except sqlite3.OperationalError as error:
            self._points = points
            raise ended_refused("connection") from error
        if not self.joined:
            self.target.execute("COMMIT")
            self._begun = False
        self._give_back()

    def rollback(self) -> None:
        """Undo what is still open of it. Rolling back twice does nothing."""
        try:
            if (self._begun or self._points) and self.target.in_transaction:
                self._end()
        finally:
            self._begun, self._points = False, 0
            self._give_back()

    def _end(self) -> None:
        if self.joined:
            with contextlib.suppress(sqlite3.OperationalError):
                self.target.execute("ROLLBACK TO oncekey_1")
                self.target.execute("RELEASE oncekey_1")
                return
        # Ours; or one that began by itself, after somebody had ended the caller's.
        self.target.execute("ROLLBACK")

    def _give_back(self) -> None:
        if self._close is not None:
            self._close(self.target)
            self._close = None


class AlchemyLink:
    """A SQLAlchemy ``Session`` or ``Connection``."""

    def __init__(self, on: Any, close: Callable[[Any], None] | None = None) -> None:
        self.target = on
        self.joined = False
        self._close = close
        self._stack: list[Any] = []
        self.raw: Any = None  # the driver's connection, once it is known
        bind = on if hasattr(on, "exec_driver_sql") else on.get_bind()
        self.flavour = bind.dialect.name
        self._driver = bind.dialect.driver

    def _connection(self) -> Any:
        on = self.target
        return on if hasattr(on, "exec_driver_sql") else on.connection()

    def begin(self) -> None:
        on = self.target
        self.joined = bool(on.in_transaction())
        if self.joined and not getattr(on, "is_active", True):
            raise aborted_refused()
        if not self.joined:
            self._stack.append(on.begin())
        connection = self._connection()
        self.raw = connection.connection.driver_connection
        if self.flavour == "sqlite":
            # SQLAlchemy's begin sends nothing; the file is locked now, not at the first write.
            if not self._in_sqlite_transaction(connection):
                connection.exec_driver_sql("BEGIN IMMEDIATE")
        elif self._autocommits(connection):
            raise autocommit_refused("SQLAlchemy " + type(on).__name__)
        if self.joined or self.flavour == "sqlite":
            # In SQLite also where it is ours: if it is gone at the end, somebody else ended it.
            self._stack.append(on.begin_nested())

    @staticmethod
    def _in_sqlite_transaction(connection: Any) -> bool:
        driver = connection.connection.driver_connection
        return bool(getattr(driver, "in_transaction", False))

    @staticmethod
    def _autocommits(connection: Any) -> bool:
        raw = connection.connection.dbapi_connection
        option = connection.get_execution_options().get("isolation_level")
        return getattr(raw, "autocommit", False) is True or option == "AUTOCOMMIT"

    def execute(self, sql: str, args: list[Any]) -> list[Any]:
        connection = self._connection()
        if self.flavour == "sqlite" or self._driver == "asyncpg":
            result = connection.exec_driver_sql(sql, tuple(args))
        else:
            result = connection.exec_driver_sql(pyformat(sql), named_args(args))
        return list(result.fetchall()) if result.returns_rows else []

    def must_be_open(self) -> None:
        if any(not block.is_active for block in self._stack):
            raise ended_refused(type(self.target).__name__)
        if self.flavour == "sqlite" and not self._in_sqlite_transaction(self._connection()):
            raise ended_refused(type(self.target).__name__)

    def flush(self) -> None:
        if hasattr(self.target, "flush") and all(block.is_active for block in self._stack):
            self.target.flush()

    def savepoint(self) -> None:
        self._stack.append(self.target.begin_nested())

    def undo(self) -> None:
        self._stack.pop().rollback()

    def commit(self) -> None:
        self.must_be_open()
        while self._stack:
            block = self._stack[-1]
            try:
                block.commit()
            except Exception as error:
                if self.flavour == "sqlite" and len(self._stack) > 1:
                    raise ended_refused(type(self.target).__name__) from error
                raise
            self._stack.pop()
        self._give_back()

    def rollback(self) -> None:
        stack, self._stack = self._stack, []
        ended = any(not block.is_active for block in stack)
        try:
            for block in reversed(stack):
                try:
                    if block.is_active:
                        block.rollback()
                except Exception:  # noqa: BLE001 - its savepoint is gone: see below
                    ended = True
            if stack and (ended or not self.joined):
                # Also what is left of a commit that failed, or began by itself after somebody had
                # ended ours.
                self.target.rollback()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        close, self._close = self._close, None
        if close is not None:
            close(self.target)


class DjangoLink:
    """One of Django's connections: ``django.db.connection`` or ``connections["name"]``."""

    def __init__(self, connection: Any) -> None:
        self.target = connection
        self.joined = False
        self.flavour = connection.vendor
        self._stack: list[Any] = []

    def begin(self) -> None:
        connection = self.target
        self.joined = connection.in_atomic_block or not connection.get_autocommit()
        if connection.in_atomic_block and connection.needs_rollback:
            raise aborted_refused()
        self._push()
        if self.flavour == "sqlite" and not self.joined:
            self._push()  # a savepoint: if it is gone at the end, somebody else ended it

    def _push(self) -> None:
        from django.db import transaction

        block: Any = transaction.atomic(using=self.target.alias)
        block.__enter__()
        self._stack.append(block)

    def execute(self, sql: str, args: list[Any]) -> list[Any]:
        with self.target.cursor() as cursor:
            if self.flavour == "sqlite":
                cursor.execute(sql.replace("%", "%%").replace("?", "%s"), args)
            else:
                cursor.execute(pyformat(sql), named_args(args))
            return list(cursor.fetchall()) if cursor.description else []

    def must_be_open(self) -> None:
        if not self.target.in_atomic_block:
            raise ended_refused("connection")

    def flush(self) -> None:
        """Nothing is held back."""

    def savepoint(self) -> None:
        self._push()

    def undo(self) -> None:
        error = _Undo()
        self._stack.pop().__exit__(_Undo, error, None)

    def commit(self) -> None:
        while self._stack:
            try:
                self._stack.pop().__exit__(None, None, None)
            except Exception as error:
                if self._stack and self.flavour == "sqlite":
                    raise ended_refused("connection") from error
                raise

    def rollback(self) -> None:
        failed: Exception | None = None
        while self._stack:
            try:
                self.undo()
            except Exception as error:  # noqa: BLE001 - the outer ones must be ended too
                failed = error
        if failed is not None:
            raise failed


class _Undo(Exception):
    """Makes Django's ``atomic`` roll back."""
