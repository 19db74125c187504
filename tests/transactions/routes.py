"""Every way to reach a database that a transaction can run on, behind one face.

A test is written once, as a coroutine; sync libraries are simply called from it.
"""

from __future__ import annotations

import contextlib
import inspect
import sqlite3
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from oncekey._core.block import OnlySync

INSERT = "INSERT INTO effects (name) VALUES "
POOL = 4


class Route(NamedTuple):
    """One of them. ``what`` is none, connection, session, pool, engine or sessionmaker."""

    flavour: str  # pg or sqlite
    world: str  # sync or async
    library: str
    what: str

    @property
    def id(self) -> str:
        return "-".join(self)

    @property
    def joins(self) -> bool:
        """Whether the caller can have a transaction open on what it passes."""
        return self.what in ("connection", "session")

    @property
    def borrowed(self) -> bool:
        """Whether a connection is taken from the caller and must be given back."""
        return self.what in ("pool", "engine", "sessionmaker")


def _alchemy(flavour: str, world: str, library: str) -> list[Route]:
    kinds = ("connection", "session", "engine", "sessionmaker")
    return [Route(flavour, world, library, kind) for kind in kinds]


ROUTES = [
    Route("pg", "sync", "psycopg", "none"),
    Route("pg", "sync", "psycopg", "connection"),
    Route("pg", "sync", "psycopg", "pool"),
    *_alchemy("pg", "sync", "sqlalchemy+psycopg"),
    Route("pg", "sync", "django", "connection"),
    Route("pg", "async", "asyncpg", "none"),
    Route("pg", "async", "asyncpg", "connection"),
    Route("pg", "async", "asyncpg", "pool"),
    Route("pg", "async", "psycopg", "none"),
    Route("pg", "async", "psycopg", "connection"),
    Route("pg", "async", "psycopg", "pool"),
    *_alchemy("pg", "async", "sqlalchemy+asyncpg"),
    *_alchemy("pg", "async", "sqlalchemy+psycopg"),
    Route("sqlite", "sync", "sqlite3", "none"),
    Route("sqlite", "sync", "sqlite3", "connection"),
    *_alchemy("sqlite", "sync", "sqlalchemy+pysqlite"),
    Route("sqlite", "sync", "django", "connection"),
    Route("sqlite", "async", "aiosqlite", "none"),
    Route("sqlite", "async", "aiosqlite", "connection"),
    *_alchemy("sqlite", "async", "sqlalchemy+aiosqlite"),
]


async def done(value: Any) -> Any:
    """The value, awaited where it has to be."""
    return await value if inspect.isawaitable(value) else value


class Place(NamedTuple):
    """Where the databases are."""

    url: str
    file: str

    def engine_url(self, route: Route) -> str:
        driver = route.library.partition("+")[2]
        if route.flavour == "sqlite":
            return f"sqlite+{driver}:///{self.file}"
        return self.url.replace("postgresql://", f"postgresql+{driver}://")


class Caller:
    """A user of one route: what it passes as ``on``, and how it writes and commits."""

    def __init__(self, route: Route, place: Place, engine: Any = None) -> None:
        self.route = route
        self.place = place
        self.on: Any = None
        self.engine = engine  # of another caller, who closes it
        self._block: Any = None

    @contextlib.asynccontextmanager
    async def opened(self, **options: Any) -> AsyncIterator[Caller]:
        """Open what this route needs, and close it at the end."""
        async with contextlib.AsyncExitStack() as stack:
            self.on = await self._open(stack, options)
            yield self

    async def _open(self, stack: contextlib.AsyncExitStack, options: dict[str, Any]) -> Any:
        route = self.route
        if route.what == "none":
            return None
        if "+" in route.library:
            return await self._open_alchemy(stack, options)
        if route.library == "django":
            from tests.transactions.django_setup import connection_for

            connection = connection_for(route, self.place)
            stack.callback(connection.close)
            return connection
        if route.library == "sqlite3":
            opened = sqlite3.connect(self.place.file, **options)
            stack.callback(opened.close)
            return opened
        if route.library == "aiosqlite":
            import aiosqlite

            return await stack.enter_async_context(aiosqlite.connect(self.place.file, **options))
        if route.library == "asyncpg":
            return await self._open_asyncpg(stack, options)
        return await self._open_psycopg(stack, options)

    async def _open_asyncpg(self, stack: contextlib.AsyncExitStack, options: Any) -> Any:
        import asyncpg

        if self.route.what == "pool":
            pool = asyncpg.create_pool(self.place.url, min_size=1, max_size=POOL, **options)
            return await stack.enter_async_context(pool)
        connection = await asyncpg.connect(self.place.url, **options)
        stack.push_async_callback(connection.close)
        return connection

    async def _open_psycopg(self, stack: contextlib.AsyncExitStack, options: Any) -> Any:
        import psycopg
        import psycopg_pool

        url, alone = self.place.url, self.route.world == "sync"
        if self.route.what == "pool":
            sizes = {"min_size": 1, "max_size": POOL, "open": False, "kwargs": options}
            if alone:
                pool: Any = stack.enter_context(psycopg_pool.ConnectionPool(url, **sizes))
            else:
                pool = psycopg_pool.AsyncConnectionPool(url, **sizes)
                await stack.enter_async_context(pool)
            await done(pool.wait())  # or the first who asks makes it grow, and counting is hard
            return pool
        if alone:
            connection: Any = psycopg.connect(url, **options)
            stack.callback(connection.close)
        else:
            connection = await psycopg.AsyncConnection.connect(url, **options)
            stack.push_async_callback(connection.close)
        return connection

    async def _open_alchemy(self, stack: contextlib.AsyncExitStack, options: Any) -> Any:
        alone = self.route.world == "sync"
        engine = self.engine
        if engine is None:
            make = sa.create_engine if alone else create_async_engine
            sizes = {"pool_size": POOL, "max_overflow": 0}
            engine = make(self.place.engine_url(self.route), **(sizes | options))
            self.engine = engine

            async def dispose() -> None:
                await done(engine.dispose())

            stack.push_async_callback(dispose)
        if self.route.what == "engine":
            return engine
        if self.route.what == "sessionmaker":
            return sessionmaker(engine) if alone else async_sessionmaker(engine)
        if self.route.what == "connection":
            connection = engine.connect() if alone else await engine.connect()
            stack.push_async_callback(_closing(connection))
            return connection
        session: Any = Session(engine) if alone else AsyncSession(engine)
        stack.push_async_callback(_closing(session))
        return session

    async def write(self, target: Any, name: str) -> None:
        """Write an effect on what the transaction gave us."""
        library = self.route.library
        if "+" in library:
            await done(target.execute(sa.text(f"{INSERT}(:name)"), {"name": name}))
        elif library == "asyncpg":
            await target.execute(f"{INSERT}($1)", name)
        elif library == "django":
            with target.cursor() as cursor:
                cursor.execute(f"{INSERT}(%s)", [name])
        else:
            mark = "?" if self.route.flavour == "sqlite" else "%s"
            await done(target.execute(f"{INSERT}({mark})", (name,)))

    async def run(self, target: Any, sql: str) -> None:
        """Run any statement."""
        library = self.route.library
        if "+" in library:
            await done(target.execute(sa.text(sql)))
        elif library == "django":
            with target.cursor() as cursor:
                cursor.execute(sql)
        else:
            await done(target.execute(sql))

    # The caller's own transaction

    async def begin(self) -> None:
        on, library = self.on, self.route.library
        if "+" in library:
            await done(on.begin())
        elif library == "asyncpg":
            self._block = on.transaction()
            await self._block.start()
        elif library == "django":
            from django.db import transaction

            self._block = transaction.atomic(using=on.alias)
            self._block.__enter__()
        elif self.route.flavour == "sqlite":
            await done(on.execute("BEGIN"))
        else:
            await done(on.execute("SELECT 1"))

    async def commit(self) -> None:
        if self.route.library == "django":
            self._block.__exit__(None, None, None)
        elif self.route.library == "asyncpg":
            await self._block.commit()
        else:
            await done(self.on.commit())

    async def rollback(self) -> None:
        if self.route.library == "django":
            self._block.__exit__(KeyError, KeyError(), None)
        elif self.route.library == "asyncpg":
            await self._block.rollback()
        else:
            await done(self.on.rollback())

    def in_transaction(self) -> bool:
        """Whether a transaction is open on what was passed."""
        on, library = self.on, self.route.library
        if library == "asyncpg":
            return bool(on.is_in_transaction())
        if library == "django":
            return bool(on.in_atomic_block)
        if library in ("sqlite3", "aiosqlite"):
            return bool(on.in_transaction)
        if "+" in library:
            return bool(on.in_transaction())
        return int(on.info.transaction_status) != 0

    def borrowed(self) -> int:
        """How many connections of the pool are out."""
        on = self.on
        if self.engine is not None:
            return int(self.engine.pool.checkedout())
        if self.route.library == "asyncpg":
            return int(on.get_size() - on.get_idle_size())
        stats = on.get_stats()
        return int(stats["pool_size"] - stats["pool_available"])


def _closing(thing: Any) -> Any:
    async def close() -> None:
        await done(thing.close())

    return close


@contextlib.asynccontextmanager
async def block(store: Any, key: str, payload: object = None, **options: Any) -> AsyncIterator[Any]:
    """``store.transaction(...)``, sync or async."""
    transaction = store.transaction(key, payload, **options)
    if transaction.awaits:
        async with transaction as tx:
            yield tx
    else:
        with transaction as tx:
            yield tx


class entered:
    """``async with`` for blocks of both worlds."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self._sync = isinstance(made, OnlySync) or not hasattr(made, "__aenter__")

    async def __aenter__(self) -> Any:
        return await done(self._made.__enter__() if self._sync else self._made.__aenter__())

    async def __aexit__(self, *exc: Any) -> Any:
        leave = self._made.__exit__ if self._sync else self._made.__aexit__
        return await done(leave(*exc))
