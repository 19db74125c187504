"""Where statements of an asynchronous store run. See ``connections.py``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Protocol

from oncekey.drivers._deadlines import Attempts, Deadline, Late, alimited, end, in_time, to_driver
from oncekey.errors import StoreConfigError, StoreError, StoreReadOnlyError
from oncekey.stores.postgres.connections import (
    CONNECT_SECONDS,
    LANE,
    SESSION,
    SPARE,
    Lent,
    Rows,
    check_dialect,
    closed_error,
    engine_of,
    psycopg_options,
    stale,
)
from oncekey.stores.postgres.errors import bad_address, bad_certificate, named, unreadable

__all__ = ["AsyncSource", "async_source"]


class AsyncSource(Protocol):
    """Runs statements for an async store, on the loop that calls."""

    listen_dsn: str | None

    async def fetch(
        self, lane: str, sql: str, args: list[Any], deadline: Deadline | None = None
    ) -> Rows: ...
    async def aclose(self) -> None: ...


def async_source(given: object, driver: str, prepare: bool, timeout: float) -> Any:
    """The source for what a ``AsyncPostgresStore`` was given."""
    if isinstance(given, str):
        kind: Any = AsyncpgSource if driver == "asyncpg" else AsyncPsycopgSource
        return kind(given, prepare, timeout)
    package = to_driver(given)
    if package == "asyncpg" and hasattr(given, "acquire"):
        return AsyncpgPoolSource(given, prepare, timeout)
    if package == "psycopg_pool" and hasattr(given, "getconn"):
        return AsyncPoolSource(given, prepare, timeout)
    if package == "sqlalchemy" or callable(given):
        engine = engine_of(given)
        if engine is not None and hasattr(engine, "sync_engine"):
            return AsyncEngineSource(engine, prepare, timeout)
    raise StoreConfigError(
        f"AsyncPostgresStore can't use a {type(given).__name__}: pass a URL, an asyncpg Pool, a "
        "psycopg_pool.AsyncConnectionPool, a SQLAlchemy AsyncEngine or an async_sessionmaker; sync "
        "ones go to PostgresStore"
    )


async def _arun(connection: Any, sql: str, args: list[Any], prepare: bool) -> Rows:
    import psycopg
    from psycopg.rows import tuple_row

    cursor: Any
    async with psycopg.AsyncRawCursor(connection, row_factory=tuple_row) as cursor:
        await cursor.execute(sql, args, prepare=prepare, binary=True)
        return await cursor.fetchall() if cursor.description else []


async def _run_asyncpg(connection: Any, sql: str, args: list[Any], prepare: bool) -> Rows:
    if prepare:
        return list(await connection.fetch(sql, *args))
    # A pooler keeps one server for a transaction. Who is cancelled in it can't wait for its end.
    block = connection.transaction()
    try:
        await block.start()
        rows = list(await connection.fetch(sql, *args))
        await block.commit()
    except Exception:
        if not connection.is_closed():
            await block.rollback()
        raise
    except BaseException:
        end(connection)
        raise
    return rows


class _Lane:
    """One connection of one loop: a statement at a time, and what is prepared on it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.connection: Any = None
        self.prepared: dict[str, Any] = {}


class _Loop:
    """What belongs to one event loop: no connection may be used from another."""

    def __init__(self) -> None:
        self.lanes: dict[str, _Lane] = {}
        self.spare: list[Any] = []  # connections that wait for the next transaction
        self.attempts = Attempts()


class _Own:
    """Connections of our own, one a lane and loop."""

    def __init__(self, dsn: str, prepare: bool, timeout: float) -> None:
        self._dsn = dsn
        self.listen_dsn: str | None = dsn
        self._prepare = prepare
        self._timeout = timeout
        self._loops: dict[asyncio.AbstractEventLoop, _Loop] = {}
        self._closed = False

    # What drivers do differently

    async def _reach(self) -> Any:
        raise NotImplementedError

    def _gone(self, connection: Any) -> bool:
        raise NotImplementedError

    def _idle(self, connection: Any) -> bool:
        raise NotImplementedError

    async def _run(self, lane: _Lane, sql: str, args: list[Any]) -> Rows:
        raise NotImplementedError

    async def _close(self, connection: Any) -> None:
        raise NotImplementedError

    # What they have in common

    def _loop(self) -> _Loop:
        if self._closed:
            raise closed_error()
        loop = asyncio.get_running_loop()
        found = self._loops.get(loop)
        if found is None:
            for old in [old for old in self._loops if old.is_closed()]:
                del self._loops[old]
            found = self._loops[loop] = _Loop()
        return found

    async def fetch(
        self, lane: str, sql: str, args: list[Any], deadline: Deadline | None = None
    ) -> Rows:
        deadline = deadline or Deadline(self._timeout)
        link = self._loop().lanes.setdefault(lane, _Lane())
        try:
            async with in_time(deadline):
                await link.lock.acquire()
            try:
                used = link.connection
                try:
                    return await self._once(link, sql, args, deadline)
                except StoreReadOnlyError:
                    if used is None or link.connection is not used:
                        raise
                    # A primary no longer: the address may lead to another by now.
                    end(used)
                    return await self._once(link, sql, args, deadline)
            finally:
                link.lock.release()
        except Late:
            self._drop_spares()  # they may well be on the same dead way
            raise deadline.missed() from None

    async def _once(self, link: _Lane, sql: str, args: list[Any], deadline: Deadline) -> Rows:
        try:
            if link.connection is None or self._gone(link.connection):
                if link.connection is not None:
                    end(link.connection)
                link.connection, link.prepared = None, {}
                link.connection = await self._new(LANE, deadline)
            async with alimited(link.connection, deadline):
                deadline.sent = True
                return await self._run(link, sql, args)
        except (StoreError, Late):
            raise
        except Exception as error:
            raise named(error) from error

    async def _new(self, settings: str, deadline: Deadline) -> Any:
        connection = await self._loop().attempts.wait_async(self._reached, deadline)
        try:
            if self._prepare:
                async with alimited(connection, deadline):
                    await connection.execute(settings)
        except BaseException:
            end(connection)
            raise
        return connection

    async def _reached(self) -> Any:
        try:
            return await self._reach()
        except Exception as error:
            if unreadable(error) and not isinstance(error, StoreError):
                raise bad_address() from None
            raise

    async def borrow(self) -> Any:
        """A connection for a transaction of its own."""
        spare = self._loop().spare
        while spare:
            connection = spare.pop()
            if not self._gone(connection):
                return connection
            end(connection)
        deadline = Deadline(self._timeout)
        try:
            return await self._new(SESSION, deadline)
        except Late:
            raise deadline.missed() from None

    async def give_back(self, connection: Any) -> None:
        """Take a borrowed connection back; one that is not idle is closed."""
        if self._gone(connection):
            self._drop_spares()  # what ended this one may have ended them
        elif not self._closed and self._idle(connection) and len(self._loop().spare) < SPARE:
            self._loop().spare.append(connection)
            return
        end(connection)

    def _drop_spares(self) -> None:
        found = self._loops.get(asyncio.get_running_loop())
        while found is not None and found.spare:
            end(found.spare.pop())

    async def aclose(self) -> None:
        self._closed = True
        found = self._loops.pop(asyncio.get_running_loop(), None) or _Loop()
        self._loops.clear()
        found.attempts.drop(end)
        lanes = [lane.connection for lane in found.lanes.values() if lane.connection is not None]
        await asyncio.gather(*(self._close(connection) for connection in [*lanes, *found.spare]))


class AsyncPsycopgSource(_Own):
    """Connections of our own by psycopg."""

    async def _reach(self) -> Any:
        import psycopg

        options = psycopg_options(self._dsn)
        connection = await psycopg.AsyncConnection.connect(self._dsn, **options)
        if not self._prepare:
            connection.prepare_threshold = None
        return connection

    def _gone(self, connection: Any) -> bool:
        return stale(connection)

    def _idle(self, connection: Any) -> bool:
        return bool(connection.info.transaction_status == 0)

    async def _run(self, lane: _Lane, sql: str, args: list[Any]) -> Rows:
        return await _arun(lane.connection, sql, args, self._prepare)

    async def _close(self, connection: Any) -> None:
        await connection.close()


class AsyncpgSource(_Own):
    """Connections of our own by asyncpg, with prepared statements."""

    async def _reach(self) -> Any:
        import asyncpg

        options: dict[str, Any] = {} if self._prepare else {"statement_cache_size": 0}
        try:
            return await asyncpg.connect(self._dsn, timeout=CONNECT_SECONDS, **options)
        except FileNotFoundError as error:
            if "sslrootcert" in self._dsn or "sslcert" in self._dsn:
                raise bad_certificate() from error
            raise

    def _gone(self, connection: Any) -> bool:
        return bool(connection.is_closed())

    def _idle(self, connection: Any) -> bool:
        return not connection.is_in_transaction()

    async def _run(self, lane: _Lane, sql: str, args: list[Any]) -> Rows:
        if not self._prepare:
            return await _run_asyncpg(lane.connection, sql, args, False)
        statement = lane.prepared.get(sql)
        if statement is None:
            statement = lane.prepared[sql] = await lane.connection.prepare(sql)
        return list(await statement.fetch(*args))

    async def _close(self, connection: Any) -> None:
        try:
            await connection.close(timeout=self._timeout)
        except Exception:  # noqa: BLE001 - the server does not answer: it was closed without
            end(connection)


class AsyncPoolSource(Lent):
    """A ``psycopg_pool.AsyncConnectionPool`` of the caller's."""

    def __init__(self, pool: Any, prepare: bool, timeout: float) -> None:
        super().__init__(prepare, timeout)
        self._pool = pool
        self.listen_dsn = pool.conninfo or None

    @contextlib.asynccontextmanager
    async def _connection(self, deadline: Deadline) -> AsyncIterator[Any]:
        async with self._pool.connection(timeout=deadline.left()) as connection:
            before = connection.autocommit
            if not before:
                await connection.set_autocommit(True)
            try:
                yield connection
            finally:
                if not before and not connection.closed:
                    await connection.set_autocommit(False)

    async def fetch(
        self, lane: str, sql: str, args: list[Any], deadline: Deadline | None = None
    ) -> Rows:
        deadline = self._begin(deadline)
        try:
            async with self._connection(deadline) as connection, alimited(connection, deadline):
                deadline.sent = True
                with _left_if_read_only(connection):
                    return await _arun(connection, sql, args, self._prepare)
        except Exception as error:
            raise self._failed(error, deadline) from error


@contextlib.contextmanager
def _left_if_read_only(connection: Any) -> Any:
    """Close a connection to a server that is no primary any more: its pool makes another."""
    try:
        yield
    except Exception as error:
        if isinstance(named(error), StoreReadOnlyError):
            end(connection)
        raise


class AsyncpgPoolSource(Lent):
    """An ``asyncpg.Pool`` of the caller's."""

    def __init__(self, pool: Any, prepare: bool, timeout: float) -> None:
        super().__init__(prepare, timeout)
        self._pool = pool

    async def fetch(
        self, lane: str, sql: str, args: list[Any], deadline: Deadline | None = None
    ) -> Rows:
        deadline = self._begin(deadline)
        try:
            async with (
                self._pool.acquire(timeout=deadline.left()) as connection,
                alimited(connection, deadline),
            ):
                deadline.sent = True
                with _left_if_read_only(connection):
                    return await _run_asyncpg(connection, sql, args, self._prepare)
        except Exception as error:
            raise self._failed(error, deadline) from error


class AsyncEngineSource(Lent):
    """A SQLAlchemy ``AsyncEngine`` of the caller's, on asyncpg or psycopg 3."""

    def __init__(self, engine: Any, prepare: bool, timeout: float) -> None:
        check_dialect(engine, "asyncpg", "psycopg", "psycopg_async")
        super().__init__(prepare, timeout)
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")

    @contextlib.asynccontextmanager
    async def _driver(self, deadline: Deadline) -> AsyncIterator[Any]:
        connection = self._engine.connect()
        async with in_time(deadline):
            await connection.start()
        try:
            driver = (await connection.get_raw_connection()).driver_connection
            try:
                yield driver
            except Exception as error:
                closed = driver.is_closed() if to_driver(driver) == "asyncpg" else driver.closed
                if closed or isinstance(named(error), StoreReadOnlyError):
                    await connection.invalidate()  # the pool does not see what goes past it
                raise
        finally:
            await connection.close()

    async def fetch(
        self, lane: str, sql: str, args: list[Any], deadline: Deadline | None = None
    ) -> Rows:
        deadline = self._begin(deadline)
        try:
            async with self._driver(deadline) as driver, alimited(driver, deadline):
                deadline.sent = True
                if to_driver(driver) == "asyncpg":
                    return list(await driver.fetch(sql, *args))
                return await _arun(driver, sql, args, self._prepare)
        except Exception as error:
            raise self._failed(error, deadline) from error
