"""What callers may and may not write: each line that must fail says so to both checkers."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Any, assert_type

import psycopg
import psycopg_pool
from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from oncekey import (
    AsyncOnce,
    AsyncPostgresStore,
    AsyncSQLiteStore,
    AsyncWebhookDedup,
    IdempotencyStore,
    Once,
    PostgresStore,
    SQLiteStore,
    ToolContext,
    Tx,
    WebhookDedup,
)
from oncekey.adapters.asgi import IdempotencyMiddleware
from oncekey.adapters.celery import idempotent as celery_idempotent
from oncekey.receiver import AsyncWebhookReceiver, WebhookReceiver
from oncekey.signatures import provider

once = Once("memory://", ttl=60)
aonce = AsyncOnce("memory://", lease=5)


@aonce(key="order_id")
async def charge(order_id: str, amount: int) -> list[int]:
    return [amount]


# --- coroutines: what asyncio.run and create_task take ---------------------------------------

assert_type(asyncio.run(charge("a", 1)), list[int])


async def in_a_task() -> None:
    assert_type(await asyncio.create_task(charge("a", 1)), list[int])


# --- options: a wrong name or type is an error where it is written ----------------------------

Once("memory://", tll=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
AsyncOnce("memory://", tll=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
once(key="a", tll=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
once(key="a", ttl="3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
once.guard("k", tll=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
aonce(key="a", tll=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
aonce.guard("k", tll=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
celery_idempotent(once, key="a", tll=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
SQLiteStore("f.db").transaction("k", tll=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
once.transaction("k", tll=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
stripe = provider("stripe", secret="whsec_test")
WebhookReceiver(stripe, "memory://", retention=86_400, strict_types=True)
WebhookReceiver(stripe, "memory://", retension=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
AsyncWebhookReceiver(stripe, "memory://", retension=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


async def app(scope: Any, receive: Any, send: Any) -> None: ...


IdempotencyMiddleware(app, "memory://", ttl=60, required=True)
IdempotencyMiddleware(app, "memory://", tll=60)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]

# --- wrap(transactional=True): callers don't pass tx ------------------------------------------

seller = IdempotencyStore(AsyncSQLiteStore("a.db"))
Params = dict[str, Any]


@seller.wrap(transactional=True)
async def create(params: Params, context: ToolContext | None = None, *, tx: Tx) -> str:
    return str(tx.answer)


@seller.wrap(transactional=True)
async def other(context: ToolContext, params: Params, tx: Tx) -> int:
    return 1


@seller.wrap(transactional=True)
async def plain(params: Params, context: ToolContext | None = None) -> str:
    return ""


class Seller:
    @seller.wrap(transactional=True)
    async def update(self, params: Params, context: ToolContext | None = None, *, tx: Tx) -> str:
        return ""


async def buy() -> None:
    assert_type(await create({}), str)
    assert_type(await create({}, ToolContext("a")), str)
    assert_type(await create({}, context=ToolContext("a")), str)
    assert_type(await other(ToolContext("a"), {}), int)
    assert_type(await plain({}), str)
    assert_type(await Seller().update({}, ToolContext("a")), str)


# --- tx.connection: what was passed, or what a pool, engine or factory gives ---------------------

Row = tuple[int]


def connections(
    sqlite: sqlite3.Connection,
    pg: psycopg.Connection[Row],
    pool: psycopg_pool.ConnectionPool[psycopg.Connection[Row]],
    engine: Engine,
    sessions: sessionmaker[Session],
) -> None:
    store, files = PostgresStore("postgresql://"), SQLiteStore("a.db")
    with files.transaction("k", on=sqlite) as on_sqlite:
        assert_type(on_sqlite.connection, sqlite3.Connection)
    with store.transaction("k", on=pg) as on_pg:
        assert_type(on_pg.connection, psycopg.Connection[Row])
    with store.transaction("k", on=pool) as on_pool:
        assert_type(on_pool.connection, psycopg.Connection[Row])
    with store.transaction("k", on=engine, ttl=60) as on_engine:
        assert_type(on_engine.connection, Connection)
    with store.transaction("k", on=sessions) as on_session:
        assert_type(on_session.session, Session)
    with store.transaction("k", on=lambda: pg) as on_given:
        assert_type(on_given.connection, psycopg.Connection[Row])
    with Once(store).transaction("k", on=sessions) as guarded:
        assert_type(guarded.connection, Session)
    with WebhookDedup(store).transaction("s", "k", "h", on=pool) as handled:
        assert_type(handled.connection, psycopg.Connection[Row])
    with store.transaction("k") as own:
        assert_type(own, Tx[Any])
    takes_any(on_session)


def takes_any(tx: Tx) -> None: ...


async def async_connections(
    pool: psycopg_pool.AsyncConnectionPool[psycopg.AsyncConnection[Row]],
    engine: AsyncEngine,
    sessions: async_sessionmaker[AsyncSession],
) -> None:
    store = AsyncPostgresStore("postgresql://")
    async with store.transaction("k", on=pool) as on_pool:
        assert_type(on_pool.connection, psycopg.AsyncConnection[Row])
    async with store.transaction("k", on=engine) as on_engine:
        assert_type(on_engine.connection, AsyncConnection)
    async with AsyncOnce(store).transaction("k", on=sessions) as guarded:
        assert_type(guarded.connection, AsyncSession)
    async with AsyncWebhookDedup(store).transaction("s", "k", "h", on=sessions) as handled:
        assert_type(handled.connection, AsyncSession)
