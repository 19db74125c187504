"""What a PostgreSQL store runs on: URLs, pools, engines, and a pooler between."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.servers.fixtures_pg import TERMS, eventually, key, sessions, sql
from tests.servers.pooler import TransactionPooler
from tests.servers.postgres import Postgres
from tests.servers.sources_pg import ASYNC, SYNC, _async_engine, label

from oncekey._core.flows import new_owner
from oncekey.errors import StoreClosedError, StoreError, StoreUnavailableError
from oncekey.models import State, Verdict
from oncekey.stores.postgres import AsyncPostgresStore, PostgresStore

Make = Callable[..., Any]
FIRST = ["001 records (pre)", "002 notes (pre)"]


def use(store: PostgresStore, name: str = "k") -> None:
    won = store.claim(key(name), owner := new_owner(), b"f", TERMS)
    assert won.verdict is Verdict.WON
    assert store.complete(key(name), owner, won.fence, b"j1", TERMS)


async def ause(store: AsyncPostgresStore, name: str = "k") -> None:
    won = await store.claim(key(name), owner := new_owner(), b"f", TERMS)
    assert won.verdict is Verdict.WON
    assert await store.complete(key(name), owner, won.fence, b"j1", TERMS)


# Opening and closing


def test_a_sync_store_closes_what_it_opened(pg_url: str) -> None:
    """After close nobody is connected, not even the listener, and a call says that it is closed."""
    store = PostgresStore(pg_url)
    use(store)
    store.wait(key("k2"), 0.05)
    eventually(lambda: any("LISTEN" in query for _, query in sessions(pg_url)), "listening")
    assert len(sessions(pg_url)) == 4  # claims, completions, the rest, and the listener
    store.close()
    store.close()
    eventually(lambda: not sessions(pg_url), "closing")
    with pytest.raises(StoreClosedError, match="connect again"):
        store.claim(key("k3"), new_owner(), b"", TERMS)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_an_async_store_closes_what_it_opened(pg_url: str, driver: str) -> None:
    """After aclose nobody is connected, not even the listener, and a call says so."""
    store = AsyncPostgresStore(pg_url, driver=driver)
    await ause(store)
    await store.wait(key("k2"), 0.05)
    await asyncio.to_thread(
        eventually, lambda: any("LISTEN" in query for _, query in sessions(pg_url)), "listening"
    )
    assert len(sessions(pg_url)) == 4
    await store.aclose()
    await store.aclose()
    await asyncio.to_thread(eventually, lambda: not sessions(pg_url), "closing")
    with pytest.raises(StoreClosedError, match="connect again"):
        await store.claim(key("k3"), new_owner(), b"", TERMS)


@pytest.mark.parametrize("source", SYNC[1:], ids=label)
def test_what_a_sync_store_was_given_stays_open(source: Make, pg_url: str) -> None:
    """Closing a store leaves a pool or an engine as it was; another store can go on with it."""
    with source(pg_url) as (given, options):
        with PostgresStore(given, **options) as store:
            use(store)
        with PostgresStore(given, **options) as store:
            assert store.read(key("k")) is not None


@pytest.mark.parametrize("source", ASYNC[2:], ids=label)
async def test_what_an_async_store_was_given_stays_open(source: Make, pg_url: str) -> None:
    """Closing a store leaves a pool or an engine as it was; another store can go on with it."""
    async with source(pg_url) as (given, options):
        async with AsyncPostgresStore(given, **options) as store:
            await ause(store)
        async with AsyncPostgresStore(given, **options) as store:
            assert await store.read(key("k")) is not None


def test_a_pool_gets_its_connections_back_as_they_were(pg_url: str) -> None:
    """The caller's own transactions go on as before: not in autocommit, nothing left open."""
    from psycopg_pool import ConnectionPool

    with ConnectionPool(pg_url, min_size=1, max_size=1) as pool, PostgresStore(pool) as store:
        use(store)
        with pool.connection() as connection:
            assert not connection.autocommit
            assert connection.info.transaction_status.name == "IDLE"


# Making the schema through any of them


@pytest.mark.parametrize("source", SYNC, ids=label)
def test_a_sync_store_makes_the_schema(source: Make, postgres: Postgres) -> None:
    """create_schema works on whatever the store was given, and leaves no transaction open."""
    url = postgres.database()
    with source(url) as (given, options), PostgresStore(given, **options) as store:
        assert store.create_schema() == FIRST
        assert store.create_schema() == []
        use(store)


@pytest.mark.parametrize("source", ASYNC, ids=label)
async def test_an_async_store_makes_the_schema(source: Make, postgres: Postgres) -> None:
    """create_schema works on whatever the store was given, and leaves no transaction open."""
    async with source(postgres.database()) as (given, options):
        async with AsyncPostgresStore(given, **options) as store:
            assert await store.create_schema() == FIRST
            assert await store.create_schema() == []
            await ause(store)


@pytest.mark.parametrize("source", SYNC, ids=label)
def test_a_schema_that_fails_halfway_leaves_nothing(source: Make, postgres: Postgres) -> None:
    """A table in the way ends create_schema with an error, and nothing of it stays."""
    url = postgres.database()
    sql(url, "CREATE TABLE oncekey_state (wrong int)")
    with source(url) as (given, options), PostgresStore(given, **options) as store:
        with pytest.raises(StoreError):
            store.create_schema()
        left = sql(url, "SELECT relname FROM pg_class WHERE relname LIKE 'oncekey%'")
        assert left == [("oncekey_state",)]
        sql(url, "DROP TABLE oncekey_state")
        assert store.create_schema() == FIRST


@pytest.mark.parametrize("source", ASYNC, ids=label)
async def test_an_async_schema_that_fails_halfway_leaves_nothing(
    source: Make, postgres: Postgres
) -> None:
    """A table in the way ends create_schema with an error, and nothing of it stays."""
    url = postgres.database()
    sql(url, "CREATE TABLE oncekey_state (wrong int)")
    async with source(url) as (given, options):
        async with AsyncPostgresStore(given, **options) as store:
            with pytest.raises(StoreError):
                await store.create_schema()
            left = sql(url, "SELECT relname FROM pg_class WHERE relname LIKE 'oncekey%'")
            assert left == [("oncekey_state",)]
            sql(url, "DROP TABLE oncekey_state")
            assert await store.create_schema() == FIRST


# Connections that the server ends


KILL = (
    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = "
    "current_database() AND pid <> pg_backend_pid()"
)


def test_a_sync_store_goes_on_after_its_connections_were_ended(pg_url: str) -> None:
    """A connection that was ended while idle is noticed before it is used: no call fails."""
    with PostgresStore(pg_url) as store:
        use(store, "before")
        sql(pg_url, KILL)
        use(store, "after")


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_an_async_store_goes_on_after_its_connections_were_ended(
    pg_url: str, driver: str
) -> None:
    """A connection that was ended while idle is noticed before it is used: no call fails."""
    async with AsyncPostgresStore(pg_url, driver=driver) as store:
        await ause(store, "before")
        await asyncio.to_thread(sql, pg_url, KILL)
        await ause(store, "after")


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize("turns", [2, 3])
async def test_an_end_that_is_half_read_is_noticed_too(
    pg_url: str, driver: str, turns: int
) -> None:
    """A loop that was busy has read the server's last words, or its end too: no call fails."""
    async with AsyncPostgresStore(pg_url, driver=driver) as store:
        await store.now()
        sql(pg_url, KILL)  # nothing else runs in this loop meanwhile
        for _ in range(turns):
            await asyncio.sleep(0)
        await store.now()


@pytest.mark.parametrize("source", SYNC[1:], ids=label)
def test_a_pool_gets_rid_of_ended_connections(source: Make, pg_url: str) -> None:
    """Every connection of a pool was ended: each fails at most once, then all is well again."""
    with source(pg_url) as (given, options), PostgresStore(given, listen=False, **options) as store:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda n: use(store, f"before-{n}"), range(4)))
        sql(pg_url, KILL)
        failures = 0
        while failures < 5:
            try:
                store.first_seen(key("after"), TERMS)
            except StoreUnavailableError:
                failures += 1
            else:
                break
        assert failures < 5
        use(store, "again")


@pytest.mark.parametrize("source", ASYNC[2:], ids=label)
async def test_an_async_pool_gets_rid_of_ended_connections(source: Make, pg_url: str) -> None:
    """Every connection of a pool was ended: each fails at most once, then all is well again."""
    async with source(pg_url) as (given, options):
        async with AsyncPostgresStore(given, listen=False, **options) as store:
            await asyncio.gather(*(ause(store, f"before-{n}") for n in range(4)))
            await asyncio.to_thread(sql, pg_url, KILL)
            failures = 0
            while failures < 5:
                try:
                    await store.first_seen(key("after"), TERMS)
                except StoreUnavailableError:
                    failures += 1
                else:
                    break
            assert failures < 5
            await ause(store, "again")


# Many calls at once beside the batches


@pytest.mark.parametrize("source", ASYNC, ids=label)
async def test_calls_outside_batches_may_come_at_the_same_time(source: Make, pg_url: str) -> None:
    """now, write and sweep from many tasks at once, from the first call on, all come through."""
    async with source(pg_url) as (given, options):
        async with AsyncPostgresStore(given, timeout=60, **options) as store:
            expires = 4_000_000_000_000
            calls = [
                call
                for n in range(30)
                for call in (store.now(), store.write(key(n), b"f", b"j1", expires), store.sweep())
            ]
            done = await asyncio.gather(*calls, return_exceptions=True)
            assert not [result for result in done if isinstance(result, BaseException)]
            records = await asyncio.gather(*(store.read(key(n)) for n in range(30)))
            assert {record.state for record in records if record} == {State.COMPLETED}


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_burst_from_the_start_opens_a_connection_a_lane(pg_url: str, driver: str) -> None:
    """A hundred calls of each kind at once on a fresh store: three connections, all closed."""
    async with AsyncPostgresStore(pg_url, driver=driver, listen=False) as store:
        await asyncio.gather(
            *(ause(store, f"k{n}") for n in range(100)), *(store.now() for _ in range(100))
        )
        assert len(sessions(pg_url)) <= 3
    gc.collect()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_cancelled_calls_do_not_disturb_others(pg_url: str, driver: str) -> None:
    """Tasks that are cancelled in the middle of a call leave connections that still work."""
    async with AsyncPostgresStore(pg_url, driver=driver) as store:
        await ause(store, "warm")
        for round_ in range(20):
            calls = [
                asyncio.ensure_future(call)
                for call in (
                    store.claim(key(f"c{round_}"), new_owner(), b"", TERMS),
                    store.now(),
                    store.wait(key(f"c{round_}"), 5),
                    store.write(key(f"w{round_}"), b"", b"j1", 4_000_000_000_000),
                )
            ]
            for _ in range(round_ % 5):
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            assert await store.now() > 0
            await ause(store, f"after-{round_}")


# Behind a transaction pooler


def several(store: PostgresStore) -> None:
    for number in range(4):
        use(store, str(number))


async def aseveral(store: AsyncPostgresStore, begin: str = "") -> None:
    for number in range(4):
        await ause(store, f"{begin}{number}")


def test_the_pooler_moves_clients_about(pg_url: str) -> None:
    """With prepared statements a store breaks behind a transaction pooler: the pooler is one."""
    with TransactionPooler(pg_url) as pooler:
        with PostgresStore(pooler.url, prepare=True, listen=False) as store:
            with pytest.raises(StoreError):
                several(store)
        assert pooler.switches


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_the_pooler_moves_async_clients_about(pg_url: str, driver: str) -> None:
    """With prepared statements an async store breaks behind a transaction pooler too."""

    async def for_a_while(store: AsyncPostgresStore) -> None:
        for again in "abcd":
            await aseveral(store, again)
            await store.now()  # an odd number of turns: nobody keeps its place by luck

    with TransactionPooler(pg_url) as pooler:
        async with AsyncPostgresStore(
            pooler.url, driver=driver, prepare=True, listen=False
        ) as store:
            with pytest.raises(StoreError):
                await for_a_while(store)


def test_many_threads_share_two_connections_of_a_pooler(pg_url: str) -> None:
    """With prepare=False 16 threads on 4 stores work over the pooler's two connections."""
    with TransactionPooler(pg_url) as pooler, contextlib.ExitStack() as ends:
        opened = [PostgresStore(pooler.url, prepare=False, timeout=60) for _ in range(4)]
        stores = [ends.enter_context(store) for store in opened]
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(lambda n: use(stores[n % 4], str(n)), range(200)))
        assert len(sessions(pg_url)) == 2
        assert pooler.switches > 20


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_many_tasks_share_two_connections_of_a_pooler(pg_url: str, driver: str) -> None:
    """With prepare=False tasks on 4 async stores work over the pooler's two connections."""
    options: dict[str, Any] = {"driver": driver, "prepare": False, "timeout": 60}
    with TransactionPooler(pg_url) as pooler:
        async with contextlib.AsyncExitStack() as ends:
            opened = [AsyncPostgresStore(pooler.url, **options) for _ in range(4)]
            stores = [await ends.enter_async_context(store) for store in opened]
            for n in range(10):
                await asyncio.gather(*(ause(stores[m % 4], f"{n}-{m}") for m in range(20)))
            assert len(sessions(pg_url)) == 2
            assert pooler.switches > 4


async def test_a_pool_of_asyncpg_works_behind_a_pooler(pg_url: str) -> None:
    """An asyncpg pool without a statement cache and prepare=False work behind a pooler."""
    import asyncpg

    with TransactionPooler(pg_url) as pooler:
        async with asyncpg.create_pool(
            pooler.url, min_size=1, max_size=4, statement_cache_size=0
        ) as pool:
            async with AsyncPostgresStore(pool, prepare=False) as store:
                await asyncio.gather(*(ause(store, str(n)) for n in range(50)))


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_an_engine_works_behind_a_pooler(pg_url: str, driver: str) -> None:
    """A SQLAlchemy engine set up for a pooler, and prepare=False, work behind it."""
    options: dict[str, Any] = {"prepare_threshold": None}
    if driver == "asyncpg":
        options = {"statement_cache_size": 0, "prepared_statement_cache_size": 0}
    with TransactionPooler(pg_url) as pooler:
        async with _async_engine(pooler.url, driver, connect_args=options) as engine:
            async with AsyncPostgresStore(engine, prepare=False) as store:
                for number in range(6):
                    await ause(store, str(number))
