"""Where statements of an asynchronous store run. See ``connections.py``."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import operator
from collections.abc import AsyncIterator, Callable
from typing import Any

from oncekey.drivers._deadlines import Attempts, Deadline, Late, alimited, end, in_time, to_driver
from oncekey.errors import (
    StoreConfigError,
    StoreError,
    StoreReadOnlyError,
    StoreUnavailableError,
)
from oncekey.stores.postgres.addresses import place_of
from oncekey.stores.postgres.connections import (
    CONNECT_SECONDS,
    LANE,
    LANES,
    SESSION,
    SPARE,
    Lent,
    Rows,
    checked_engine,
    closed_error,
    engine_of,
    left_if_read_only,
    psycopg_options,
    stale,
)
from oncekey.stores.postgres.errors import bad_address, bad_certificate, named, unreadable

__all__ = ["async_source"]


def async_source(given: Any, driver: str, prepare: bool, timeout: float) -> Any:
    """The source for what a ``AsyncPostgresStore`` was given."""
    if isinstance(given, str):
        kind: Any = AsyncpgSource if driver == "asyncpg" else AsyncPsycopgSource
        return kind(given, prepare, timeout)
    package = to_driver(given)
    if package == "asyncpg" and hasattr(given, "acquire"):
        return AsyncLentSource(functools.partial(_from_asyncpg_pool, given), prepare, timeout)
    if package == "psycopg_pool" and hasattr(given, "getconn"):
        borrow = functools.partial(_from_psycopg_pool, given)
        return AsyncLentSource(borrow, prepare, timeout, given.conninfo)
    if package == "sqlalchemy" or callable(given):
        engine = engine_of(given)
        if engine is not None and hasattr(engine, "sync_engine"):
            engine = checked_engine(engine, "asyncpg", "psycopg", "psycopg_async")
            return AsyncLentSource(functools.partial(_from_engine, engine), prepare, timeout)
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


class _EndedError(StoreUnavailableError):
    """The server has ended a connection, as was seen before anything was sent on it."""


class _Lane:
    """One connection of one loop: a statement at a time, and what is prepared on it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.connection: Any = None
        self.prepared: dict[str, Any] = {}

    async def taken(self, deadline: Deadline) -> None:
        """Wait for one's turn, until the deadline at most; also where no task runs."""
        turn = asyncio.ensure_future(self.lock.acquire())
        try:
            await asyncio.wait((turn,), timeout=deadline.left())
        except BaseException:
            turn.add_done_callback(lambda _: self._left(turn))
            turn.cancel()
            raise
        if not turn.done():
            turn.cancel()
            raise Late

    def _left(self, turn: asyncio.Future[Any]) -> None:
        if not turn.cancelled():
            self.lock.release()


class _Loop:
    """What belongs to one event loop: no connection may be used from another."""

    def __init__(self) -> None:
        self.lanes = {lane: _Lane() for lane in LANES}
        self.spare: list[Any] = []  # connections that wait for the next transaction
        self.attempts = {LANE: Attempts(), SESSION: Attempts()}


class _Own:
    """Connections of our own, one a lane and loop."""

    stepped = False  # whether statements run outside of a task, too

    def __init__(self, dsn: str, prepare: bool, timeout: float) -> None:
        self._dsn = dsn
        self.listen_dsn: str | None = dsn
        self._prepare = prepare
        self._timeout = timeout
        self._loops: dict[asyncio.AbstractEventLoop, _Loop] = {}
        self._closed = False

    # What drivers do differently

    _gone: Callable[[Any], bool]

    async def _reach(self) -> Any:
        raise NotImplementedError

    def _idle(self, connection: Any) -> bool:
        raise NotImplementedError

    async def _run(self, lane: _Lane, sql: str, args: list[Any], deadline: Deadline) -> Rows:
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
        link = (self._loops.get(asyncio.get_running_loop()) or self._loop()).lanes[lane]
        try:
            await (link.taken(deadline) if link.lock.locked() else link.lock.acquire())
            try:
                used = link.connection
                try:
                    return await self._once(link, sql, args, deadline)
                except (StoreReadOnlyError, _EndedError):
                    if used is None or link.connection is not used:
                        raise
                    # Ended, or a primary no longer: the address may lead to another by now.
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
            deadline.sent = True
            return await self._run(link, sql, args, deadline)
        except (StoreError, Late):
            raise
        except Exception as error:
            raise named(error) from error

    async def _new(self, settings: str, deadline: Deadline) -> Any:
        attempts = self._loop().attempts[settings]
        return await attempts.wait_async(functools.partial(self._set_up, settings), deadline)

    async def _set_up(self, settings: str) -> Any:
        """A connection that is ready. One that comes late is for the next call."""
        try:
            connection = await self._reach()
        except Exception as error:
            if unreadable(error) and not isinstance(error, StoreError):
                raise bad_address() from None
            raise
        try:
            if self._prepare:
                async with alimited(connection, Deadline(CONNECT_SECONDS)):
                    await connection.execute(settings)
        except BaseException:
            end(connection)
            raise
        return connection

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
        for attempts in found.attempts.values():
            attempts.drop(end)
        lanes = [lane.connection for lane in found.lanes.values() if lane.connection is not None]
        await asyncio.gather(*(self._close(connection) for connection in [*lanes, *found.spare]))


class AsyncPsycopgSource(_Own):
    """Connections of our own by psycopg."""

    _gone = staticmethod(stale)

    async def _reach(self) -> Any:
        import psycopg

        options = psycopg_options(self._dsn)
        connection = await psycopg.AsyncConnection.connect(self._dsn, **options)
        if not self._prepare:
            connection.prepare_threshold = None
        return connection

    def _idle(self, connection: Any) -> bool:
        return bool(connection.info.transaction_status == 0)

    async def _run(self, lane: _Lane, sql: str, args: list[Any], deadline: Deadline) -> Rows:
        async with alimited(lane.connection, deadline):
            return await _arun(lane.connection, sql, args, self._prepare)

    async def _close(self, connection: Any) -> None:
        await connection.close()


class AsyncpgSource(_Own):
    """Connections of our own by asyncpg, with prepared statements."""

    stepped = True

    _gone = staticmethod(operator.methodcaller("is_closed"))

    async def _reach(self) -> Any:
        import asyncpg

        options: dict[str, Any] = {} if self._prepare else {"statement_cache_size": 0}
        try:
            return await asyncpg.connect(self._dsn, timeout=CONNECT_SECONDS, **options)
        except FileNotFoundError as error:
            if "sslrootcert" in self._dsn or "sslcert" in self._dsn:
                raise bad_certificate() from error
            raise
        except asyncpg.PostgresError as error:  # its text does not say where
            raise named(error, place_of(self._dsn)) from error

    def _idle(self, connection: Any) -> bool:
        return not connection.is_in_transaction()

    async def _run(self, lane: _Lane, sql: str, args: list[Any], deadline: Deadline) -> Rows:
        # Ended by a timer, not by asyncio.timeout: it needs no task, and asyncpg answers to being
        # cancelled by connecting once more, to a server that may be silent.
        connection = lane.connection
        timer = asyncio.get_running_loop().call_later(deadline.left(), end, connection)
        try:
            if not self._prepare:
                return await _run_asyncpg(connection, sql, args, False)
            statement = lane.prepared.get(sql)
            if statement is None:
                statement = lane.prepared[sql] = await connection.prepare(sql)
            rows: Rows = await statement.fetch(*args)
            return rows
        except Exception as error:
            if connection.is_closed():
                deadline.left()  # raises, if that is why
            if type(error).__name__ == "InternalClientError":
                # The server's goodbye was read, the end of its stream not yet: asyncpg did not call
                # the connection closed, and sends nothing on it.
                raise _EndedError("PostgreSQL has ended the connection: try again") from error
            raise
        finally:
            timer.cancel()

    async def _close(self, connection: Any) -> None:
        try:
            await connection.close(timeout=self._timeout)
        except Exception:  # noqa: BLE001 - the server does not answer: it was closed without
            end(connection)


class AsyncLentSource(Lent):
    """Connections of a pool or an engine of the caller's, by asyncpg or psycopg."""

    async def fetch(
        self, lane: str, sql: str, args: list[Any], deadline: Deadline | None = None
    ) -> Rows:
        deadline = self._begin(deadline)
        try:
            async with self._borrow(deadline) as connection, alimited(connection, deadline):
                deadline.sent = True
                run = _run_asyncpg if to_driver(connection) == "asyncpg" else _arun
                with left_if_read_only(connection):
                    return await run(connection, sql, args, self._prepare)
        except Exception as error:
            raise self._failed(error, deadline) from error


@contextlib.asynccontextmanager
async def _from_psycopg_pool(pool: Any, deadline: Deadline) -> AsyncIterator[Any]:
    async with pool.connection(timeout=deadline.left()) as connection:
        before = connection.autocommit
        if not before:
            await connection.set_autocommit(True)
        try:
            yield connection
        finally:
            if not before and not connection.closed:
                await connection.set_autocommit(False)


def _from_asyncpg_pool(pool: Any, deadline: Deadline) -> Any:
    return pool.acquire(timeout=deadline.left())


@contextlib.asynccontextmanager
async def _from_engine(engine: Any, deadline: Deadline) -> AsyncIterator[Any]:
    connection = engine.connect()
    async with in_time(deadline):
        await connection.start()
    try:
        driver = (await connection.get_raw_connection()).driver_connection
        try:
            yield driver
        except Exception:
            if driver.is_closed() if to_driver(driver) == "asyncpg" else driver.closed:
                await connection.invalidate()  # the pool does not see what goes past it
            raise
    finally:
        await connection.close()
