"""Deliveries inside the app's own transaction: on every driver, and through failures."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from tests.servers.fixtures_pg import Databases, sql
from tests.transactions.routes import ROUTES, Caller, Place
from tests.transactions.routes import Route as Way

from oncekey import AsyncSQLiteStore, PostgresStore, SQLiteStore, aconnect
from oncekey.errors import PermanentError, PolicyError, TransactionRefusedError
from oncekey.inbox import (
    Arrival,
    AsyncInbox,
    Delivery,
    DeliveryState,
    Filter,
    Route,
    TargetPolicy,
    open_inbox,
)
from oncekey.inbox.consume import Consumer

SOON = 30.0
QUICK = TargetPolicy(concurrency=1, first_delay=0.01, factor=1, jitter=0, tries=3)
EFFECTS = "CREATE TABLE effects (name text NOT NULL)"
WAYS = [way for way in ROUTES if way.what != "none"]


@pytest.fixture
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    file = str(tmp_path / "app.db")
    with contextlib.closing(sqlite3.connect(file)) as made:
        made.execute(EFFECTS)
        made.commit()
    needs = "way" in request.fixturenames and request.getfixturevalue("way").flavour == "sqlite"
    if needs:
        return Place("", file)
    url = request.getfixturevalue("postgres").database()
    sql(url, EFFECTS)
    return Place(url, file)


@contextlib.asynccontextmanager
async def inbox_in(place: Place, flavour: str) -> AsyncIterator[AsyncInbox]:
    """An inbox in the app's own database."""
    if flavour == "sqlite":
        opened = await open_inbox(f"sqlite:///{place.file}")
    else:
        opened = await open_inbox(place.url, create=True)
    try:
        yield opened
    finally:
        await opened.aclose()


def effects(place: Place, flavour: str) -> list[str]:
    if flavour == "pg":
        return sorted(row[0] for row in sql(place.url, "SELECT name FROM effects"))
    with contextlib.closing(sqlite3.connect(place.file)) as opened:
        return sorted(row[0] for row in opened.execute("SELECT name FROM effects"))


async def come(inbox: AsyncInbox, *keys: str, order: str | None = None) -> list[str]:
    return [
        (await inbox.ingest(Arrival("shop", key, "paid", b"{}", routes=(Route("app", order),)))).id
        for key in keys
    ]


async def drained(inbox: AsyncInbox) -> None:
    """Wait until nothing waits for the app any more."""
    async with asyncio.timeout(SOON):
        while any(depth.waiting for depth in await inbox.depths()):
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def consuming(consumer: Consumer) -> AsyncIterator[None]:
    task = asyncio.create_task(consumer.run())
    try:
        yield
    finally:
        await consumer.stop(grace=5)
        await task


def handler_of(caller: Caller) -> Callable[..., Any]:
    """A handler of this route's world, which writes the event's key."""
    if caller.route.world == "sync":

        def plain(connection: Any, delivery: Delivery) -> None:
            asyncio.run(caller.write(connection, delivery.event.key))  # it awaits nothing

        return plain

    async def awaits(connection: Any, delivery: Delivery) -> None:
        await caller.write(connection, delivery.event.key)

    return awaits


def options_of(way: Way) -> dict[str, Any]:
    """For connections that a handler uses in a thread of its own."""
    return {"check_same_thread": False} if way.library == "sqlite3" else {}


def passed(caller: Caller, opened: list[Any]) -> Any:
    """What the app passes as ``on``; Django's connections belong to the thread that uses them."""
    if caller.route.library != "django":
        return caller.on
    from tests.transactions.django_setup import connection_for

    def here() -> Any:
        connection = connection_for(caller.route, caller.place)
        if connection not in opened:
            connection.inc_thread_sharing()  # so that the test may close it
            opened.append(connection)
        return connection

    return here


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.id)
async def test_effect_and_finish_are_one_commit_on_every_driver(way: Way, place: Place) -> None:
    """With the inbox in the app's database each event has its effect once, and is finished."""
    async with inbox_in(place, way.flavour) as inbox:
        ids = await come(inbox, "a", "b")
        await come(inbox, "c", "d", order="7")
        opened: list[Any] = []
        async with Caller(way, place).opened(**options_of(way)) as caller:
            consumer = Consumer(inbox, "app", on=passed(caller, opened), policy=QUICK)
            consumer(handler_of(caller))
            async with consuming(consumer):
                await drained(inbox)
        for connection in opened:
            connection.close()
        assert effects(place, way.flavour) == ["a", "b", "c", "d"]
        found = await inbox.event(ids[0])
        assert found is not None
        assert [one.outcome for one in found.attempts] == ["delivered"]
        assert found.deliveries[0].state is DeliveryState.DELIVERED


ASYNCPG = Way("pg", "async", "asyncpg", "pool")
AIOSQLITE = Way("sqlite", "async", "aiosqlite", "connection")


@pytest.mark.parametrize("way", [ASYNCPG, AIOSQLITE], ids=lambda way: way.id)
async def test_a_handler_that_fails_leaves_no_effect(way: Way, place: Place) -> None:
    """A failure rolls the writes back and is retried; the last one is dead; permanent at once."""
    left = {"a": 1, "b": 99, "c": 99}
    async with inbox_in(place, way.flavour) as inbox, Caller(way, place).opened() as caller:
        await come(inbox, "a", "b", "c")
        consumer = Consumer(inbox, "app", on=caller.on, policy=QUICK)

        @consumer
        async def handle(connection: Any, delivery: Delivery) -> None:
            key = delivery.event.key
            await caller.write(connection, key)
            if left[key]:
                left[key] -= 1
                raise PermanentError("no") if key == "c" else RuntimeError("no")

        async with consuming(consumer):
            await drained(inbox)
        dead = (await inbox.dead_letters(Filter())).items
    assert effects(place, way.flavour) == ["a"]
    assert {one.error: one.attempts for one in dead} == {"RuntimeError": 3, "PermanentError": 1}


@pytest.mark.parametrize("way", [ASYNCPG, AIOSQLITE], ids=lambda way: way.id)
async def test_who_lost_the_delivery_commits_nothing(way: Way, place: Place) -> None:
    """A worker whose lease ran out, and whose delivery another finished, has no effect."""
    async with inbox_in(place, way.flavour) as inbox, Caller(way, place).opened() as caller:
        await come(inbox, "a")
        late = (await inbox.fetch({"app": 1}, 1))[0]
        async with asyncio.timeout(SOON):
            while not await inbox.fetch({"app": 1}, 60_000):
                await asyncio.sleep(0.01)
        consumer = Consumer(inbox, "app", on=caller.on, policy=QUICK)

        @consumer
        async def handle(connection: Any, delivery: Delivery) -> None:
            await caller.write(connection, "never")

        await consumer.send(late, 5_000)
    assert effects(place, way.flavour) == []


async def test_a_loop_of_ones_own(place: Place) -> None:
    """``async for`` gives deliveries; the block's writes and the finish are one commit."""
    async with inbox_in(place, "pg") as inbox, asyncpg.create_pool(place.url) as pool:
        await come(inbox, "a", "b", "c")
        consumer = Consumer(inbox, "app", on=pool, policy=QUICK)
        seen = []
        async with asyncio.timeout(SOON):
            async for taken in consumer:
                key = taken.delivery.event.key
                seen.append(key)
                if key == "a" and seen.count("a") == 1:
                    with contextlib.suppress(ValueError):
                        async with taken as connection:
                            await connection.execute("INSERT INTO effects VALUES ($1)", key)
                            raise ValueError("not yet")
                    continue
                if key == "b" and seen.count("b") == 1:
                    continue  # left alone: it comes again, and the try does not count
                async with taken as connection:
                    await connection.execute("INSERT INTO effects VALUES ($1)", key)
                if len(effects(place, "pg")) == 3:
                    break
        await drained(inbox)
    assert effects(place, "pg") == ["a", "b", "c"]
    assert seen.count("a") == seen.count("b") == 2


async def test_an_inbox_elsewhere_is_exactly_once_too(place: Place, tmp_path: Path) -> None:
    """With the inbox in a file and the app in PostgreSQL, a second delivery is a replay."""
    async with await open_inbox(f"sqlite:///{tmp_path / 'inbox.db'}") as inbox:
        ids = await come(inbox, "a", "b")
        with PostgresStore(place.url) as made:
            made.create_schema()
        async with aconnect(place.url) as store, asyncpg.create_pool(place.url) as pool:
            consumer = Consumer(inbox, "app", on=pool, store=store, policy=QUICK)

            @consumer
            async def handle(connection: Any, delivery: Delivery) -> None:
                await connection.execute("INSERT INTO effects VALUES ($1)", delivery.event.key)

            async with consuming(consumer):
                await drained(inbox)
                await inbox.replay(ids[0], actor="me")
                await drained(inbox)
        found = await inbox.event(ids[0])
        assert found is not None
        assert len(found.attempts) == 2
    assert effects(place, "pg") == ["a", "b"]


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_an_inbox_elsewhere_with_the_app_in_a_file(kind: str, tmp_path: Path) -> None:
    """Two files: the record in the app's own file makes a second delivery a replay."""
    app = Place("", str(tmp_path / "app.db"))
    with contextlib.closing(sqlite3.connect(app.file)) as made:
        made.execute(EFFECTS)
    async with await open_inbox(f"sqlite:///{tmp_path / 'inbox.db'}") as inbox:
        ids = await come(inbox, "a")
        way = Way("sqlite", kind, "sqlite3" if kind == "sync" else "aiosqlite", "none")
        store: Any = SQLiteStore(app.file) if kind == "sync" else AsyncSQLiteStore(app.file)
        consumer = Consumer(inbox, "app", on=None, store=store, policy=QUICK)
        consumer(handler_of(Caller(way, app)))
        try:
            async with consuming(consumer):
                await drained(inbox)
                await inbox.replay(ids[0], actor="me")
                await drained(inbox)
        finally:
            store.close() if kind == "sync" else await store.aclose()
    assert effects(app, "sqlite") == ["a"]


async def test_another_database_is_refused(place: Place, postgres: Databases) -> None:
    """A connection to a database that is not the inbox's can't be one commit, and is told so."""
    other = postgres.database()
    await (await open_inbox(other, create=True)).aclose()
    async with inbox_in(place, "pg") as inbox, asyncpg.create_pool(other) as pool:
        await come(inbox, "a")
        consumer = Consumer(inbox, "app", on=pool, policy=QUICK)

        @consumer
        async def handle(connection: Any, delivery: Delivery) -> None:
            raise AssertionError("never called")

        async with asyncio.timeout(SOON):
            with pytest.raises(TransactionRefusedError, match="another database than the inbox's"):
                await consumer.run()
            async for taken in consumer:  # it is still there: no event is given up for that
                with pytest.raises(TransactionRefusedError, match="pass store="):
                    await taken.__aenter__()
                break
        assert (await inbox.dead_letters(Filter())).items == ()
        assert [one.waiting for one in await inbox.depths()] == [1]


async def test_an_entity_that_is_handled_stops_no_other_event(place: Place) -> None:
    """While an ordered handler runs, its entity's next event comes in, and is handled after it."""
    inside, go_on = asyncio.Event(), asyncio.Event()
    seen = []
    async with inbox_in(place, "pg") as inbox, asyncpg.create_pool(place.url) as pool:
        await come(inbox, "a", order="7")
        consumer = Consumer(inbox, "app", on=pool, policy=TargetPolicy(concurrency=2))

        @consumer
        async def handle(connection: Any, delivery: Delivery) -> None:
            seen.append(delivery.event.key)
            inside.set()
            await go_on.wait()

        async with asyncio.timeout(SOON), consuming(consumer):
            await inside.wait()
            await come(inbox, "b", order="7")
            await come(inbox, "c")
            assert seen[0] == "a"
            assert "b" not in seen
            go_on.set()
            await drained(inbox)
    assert sorted(seen) == ["a", "b", "c"]


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_an_old_snapshot_is_refused_for_what_is_in_order(
    place: Place, isolation: str
) -> None:
    """Such a transaction would not see who waits for it, and leave that one waiting for ever."""

    async def begun(connection: asyncpg.Connection[Any]) -> None:
        level = isolation.replace("_", " ")
        await connection.execute(f"SET default_transaction_isolation = '{level}'")

    async with inbox_in(place, "pg") as inbox, asyncpg.create_pool(place.url, setup=begun) as pool:
        await come(inbox, "a", order="7")
        consumer = Consumer(inbox, "app", on=pool, policy=QUICK)

        @consumer
        async def handle(connection: Any, delivery: Delivery) -> None: ...

        async with asyncio.timeout(SOON):
            with pytest.raises(TransactionRefusedError, match="use READ COMMITTED"):
                await consumer.run()


async def test_each_target_of_an_event_has_its_own_effect(place: Place, tmp_path: Path) -> None:
    """With the inbox elsewhere two consumers share an app's store, and no record; for long."""
    async with await open_inbox(f"sqlite:///{tmp_path / 'inbox.db'}") as inbox:
        routes = (Route("billing"), Route("ledger"))
        await inbox.ingest(Arrival("shop", "a", "paid", b"{}", routes=routes))
        with PostgresStore(place.url) as made:
            made.create_schema()
        async with aconnect(place.url) as store, asyncpg.create_pool(place.url) as pool:
            async with contextlib.AsyncExitStack() as running:
                for name in ("billing", "ledger"):
                    consumer = Consumer(
                        inbox, name, on=pool, store=store, policy=QUICK, remember=90 * 86_400
                    )

                    async def handle(connection: Any, delivery: Delivery) -> None:
                        await connection.execute("INSERT INTO effects VALUES ($1)", delivery.target)

                    consumer(handle)
                    await running.enter_async_context(consuming(consumer))
                await drained(inbox)
    assert effects(place, "pg") == ["billing", "ledger"]
    days = "SELECT (expires_at / 1000 - extract(epoch FROM now())) / 86400 FROM oncekey_records"
    assert [round(row[0]) for row in sql(place.url, days)] == [90, 90]


def test_a_record_that_ends_too_soon_is_refused(tmp_path: Path) -> None:
    """A consumer's record must outlive a redelivery: a day at the least."""
    with pytest.raises(PolicyError, match="remember"):
        Consumer(None, "app", on=None, remember=60)  # type: ignore[arg-type]
