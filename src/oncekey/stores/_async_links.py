"""Callers' asynchronous connections, one small class a library. See ``_links.py``."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from oncekey.errors import StoreUnavailableError, TransactionRefusedError
from oncekey.stores._links import (
    AlchemyLink,
    _wrong_world,
    aborted_refused,
    autocommit_refused,
    ended_refused,
    kind_of,
)

__all__ = ["AsyncLink", "async_link"]

Close = Callable[[Any], Awaitable[Any]]


class AsyncLink(Protocol):
    """One transaction on one connection. ``flavour`` is postgresql or sqlite."""

    target: Any
    joined: bool
    flavour: str

    async def begin(self) -> None: ...
    async def execute(self, sql: str, args: list[Any]) -> list[Any]: ...
    def must_be_open(self) -> None: ...
    async def flush(self) -> None: ...
    async def savepoint(self) -> None: ...
    async def undo(self) -> None: ...
    async def commit(self) -> None: ...
    async def rollback(self) -> None: ...


async def async_link(
    on: Any, close: Close | None = None, timeout: float | None = None
) -> AsyncLink:
    """The link for a caller's connection, session, engine, pool or factory of those.

    ``timeout``: the seconds to wait for a connection of a pool.
    """
    kind = kind_of(on)
    if kind == "asyncpg":
        if hasattr(on, "acquire"):
            return AsyncpgLink(await on.acquire(timeout=timeout), on.release)
        return AsyncpgLink(on, close)
    if kind == "psycopg" and hasattr(on, "pgconn") and hasattr(on, "cursor"):
        if not hasattr(on, "__aenter__"):
            raise _wrong_world(on, "sync")
        return AsyncPsycopgLink(on, close)
    if kind == "psycopg_pool":
        if not hasattr(on, "__aenter__"):
            raise _wrong_world(on, "sync")
        return AsyncPsycopgLink(await on.getconn(timeout), on.putconn)
    if kind == "aiosqlite":
        return AiosqliteLink(on, close)
    if type(on).__name__ == "async_scoped_session":
        on = on()
    if kind == "sqlalchemy":
        if hasattr(on, "sync_engine") and not hasattr(on, "run_sync"):
            connection = on.connect()
            await connection.start()
            return AsyncAlchemyLink(connection, _aclose)
        if hasattr(on, "run_sync"):
            return AsyncAlchemyLink(on, close)
        if type(on).__name__ == "async_sessionmaker":
            return AsyncAlchemyLink(on(), _aclose)
        raise _wrong_world(on, "sync")
    if kind in ("sqlite3", "django"):
        raise _wrong_world(on, "sync")
    if callable(on):
        return await async_link(on(), timeout=timeout)
    raise TransactionRefusedError(
        f"{type(on).__name__} is no connection that oncekey knows: pass an asyncpg Connection, a "
        "psycopg AsyncConnection, a SQLAlchemy AsyncSession or AsyncConnection, an aiosqlite "
        "Connection, or a pool, engine or sessionmaker of those"
    )


async def _aclose(thing: Any) -> None:
    await thing.close()


class _Borrowed:
    """Gives back what was taken from a pool or opened for this transaction."""

    target: Any
    _close: Close | None

    async def _give_back(self) -> None:
        close, self._close = self._close, None
        if close is not None:
            await close(self.target)

    async def flush(self) -> None:
        """Nothing is held back."""


class AsyncpgLink(_Borrowed):
    """An asyncpg connection."""

    flavour = "postgresql"

    def __init__(self, connection: Any, close: Close | None = None) -> None:
        self.target = connection
        self.joined = False
        self._close = close
        self._stack: list[Any] = []

    async def begin(self) -> None:
        import asyncpg

        if self.target.is_closed():
            raise StoreUnavailableError("this asyncpg connection is closed: pass an open one")
        self.joined = self.target.is_in_transaction()
        try:
            await self._push()
        except asyncpg.InterfaceError as error:
            raise TransactionRefusedError(
                "this asyncpg connection is in a transaction that was begun by a BEGIN of its own: "
                "use 'async with connection.transaction()' instead"
            ) from error
        except asyncpg.InFailedSQLTransactionError as error:
            raise aborted_refused() from error

    async def _push(self) -> None:
        block = self.target.transaction()
        await block.start()
        self._stack.append(block)

    async def execute(self, sql: str, args: list[Any]) -> list[Any]:
        return list(await self.target.fetch(sql, *args))

    def must_be_open(self) -> None:
        if not self.target.is_in_transaction():
            raise ended_refused("connection")

    async def savepoint(self) -> None:
        await self._push()

    async def undo(self) -> None:
        await self._stack.pop().rollback()

    async def commit(self) -> None:
        self.must_be_open()
        while self._stack:
            await self._stack.pop().commit()
        await self._give_back()

    async def rollback(self) -> None:
        try:
            while self._stack:
                await self.undo()
        finally:
            await self._give_back()


class AsyncPsycopgLink(_Borrowed):
    """A psycopg 3 ``AsyncConnection``."""

    flavour = "postgresql"

    def __init__(self, connection: Any, close: Close | None = None) -> None:
        self.target = connection
        self.joined = False
        self._close = close
        self._stack: list[Any] = []

    async def begin(self) -> None:
        from psycopg.pq import TransactionStatus

        connection = self.target
        status = connection.info.transaction_status
        if status == TransactionStatus.INERROR:
            raise aborted_refused()
        self.joined = status != TransactionStatus.IDLE
        if connection.autocommit and not self.joined and self._close is None:
            raise autocommit_refused("psycopg connection")
        await self._push()

    async def _push(self) -> None:
        block = self.target.transaction()
        await block.__aenter__()
        self._stack.append(block)

    async def execute(self, sql: str, args: list[Any]) -> list[Any]:
        import psycopg
        from psycopg.rows import tuple_row

        cursor: Any
        async with psycopg.AsyncRawCursor(self.target, row_factory=tuple_row) as cursor:
            await cursor.execute(sql, args, binary=True)
            return await cursor.fetchall() if cursor.description else []

    def must_be_open(self) -> None:
        """Psycopg itself refuses to commit inside its block; SQL that does is found later."""

    async def savepoint(self) -> None:
        await self._push()

    async def undo(self) -> None:
        import psycopg

        await self._stack.pop().__aexit__(psycopg.Rollback, psycopg.Rollback(), None)

    async def commit(self) -> None:
        while self._stack:
            await self._stack.pop().__aexit__(None, None, None)
        await self._give_back()

    async def rollback(self) -> None:
        try:
            while self._stack:
                await self.undo()
        finally:
            await self._give_back()


class AsyncAlchemyLink(_Borrowed):
    """A SQLAlchemy ``AsyncSession`` or ``AsyncConnection``: the sync link, run as they run it."""

    def __init__(self, on: Any, close: Close | None = None) -> None:
        self.target = on
        self._close = close
        inner = on.sync_session if hasattr(on, "sync_session") else on.sync_connection
        if inner is None:
            raise TransactionRefusedError(
                "this AsyncConnection was not started: use 'async with engine.connect()'"
            )
        self._link = AlchemyLink(inner)
        self.flavour: str = self._link.flavour
        self.joined = False

    async def begin(self) -> None:
        await self.target.run_sync(lambda _: self._link.begin())
        self.joined = self._link.joined

    async def execute(self, sql: str, args: list[Any]) -> list[Any]:
        rows: list[Any] = await self.target.run_sync(lambda _: self._link.execute(sql, args))
        return rows

    def must_be_open(self) -> None:
        """Looked at in the sync link's own commit and execute, which may wait."""

    async def flush(self) -> None:
        await self.target.run_sync(lambda _: self._link.flush())

    async def savepoint(self) -> None:
        await self.target.run_sync(lambda _: self._link.savepoint())

    async def undo(self) -> None:
        await self.target.run_sync(lambda _: self._link.undo())

    async def commit(self) -> None:
        await self.target.run_sync(lambda _: self._link.commit())
        await self._give_back()

    async def rollback(self) -> None:
        try:
            await self.target.run_sync(lambda _: self._link.rollback())
        finally:
            await self._give_back()


class AiosqliteLink(_Borrowed):
    """An ``aiosqlite`` connection."""

    flavour = "sqlite"

    def __init__(self, connection: Any, close: Close | None = None) -> None:
        self.target = connection
        self.joined = False
        self._close = close
        self._points = 0

    async def begin(self) -> None:
        self.joined = self.target.in_transaction
        if not self.joined:
            await self.target.execute("BEGIN IMMEDIATE")
        await self.savepoint()  # if it is gone at the end, somebody else ended the transaction

    async def execute(self, sql: str, args: list[Any]) -> list[Any]:
        async with await self.target.cursor() as cursor:
            cursor.row_factory = None
            await cursor.execute(sql, args)
            return list(await cursor.fetchall())

    def must_be_open(self) -> None:
        if not self.target.in_transaction:
            raise ended_refused("connection")

    async def savepoint(self) -> None:
        self._points += 1
        await self.target.execute(f"SAVEPOINT oncekey_{self._points}")

    async def undo(self) -> None:
        await self.target.execute(f"ROLLBACK TO oncekey_{self._points}")
        await self.target.execute(f"RELEASE oncekey_{self._points}")
        self._points -= 1

    async def commit(self) -> None:
        try:
            await self.target.execute("RELEASE oncekey_1")
        except sqlite3.OperationalError as error:
            raise ended_refused("connection") from error
        self._points = 0
        if not self.joined:
            await self.target.execute("COMMIT")
        await self._give_back()

    async def rollback(self) -> None:
        begun, self._points = self._points, 0
        try:
            if begun and self.target.in_transaction:
                if self.joined:
                    with contextlib.suppress(sqlite3.OperationalError):
                        await self.target.execute("ROLLBACK TO oncekey_1")
                        await self.target.execute("RELEASE oncekey_1")
                        return
                # Ours; or one that began by itself, after somebody had ended the caller's.
                await self.target.execute("ROLLBACK")
        finally:
            await self._give_back()
