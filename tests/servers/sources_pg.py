"""Everything that a PostgreSQL store can be given, made for one URL; closed by whoever made it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

__all__ = ["ASYNC", "SYNC", "label"]

Given = tuple[Any, dict[str, Any]]  # what to pass, and options


def label(function: Callable[..., Any]) -> str:
    """A name for a parameter of a test."""
    return function.__name__


def with_driver(url: str, driver: str) -> str:
    """The URL as SQLAlchemy wants it."""
    return url.replace("postgresql://", f"postgresql+{driver}://")


# For a sync store


@contextlib.contextmanager
def by_url(url: str) -> Iterator[Given]:
    yield url, {}


@contextlib.contextmanager
def connection_pool(url: str) -> Iterator[Given]:
    from psycopg_pool import ConnectionPool

    with ConnectionPool(url, min_size=1, max_size=4) as pool:
        yield pool, {}
        with pool.connection() as connection:  # it was left open
            connection.execute("SELECT 1")


@contextlib.contextmanager
def engine(url: str) -> Iterator[Given]:
    import sqlalchemy

    made = sqlalchemy.create_engine(with_driver(url, "psycopg"))
    try:
        yield made, {}
    finally:
        made.dispose()


@contextlib.contextmanager
def sessionmaker(url: str) -> Iterator[Given]:
    import sqlalchemy.orm

    with engine(url) as (made, options):
        yield sqlalchemy.orm.sessionmaker(made), options


# For an async store


@contextlib.asynccontextmanager
async def url_asyncpg(url: str) -> AsyncIterator[Given]:
    yield url, {"driver": "asyncpg"}


@contextlib.asynccontextmanager
async def url_psycopg(url: str) -> AsyncIterator[Given]:
    yield url, {"driver": "psycopg"}


@contextlib.asynccontextmanager
async def asyncpg_pool(url: str) -> AsyncIterator[Given]:
    import asyncpg

    async with asyncpg.create_pool(url, min_size=1, max_size=4) as pool:
        yield pool, {}
        assert await pool.fetchval("SELECT 1") == 1


@contextlib.asynccontextmanager
async def async_connection_pool(url: str) -> AsyncIterator[Given]:
    from psycopg_pool import AsyncConnectionPool

    async with AsyncConnectionPool(url, min_size=1, max_size=4, open=False) as pool:
        yield pool, {}
        async with pool.connection() as connection:
            await connection.execute("SELECT 1")


@contextlib.asynccontextmanager
async def _async_engine(url: str, driver: str, **options: Any) -> AsyncIterator[Any]:
    from sqlalchemy.ext.asyncio import create_async_engine

    made = create_async_engine(with_driver(url, driver), **options)
    try:
        yield made
    finally:
        await made.dispose()


@contextlib.asynccontextmanager
async def engine_asyncpg(url: str) -> AsyncIterator[Given]:
    async with _async_engine(url, "asyncpg") as made:
        yield made, {}


@contextlib.asynccontextmanager
async def engine_psycopg(url: str) -> AsyncIterator[Given]:
    async with _async_engine(url, "psycopg") as made:
        yield made, {}


@contextlib.asynccontextmanager
async def async_sessionmaker(url: str) -> AsyncIterator[Given]:
    from sqlalchemy.ext import asyncio

    async with _async_engine(url, "asyncpg") as made:
        yield asyncio.async_sessionmaker(made), {}


SYNC = [by_url, connection_pool, engine, sessionmaker]
ASYNC = [
    url_asyncpg,
    url_psycopg,
    asyncpg_pool,
    async_connection_pool,
    engine_asyncpg,
    engine_psycopg,
    async_sessionmaker,
]
