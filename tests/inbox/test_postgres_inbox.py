"""An inbox in PostgreSQL: what is only true of a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
from tests.servers.fixtures_pg import Databases, sql

from oncekey import PostgresStore
from oncekey.errors import StoreConfigError, StoreError, StoreUnavailableError
from oncekey.inbox import Arrival, AsyncInbox, Filter, Outcome, Result, Route, event_key, open_inbox
from oncekey.inbox.models import event_id, event_number

DAY = 86_400_000
_WAITING = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


@pytest.fixture
async def url(postgres: Databases) -> str:
    made = postgres.database()
    await (await open_inbox(made, create=True)).aclose()
    return made


@pytest.fixture
async def inbox(url: str) -> AsyncIterator[AsyncInbox]:
    async with await open_inbox(url) as opened:
        yield opened


def arrival(key: str, body: bytes = b"{}") -> Arrival:
    return Arrival("shop", key, "paid", body, routes=(Route("app"),))


async def age(url: str, days: int) -> None:
    """Let every event have come so many days ago, in a partition of its day."""
    back = (days * DAY) << 20
    first = sql(url, "SELECT min(id) FROM oncekey_inbox_event")[0][0] - back
    day = (first >> 20) // DAY
    for table, column in (("event", "id"), ("attempt", "event"), ("duplicate", "event")):
        sql(
            url,
            f"CREATE TABLE oncekey_inbox_{table}_d{day} PARTITION OF oncekey_inbox_{table} "
            f"FOR VALUES FROM ({day * DAY << 20}) TO ({(day + 1) * DAY << 20})",
            f"UPDATE oncekey_inbox_{table} SET {column} = {column} - {back}",
        )
    for table in ("delivery", "dead"):
        sql(url, f"UPDATE oncekey_inbox_{table} SET id = id - {back}")


async def test_old_days_are_dropped_and_what_is_unfinished_moves(
    inbox: AsyncInbox, url: str
) -> None:
    """A day goes at once; its unfinished and dead events stay, with their history."""
    for n in range(20):
        await inbox.ingest(arrival(f"k{n}"))
    await inbox.ingest(arrival("k19"))
    found = await inbox.fetch({"app": 19}, 60_000)
    ended = [Result(one, Outcome.DELIVERED) for one in found[:-1]]
    await inbox.finish([*ended, Result(found[-1], Outcome.DEAD, error="x")])
    await age(url, 40)
    before = {row[0] for row in sql(url, "SELECT relname FROM pg_class WHERE relname ~ '_d[0-9]'")}
    await inbox.prune(30 * DAY)
    after = {row[0] for row in sql(url, "SELECT relname FROM pg_class WHERE relname ~ '_d[0-9]'")}
    assert len(before - after) >= 3  # a partition of each table, with its indexes
    rows = (await inbox.search(Filter())).items
    assert sorted(row.key for row in rows) == ["k18", "k19"]
    assert {row.key: (row.attempts, row.duplicates) for row in rows} == {
        "k18": (1, 0),
        "k19": (0, 1),
    }
    assert [one.event.key for one in await inbox.fetch({"app": 5}, 60_000)] == ["k19"]
    assert (await inbox.ingest(arrival("new"))).new


async def test_pruning_waits_for_nobody_and_blocks_nobody(inbox: AsyncInbox, url: str) -> None:
    """While somebody reads an old day it stays, and ingest goes on."""
    await inbox.ingest(arrival("k"))
    await inbox.finish([Result(one, Outcome.DELIVERED) for one in await inbox.fetch({"app": 1}, 9)])
    await age(url, 40)
    reader = await asyncpg.connect(url)
    try:
        async with reader.transaction():
            await reader.fetch("SELECT count(*) FROM oncekey_inbox_event")
            async with asyncio.timeout(60):
                _, kept = await asyncio.gather(
                    inbox.prune(30 * DAY), inbox.ingest(arrival("meanwhile"))
                )
            assert kept.new
            assert [row.key for row in await inbox.search(Filter())] == ["meanwhile", "k"]
        await inbox.prune(30 * DAY)
        assert [row.key for row in await inbox.search(Filter())] == ["meanwhile"]
    finally:
        await reader.close()


async def test_what_is_replayed_while_its_day_goes_stays(
    inbox: AsyncInbox, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay between the look for what is unfinished and the end of the day keeps the day."""
    kept = await inbox.ingest(arrival("k"))
    await inbox.finish([Result(one, Outcome.DELIVERED) for one in await inbox.fetch({"app": 1}, 9)])
    await age(url, 40)
    old = event_id(event_number(kept.id) - ((40 * DAY) << 20))
    # The replay commits once the day's rows are saved: as late as it can.
    done = asyncio.Event()
    connect = asyncpg.Connection.execute

    async def execute(self: Any, query: str, *args: Any, **more: Any) -> str:
        if "ACCESS EXCLUSIVE" in query and not done.is_set():
            done.set()
            assert await other.replay(old, ["app"], actor="me") == 1
        return await connect(self, query, *args, **more)

    async with await open_inbox(url) as other:
        monkeypatch.setattr(asyncpg.Connection, "execute", execute)
        await inbox.prune(30 * DAY)
        assert done.is_set()
        (delivery,) = await inbox.fetch({"app": 5}, 60_000)
        assert delivery.event.id == old


async def test_people_who_look_hold_up_nothing(inbox: AsyncInbox, url: str) -> None:
    """With any number of reports under way an event is kept, fetched and finished."""
    holder = await asyncpg.connect(url)
    try:
        await holder.execute("SELECT pg_advisory_lock(7)")

        def stuck() -> Any:
            yield "SELECT pg_advisory_xact_lock_shared(7)", []

        running = [asyncio.ensure_future(inbox._read(stuck())) for _ in range(12)]  # type: ignore[attr-defined]
        running += [asyncio.ensure_future(inbox._write(stuck())) for _ in range(12)]  # type: ignore[attr-defined]
        async with asyncio.timeout(60):
            while (await holder.fetchval(_WAITING)) < 5:
                await asyncio.sleep(0.01)
            assert (await inbox.ingest(arrival("k"))).new
            (delivery,) = await inbox.fetch({"app": 1}, 60_000)
            assert await inbox.finish([Result(delivery, Outcome.DELIVERED)]) == [True]
        await holder.execute("SELECT pg_advisory_unlock(7)")
        await asyncio.gather(*running)
    finally:
        await holder.close()


async def test_its_keys_are_records(inbox: AsyncInbox, url: str) -> None:
    """One space of keys: a store on the database reads them; an expired one is a new event."""
    kept = await inbox.ingest(arrival("k"))
    with PostgresStore(url) as store:
        record = store.read(event_key("shop", "k"))
        assert record is not None
        assert record.answer == f'j"{kept.id}"'.encode()
    sql(url, "UPDATE oncekey_records SET expires_at = 1, purge_at = 1")
    first, second = await asyncio.gather(inbox.ingest(arrival("k")), inbox.ingest(arrival("k")))
    assert sorted((first.new, second.new)) == [False, True]
    assert first.id == second.id != kept.id


async def test_a_batch_is_one_statement(inbox: AsyncInbox, url: str) -> None:
    """A hundred events at a time are ingested, fetched and finished in a few round trips."""
    await inbox.ingest(arrival("warm"))
    await asyncio.gather(*(inbox.ingest(arrival(f"k{n}")) for n in range(100)))
    found = await inbox.fetch({"app": 200}, 60_000)
    held = await asyncio.gather(*(inbox.finish([Result(one, Outcome.DELIVERED)]) for one in found))
    assert all(one == [True] for one in held)
    assert len(found) == 101
    calls = {
        row[0].split()[0]: row[1]
        for row in sql(
            url,
            "SELECT 'ingested', count(DISTINCT xmin::text) FROM oncekey_records "
            "UNION ALL SELECT 'finished', count(DISTINCT xmin::text) FROM oncekey_inbox_attempt",
        )
    }
    assert calls["ingested"] <= 4
    assert calls["finished"] <= 3


async def test_large_bodies_share_no_statement(inbox: AsyncInbox) -> None:
    """A batch of large events is cut to what a message may hold, and all of it is kept."""
    bodies = [bytes([n]) * 6_000_000 for n in range(6)]
    kept = await asyncio.gather(
        *(inbox.ingest(arrival(f"k{n}", body)) for n, body in enumerate(bodies))
    )
    assert all(one.new for one in kept)
    found = [await inbox.event(one.id) for one in kept]
    assert [one.event.body for one in found if one is not None] == bodies


async def test_tables_that_are_missing_or_newer_are_told(postgres: Databases) -> None:
    """Each is refused with what to run."""
    url = postgres.database()
    with pytest.raises(StoreConfigError, match="migrate --inbox"):
        await open_inbox(url)
    with PostgresStore(url) as store:
        store.create_schema()
    with pytest.raises(StoreConfigError, match=r"no tables of an inbox.*migrate --inbox"):
        await open_inbox(url)
    await (await open_inbox(url, create=True)).aclose()
    sql(url, "INSERT INTO oncekey_inbox_schema VALUES (99, 0)")
    with pytest.raises(StoreConfigError, match=r"version 99.*upgrade oncekey"):
        await open_inbox(url)
    sql(url, "DELETE FROM oncekey_inbox_schema")
    with pytest.raises(StoreConfigError, match=r"needs 2.*migrate --inbox"):
        await open_inbox(url)


async def test_nobody_there_is_told_without_the_password(postgres: Databases) -> None:
    """An address where nobody listens, and the inbox's own name, show no password."""
    with pytest.raises(StoreUnavailableError) as caught:
        await open_inbox("postgresql://me:hunter2@127.0.0.1:1/x", timeout=5)
    assert "hunter2" not in str(caught.value)
    from oncekey.inbox.postgres.pool import shown_url

    assert shown_url("postgresql://me:hunter2@h:5/x?a=b") == "postgresql://me@h:5/x"


async def test_a_connection_that_is_cut_loses_nothing(inbox: AsyncInbox, url: str) -> None:
    """After every session is ended, calls fail or work, and the next ones work."""
    await inbox.ingest(arrival("a"))
    sql(
        url,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name = 'oncekey-inbox' AND datname = current_database()",
    )
    for _ in range(10):
        try:
            await inbox.ingest(arrival("b"))
            break
        except StoreError:
            await asyncio.sleep(0.05)
    assert sorted(row.key for row in await inbox.search(Filter())) == ["a", "b"]


async def test_a_long_snapshot_hides_nothing(inbox: AsyncInbox, url: str) -> None:
    """With the floor on due times raised, what is queued or replayed later is still found."""
    holder = await asyncpg.connect(url)
    try:
        async with holder.transaction(isolation="repeatable_read"):
            await holder.fetch("SELECT count(*) FROM oncekey_inbox_delivery")
            ids = []
            for n in range(5):
                ids.append((await inbox.ingest(arrival(f"k{n}"))).id)
                found = await inbox.fetch({"app": 3}, 60_000)
                assert [one.event.id for one in found] == [ids[-1]]
                await inbox.finish([Result(one, Outcome.DELIVERED) for one in found])
            await inbox.replay(ids[0], actor="me")
            assert len(await inbox.fetch({"app": 3}, 60_000)) == 1
            # Due long before the floor: found by the full look that comes every few seconds.
            await inbox.ingest(arrival("late"))
            sql(url, "UPDATE oncekey_inbox_delivery SET due_at = 5 WHERE held_by = ''")
            async with asyncio.timeout(30):
                while not await inbox.fetch({"app": 3}, 60_000):
                    await asyncio.sleep(0.2)
    finally:
        await holder.close()


async def test_migrate_makes_the_tables(postgres: Databases) -> None:
    """The command that errors name makes what was missing, and looks without changing."""
    from oncekey.cli import main

    url = postgres.database()
    assert await asyncio.to_thread(main, ["migrate", "--inbox", "--check", url]) != 0
    assert await asyncio.to_thread(main, ["migrate", "--inbox", url]) == 0
    assert await asyncio.to_thread(main, ["migrate", "--inbox", "--check", url]) == 0
    async with await open_inbox(url) as inbox:
        assert (await inbox.ingest(arrival("k"))).new


async def test_an_older_inbox_is_refused_then_brought_up_to_date(url: str) -> None:
    """Version 1 names the command; after that what was there stays, and the chain begins."""
    async with await open_inbox(url) as inbox:
        made = await inbox.ingest(arrival("before"))
    sql(
        url,
        "ALTER TABLE oncekey_inbox_audit DROP COLUMN number, DROP COLUMN before, DROP COLUMN hash",
        "DROP TABLE oncekey_inbox_head",
        "DELETE FROM oncekey_inbox_schema WHERE version > 1",
        "INSERT INTO oncekey_inbox_audit (at, actor, action, subject, detail) "
        "VALUES (1, 'anna', 'look', 'x', '')",
    )
    with pytest.raises(StoreConfigError, match=r"has schema version 1.*oncekey migrate --inbox"):
        await open_inbox(url)
    async with await open_inbox(url, create=True) as inbox:
        await inbox.record("look", "y", actor="anna")
        assert [one.subject for one in (await inbox.audit()).items] == ["y", "x"]
        found = await inbox.verify_audit()
        assert (found.head.number, found.problems) == (1, [])
        assert not (await inbox.ingest(arrival("before"))).new
        assert [one.event.id for one in await inbox.fetch({"app": 9}, 60_000)] == [made.id]
