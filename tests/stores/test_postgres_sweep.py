"""Expired records leave by themselves, in small steps whose cost does not grow with the table."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from tests.servers.fixtures_pg import TERMS, key, sql
from tests.servers.postgres import Postgres

from oncekey._core.flows import new_owner
from oncekey.models import Terms, Verdict
from oncekey.stores.postgres import AsyncPostgresStore, PostgresStore
from oncekey.stores.postgres.flows import GRACE_MS, SWEEP_EVERY, SWEEP_PAGES

BRIEF = Terms(lease_ms=1000, ttl_ms=1000)
HANG = 30
AGES = 4_000_000_000_000  # milliseconds since 1970: long from now

# Rows as they would be after that many completed calls.
FILL = """
    INSERT INTO oncekey_records (tenant, key, scope, state, owner, fence, fingerprint, lease_until,
        expires_at, purge_at, attempts, answer)
    SELECT '', sha256(('filled ' || n)::bytea), 'once:filled', 1, 'owner of 16 byte', n, '', 0,
        {at}, {at}, 1, 'j"an answer"'
    FROM generate_series(1, {count}) AS n
"""


def count(url: str, which: str = "true") -> int:
    return int(sql(url, f"SELECT count(*) FROM oncekey_records WHERE {which}")[0][0])


def fill(url: str, rows: int, purge_at: int = AGES) -> None:
    # What it read is counted before it ends, and not while something else is measured.
    sql(url, FILL.format(count=rows, at=purge_at) + "; SELECT pg_stat_force_next_flush()")


@pytest.fixture
def store(own_url: str) -> Iterator[PostgresStore]:
    with PostgresStore(own_url) as opened:
        yield opened


# By itself


def test_expired_records_leave_as_writes_go_on(timed_postgres: Postgres, timed_url: str) -> None:
    """Nobody sweeps: what is past its time and a minute more is gone after some new records."""
    with PostgresStore(timed_url) as store:
        for number in range(50):
            assert store.first_seen(key(f"mark-{number}"), BRIEF)
            won = store.claim(key(number), own := new_owner(), b"", BRIEF)
            assert store.complete(key(number), own, won.fence, b"j1", BRIEF)
        assert store.first_seen(key("lasting"), TERMS)
        old = "scope = 'once:postgres' AND purge_at < extract(epoch FROM now()) * 1000"
        timed_postgres.clock("+30")
        for number in range(SWEEP_EVERY):
            store.first_seen(key(f"soon-{number}"), TERMS)
        assert count(timed_url, old) == 100  # kept for a while, for those whose clock lags
        timed_postgres.clock(f"+{GRACE_MS // 1000 + 10}")
        for number in range(SWEEP_EVERY):
            store.first_seen(key(f"later-{number}"), TERMS)
        assert count(timed_url, old) == 0
        assert not store.first_seen(key("lasting"), TERMS)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_an_async_store_sweeps_by_itself_too(
    timed_postgres: Postgres, timed_url: str, driver: str
) -> None:
    """Async: claims alone set it off as well, and aclose waits for the step under way."""
    async with AsyncPostgresStore(timed_url, driver=driver) as store:
        marks = (store.first_seen(key(n), BRIEF) for n in range(100))
        assert all(await asyncio.gather(*marks))
        timed_postgres.clock(f"+{GRACE_MS // 1000 + 10}")
        claims = (store.claim(key(f"c{n}"), new_owner(), b"", TERMS) for n in range(SWEEP_EVERY))
        await asyncio.gather(*claims)
    assert count(timed_url) == SWEEP_EVERY


def test_waiters_that_nobody_is_any_more_leave_too(
    timed_postgres: Postgres, timed_url: str
) -> None:
    """What asked for an outcome long ago is forgotten by a step of sweeping."""
    with PostgresStore(timed_url) as store:
        store.wait(key("k"), 0.03)
        assert sql(timed_url, "SELECT count(*) FROM oncekey_waiters") == [(1,)]
        timed_postgres.clock("+120")
        store.sweep()
        assert sql(timed_url, "SELECT count(*) FROM oncekey_waiters") == [(0,)]


# By request


def test_sweeping_removes_what_is_past_its_time(own_url: str, store: PostgresStore) -> None:
    """sweep removes expired records and no other, and counts them."""
    fill(own_url, 500, purge_at=1000)
    store.first_seen(key("k"), TERMS)
    assert store.sweep() == 500
    assert count(own_url) == 1
    assert store.sweep() == 0
    assert store.sweep(now=AGES) == 1


@pytest.mark.parametrize("partitions", [0, 4])
async def test_sweeping_reaches_every_page(own_postgres: Postgres, partitions: int) -> None:
    """Wherever the last step stopped, delete_expired removes every record past its time."""
    url = own_postgres.database()
    with PostgresStore(url) as store:
        store.create_schema(partitions=partitions)
    fill(url, 20_000 if partitions else 5000, purge_at=1000)
    sql(url, f"UPDATE oncekey_state SET page = {SWEEP_PAGES}")  # as after one step by itself
    async with AsyncPostgresStore(url) as backend:
        await backend.delete_expired()
    assert count(url) == 0


def test_a_step_is_small(own_url: str, store: PostgresStore) -> None:
    """One step passes over a few pages; the next goes on where it stopped, then begins anew."""
    fill(own_url, 20_000, purge_at=1000)
    pages = int(sql(own_url, "SELECT pg_relation_size('oncekey_records') / 8192")[0][0])
    removed = []
    for _ in range(pages // SWEEP_PAGES + 1):
        before = count(own_url)
        store._new_records = SWEEP_EVERY - 1
        store._maybe_sweep()
        removed.append(before - count(own_url))
    assert sum(removed) == 20_000
    assert max(removed) <= SWEEP_PAGES * 60
    assert sql(own_url, "SELECT page FROM oncekey_state") == [(0,)]


def test_one_sweeps_at_a_time(own_url: str, store: PostgresStore) -> None:
    """While another has the sweepers' row, sweep gives 0 at once and calls don't wait."""
    fill(own_url, 100, purge_at=1000)
    store.now()
    with ThreadPoolExecutor(1) as thread, psycopg.connect(own_url) as other:
        other.execute("SELECT FROM oncekey_state FOR UPDATE")
        assert thread.submit(store.sweep).result(HANG) == 0

        def write() -> None:
            for number in range(SWEEP_EVERY + 1):
                assert store.first_seen(key(number), TERMS)

        thread.submit(write).result(HANG)
        other.rollback()
    assert store.sweep() == 100


def test_locked_rows_are_passed_over(own_url: str, store: PostgresStore) -> None:
    """A record that a transaction holds is left for a later step; nobody waits for it."""
    fill(own_url, 100, purge_at=1000)
    with ThreadPoolExecutor(1) as thread, psycopg.connect(own_url) as other:
        other.execute("SELECT FROM oncekey_records WHERE fence = 7 FOR UPDATE")
        assert thread.submit(store.sweep).result(HANG) == 99
        other.rollback()
    assert store.sweep() == 1


def test_partitions_are_swept(own_postgres: Postgres) -> None:
    """Sweeping walks all partitions, also where they differ in size."""
    url = own_postgres.database()
    with PostgresStore(url) as store:
        store.create_schema(partitions=4)
        fill(url, 5000, purge_at=1000)
        sql(url, "DELETE FROM oncekey_records_0", "VACUUM oncekey_records")
        left = count(url)
        assert left > 3000
        store.first_seen(key("k"), TERMS)
        assert store.sweep(limit=10_000) == left
        assert count(url) == 1


def test_many_sweepers_remove_each_record_once(own_url: str) -> None:
    """Eight sweepers at once: together they count every record once."""
    fill(own_url, 5000, purge_at=1000)
    stores = [PostgresStore(own_url) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        removed = sum(threads.map(lambda store: store.sweep(100_000), stores))
        removed += stores[0].sweep(100_000) + stores[0].sweep(100_000)
    for store in stores:
        store.close()
    assert removed == 5000
    assert count(own_url) == 0


# What it costs


def touched(url: str) -> int:
    """Blocks of the records and their index that were read so far, from memory or disk."""
    rows = sql(
        url,
        "SELECT sum(heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit)::bigint "
        "FROM pg_statio_user_tables WHERE relname LIKE 'oncekey_records%'",
    )
    return int(rows[0][0])


class Meter:
    """Counts the blocks that a call reads, on the connections of one store."""

    def __init__(self, url: str, store: PostgresStore) -> None:
        self.url = url
        self.store = store

    def _flush(self) -> int:
        for lane in ("claim", "settle", "other"):
            self.store._source.fetch(lane, "SELECT pg_stat_force_next_flush()", [])
        return touched(self.url)

    def __call__(self, work: Callable[[], Any]) -> int:
        before = self._flush()
        work()
        return self._flush() - before


def every_call(store: PostgresStore, name: str) -> dict[str, Callable[[], Any]]:
    """One call of each kind, in an order that makes sense."""
    own, held = new_owner(), new_owner()
    fences: dict[str, int] = {}

    def claim(which: str, owner: bytes) -> None:
        fences[which] = store.claim(key(f"{name}-{which}"), owner, b"f", TERMS).fence

    return {
        "claim": lambda: claim("one", own),
        "renew": lambda: store.renew(key(f"{name}-one"), own, fences["one"], TERMS),
        "complete": lambda: store.complete(key(f"{name}-one"), own, fences["one"], b"j1", TERMS),
        "replay": lambda: store.claim(key(f"{name}-one"), held, b"f", TERMS),
        "claim another": lambda: claim("two", held),
        "release": lambda: store.release(key(f"{name}-two"), held, fences["two"]),
        "first seen": lambda: store.first_seen(key(f"{name}-three"), TERMS),
        "duplicate": lambda: store.first_seen(key(f"{name}-three"), TERMS),
        "read": lambda: store.read(key(f"{name}-one")),
    }


@pytest.mark.parametrize("partitions", [0, 4])
def test_calls_stay_cheap_as_the_table_grows(own_postgres: Postgres, partitions: int) -> None:
    """Plans that were made on an empty table find records by the index in one of 100,000 rows."""
    url = own_postgres.database()
    with PostgresStore(url) as store:
        store.create_schema(partitions=partitions)
        for warm in range(12):  # PostgreSQL settles on a plan for good after some executions
            for call in every_call(store, f"warm-{warm}").values():
                call()
        fill(url, 100_000)
        meter = Meter(url, store)
        cost = {what: meter(call) for what, call in every_call(store, "grown").items()}
    assert {what: blocks for what, blocks in cost.items() if blocks > 20} == {}
    assert cost["replay"] > 0  # the meter measures


def test_batches_stay_cheap_as_the_table_grows(own_url: str, store: PostgresStore) -> None:
    """The same for batches: a claim or completion among fifty reads a few blocks."""
    from oncekey.stores._batching import Job

    def batch(name: str) -> tuple[int, int]:
        own = new_owner()
        claims = [Job("claim", (key(f"{name}-{n}"), own, b"f", TERMS)) for n in range(50)]
        meter = Meter(own_url, store)
        claimed = meter(lambda: store._run("claim", claims))
        assert {job.outcome().verdict for job in claims} == {Verdict.WON}
        done = [
            Job("complete", (*job.args[:2], job.outcome().fence, b"j1", TERMS)) for job in claims
        ]
        completed = meter(lambda: store._run("settle", done))
        assert all(job.outcome() for job in done)
        return claimed, completed

    for number in range(8):
        batch(f"warm-{number}")
    fill(own_url, 100_000)
    claimed, completed = batch("grown")
    assert max(claimed, completed) < 50 * 20


def step_cost(url: str, store: PostgresStore) -> int:
    def step() -> None:
        store._new_records = SWEEP_EVERY - 1
        store._maybe_sweep()

    return max(Meter(url, store)(step) for _ in range(3))


@pytest.mark.parametrize("purge_at", [AGES, 1000], ids=["nothing to remove", "all to remove"])
@pytest.mark.parametrize("partitions", [0, 4])
def test_a_step_of_sweeping_stays_cheap(
    own_postgres: Postgres, partitions: int, purge_at: int
) -> None:
    """A step reads no more of 100,000 records than of 4,000, with a plan from an empty table."""
    cost = []
    for rows in (4000 * (partitions or 1), 100_000):
        url = own_postgres.database()
        with PostgresStore(url) as store:
            store.create_schema(partitions=partitions)
            for _ in range(4):
                step_cost(url, store)
            fill(url, rows, purge_at)
            cost.append(step_cost(url, store))
    assert cost[0] >= SWEEP_PAGES
    assert cost[1] <= cost[0] * 1.5


@pytest.mark.skipif(
    not os.environ.get("ONCEKEY_SLOW"),
    reason="fills a table with 10 million records, for minutes and gigabytes: set ONCEKEY_SLOW=1",
)
def test_ten_million_records(own_url: str, store: PostgresStore) -> None:
    """With ten million records calls read a few blocks and a step of sweeping a few pages."""
    for call in every_call(store, "warm").values():
        call()
    fill(own_url, 10_000_000)
    meter = Meter(own_url, store)
    cost = {what: meter(call) for what, call in every_call(store, "grown").items()}
    assert {what: blocks for what, blocks in cost.items() if blocks > 50} == {}
    assert step_cost(own_url, store) < 4 * SWEEP_PAGES
