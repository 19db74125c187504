"""Waiting for another worker's outcome: LISTEN/NOTIFY, its loss, and forks."""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from tests.servers.fixtures_pg import SCOPE, TERMS, eventually, key, sessions, sql
from tests.stores.test_fork import Child

from oncekey import AsyncOnce, Once
from oncekey._core.flows import new_owner
from oncekey.models import Record, State, Verdict
from oncekey.stores.postgres import AsyncPostgresStore, PostgresStore

DRIVERS = ["asyncpg", "psycopg"]
LONG = 60.0  # nobody sleeps so long: whoever returns before was woken
HANG = 30.0


def listeners(url: str) -> list[int]:
    """Who listens."""
    return [pid for pid, query in sessions(url) if query.upper().startswith("LISTEN")]


def registered(url: str) -> int:
    """How many keys somebody waits for."""
    return int(sql(url, "SELECT count(*) FROM oncekey_waiters")[0][0])


@pytest.fixture
def other(pg_url: str) -> Iterator[PostgresStore]:
    """Another worker, that shares nothing but the database."""
    with PostgresStore(pg_url, listen=False) as store:
        yield store


@pytest.mark.parametrize("settle", ["complete", "release"])
def test_another_workers_outcome_wakes_a_thread(
    pg_url: str, other: PostgresStore, settle: str
) -> None:
    """A thread that would sleep for a minute is woken when another worker completes or releases."""
    won = other.claim(key("k"), own := new_owner(), b"f", TERMS)
    with PostgresStore(pg_url) as store:
        waiter = threading.Thread(target=store.wait, args=(key("k"), LONG))
        waiter.start()
        eventually(lambda: listeners(pg_url) and registered(pg_url), "waiting")
        args = (b"j1", TERMS) if settle == "complete" else ()
        assert getattr(other, settle)(key("k"), own, won.fence, *args)
        waiter.join(HANG)
        assert not waiter.is_alive()
    assert registered(pg_url) == 0


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("settle", ["complete", "release"])
async def test_another_workers_outcome_wakes_a_task(
    pg_url: str, other: PostgresStore, driver: str, settle: str
) -> None:
    """A task that would sleep for a minute is woken when another worker completes or releases."""
    won = other.claim(key("k"), own := new_owner(), b"f", TERMS)
    async with AsyncPostgresStore(pg_url, driver=driver) as store:
        waiter = asyncio.ensure_future(store.wait(key("k"), LONG))
        await asyncio.to_thread(
            eventually, lambda: listeners(pg_url) and registered(pg_url), "waiting"
        )
        args = (b"j1", TERMS) if settle == "complete" else ()
        assert getattr(other, settle)(key("k"), own, won.fence, *args)
        await asyncio.wait_for(waiter, HANG)


def test_a_guarded_call_gets_another_workers_answer(pg_url: str, other: PostgresStore) -> None:
    """A call that waits gives the answer that another worker recorded, without running."""
    runs: list[str] = []
    started, finish = threading.Event(), threading.Event()
    theirs = Once(other, scope="wait", wait=LONG)
    with PostgresStore(pg_url) as store, ThreadPoolExecutor(2) as threads:
        store.poll_seconds = LONG
        ours = Once(store, scope="wait", wait=LONG)

        def work(name: str) -> str:
            runs.append(name)
            started.set()
            assert finish.wait(HANG)
            return "theirs"

        first = threads.submit(theirs(key="name", name=None)(work), "k")
        assert started.wait(HANG)
        second = threads.submit(ours(key="name", name=None)(work), "k")
        eventually(lambda: listeners(pg_url) and registered(pg_url), "waiting")
        finish.set()
        assert (first.result(HANG), second.result(HANG)) == ("theirs", "theirs")
    assert runs == ["k"]


# Nobody waits, nobody is told


def heard(connection: psycopg.Connection, url: str) -> list[str]:
    """What was announced so far: all that comes before our own announcement."""
    sql(url, "NOTIFY oncekey, 'end'")
    payloads = []
    for note in connection.notifies(timeout=HANG):
        if note.payload == "end":
            return payloads
        payloads.append(note.payload)
    raise AssertionError("no notification at all")


def test_nothing_is_announced_where_nobody_waits(pg_url: str, other: PostgresStore) -> None:
    """Completions and releases announce nothing, unless somebody waits for that very key."""
    with psycopg.connect(pg_url, autocommit=True) as listener:
        listener.execute("LISTEN oncekey")
        for number in range(40):
            own = new_owner()
            won = other.claim(key(number), own, b"f", TERMS)
            if number % 2:
                assert other.complete(key(number), own, won.fence, b"j1", TERMS)
            else:
                assert other.release(key(number), own, won.fence)
            other.first_seen(key(f"mark-{number}"), TERMS)
        assert heard(listener, pg_url) == []
        won = other.claim(key("awaited"), own, b"f", TERMS)
        with PostgresStore(pg_url) as store:
            waiter = threading.Thread(target=store.wait, args=(key("awaited"), LONG))
            waiter.start()
            eventually(lambda: listeners(pg_url) and registered(pg_url), "waiting")
            other.complete(key("awaited"), own, won.fence, b"j1", TERMS)
            waiter.join(HANG)
        (note,) = heard(listener, pg_url)  # which tells nothing of the key to those who don't wait
        assert note not in key("awaited").digest.hex()
        assert str(uuid.UUID(note)) == note


def test_other_words_on_the_channel_do_no_harm(pg_url: str, other: PostgresStore) -> None:
    """Somebody else's notifications on the channel are passed over."""
    won = other.claim(key("k"), own := new_owner(), b"f", TERMS)
    with PostgresStore(pg_url) as store:
        waiter = threading.Thread(target=store.wait, args=(key("k"), LONG))
        waiter.start()
        eventually(lambda: listeners(pg_url) and registered(pg_url), "waiting")
        sql(pg_url, "NOTIFY oncekey, 'not hex'", "NOTIFY oncekey", "NOTIFY oncekey, 'é'")
        other.complete(key("k"), own, won.fence, b"j1", TERMS)
        waiter.join(HANG)
        assert not waiter.is_alive()


def test_a_short_wait_asks_for_nothing(pg_url: str, other: PostgresStore) -> None:
    """A wait of a few milliseconds neither registers nor starts a listener."""
    with PostgresStore(pg_url) as store:
        store.wait(key("k"), 0.005)
        assert registered(pg_url) == 0
        assert store._listener is not None
        assert store._listener._thread is None


# Losing what would wake us


class Deaf:
    """Listens to nothing, as one that is about to connect."""

    def want(self) -> None:
        """Be wanted."""

    async def aclose(self) -> None:
        """Be closed."""


async def test_an_outcome_between_asking_and_sleeping_is_not_missed(pg_url: str) -> None:
    """The key is completed right after the waiter looked at it: it does not sleep over that."""
    async with AsyncPostgresStore(pg_url) as store:
        store._lanes().listener = Deaf()  # type: ignore[assignment]
        won = await store.claim(key("k"), own := new_owner(), b"f", TERMS)
        look = store.read

        async def read(name: Any) -> Record | None:
            found = await look(name)
            assert found is not None
            if found.state is State.PENDING:
                await store.complete(key("k"), own, won.fence, b"j1", TERMS)
            return found

        store.read = read  # type: ignore[method-assign]
        await asyncio.wait_for(store.wait(key("k"), LONG), HANG / 3)


def test_a_thread_does_not_miss_that_outcome_either(pg_url: str) -> None:
    """The same for a thread."""
    with PostgresStore(pg_url) as store:
        won = store.claim(key("k"), own := new_owner(), b"f", TERMS)
        look = store.read

        def read(name: Any) -> Record | None:
            found = look(name)
            assert found is not None
            if found.state is State.PENDING:
                store.complete(key("k"), own, won.fence, b"j1", TERMS)
            return found

        store.read = read  # type: ignore[method-assign]
        waiter = threading.Thread(target=store.wait, args=(key("k"), LONG), daemon=True)
        waiter.start()
        waiter.join(HANG)
        assert not waiter.is_alive()


def test_an_outcome_before_the_first_asked_wakes_the_others(
    pg_url: str, other: PostgresStore
) -> None:
    """Several wait, and the outcome comes before the one that asks for all has asked: all wake."""
    won = other.claim(key("k"), own := new_owner(), b"f", TERMS)
    asking, ask = threading.Event(), threading.Event()
    with PostgresStore(pg_url) as store:
        store.now()
        fetch = store._source.fetch

        def slowly(lane: str, text: str, *args: Any, **options: Any) -> Any:
            if 'INSERT INTO "public".oncekey_waiters' in text:
                asking.set()
                assert ask.wait(HANG)
            return fetch(lane, text, *args, **options)

        store._source.fetch = slowly  # type: ignore[method-assign]
        waiters = [
            threading.Thread(target=store.wait, args=(key("k"), LONG), daemon=True) for _ in "ab"
        ]
        waiters[0].start()
        assert asking.wait(HANG)
        waiters[1].start()
        eventually(lambda: len(store._waiters._waiting.get(key("k").digest, ())) == 2, "waiting")
        assert other.complete(key("k"), own, won.fence, b"j1", TERMS)
        ask.set()
        for waiter in waiters:
            waiter.join(HANG / 3)
        assert not any(waiter.is_alive() for waiter in waiters)


def end(url: str, pid: int) -> None:
    """End a connection from the server's side."""
    assert sql(url, "SELECT pg_terminate_backend(%s, 10000)", args=[pid]) == [(True,)]


def test_threads_outlive_the_loss_of_their_listener(pg_url: str, other: PostgresStore) -> None:
    """Its connection is ended: the outcome is seen all the same, and listening starts again."""
    with PostgresStore(pg_url) as store, ThreadPoolExecutor(1) as threads:
        once = Once(store, scope=SCOPE.parts[0], wait=LONG)
        won = other.claim(key("k"), own := new_owner(), b"", TERMS)

        @once(key="name", name=None)
        def work(name: str) -> str:
            return "ran"

        call = threads.submit(work, "k")
        eventually(lambda: listeners(pg_url) and registered(pg_url), "waiting")
        (first,) = listeners(pg_url)
        end(pg_url, first)
        other.complete(key("k"), own, won.fence, b'j"theirs"', TERMS)
        assert call.result(HANG) == "theirs"
        eventually(lambda: listeners(pg_url), "listening again")
        waiter = threading.Thread(target=store.wait, args=(key("k2"), LONG))
        won = other.claim(key("k2"), own, b"", TERMS)
        waiter.start()
        eventually(lambda: registered(pg_url), "waiting")
        other.complete(key("k2"), own, won.fence, b"j1", TERMS)
        waiter.join(HANG)
        assert not waiter.is_alive()
        assert listeners(pg_url) != [first]


@pytest.mark.parametrize("driver", DRIVERS)
async def test_tasks_outlive_the_loss_of_their_listener(
    pg_url: str, other: PostgresStore, driver: str
) -> None:
    """Its connection is ended: the outcome is seen all the same, and listening starts again."""
    async with AsyncPostgresStore(pg_url, driver=driver) as store:
        once = AsyncOnce(store, scope=SCOPE.parts[0], wait=LONG)
        won = other.claim(key("k"), own := new_owner(), b"", TERMS)

        @once(key="name", name=None)
        async def work(name: str) -> str:
            return "ran"

        async def until(condition: Any) -> None:
            await asyncio.to_thread(eventually, condition, "waiting")

        call = asyncio.ensure_future(work("k"))
        await until(lambda: listeners(pg_url) and registered(pg_url))
        (first,) = listeners(pg_url)
        await asyncio.to_thread(end, pg_url, first)
        other.complete(key("k"), own, won.fence, b'j"theirs"', TERMS)
        assert await asyncio.wait_for(call, HANG) == "theirs"
        await until(lambda: listeners(pg_url))
        won = other.claim(key("k2"), own, b"", TERMS)
        waiter = asyncio.ensure_future(store.wait(key("k2"), LONG))
        await until(lambda: registered(pg_url))
        other.complete(key("k2"), own, won.fence, b"j1", TERMS)
        await asyncio.wait_for(waiter, HANG)
        assert listeners(pg_url) != [first]


# Waiters hold no connection


def test_two_hundred_threads_wait_on_four_connections(pg_url: str, other: PostgresStore) -> None:
    """However many threads wait, the store has its three connections and its listener."""
    won = {n: other.claim(key(n), new_owner(), b"", TERMS) for n in range(2)}
    assert {reply.verdict for reply in won.values()} == {Verdict.WON}
    own = new_owner()
    fence = other.claim(key("one"), own, b"", TERMS).fence
    before = len(sessions(pg_url))
    with PostgresStore(pg_url) as store:
        threads = [threading.Thread(target=store.wait, args=(key("one"), LONG)) for _ in range(200)]
        for thread in threads:
            thread.start()
        eventually(lambda: listeners(pg_url) and registered(pg_url), "listening")
        eventually(
            lambda: len(store._waiters._waiting.get(key("one").digest, ())) == 200, "waiting"
        )
        assert len(sessions(pg_url)) - before <= 4
        other.complete(key("one"), own, fence, b"j1", TERMS)
        for thread in threads:
            thread.join(HANG)
        assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_two_hundred_tasks_wait_on_four_connections(
    pg_url: str, other: PostgresStore, driver: str
) -> None:
    """However many tasks wait, for one key or for many, the store has four connections."""
    own = new_owner()
    fences = {n: other.claim(key(n), own, b"", TERMS).fence for n in range(20)}
    before = len(sessions(pg_url))
    async with AsyncPostgresStore(pg_url, driver=driver) as store:
        waiters = [asyncio.ensure_future(store.wait(key(n % 20), LONG)) for n in range(200)]

        def all_wait() -> bool:
            waiting = sum(len(found) for found in store._waiters._waiting.values())
            return bool(listeners(pg_url)) and registered(pg_url) == 20 and waiting == 200

        await asyncio.to_thread(eventually, all_wait, "waiting")
        assert len(sessions(pg_url)) - before <= 4
        for number, fence in fences.items():
            other.complete(key(number), own, fence, b"j1", TERMS)
        await asyncio.wait_for(asyncio.gather(*waiters), HANG)


# Forks


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def work(store: PostgresStore, who: str) -> int:
    """Use every lane; gives the number of connections that the server sees of this process."""
    for number in range(5):
        own = new_owner()
        won = store.claim(key(f"{who}-{number}"), own, b"", TERMS)
        assert won.verdict is Verdict.WON
        assert store.complete(key(f"{who}-{number}"), own, won.fence, b"j1", TERMS)
    store.now()
    store.wait(key(f"{who}-none"), 0.03)
    return os.getpid()


@forks
@pytest.mark.parametrize("closes", [False, True])
def test_a_fork_gets_connections_of_its_own(pg_url: str, closes: bool) -> None:
    """A child connects anew, also if it closes the store; the parent's sessions go on."""
    with PostgresStore(pg_url) as store:
        work(store, "before")
        eventually(lambda: listeners(pg_url), "listening")
        mine = {pid for pid, _ in sessions(pg_url)}

        def child() -> set[int]:
            if not closes:
                work(store, "child")
            theirs = {pid for pid, _ in sessions(pg_url)} - mine
            store.close()
            return theirs

        theirs = Child(child).result()
        assert not theirs if closes else len(theirs) >= 3
        work(store, "after")
        assert {pid for pid, _ in sessions(pg_url)} >= mine


@forks
@pytest.mark.parametrize("driver", DRIVERS)
def test_an_async_store_works_after_a_fork(pg_url: str, driver: str) -> None:
    """Loops of parent and child have connections of their own."""
    store = AsyncPostgresStore(pg_url, driver=driver)

    async def mark(who: str) -> list[bool]:
        async with AsyncPostgresStore(pg_url, driver=driver) as own:
            await own.now()
        found = await asyncio.gather(*(store.first_seen(key(f"{who}{n}"), TERMS) for n in range(9)))
        return list(found)

    async def main() -> None:
        assert all(await mark("before"))
        child = Child(lambda: asyncio.run(mark("child")))
        assert all(await mark("parent"))
        assert all(await asyncio.to_thread(child.result))
        assert not any(await mark("child"))
        await store.aclose()

    with asyncio.Runner() as runner:
        runner.run(main())
