"""What can't be safe is refused with the reason and the remedy, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import pytest_asyncio
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from tests.servers.postgres import Postgres
from tests.transactions.conftest import EFFECTS, Witness, close_store, make_store
from tests.transactions.routes import ROUTES, Caller, Place, Route, block, done

from oncekey import (
    AsyncSQLiteStore,
    IdempotencyStore,
    MemoryBackend,
    MemoryStore,
    Once,
    PgBackend,
    PgStore,
    SQLiteStore,
    StoreConfigError,
    StoreError,
    StoreReadOnlyError,
    TransactionRefusedError,
)
from oncekey.errors import ClaimLostError


def some(**wanted: str) -> Any:
    """Routes by their fields; ``library`` by how it starts."""
    found = [
        route
        for route in ROUTES
        if route.what != "none"
        and all(getattr(route, field).startswith(value) for field, value in wanted.items())
    ]
    return pytest.mark.parametrize("route", found, ids=lambda route: route.id)


def joins(**wanted: str) -> Any:
    mark = some(**wanted)
    found = [route for route in mark.args[1] if route.joins]
    return pytest.mark.parametrize("route", found, ids=lambda route: route.id)


class Refusal:
    """Runs a block that must not be entered, and looks at what it leaves."""

    def __init__(self, store: Any, witness: Witness, route: Route, name: str) -> None:
        self.store, self.witness, self.route, self.name = store, witness, route, name

    async def __call__(
        self,
        on: Any,
        *words: str,
        error: type[StoreError] = TransactionRefusedError,
        held: bool = False,
    ) -> None:
        with pytest.raises(error) as caught:
            async with block(self.store, self.name, on=on, wait=0):
                pytest.fail("ran")
        for word in words:
            assert word in str(caught.value)
        if not held:
            for flavour in ("pg", "sqlite"):
                self.witness.all_is_tidy(flavour)
        for flavour in ("pg", "sqlite"):
            assert self.witness.record(flavour, self.name) is None

    async def free(self, on: Any, store: Any = None) -> None:
        """The key is free: a proper connection gets it."""
        async with block(store or self.store, self.name, on=on, wait=0) as tx:
            assert not tx.replayed


@pytest.fixture
def refused(store: Any, witness: Witness, route: Route, name: str) -> Refusal:
    return Refusal(store, witness, route, name)


# Autocommit


@some(flavour="pg", library="psycopg", what="connection")
async def test_psycopg_connection_in_autocommit_is_refused(
    route: Route, place: Place, refused: Refusal, witness: Witness, name: str
) -> None:
    """Each statement would commit alone; with a transaction open on it the connection is fine."""
    async with Caller(route, place).opened(autocommit=True) as caller:
        await refused(caller.on, "autocommit", "Turn autocommit off")
        await caller.run(caller.on, "BEGIN")
        async with block(refused.store, name, on=caller.on) as tx:
            await caller.write(tx.connection, name)
        await caller.run(caller.on, "ROLLBACK")
        assert witness.record("pg", name) is None
        await caller.run(caller.on, "BEGIN")
        async with block(refused.store, name, on=caller.on) as tx:
            await caller.write(tx.connection, name)
        await caller.run(caller.on, "COMMIT")
        assert witness.effects("pg", name) == 1


@some(flavour="pg", library="sqlalchemy")
async def test_engine_in_autocommit_is_refused(
    route: Route, place: Place, refused: Refusal
) -> None:
    """SQLAlchemy's AUTOCOMMIT makes its begin a pretence, whatever was made of the engine."""
    async with Caller(route, place).opened(isolation_level="AUTOCOMMIT") as caller:
        await refused(caller.on, "autocommit", "Turn autocommit off")
        if route.borrowed:
            assert caller.borrowed() == 0
        else:
            assert not caller.in_transaction()


@joins(flavour="pg", library="sqlalchemy")
async def test_one_connection_in_autocommit_is_refused(
    route: Route, place: Place, refused: Refusal
) -> None:
    """AUTOCOMMIT set on this connection or session alone, before or in its transaction."""
    async with Caller(route, place).opened() as caller:
        if route.what == "connection":
            await done(caller.on.execution_options(isolation_level="AUTOCOMMIT"))
        else:
            options = {"isolation_level": "AUTOCOMMIT"}
            await done(caller.on.connection(execution_options=options))
        await refused(caller.on, "autocommit")


@some(flavour="sqlite", library="sqlalchemy")
async def test_sqlite_engine_in_autocommit_is_refused_or_atomic(
    route: Route, place: Place, store: Any, witness: Witness, name: str
) -> None:
    """With SQLAlchemy's AUTOCOMMIT on SQLite an error never leaves an effect or a claim."""
    async with Caller(route, place).opened(isolation_level="AUTOCOMMIT") as caller:

        async def work() -> None:
            async with block(store, name, on=caller.on) as tx:
                await caller.write(tx.connection, name)
                raise KeyError

        with pytest.raises((KeyError, TransactionRefusedError)):
            await work()
    assert witness.effects("sqlite", name) == 0
    assert witness.record("sqlite", name) is None


# Another database


@pytest.fixture(scope="session")
def elsewhere(tx_server: Postgres, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Place]:
    """Another database and another file, with and without the tables of oncekey."""
    found = {}
    folder = tmp_path_factory.mktemp("elsewhere")
    for kind in ("with tables", "without tables"):
        url, file = tx_server.database(), str(folder / f"{kind}.db")
        with psycopg.connect(url, autocommit=True) as admin:
            admin.execute(EFFECTS)
        raw = sqlite3.connect(file)
        raw.execute(EFFECTS)
        raw.close()
        if kind == "with tables":
            with PgStore(url) as store:
                store.create_schema()
            SQLiteStore(file).close()
        found[kind] = Place(url, file)
    return found


@some()
@pytest.mark.parametrize("kind", ["with tables", "without tables"])
async def test_another_database_is_refused(
    route: Route, elsewhere: dict[str, Place], refused: Refusal, name: str, kind: str
) -> None:
    """A claim in another database protects nothing; the caller's transaction there goes on."""
    there = elsewhere[kind]
    onlooker = Witness(there)
    error: Any = TransactionRefusedError
    if route.flavour == "pg" and kind == "without tables":
        error = StoreConfigError
    async with Caller(route, there).opened() as caller:
        await refused(caller.on, error=error)
        assert onlooker.loose_ends(route.flavour) == []
        if route.joins:
            assert not caller.in_transaction()
            await caller.begin()
            await caller.write(caller.on, name)
            await refused(caller.on, error=error)
            assert caller.in_transaction()
            await caller.commit()
            assert onlooker.effects(route.flavour, name) == 1
        else:
            assert caller.borrowed() == 0
    assert onlooker.loose_ends(route.flavour) == []
    onlooker.close()


@some()
async def test_another_kind_of_database_is_refused(
    route: Route, place: Place, witness: Witness, name: str
) -> None:
    """PostgreSQL's connection to a SQLite store, and the reverse; the caller's work survives it."""
    flavour = "sqlite" if route.flavour == "pg" else "pg"
    other = make_store(Route(flavour, route.world, route.library, "none"), place)
    refused = Refusal(other, witness, route, name)
    async with Caller(route, place).opened() as caller:
        await refused(caller.on, "one database")
        if route.joins:
            await caller.begin()
            await caller.write(caller.on, name)
            await refused(caller.on, "one database", held=True)
            assert caller.in_transaction()
            await caller.commit()
            assert witness.effects(route.flavour, name) == 1
    await close_store(other)


# The state of a caller's transaction


@joins(flavour="pg")
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_open_transaction_with_an_old_snapshot_is_refused(
    route: Route, caller: Caller, refused: Refusal, witness: Witness, name: str, level: str
) -> None:
    """It can't see what others have committed since; a replay that it can see it gets."""
    async with block(refused.store, f"{name} done", on=caller.on) as tx:
        tx.answer = 1
    if route.library != "psycopg":
        await caller.begin()
    await caller.run(caller.on, f"SET TRANSACTION ISOLATION LEVEL {level}")
    await caller.write(caller.on, name)
    await refused(caller.on, level.lower(), "READ COMMITTED", held=True)
    async with block(refused.store, f"{name} done", on=caller.on) as tx:
        assert tx.replayed
    assert caller.in_transaction()
    await caller.commit()
    assert witness.effects("pg", name) == 1
    await refused.free(caller.on)


@joins(flavour="pg")
async def test_transaction_that_has_failed_is_refused(
    route: Route, caller: Caller, refused: Refusal
) -> None:
    """After an error PostgreSQL takes nothing but a rollback; then the connection is fine."""
    if route.library == "django":
        from django.db import transaction

        with transaction.atomic(caller.on.alias):
            with contextlib.suppress(Exception):
                await caller.run(caller.on, "SELECT * FROM no_such_table")
            await refused(caller.on, "has failed already", "roll it back", held=True)
            transaction.set_rollback(True, caller.on.alias)
    else:
        await caller.begin()
        with contextlib.suppress(Exception):
            await caller.run(caller.on, "SELECT * FROM no_such_table")
        await refused(caller.on, "has failed already", "roll it back", held=True)
        await caller.rollback()
    assert not caller.in_transaction()
    await refused.free(caller.on)


@joins(flavour="pg")
async def test_read_only_transaction_is_refused(
    route: Route, caller: Caller, refused: Refusal
) -> None:
    """Nothing can be claimed in it; the caller's transaction goes on."""
    if route.library != "psycopg":
        await caller.begin()
    await caller.run(caller.on, "SET TRANSACTION READ ONLY")
    await refused(caller.on, "read-only", error=StoreReadOnlyError, held=True)
    assert caller.in_transaction()
    await caller.run(caller.on, "SELECT 1")
    await caller.rollback()
    await refused.free(caller.on)


@some(flavour="pg", library="asyncpg", what="connection")
async def test_asyncpg_transaction_begun_by_hand_is_refused(
    route: Route, caller: Caller, refused: Refusal, witness: Witness, name: str
) -> None:
    """asyncpg does not know of a BEGIN that was sent as a statement."""
    await caller.run(caller.on, "BEGIN")
    await caller.write(caller.on, name)
    await refused(caller.on, "BEGIN", "connection.transaction()", held=True)
    assert caller.in_transaction()
    await caller.run(caller.on, "COMMIT")
    assert witness.effects("pg", name) == 1
    await refused.free(caller.on)


@some(flavour="pg", library="asyncpg", what="connection")
async def test_closed_asyncpg_connection_is_named_as_such(
    route: Route, place: Place, refused: Refusal
) -> None:
    """A connection that is closed is not taken for one with a transaction of its own."""
    async with Caller(route, place).opened() as caller:
        await caller.on.close()
        with pytest.raises(StoreError) as caught:
            async with block(refused.store, refused.name, on=caller.on, wait=0):
                pytest.fail("ran")
    assert "BEGIN" not in str(caught.value)


# The wrong thing


@pytest.fixture
def sync_things(place: Place) -> Iterator[list[Any]]:
    engine = sa.create_engine(place.url.replace("postgresql:", "postgresql+psycopg:"))
    with psycopg.connect(place.url) as connection, engine.connect() as alchemy:
        with contextlib.closing(sqlite3.connect(place.file)) as lite:
            yield [connection, engine, alchemy, Session(engine), sessionmaker(engine), lite]
    engine.dispose()


@pytest_asyncio.fixture(loop_scope="session")
async def async_things(place: Place) -> AsyncIterator[list[Any]]:
    import aiosqlite
    import asyncpg

    engine = create_async_engine(place.url.replace("postgresql:", "postgresql+asyncpg:"))
    connection = await psycopg.AsyncConnection.connect(place.url)
    raw = await asyncpg.connect(place.url)
    alchemy = await engine.connect()
    session = async_sessionmaker(engine)()
    async with aiosqlite.connect(place.file) as lite:
        yield [
            *(connection, raw, engine, alchemy, session, async_sessionmaker(engine), lite),
            *(session.sync_session, alchemy.sync_connection),
        ]
    await session.close()
    await alchemy.close()
    await raw.close()
    await connection.close()
    await engine.dispose()


async def test_sync_store_refuses_what_is_async(
    place: Place, witness: Witness, name: str, async_things: list[Any]
) -> None:
    """An asynchronous connection can't be used without awaiting, and is told so."""
    for store in (PgStore(place.url), SQLiteStore(place.file)):
        for on in async_things[:-2]:  # what lies inside SQLAlchemy's async objects is no mistake
            with pytest.raises(TransactionRefusedError, match=r"connection|async"):
                with store.transaction(name, on=on):
                    pytest.fail("ran")
        store.close()
    witness.all_is_tidy()
    assert witness.record("pg", name) is None


async def test_async_store_refuses_what_is_sync(
    place: Place, witness: Witness, name: str, sync_things: list[Any]
) -> None:
    """A synchronous connection would stop the loop, and is told so."""
    for store in (PgBackend(place.url), AsyncSQLiteStore(place.file)):
        for on in sync_things:
            with pytest.raises(TransactionRefusedError, match="is sync, this store is async"):
                async with store.transaction(name, on=on):
                    pytest.fail("ran")
        await store.aclose()
    witness.all_is_tidy()
    assert witness.record("pg", name) is None


async def test_what_is_no_connection_is_refused(place: Place, name: str) -> None:
    """Anything else is refused with a list of what would do."""
    engine = create_async_engine(place.url.replace("postgresql:", "postgresql+asyncpg:"))
    with PgStore(place.url) as store:
        for on in ("postgresql://x", 7, object(), Session()):
            with pytest.raises(TransactionRefusedError, match=r"pass|bind"):
                with store.transaction(name, on=on, wait=0):
                    pytest.fail("ran")
    backend = PgBackend(place.url)
    for thing in (object(), engine.connect()):  # the latter was never awaited
        with pytest.raises(TransactionRefusedError, match=r"pass|await|start"):
            async with backend.transaction(name, on=thing, wait=0):
                pytest.fail("ran")
    await backend.aclose()
    await engine.dispose()


def test_scoped_session_is_as_good_as_its_session(
    place: Place, witness: Witness, name: str
) -> None:
    """What Flask applications have for a session works like one."""
    engine = sa.create_engine(place.url.replace("postgresql:", "postgresql+psycopg:"))
    scoped = scoped_session(sessionmaker(engine))
    insert = sa.text("INSERT INTO effects (name) VALUES (:name)")
    with PgStore(place.url) as store:
        for _ in range(2):
            with store.transaction(name, on=scoped) as tx:
                if not tx.replayed:
                    tx.session.execute(insert, {"name": name})
        assert witness.effects("pg", name) == 1
        with store.transaction(f"{name} 2", on=scoped) as tx:
            scoped.execute(insert, {"name": name})
        assert witness.effects("pg", name) == 2
    scoped.remove()
    engine.dispose()


async def test_memory_has_no_transactions() -> None:
    """A store without a database says so, when the handler is wrapped or the block is opened."""
    with pytest.raises(TransactionRefusedError, match="PostgreSQL or SQLite"):
        Once(MemoryStore()).transaction("k")
    with pytest.raises(TransactionRefusedError, match="PostgreSQL or SQLite"):
        Once(MemoryStore())(key="k", transactional=True)(lambda k: 1)
    for backend in (MemoryStore(), MemoryBackend()):
        with pytest.raises(TransactionRefusedError, match="PostgreSQL or SQLite"):
            IdempotencyStore(backend).wrap(transactional=True)(lambda params, context=None: {})


# Misuse from within


every_route = pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.id)


@every_route
async def test_nested_block_for_the_same_key_is_refused(
    route: Route, store: Any, caller: Caller, witness: Witness, name: str
) -> None:
    """It would wait for itself; the outer block may go on."""
    async with block(store, name, on=caller.on) as tx:
        with pytest.raises(TransactionRefusedError, match="open already"):
            async with block(store, name, on=caller.on):
                pytest.fail("ran")
        await caller.write(tx.connection, name)
    assert witness.effects(route.flavour, name) == 1


def test_same_key_in_another_store_is_another_key(place: Place, name: str) -> None:
    """Blocks of two stores nest: their keys have nothing to do with each other."""
    with PgStore(place.url) as one, SQLiteStore(place.file) as other:
        with one.transaction(name), other.transaction(name) as tx:
            assert not tx.replayed


def test_nested_block_on_a_second_connection_to_sqlite_is_refused_at_once(
    place: Place, name: str
) -> None:
    """A file has one writer: an inner block on another connection would wait for the outer one."""
    with SQLiteStore(place.file) as store:
        with store.transaction(name):
            with pytest.raises(TransactionRefusedError, match="on="):
                with store.transaction(f"{name} inner"):
                    pytest.fail("ran")


ENDS = ["api commit", "api rollback", "COMMIT", "ROLLBACK"]


def begins_by_itself(route: Route) -> bool:
    """Whether a statement after the end of a transaction begins another one by itself.

    Without that it is committed at once, by nobody's doing but the handler's own.
    """
    if route.what == "none" or route.library == "asyncpg" or route.library.endswith("+asyncpg"):
        return False
    return route != Route("sqlite", "sync", "django", "connection")


def settled(witness: Witness, flavour: str, name: str) -> None:
    """An effect never stands there without a record that keeps others from repeating it."""
    assert (witness.record(flavour, name) is not None) == bool(witness.effects(flavour, name))


@every_route
@pytest.mark.parametrize("how", ENDS)
async def test_handler_that_ends_the_transaction_itself_is_refused(
    route: Route, store: Any, caller: Caller, witness: Witness, name: str, how: str
) -> None:
    """It is told, what it did after that is undone, and the connection is left as it was."""
    flavour, more = route.flavour, f"{name} more"

    async def work() -> None:
        async with block(store, name, on=caller.on) as tx:
            await caller.write(tx.connection, name)
            if how.startswith("api"):
                if not hasattr(tx.connection, how[4:]):
                    pytest.skip("this library has no such method")
                await done(getattr(tx.connection, how[4:])())
            else:
                await caller.run(tx.connection, how)
            if begins_by_itself(route):
                await caller.write(tx.connection, more)
            tx.answer = 1

    with pytest.raises(Exception) as caught:
        await work()
    ours = isinstance(caught.value, (TransactionRefusedError, ClaimLostError))
    assert ours or type(caught.value).__name__ in ("ProgrammingError", "TransactionManagementError")
    assert witness.effects(flavour, more) == 0
    if route.joins:
        assert not caller.in_transaction()
    if route.borrowed:
        assert caller.borrowed() == 0
    witness.all_is_tidy(flavour)
    settled(witness, flavour, name)
    if how.lower().endswith("rollback"):
        assert witness.effects(flavour, name) == 0
        async with block(store, name, on=caller.on, wait=0) as tx:
            assert not tx.replayed
            await caller.write(tx.connection, name)
        assert witness.effects(flavour, name) == 1
    async with block(store, f"{name} next", on=caller.on, wait=0) as tx:
        await caller.write(tx.connection, f"{name} next")
    assert witness.effects(flavour, f"{name} next") == 1


@joins()
@pytest.mark.parametrize("how", ["COMMIT", "ROLLBACK"])
async def test_block_that_ends_the_callers_transaction_is_refused(
    route: Route, store: Any, caller: Caller, witness: Witness, name: str, how: str
) -> None:
    """Nothing that came after the transaction was ended by hand is committed by oncekey."""
    await caller.begin()

    async def work() -> None:
        async with block(store, name, on=caller.on) as tx:
            await caller.write(tx.connection, name)
            await caller.run(tx.connection, how)
            if begins_by_itself(route):
                await caller.write(tx.connection, f"{name} more")
            tx.answer = 1

    with pytest.raises(Exception) as caught:
        await work()
    assert not isinstance(caught.value, AssertionError)
    with contextlib.suppress(Exception):
        await caller.rollback()
    assert witness.effects(route.flavour, f"{name} more") == 0
    settled(witness, route.flavour, name)


async def test_async_generator_that_is_closed_inside_a_block_rolls_back(
    place: Place, witness: Witness, name: str
) -> None:
    """Closing a generator that stands in a block ends its transaction and frees key and pool."""
    route = Route("pg", "async", "asyncpg", "pool")
    backend = PgBackend(place.url)
    async with Caller(route, place).opened() as caller:

        async def dependency() -> AsyncIterator[Any]:
            async with backend.transaction(name, on=caller.on) as tx:
                await caller.write(tx.connection, name)
                yield tx

        opened = dependency()
        await anext(opened)
        await opened.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(10):
            while caller.borrowed():
                await asyncio.sleep(0.01)
        assert witness.effects("pg", name) == 0
        witness.all_is_tidy()
        async with backend.transaction(name, on=caller.on, wait=0) as tx:
            assert not tx.replayed
    await backend.aclose()


def test_refused_file_names_no_secret(tmp_path: Path, place: Place) -> None:
    """A refusal never shows a password."""
    url = place.url.replace("postgres@", "postgres:hunter2@")
    with PgStore(url) as store, contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as lite:
        with pytest.raises(TransactionRefusedError) as caught:
            with store.transaction("k", on=lite):
                pytest.fail("ran")
    assert "hunter2" not in repr(caught.value)
