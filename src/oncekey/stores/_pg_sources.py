"""Where statements run: connections of our own, or those of a pool or an engine that was passed in.

A source of our own keeps one connection for each lane, so that claims and completions don't wait
for each other. Others are borrowed for one batch and given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final, Protocol

from oncekey._core.forks import Forking, watch_forks
from oncekey.errors import StoreClosedError, StoreConfigError, StoreError
from oncekey.stores._pg_errors import bad_address, named, unreadable

__all__ = ["AsyncSource", "Source", "async_source", "sync_source"]

LANES: Final = ("claim", "settle", "other")
CONNECT_SECONDS: Final = 10
# A plan that was made while the table was tiny would go on scanning it when it has grown.
KEEP_TO_INDEX: Final = "SET enable_seqscan = off"
SPARE: Final = 8  # connections that wait for the next transaction

Rows = list[Any]


class Source(Protocol):
    """Runs statements for a sync store."""

    listen_dsn: str | None

    def fetch(self, lane: str, sql: str, args: list[Any]) -> Rows: ...
    def close(self) -> None: ...


class AsyncSource(Protocol):
    """Runs statements for an async store, on the loop that calls."""

    listen_dsn: str | None

    async def fetch(self, lane: str, sql: str, args: list[Any]) -> Rows: ...
    async def aclose(self) -> None: ...


def _kind(given: object) -> str:
    return type(given).__module__.partition(".")[0]


def sync_source(given: object, prepare: bool) -> Any:
    """The source for what a ``PgStore`` was given."""
    if isinstance(given, str):
        return PsycopgSource(given, prepare)
    kind = _kind(given)
    if kind == "psycopg_pool" and hasattr(given, "getconn"):
        return PoolSource(given, prepare)
    if kind == "sqlalchemy" or callable(given):
        engine = _engine(given)
        if engine is not None and not hasattr(engine, "sync_engine"):
            return EngineSource(engine, prepare)
    raise StoreConfigError(
        f"PgStore can't use a {type(given).__name__}: pass a URL, a psycopg_pool.ConnectionPool, a "
        "SQLAlchemy Engine or a sessionmaker; async ones go to PgBackend"
    )


def async_source(given: object, driver: str, prepare: bool) -> Any:
    """The source for what a ``PgBackend`` was given."""
    if isinstance(given, str):
        if driver == "asyncpg":
            return AsyncpgSource(given, prepare)
        return AsyncPsycopgSource(given, prepare)
    kind = _kind(given)
    if kind == "asyncpg" and hasattr(given, "acquire"):
        return AsyncpgPoolSource(given, prepare)
    if kind == "psycopg_pool" and hasattr(given, "getconn"):
        return AsyncPoolSource(given, prepare)
    if kind == "sqlalchemy" or callable(given):
        engine = _engine(given)
        if engine is not None and hasattr(engine, "sync_engine"):
            return AsyncEngineSource(engine, prepare)
    raise StoreConfigError(
        f"PgBackend can't use a {type(given).__name__}: pass a URL, an asyncpg Pool, a "
        "psycopg_pool.AsyncConnectionPool, a SQLAlchemy AsyncEngine or an async_sessionmaker; sync "
        "ones go to PgStore"
    )


def _engine(given: Any) -> Any:
    """The engine of an engine, or of the sessions that a factory makes."""
    if hasattr(given, "dialect") and hasattr(given, "connect"):
        return given
    if callable(given):
        session: Any = given()
        bind = getattr(session, "bind", None)
        if bind is None and hasattr(session, "get_bind"):
            bind = session.get_bind()
        return bind if hasattr(bind, "sync_engine") else getattr(bind, "engine", bind)
    return None


class _Lent:
    """A source that is somebody else's: it stays open when the store is closed."""

    _closed = False

    def _must_be_open(self) -> None:
        if self._closed:
            raise StoreClosedError("this store is closed: connect again")


# psycopg, sync


def _run(connection: Any, sql: str, args: list[Any], prepare: bool) -> Rows:
    import psycopg
    from psycopg.rows import tuple_row

    cursor: Any
    with psycopg.RawCursor(connection, row_factory=tuple_row) as cursor:
        cursor.execute(sql, args, prepare=prepare, binary=True)
        return cursor.fetchall() if cursor.description else []


def _stale(connection: Any) -> bool:
    """Whether the server has hung up while nobody was looking: something came in unasked."""
    if connection.closed:
        return True
    if not hasattr(select, "poll"):  # Windows: the first call after a restart fails instead
        return False
    poll = select.poll()
    poll.register(connection.pgconn.socket, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(0))


class PsycopgSource(Forking):
    """Connections of our own, one a lane."""

    def __init__(self, dsn: str, prepare: bool) -> None:
        import psycopg

        self._connect = psycopg.connect
        self._dsn = dsn
        self.listen_dsn: str | None = dsn
        self._prepare = prepare
        self._closed = False
        self._inherited: list[Any] = []
        self._open: dict[str, Any] = {}
        self._spare: list[Any] = []
        self._locks = {lane: threading.Lock() for lane in LANES}
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        """Leave the parent's connections alone: closing them would end the parent's sessions."""
        self._inherited.extend(self._open.values())
        self._inherited.extend(self._spare)
        self._open = {}
        self._spare = []
        self._locks = {lane: threading.Lock() for lane in LANES}

    def fetch(self, lane: str, sql: str, args: list[Any]) -> Rows:
        with self._locks[lane]:
            try:
                connection = self._open.get(lane)
                if connection is None or _stale(connection):
                    connection = self._reopen(lane, connection)
                return _run(connection, sql, args, self._prepare)
            except StoreError:
                raise
            except BaseException as error:
                broken = self._open.get(lane)
                if broken is not None and (broken.broken or not isinstance(error, Exception)):
                    broken.close()
                    del self._open[lane]
                if not isinstance(error, Exception):
                    raise
                raise named(error) from error

    def _reopen(self, lane: str, old: Any) -> Any:
        if self._closed:
            raise StoreClosedError("this store is closed: connect again")
        if old is not None:
            old.close()
        connection = self._open[lane] = self._new()
        if self._prepare:
            connection.execute(KEEP_TO_INDEX)
        return connection

    def _new(self) -> Any:
        try:
            connection = self._connect(
                self._dsn, autocommit=True, client_encoding="UTF8", **_timeout(self._dsn)
            )
        except Exception as error:
            if unreadable(error):
                raise bad_address() from None
            raise
        if not self._prepare:
            connection.prepare_threshold = None
        return connection

    def borrow(self) -> Any:
        """A connection for a transaction of its own."""
        if self._closed:
            raise StoreClosedError("this store is closed: connect again")
        while self._spare:
            connection = self._spare.pop()
            if not _stale(connection):
                return connection
            connection.close()
        return self._new()

    def give_back(self, connection: Any) -> None:
        """Take a borrowed connection back; one that is not idle is closed."""
        idle = connection.info.transaction_status == 0 and not connection.broken
        if idle and not self._closed and len(self._spare) < SPARE:
            self._spare.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        self._closed = True
        for lane in LANES:
            with self._locks[lane]:
                connection = self._open.pop(lane, None)
                if connection is not None:
                    connection.close()
        while self._spare:
            self._spare.pop().close()


def _timeout(dsn: str) -> dict[str, Any]:
    return {} if "connect_timeout" in dsn else {"connect_timeout": CONNECT_SECONDS}


@contextlib.contextmanager
def _autocommit(connection: Any) -> Iterator[None]:
    """One statement, one transaction, whatever its owner has set; given back as it was."""
    before = connection.autocommit
    if not before:
        connection.autocommit = True
    try:
        yield
    finally:
        if not before and not connection.closed:
            connection.autocommit = False


class PoolSource(_Lent):
    """A ``psycopg_pool.ConnectionPool`` of the caller's."""

    def __init__(self, pool: Any, prepare: bool) -> None:
        self._pool = pool
        self._prepare = prepare
        self.listen_dsn: str | None = pool.conninfo or None

    def fetch(self, lane: str, sql: str, args: list[Any]) -> Rows:
        try:
            self._must_be_open()
            with self._pool.connection() as connection, _autocommit(connection):
                return _run(connection, sql, args, self._prepare)
        except StoreError:
            raise
        except Exception as error:
            raise named(error) from error

    def close(self) -> None:
        """The pool is the caller's."""
        self._closed = True


class EngineSource(_Lent):
    """A SQLAlchemy ``Engine`` of the caller's, on psycopg 3."""

    listen_dsn: str | None = None

    def __init__(self, engine: Any, prepare: bool) -> None:
        _check_dialect(engine, "psycopg")
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._prepare = prepare

    def fetch(self, lane: str, sql: str, args: list[Any]) -> Rows:
        try:
            self._must_be_open()
            with self._engine.connect() as connection:
                driver = connection.connection.driver_connection
                try:
                    return _run(driver, sql, args, self._prepare)
                except Exception:
                    if driver.closed:
                        connection.invalidate()  # the pool does not see what goes past it
                    raise
        except Exception as error:
            raise named(getattr(error, "orig", None) or error) from error

    def close(self) -> None:
        """The engine is the caller's."""
        self._closed = True


def _check_dialect(engine: Any, *drivers: str) -> None:
    if engine.dialect.name != "postgresql" or engine.dialect.driver not in drivers:
        wanted = " or ".join(f"postgresql+{driver}" for driver in drivers)
        raise StoreConfigError(
            f"this engine is {engine.dialect.name}+{engine.dialect.driver}: make it with {wanted}"
        )


# psycopg, async


async def _arun(connection: Any, sql: str, args: list[Any], prepare: bool) -> Rows:
    import psycopg
    from psycopg.rows import tuple_row

    cursor: Any
    async with psycopg.AsyncRawCursor(connection, row_factory=tuple_row) as cursor:
        await cursor.execute(sql, args, prepare=prepare, binary=True)
        return await cursor.fetchall() if cursor.description else []


class _AsyncLane:
    """One connection of one loop: a statement at a time, and what is prepared on it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.connection: Any = None
        self.prepared: dict[str, Any] = {}


class _PerLoop:
    """Connections of our own for each event loop: none may be used from another."""

    def __init__(self) -> None:
        self._loops: dict[asyncio.AbstractEventLoop, dict[str, Any]] = {}
        self._spares: dict[asyncio.AbstractEventLoop, list[Any]] = {}
        self._closed = False

    def _spare(self) -> list[Any]:
        """Connections that wait for the next transaction on this loop."""
        self._lanes()
        return self._spares.setdefault(asyncio.get_running_loop(), [])

    def _shut(self) -> tuple[dict[str, Any], list[Any]]:
        """Refuse further calls; gives what this loop has to close."""
        loop = asyncio.get_running_loop()
        self._closed = True
        found = self._loops.pop(loop, {}), self._spares.pop(loop, [])
        self._loops.clear()
        self._spares.clear()
        return found

    def _lanes(self) -> dict[str, Any]:
        if self._closed:
            raise StoreClosedError("this store is closed: connect again")
        loop = asyncio.get_running_loop()
        lanes = self._loops.get(loop)
        if lanes is None:
            for old in [old for old in self._loops if old.is_closed()]:
                del self._loops[old]
                self._spares.pop(old, None)
            lanes = self._loops[loop] = {}
        return lanes


class AsyncPsycopgSource(_PerLoop):
    """Connections of our own by psycopg, one a lane and loop."""

    def __init__(self, dsn: str, prepare: bool) -> None:
        import psycopg

        super().__init__()
        self._connect = psycopg.AsyncConnection.connect
        self._dsn = dsn
        self.listen_dsn: str | None = dsn
        self._prepare = prepare

    async def fetch(self, lane: str, sql: str, args: list[Any]) -> Rows:
        link = self._lanes().setdefault(lane, _AsyncLane())
        try:
            async with link.lock:
                if link.connection is None or _stale(link.connection):
                    if link.connection is not None:
                        await link.connection.close()
                    link.connection = await self._new()
                    if self._prepare:
                        await link.connection.execute(KEEP_TO_INDEX)
                return await _arun(link.connection, sql, args, self._prepare)
        except StoreError:
            raise
        except Exception as error:
            raise named(error) from error

    async def borrow(self) -> Any:
        """A connection for a transaction of its own."""
        spare = self._spare()
        while spare:
            connection = spare.pop()
            if not _stale(connection):
                return connection
            await connection.close()
        return await self._new()

    async def _new(self) -> Any:
        try:
            connection = await self._connect(
                self._dsn, autocommit=True, client_encoding="UTF8", **_timeout(self._dsn)
            )
        except Exception as error:
            if unreadable(error):
                raise bad_address() from None
            raise
        if not self._prepare:
            connection.prepare_threshold = None
        return connection

    async def give_back(self, connection: Any) -> None:
        """Take a borrowed connection back; one that is not idle is closed."""
        idle = connection.info.transaction_status == 0 and not connection.broken
        if idle and not self._closed and len(self._spare()) < SPARE:
            self._spare().append(connection)
        else:
            await connection.close()

    async def aclose(self) -> None:
        lanes, spare = self._shut()
        for connection in [*(lane.connection for lane in lanes.values()), *spare]:
            if connection is not None:
                await connection.close()


class AsyncPoolSource(_Lent):
    """A ``psycopg_pool.AsyncConnectionPool`` of the caller's."""

    def __init__(self, pool: Any, prepare: bool) -> None:
        self._pool = pool
        self._prepare = prepare
        self.listen_dsn: str | None = pool.conninfo or None

    async def fetch(self, lane: str, sql: str, args: list[Any]) -> Rows:
        try:
            self._must_be_open()
            async with self._pool.connection() as connection:
                before = connection.autocommit
                if not before:
                    await connection.set_autocommit(True)
                try:
                    return await _arun(connection, sql, args, self._prepare)
                finally:
                    if not before and not connection.closed:
                        await connection.set_autocommit(False)
        except StoreError:
            raise
        except Exception as error:
            raise named(error) from error

    async def aclose(self) -> None:
        """The pool is the caller's."""
        self._closed = True


# asyncpg


class AsyncpgSource(_PerLoop):
    """Connections of our own by asyncpg, one a lane and loop, with prepared statements."""

    def __init__(self, dsn: str, prepare: bool) -> None:
        import asyncpg

        super().__init__()
        self._connect: Any = asyncpg.connect
        self._dsn = dsn
        self.listen_dsn: str | None = dsn
        self._prepare = prepare

    async def fetch(self, lane: str, sql: str, args: list[Any]) -> Rows:
        link = self._lanes().setdefault(lane, _AsyncLane())
        try:
            async with link.lock:
                if link.connection is None or link.connection.is_closed():
                    link.connection = await self._new()
                    link.prepared = {}
                    if self._prepare:
                        await link.connection.execute(KEEP_TO_INDEX)
                if not self._prepare:
                    async with link.connection.transaction():  # a pooler keeps one server for it
                        return list(await link.connection.fetch(sql, *args))
                statement = link.prepared.get(sql)
                if statement is None:
                    statement = link.prepared[sql] = await link.connection.prepare(sql)
                return list(await statement.fetch(*args))
        except StoreError:
            raise
        except Exception as error:
            raise named(error) from error

    async def borrow(self) -> Any:
        """A connection for a transaction of its own."""
        spare = self._spare()
        while spare:
            connection = spare.pop()
            if not connection.is_closed():
                return connection
        return await self._new()

    async def _new(self) -> Any:
        options: dict[str, Any] = {} if self._prepare else {"statement_cache_size": 0}
        try:
            return await self._connect(self._dsn, timeout=CONNECT_SECONDS, **options)
        except Exception as error:
            if unreadable(error):
                raise bad_address() from None
            raise

    async def give_back(self, connection: Any) -> None:
        """Take a borrowed connection back; one that is not idle is closed."""
        if connection.is_closed():
            return
        if connection.is_in_transaction() or self._closed or len(self._spare()) >= SPARE:
            connection.terminate()
        else:
            self._spare().append(connection)

    async def aclose(self) -> None:
        lanes, spare = self._shut()
        for link in lanes.values():
            if link.connection is not None:
                await link.connection.close(timeout=CONNECT_SECONDS)
        for connection in spare:
            await connection.close(timeout=CONNECT_SECONDS)


class AsyncpgPoolSource(_Lent):
    """An ``asyncpg.Pool`` of the caller's."""

    listen_dsn: str | None = None

    def __init__(self, pool: Any, prepare: bool) -> None:
        self._pool = pool
        self._prepare = prepare

    async def fetch(self, lane: str, sql: str, args: list[Any]) -> Rows:
        try:
            self._must_be_open()
            async with self._pool.acquire() as connection:
                if not self._prepare:
                    async with connection.transaction():
                        return list(await connection.fetch(sql, *args))
                return list(await connection.fetch(sql, *args))
        except StoreError:
            raise
        except Exception as error:
            raise named(error) from error

    async def aclose(self) -> None:
        """The pool is the caller's."""
        self._closed = True


class AsyncEngineSource(_Lent):
    """A SQLAlchemy ``AsyncEngine`` of the caller's, on asyncpg or psycopg 3."""

    listen_dsn: str | None = None

    def __init__(self, engine: Any, prepare: bool) -> None:
        _check_dialect(engine, "asyncpg", "psycopg", "psycopg_async")
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._prepare = prepare

    @contextlib.asynccontextmanager
    async def _driver(self) -> AsyncIterator[Any]:
        async with self._engine.connect() as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            try:
                yield driver
            except Exception:
                closed = driver.is_closed() if _kind(driver) == "asyncpg" else driver.closed
                if closed:
                    await connection.invalidate()  # the pool does not see what goes past it
                raise

    async def fetch(self, lane: str, sql: str, args: list[Any]) -> Rows:
        try:
            self._must_be_open()
            async with self._driver() as connection:
                if _kind(connection) == "asyncpg":
                    return list(await connection.fetch(sql, *args))
                return await _arun(connection, sql, args, self._prepare)
        except Exception as error:
            raise named(getattr(error, "orig", None) or error) from error

    async def aclose(self) -> None:
        """The engine is the caller's."""
        self._closed = True
