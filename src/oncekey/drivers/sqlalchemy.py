"""SQLAlchemy's connections, sessions, engines and sessionmakers, sync and async."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from oncekey.drivers import (
    Calls,
    DriverConnection,
    aborted_refused,
    autocommit_refused,
    ended_refused,
    named_args,
    pyformat,
    wrong_world,
)
from oncekey.drivers._deadlines import Deadline, engine_connection
from oncekey.errors import TransactionRefusedError

__all__ = ["AlchemyConnection", "connect", "is_async"]


def connect(
    on: Any, close: Callable[[Any], Any] | None, timeout: float | None, awaits: bool
) -> Calls[DriverConnection | None]:
    """The connection or session itself, or one of an engine, sessionmaker or registry."""
    name = type(on).__name__
    if name in ("scoped_session", "async_scoped_session"):
        on = on()
    if is_async(on) is not awaits:
        raise wrong_world(on, awaits)
    if hasattr(on, "run_sync") or hasattr(on, "exec_driver_sql") or hasattr(on, "begin_nested"):
        return AlchemyConnection(on, close, awaits)
    if hasattr(on, "dialect") and hasattr(on, "begin"):  # an engine
        if awaits:
            made = on.connect()
            yield (made.start,)
        elif timeout is None:
            made = yield (on.connect,)
        else:
            made = yield engine_connection, on, Deadline(timeout)
        return AlchemyConnection(made, _close, awaits)
    if not callable(on):
        return None
    session: Any = on()  # of a sessionmaker
    if not awaits and timeout is not None and hasattr(session.get_bind(), "pool"):
        # The session takes its connection itself: see to it that there is one.
        spare = yield engine_connection, session.get_bind(), Deadline(timeout)
        spare.close()
    return AlchemyConnection(session, _close, awaits)


def is_async(on: Any) -> bool:
    """Whether this is one of SQLAlchemy's async classes, or derived from one."""
    return any(
        base.__name__.startswith(("async_", "Async")) and base.__module__.startswith("sqlalchemy.")
        for base in type(on).__mro__
    )


def _close(thing: Any) -> Any:
    return thing.close()


def _within(_: Any, call: Callable[..., Any], *args: Any) -> Any:
    """Make a call where SQLAlchemy can wait in it: it passes its sync session, which we have."""
    return call(*args)


class AlchemyConnection(DriverConnection):
    """A ``Session`` or ``Connection``, or their async form: the same, run as they run it."""

    begins_to_write = (
        "let SQLAlchemy begin it with BEGIN IMMEDIATE (a listener to the engine's event 'begin': "
        'connection.exec_driver_sql("BEGIN IMMEDIATE"))'
    )

    def __init__(self, on: Any, close: Callable[[Any], Any] | None, awaits: bool) -> None:
        super().__init__(on, close, awaits)
        if awaits:
            on = on.sync_session if hasattr(on, "sync_session") else on.sync_connection
            if on is None:
                raise TransactionRefusedError(
                    "this AsyncConnection was not started: use 'async with engine.connect()'"
                )
        self._on = on
        self._run: tuple[Any, ...] = (self.target.run_sync, _within) if awaits else ()
        bind = on if hasattr(on, "exec_driver_sql") else on.get_bind()
        self.flavour = bind.dialect.name
        self._driver = bind.dialect.driver
        if not awaits and on.in_transaction():
            with contextlib.suppress(Exception):  # it has failed, and begin says so
                self.raw = self._connection().connection.driver_connection

    def _connection(self) -> Any:
        on = self._on
        return on if hasattr(on, "exec_driver_sql") else on.connection()

    def begin(self) -> Calls[None]:
        yield *self._run, self._begin

    def _begin(self) -> None:
        on = self._on
        self.joined = bool(on.in_transaction())
        if self.joined and not getattr(on, "is_active", True):
            raise aborted_refused()
        if not self.joined:
            self._stack.append(on.begin())
        connection = self._connection()
        fairy = connection.connection
        self.raw = fairy.driver_connection
        if self.flavour == "sqlite":
            # SQLAlchemy's begin sends nothing; the file is locked now, not at the first write.
            if not getattr(self.raw, "in_transaction", False):
                connection.exec_driver_sql("BEGIN IMMEDIATE")
        elif (
            getattr(fairy.dbapi_connection, "autocommit", False) is True
            or connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"
        ):
            raise autocommit_refused("SQLAlchemy " + type(on).__name__)
        if self.joined or self.flavour == "sqlite":
            # In SQLite also where it is ours: if it is gone at the end, somebody else ended it.
            self._stack.append(on.begin_nested())

    def execute(self, sql: str, args: list[Any]) -> Calls[list[Any]]:
        rows: list[Any] = yield *self._run, self._rows, sql, args
        return rows

    def _rows(self, sql: str, args: list[Any]) -> list[Any]:
        connection = self._connection()
        if self.flavour == "sqlite" or self._driver == "asyncpg":
            result = connection.exec_driver_sql(sql, tuple(args))
        else:
            result = connection.exec_driver_sql(pyformat(sql), named_args(args))
        return list(result.fetchall()) if result.returns_rows else []

    def must_be_open(self) -> None:
        if not self.awaits:  # there only the commit may look, as it may have to wait
            self._check_open()

    def _check_open(self) -> None:
        for block in self._stack:
            if not block.is_active:
                raise ended_refused(type(self._on).__name__)
        if self.flavour == "sqlite":
            driver = self._connection().connection.driver_connection
            if not getattr(driver, "in_transaction", False):
                raise ended_refused(type(self._on).__name__)

    def flush(self) -> Calls[None]:
        if hasattr(self._on, "flush"):
            yield *self._run, self._flush

    def _flush(self) -> None:
        for block in self._stack:
            if not block.is_active:
                return
        self._on.flush()

    def savepoint(self) -> Calls[None]:
        yield *self._run, self._savepoint

    def _savepoint(self) -> None:
        self._stack.append(self._on.begin_nested())

    def undo(self) -> Calls[None]:
        yield *self._run, self._stack.pop().rollback

    def commit(self) -> Calls[None]:
        yield *self._run, self._commit
        yield from self._give_back()

    def _commit(self) -> None:
        self._check_open()
        while self._stack:
            try:
                self._stack[-1].commit()
            except Exception as error:
                if self.flavour == "sqlite" and len(self._stack) > 1:
                    raise ended_refused(type(self._on).__name__) from error
                raise
            self._stack.pop()

    def rollback(self) -> Calls[None]:
        try:
            if self._stack:
                yield *self._run, self._rollback
        finally:
            yield from self._give_back()

    def _rollback(self) -> None:
        stack, self._stack = self._stack, []
        ended = any(not block.is_active for block in stack)
        for block in reversed(stack):
            try:
                if block.is_active:
                    block.rollback()
            except Exception:  # noqa: BLE001 - its savepoint is gone: see below
                ended = True
        if ended or not self.joined:
            # Also what is left of a commit that failed, or began by itself after somebody had
            # ended ours.
            self._on.rollback()
