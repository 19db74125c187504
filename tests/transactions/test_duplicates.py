"""Many copies at once: one effect for each key, one answer, and no connection held by waiters."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import sqlite3
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from tests.scale import scaled
from tests.transactions.conftest import Witness, close_store, make_store
from tests.transactions.routes import POOL, ROUTES, Caller, Place, Route, block, done

from oncekey import AsyncSQLiteStore, SQLiteStore

COPIES, KEYS = 64, scaled(20)

# Every library, with a connection of its own and with a shared one. SQLAlchemy's connections and
# sessionmakers take the same way as its sessions and engines.
crowded = pytest.mark.parametrize(
    "route",
    [route for route in ROUTES if "+" not in route.library or route.what in ("session", "engine")],
    ids=lambda route: route.id,
)


async def one_call(store: Any, caller: Caller, key: str, number: int) -> tuple[str, str, bool]:
    async with block(store, key, {"key": key}, on=caller.on) as tx:
        if not tx.replayed:
            await caller.write(tx.connection, key)
            tx.answer = f"by {number}"
        return key, tx.answer, tx.replayed


async def one_copy(
    store: Any, shared: Caller, keys: list[str], number: int
) -> list[tuple[str, str, bool]]:
    """Ask for every key, with a connection of its own where connections can't be shared."""
    if not shared.route.joins:
        return [await one_call(store, shared, key, number) for key in keys]
    async with Caller(shared.route, shared.place, shared.engine).opened() as caller:
        return [await one_call(store, caller, key, number) for key in keys]


@crowded
async def test_sixty_four_copies_of_twenty_keys_have_one_effect_each(
    route: Route, place: Place, store: Any, witness: Witness, name: str
) -> None:
    """Threads or tasks, all at once: each key's work is done once and all get its answer."""
    keys = [f"{name} {number}" for number in range(KEYS)]
    options = {"pool_size": COPIES + 1} if route.joins and "+" in route.library else {}
    async with Caller(route, place).opened(**options) as caller:
        if route.world == "async":
            copies = [one_copy(store, caller, keys, number) for number in range(COPIES)]
            results = await asyncio.gather(*copies)
        else:
            results = _in_threads(store, caller, keys)
    answers = {(key, answer) for result in results for key, answer, _ in result}
    assert sum(len(result) for result in results) == COPIES * KEYS
    assert len(answers) == KEYS
    ran = Counter(key for result in results for key, _, replayed in result if not replayed)
    assert ran == Counter(keys)
    assert [witness.effects(route.flavour, key) for key in keys] == [1] * KEYS


def _in_threads(store: Any, shared: Caller, keys: list[str]) -> list[list[tuple[str, str, bool]]]:
    start = threading.Barrier(COPIES)

    def work(number: int) -> list[tuple[str, str, bool]]:
        start.wait()
        return asyncio.run(one_copy(store, shared, keys, number))

    with concurrent.futures.ThreadPoolExecutor(COPIES) as pool:
        return list(pool.map(work, range(COPIES)))


pools = [route for route in ROUTES if route.borrowed and route.flavour == "pg"]


@pytest.mark.parametrize("route", pools, ids=lambda route: route.id)
async def test_copies_of_a_slow_handler_leave_the_pool_to_others(
    route: Route, place: Place, witness: Witness, name: str
) -> None:
    """While 64 copies wait for one handler, three of the pool's four connections are free."""
    async with Caller(route, place).opened() as caller:
        store = _on_the_pool(route, caller)
        if route.world == "async":
            await _slow_tasks(store, caller, name)
        else:
            await _slow_threads(store, caller, name)
        await close_store(store)
        assert caller.borrowed() == 0
    assert witness.effects("pg", name) == 1
    witness.all_is_tidy()


def _on_the_pool(route: Route, caller: Caller) -> Any:
    """A store whose own statements run on the caller's pool too: the hardest case."""
    from oncekey import PgBackend, PgStore

    return (PgStore if route.world == "sync" else PgBackend)(caller.on)


async def _slow_tasks(store: Any, caller: Caller, name: str) -> None:
    running, go_on = asyncio.Event(), asyncio.Event()

    async def copy(number: int) -> Any:
        async with block(store, name, on=caller.on) as tx:
            if not tx.replayed:
                await caller.write(tx.connection, name)
                running.set()
                await go_on.wait()
                tx.answer = number
            return tx.answer

    copies = [asyncio.create_task(copy(number)) for number in range(COPIES)]
    await running.wait()
    # All at once on what is left of the pool, three times over, while the handler is held.
    async with asyncio.timeout(30):
        for _ in range(3):
            await asyncio.gather(*(_other_query(caller) for _ in range(POOL - 1)))
    assert not any(task.done() for task in copies)
    async with asyncio.timeout(30):  # pools take connections back in their own time
        while caller.borrowed() > 2:  # the handler's, and one that a copy looks with for a moment
            await asyncio.sleep(0.01)
    go_on.set()
    assert len(set(await asyncio.gather(*copies))) == 1


async def _slow_threads(store: Any, caller: Caller, name: str) -> None:
    running, go_on = threading.Event(), threading.Event()

    def copy(number: int) -> Any:
        async def body() -> Any:
            async with block(store, name, on=caller.on) as tx:
                if not tx.replayed:
                    await caller.write(tx.connection, name)
                    running.set()
                    assert go_on.wait(60)
                    tx.answer = number
                return tx.answer

        return asyncio.run(body())

    def others() -> None:
        async def body() -> None:
            for _ in range(3):
                await _other_query(caller)

        asyncio.run(body())

    with concurrent.futures.ThreadPoolExecutor(COPIES + POOL) as pool:
        copies = [pool.submit(copy, number) for number in range(COPIES)]
        try:
            assert running.wait(30)
            for other in [pool.submit(others) for _ in range(POOL - 1)]:
                other.result(30)
            assert not any(future.done() for future in copies)
            deadline = time.monotonic() + 30
            while caller.borrowed() > 2:  # pools take connections back in their own time
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            go_on.set()
        assert len({future.result(30) for future in copies}) == 1


async def _other_query(caller: Caller) -> None:
    """A query of the application's own on the same pool."""
    on, query = caller.on, "SELECT count(*) FROM effects"
    if caller.engine is not None:
        connecting = caller.engine.connect()
        if hasattr(connecting, "__aenter__"):
            async with connecting as connection:
                await connection.execute(sa.text(query))
        else:
            with connecting as connection:
                connection.execute(sa.text(query))
    elif caller.route.library == "asyncpg":
        await on.fetch(query)
    elif caller.route.world == "sync":
        with on.connection() as connection:
            connection.execute(query)
    else:
        async with on.connection() as connection:
            await done(connection.execute(query))


both = [
    Route("pg", "sync", "psycopg", "none"),
    Route("pg", "async", "asyncpg", "none"),
    Route("sqlite", "sync", "sqlite3", "none"),
    Route("sqlite", "async", "aiosqlite", "connection"),
]


@pytest.mark.parametrize("route", both, ids=lambda route: route.id)
async def test_waiting_copies_stand_still(
    route: Route, place: Place, witness: Witness, name: str
) -> None:
    """A copy waits for the outcome by waiting: it looks again now and then, not all the time."""
    store = make_store(route, place)
    looks = Counter[str]()
    wait = store.wait

    def counted(key: Any, seconds: float) -> Any:
        looks["waits"] += 1
        return wait(key, seconds)

    store.wait = counted
    outside = contextvars.copy_context()
    async with Caller(route, place).opened() as caller, Caller(route, place).opened() as other:

        async def copy() -> Any:
            async with block(store, name, on=other.on, wait=0.5) as tx:
                return tx.answer

        async with block(store, name, on=caller.on) as tx:
            await caller.write(tx.connection, name)
            if route.world == "sync":
                waiting = asyncio.to_thread(lambda: outside.run(asyncio.run, copy()))
            else:
                waiting = asyncio.create_task(copy(), context=outside)
            with pytest.raises(Exception, match="still running"):
                await waiting
    assert 1 <= looks["waits"] < 40
    assert witness.effects(route.flavour, name) == 1
    await close_store(store)


@pytest.mark.parametrize("world", ["sync", "async"])
async def test_transactions_of_one_file_take_turns(world: str, tmp_path: Path) -> None:
    """Sixteen callers with keys of their own get in one after the other, in the order of asking."""
    path, order = str(tmp_path / "turns.db"), []
    SQLiteStore(path).close()

    def write(name: int) -> None:
        with store.transaction(str(name)) as tx:
            order.append(name)
            tx.connection.execute("CREATE TABLE IF NOT EXISTS effects (name)")
            tx.connection.execute("INSERT INTO effects VALUES (?)", (name,))
            tx.connection.row_factory = sqlite3.Row  # which is gone for the next

    async def awrite(name: int) -> None:
        async with store.transaction(str(name)) as tx:
            order.append(name)
            await tx.connection.execute("CREATE TABLE IF NOT EXISTS effects (name)")
            await tx.connection.execute("INSERT INTO effects VALUES (?)", (name,))
            tx.connection.row_factory = sqlite3.Row

    store: Any
    if world == "async":
        async with AsyncSQLiteStore(path) as store:
            tasks = [asyncio.ensure_future(awrite(name)) for name in range(16)]
            tasks[7].cancel()
            await asyncio.wait(tasks)
            assert [task.cancelled() for task in tasks] == [name == 7 for name in range(16)]
            assert store._database.lent_async is None  # nor its thread
        assert order == [name for name in range(16) if name != 7]
    else:
        with SQLiteStore(path) as store:
            threads = [threading.Thread(target=write, args=(name,)) for name in range(16)]
            with store.transaction("first"):
                for number, thread in enumerate(threads, 2):
                    thread.start()
                    while len(store._database.line) < number:
                        time.sleep(0.001)
            for thread in threads:
                thread.join()
        assert order == list(range(16))
    raw = sqlite3.connect(path)
    assert raw.execute("SELECT count(*) FROM effects").fetchone() == (len(order),)
    raw.close()


LASTING = [
    "PRAGMA query_only = OFF",
    "PRAGMA cache_size = 7",
    "CREATE TEMP TABLE mine (name)",
    "CREATE TEMP VIEW mine AS SELECT 1",
]


@pytest.mark.parametrize("statement", LASTING)
@pytest.mark.parametrize("world", ["sync", "async"])
async def test_nothing_of_a_block_is_left_for_the_next(
    world: str, statement: str, tmp_path: Path
) -> None:
    """A connection on which a block set a pragma or made something of its own is not lent again."""
    path = str(tmp_path / "lasting.db")
    if world == "sync":
        with SQLiteStore(path) as store:
            with store.transaction("plain") as tx:
                tx.connection.execute("PRAGMA cache_size").fetchone()  # to read one changes nothing
                kept = tx.connection
            with store.transaction("changing") as tx:
                assert tx.connection is kept
                tx.connection.execute(statement)
            with store.transaction("next") as tx:
                assert tx.connection is not kept
        return
    async with AsyncSQLiteStore(path) as astore:
        connections = []

        async def block(name: str) -> None:
            async with astore.transaction(name) as atx:
                connections.append(atx.connection)
                if name == "changing":
                    await atx.connection.execute(statement)

        await asyncio.gather(*map(block, ["plain", "changing", "next", "last"]))
        assert connections[0] is connections[1] is not connections[2]
        assert connections[2] is connections[3]
