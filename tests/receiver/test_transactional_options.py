"""Options and handlers of transactional receivers that can't work are refused before a delivery."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from oncekey import AsyncOnce, IdempotencyStore, Once, PolicyError, TransactionRefusedError, connect
from oncekey.receiver import AsyncWebhookReceiver, ReceiverSettings, WebhookReceiver
from oncekey.signatures import provider

STRIPE = provider("stripe", secret="whsec_test")


class Makes(async_sessionmaker[AsyncSession]):
    """One of somebody's own."""


class Works(AsyncSession):
    """One of somebody's own."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'shop.db'}"


@pytest.mark.parametrize("kind", [WebhookReceiver, AsyncWebhookReceiver])
def test_a_connection_without_transactional_is_refused(kind: Any, url: str) -> None:
    """Who passes on= believes in exactly once, and has at least once."""
    for make in (lambda: kind(STRIPE, url, on=object), lambda: ReceiverSettings(on=object)):
        with pytest.raises(PolicyError, match=r"on= needs transactional=True"):
            make()


@pytest.mark.parametrize("kind", [Once, AsyncOnce])
def test_a_connection_of_a_function_without_transactional_is_refused(kind: Any, url: str) -> None:
    """The same of ``@once``, where the decorator is made."""
    with pytest.raises(PolicyError, match=r"on= needs transactional=True"):
        kind(url)(key="order", on=object)


def test_a_connection_of_a_handler_without_transactional_is_refused(url: str) -> None:
    """The same of ``wrap``, which also tells a connection of the other world."""
    store = IdempotencyStore(connect(url))
    with pytest.raises(PolicyError, match=r"on= needs transactional=True"):
        store.wrap(lambda params: None, on=object)
    on = create_async_engine("sqlite+aiosqlite://")
    with pytest.raises(TransactionRefusedError, match="pass an Engine"):
        store.wrap(lambda params: None, transactional=True, on=on)


@pytest.mark.parametrize("kind", [WebhookReceiver, AsyncWebhookReceiver])
def test_a_handler_that_can_not_be_called_is_refused_when_it_is_given(kind: Any, url: str) -> None:
    """One that wants a transaction is told of ``transactional``, the others how they are called."""

    def wants_two(event: Any, tx: Any) -> None: ...
    def wants_none() -> None: ...
    def wants_three(event: Any, tx: Any, more: Any) -> None: ...
    def may_have_two(event: Any, tx: Any = None) -> None: ...

    plain, exact = kind(STRIPE, url), kind(STRIPE, url, transactional=True)
    with pytest.raises(PolicyError, match=r"wants_two wants .* transactional=True"):
        plain.on("a")(wants_two)
    for receiver in (plain, exact):
        receiver.on("b")(may_have_two)
        for handler, call in (
            (wants_none, r"\(event\)"),
            (wants_three, r"\(event(, tx)?\)"),
        ):
            with pytest.raises(PolicyError, match=rf"can't be called as handler{call}"):
                receiver.on("c")(handler)
    exact.on("a")(wants_two)
    exact.on("c")(lambda event: None)


def test_what_is_sync_is_refused_by_an_async_receiver(url: str) -> None:
    """At once, and with the word that is to be written instead."""
    engine, plain = sa.create_engine("sqlite://"), sqlite3.connect(":memory:")
    for on, word in (
        (sessionmaker(engine), "pass an async_sessionmaker"),
        (engine, "pass an AsyncEngine"),
        (scoped_session(sessionmaker(engine)), "pass an async_scoped_session"),
        (Session(engine), "pass an AsyncSession"),
        (plain, "WebhookReceiver"),
    ):
        with pytest.raises(TransactionRefusedError, match=word):
            AsyncWebhookReceiver(STRIPE, url, transactional=True, on=on)
        with pytest.raises(TransactionRefusedError, match="Once"):
            AsyncOnce(url)(key="order", transactional=True, on=on)
        WebhookReceiver(STRIPE, url, transactional=True, on=on)
    plain.close()


async def test_what_is_async_is_refused_by_a_sync_receiver(url: str) -> None:
    """The other way round; of a function nothing is known before it is called."""
    engine = create_async_engine("sqlite+aiosqlite://")
    maker = async_sessionmaker(engine)
    for on, word in (
        (maker, "pass a sessionmaker"),
        (Makes(engine), "AsyncWebhookReceiver"),
        (Works(engine), "AsyncWebhookReceiver"),
        (engine, "pass an Engine"),
        (async_scoped_session(maker, lambda: 1), "pass a scoped_session"),
        (AsyncSession(engine), "AsyncWebhookReceiver"),
    ):
        with pytest.raises(TransactionRefusedError, match=word):
            WebhookReceiver(STRIPE, url, transactional=True, on=on)
        AsyncWebhookReceiver(STRIPE, url, transactional=True, on=on)
    WebhookReceiver(STRIPE, url, transactional=True, on=lambda: maker)
    await engine.dispose()


async def test_pools_of_drivers_are_told_apart(url: str) -> None:
    """Of asyncpg and psycopg, before they have connected to anything."""
    asyncpg = pytest.importorskip("asyncpg")
    pools = pytest.importorskip("psycopg_pool")
    for on in (
        pools.AsyncConnectionPool("", open=False),
        asyncpg.create_pool("postgresql://localhost"),
    ):
        with pytest.raises(TransactionRefusedError, match="is async"):
            WebhookReceiver(STRIPE, url, transactional=True, on=on)
    pool = pools.ConnectionPool("", open=False)
    with pytest.raises(TransactionRefusedError, match="pass an AsyncConnectionPool"):
        AsyncWebhookReceiver(STRIPE, url, transactional=True, on=pool)
