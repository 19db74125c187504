"""What an event costs an inbox, beside the bare statements, and with a long backlog.

    python benchmarks/bench_inbox.py                        # both databases, a backlog of a million
    python benchmarks/bench_inbox.py --backlog 100000 sqlite

Ingest, fetch and finish of 1 KB events are measured in processor time, of this process and of the
server's. Beside them run the least statements that could do the same (one key, one event, one
delivery, one attempt, no copies, no counters, no values, and no call to await for each event), by
turns in the same process, so that what else the machine does hits both alike. Then a fetch is
measured with a backlog of a thousand and of a million deliveries.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import sqlite3
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg

import servers
from oncekey.inbox import Arrival, AsyncInbox, Outcome, Result, Route, open_inbox

RESULTS = Path(__file__).with_name("inbox.json")
BODY = os.urandom(512).hex().encode()
HEADERS = (("content-type", "application/json"), ("x-request-id", os.urandom(100).hex()))
HEAD = json.dumps(HEADERS).encode()
TARGETS = [f"target-{n}" for n in range(10)]
AT_ONCE, FETCHED, EVENTS, ROUNDS = 64, 100, 6_400, 5
FULL_LOOK = 3.5
SHORT, FETCHES = 1_000, 30
COST, FLAT = 1.25, 1.5  # times the bare statements; times a fetch from a short backlog

BARE_SCHEMA = """
CREATE SCHEMA bare;
CREATE TABLE bare.seen (key bytea PRIMARY KEY, purge_at bigint NOT NULL, event_id bigint NOT NULL)
    WITH (fillfactor=90);
CREATE SEQUENCE bare.seq;
CREATE TABLE bare.event (id bigint NOT NULL, at bigint NOT NULL, source text NOT NULL,
    type text NOT NULL, key bytea NOT NULL, headers bytea NOT NULL, body bytea NOT NULL)
    PARTITION BY RANGE (at);
CREATE TABLE bare.event_0 PARTITION OF bare.event FOR VALUES FROM (0) TO (9000000000000);
CREATE INDEX ON bare.event (id);
CREATE TABLE bare.delivery (id bigint NOT NULL, target text NOT NULL, due_at bigint NOT NULL,
    event_at bigint NOT NULL, attempts int NOT NULL DEFAULT 0, fence int NOT NULL DEFAULT 0,
    PRIMARY KEY (id, target)) WITH (fillfactor=50, autovacuum_vacuum_scale_factor=0,
    autovacuum_vacuum_threshold=5000, autovacuum_vacuum_cost_delay=0);
CREATE INDEX ON bare.delivery (target, due_at, id);
CREATE TABLE bare.attempt (event_id bigint NOT NULL, target text NOT NULL, n int NOT NULL,
    at bigint NOT NULL, ms int NOT NULL, status int NOT NULL, note text) PARTITION BY RANGE (at);
CREATE TABLE bare.attempt_0 PARTITION OF bare.attempt FOR VALUES FROM (0) TO (9000000000000);
CREATE INDEX ON bare.attempt (event_id);
"""
NOW = "now AS MATERIALIZED (SELECT (extract(epoch FROM clock_timestamp())*1000)::bigint AS ms)"
BARE_INGEST = f"""
WITH asked AS (SELECT * FROM unnest($1::bytea[],$2::text[],$3::text[],$4::bytea[],$5::bytea[])
    AS a(key,target,type,headers,body)), {NOW},
fresh AS (INSERT INTO bare.seen (key,purge_at,event_id)
    SELECT key, ms+259200000, nextval('bare.seq') FROM (SELECT key FROM asked ORDER BY key) o, now
    ON CONFLICT DO NOTHING RETURNING key,event_id),
ev AS (INSERT INTO bare.event SELECT f.event_id, ms, 'shop', a.type, a.key, a.headers, a.body
    FROM fresh f JOIN asked a USING (key), now),
dl AS (INSERT INTO bare.delivery (id,target,due_at,event_at) SELECT f.event_id, a.target, ms, ms
    FROM fresh f JOIN asked a USING (key), now)
SELECT key,event_id FROM fresh"""
BARE_FETCH = f"""
WITH {NOW}, slots AS (SELECT * FROM unnest($1::text[],$2::int[]) AS s(target,n)),
due AS MATERIALIZED (SELECT d.place FROM slots s CROSS JOIN now CROSS JOIN LATERAL
    (SELECT q.ctid AS place FROM bare.delivery q WHERE q.target=s.target AND q.due_at<=now.ms
    ORDER BY q.due_at,q.id LIMIT s.n FOR UPDATE SKIP LOCKED) d),
took AS (UPDATE bare.delivery q SET due_at=now.ms+$3::bigint, attempts=q.attempts+1, fence=q.fence+1
    FROM now WHERE q.ctid = ANY(ARRAY(SELECT place FROM due))
    RETURNING q.id,q.target,q.event_at,q.attempts,q.fence)
SELECT t.id,t.target,t.attempts,t.fence,e.type,e.headers,e.body FROM took t CROSS JOIN LATERAL
    (SELECT * FROM bare.event e WHERE e.id=t.id AND e.at=t.event_at OFFSET 0) e"""
BARE_FINISH = """
WITH asked AS (SELECT * FROM unnest($1::bigint[],$2::text[],$3::int[],$4::int[],$5::int[])
    AS a(id,target,fence,ms,status)),
gone AS (DELETE FROM bare.delivery q USING asked a WHERE q.id=a.id AND q.target=a.target
    AND q.fence=a.fence RETURNING q.id,q.target,q.attempts,a.ms,a.status)
INSERT INTO bare.attempt (event_id,target,n,at,ms,status) SELECT id,target,attempts,
    (extract(epoch FROM clock_timestamp())*1000)::bigint,ms,status FROM gone RETURNING event_id"""

BARE_FILE = """
CREATE TABLE seen(key BLOB PRIMARY KEY, purge_at INT, event_id INT) WITHOUT ROWID;
CREATE TABLE event(id INTEGER PRIMARY KEY, at INT, source TEXT, type TEXT, key BLOB, headers BLOB,
    body BLOB);
CREATE TABLE delivery(id INT, target TEXT, due_at INT, attempts INT DEFAULT 0, fence INT DEFAULT 0,
    PRIMARY KEY(id,target)) WITHOUT ROWID;
CREATE INDEX due ON delivery(target,due_at,id);
CREATE TABLE attempt(event_id INT, target TEXT, n INT, at INT, ms INT, status INT);
CREATE INDEX att ON attempt(event_id);
"""


class Bare:
    """The least statements on PostgreSQL."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def ingest(self, number: int) -> None:
        for _ in range(0, number, AT_ONCE):
            keys = [os.urandom(32) for _ in range(AT_ONCE)]
            targets = [TARGETS[n % 10] for n in range(AT_ONCE)]
            many = [AT_ONCE * [one] for one in ("invoice.paid", HEAD, BODY)]
            await self.connection.fetch(BARE_INGEST, keys, targets, *many)

    async def drain(self) -> int:
        done = 0
        while rows := await self.connection.fetch(
            BARE_FETCH, TARGETS, [FETCHED // 10] * 10, 60_000
        ):
            columns = [[row[n] for row in rows] for n in (0, 1, 3)]
            many = [len(rows) * [one] for one in (5, 200)]
            done += len(await self.connection.fetch(BARE_FINISH, *columns, *many))
        return done


class BareFile:
    """The least statements on SQLite, in this thread."""

    def __init__(self, path: str) -> None:
        self.on = sqlite3.connect(path, isolation_level=None)
        self.on.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;" + BARE_FILE)

    async def ingest(self, number: int) -> None:
        on = self.on
        for _ in range(0, number, AT_ONCE):
            on.execute("BEGIN IMMEDIATE")
            for n in range(AT_ONCE):
                key = os.urandom(32)
                if on.execute(
                    "INSERT INTO seen VALUES(?,?,?) ON CONFLICT DO NOTHING", (key, 1, 1)
                ).rowcount:
                    made = on.execute(
                        "INSERT INTO event(at,source,type,key,headers,body) "
                        "VALUES(1,'shop','t',?,?,?)",
                        (key, HEAD, BODY),
                    ).lastrowid
                    on.execute(
                        "INSERT INTO delivery(id,target,due_at) VALUES(?,?,1)",
                        (made, TARGETS[n % 10]),
                    )
            on.execute("COMMIT")

    async def drain(self) -> int:
        on, done = self.on, 0
        while True:
            on.execute("BEGIN IMMEDIATE")
            rows = []
            for target in TARGETS:
                rows += on.execute(
                    "SELECT d.id,d.target,d.fence,e.headers,e.body FROM delivery d JOIN event e "
                    "USING(id) WHERE target=? AND due_at<=10 ORDER BY due_at,d.id LIMIT ?",
                    (target, FETCHED // 10),
                ).fetchall()
            on.executemany(
                "UPDATE delivery SET due_at=due_at+30000,attempts=attempts+1,fence=fence+1 "
                "WHERE id=? AND target=?",
                [row[:2] for row in rows],
            )
            on.execute("COMMIT")
            if not rows:
                return done
            on.execute("BEGIN IMMEDIATE")
            on.executemany(
                "DELETE FROM delivery WHERE id=? AND target=? AND fence=?",
                [(row[0], row[1], row[2] + 1) for row in rows],
            )
            on.executemany("INSERT INTO attempt VALUES(?,?,1,1,5,200)", [row[:2] for row in rows])
            on.execute("COMMIT")
            done += len(rows)


class Ours:
    """The inbox, called as a server and a worker call it."""

    def __init__(self, inbox: AsyncInbox) -> None:
        self.inbox = inbox

    async def ingest(self, number: int) -> None:
        for _ in range(0, number, AT_ONCE):
            await asyncio.gather(
                *(
                    self.inbox.ingest(
                        Arrival(
                            *("shop", os.urandom(16).hex(), "invoice.paid", BODY, HEADERS),
                            (Route(TARGETS[n % 10]),),
                        )
                    )
                    for n in range(AT_ONCE)
                )
            )

    async def drain(self) -> int:
        done = 0
        slots = dict.fromkeys(TARGETS, FETCHED // 10)
        while found := await self.inbox.fetch(slots, 60_000):
            results = [Result(one, Outcome.DELIVERED, 5, 200) for one in found]
            done += sum(await self.inbox.finish(results))
        return done


def own_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def server_cpu(postmaster: int | None) -> float:
    """Seconds of processor time of a server and its processes."""
    if postmaster is None:
        return 0.0
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_text("ascii").rpartition(")")[2].split()
                if int(name) == postmaster or int(fields[1]) == postmaster:
                    total += int(Path(f"/proc/{name}/schedstat").read_text("ascii").split()[0])
    return total / 1e9


class Cost(NamedTuple):
    """Microseconds of processor time that an event takes: in all, and of it the server's."""

    total: float
    server: float


async def cost(step: Callable[[], Awaitable[Any]], events: int, server: int | None) -> Cost:
    """What a step costs for each event."""
    own, served = own_cpu(), server_cpu(server)
    await step()
    own, served = own_cpu() - own, server_cpu(server) - served
    return Cost((own + served) / events * 1e6, served / events * 1e6)


async def compared(bare: Any, ours: Any, server: int | None) -> dict[str, Any]:
    """The steps by turns, some rounds; the middle of the ratios counts."""
    taken: dict[str, list[tuple[Cost, Cost]]] = {"ingest": [], "fetch and finish": []}
    for number in range(ROUNDS + 1):
        pairs = []
        for one in (bare, ours) if number % 2 else (ours, bare):
            first = await cost(lambda one=one: one.ingest(EVENTS), EVENTS, server)
            second = await cost(one.drain, EVENTS, server)
            pairs.append((one is ours, first, second))
        if number:
            pairs.sort(key=lambda pair: pair[0])
            for place, step in enumerate(taken, 1):
                taken[step].append((pairs[0][place], pairs[1][place]))
    found = {}
    for step, rounds in taken.items():
        found[step] = {
            "bare_rounds": [least.total for least, _ in rounds],
            "inbox_rounds": [full.total for _, full in rounds],
            "bare_us": statistics.median(least.total for least, _ in rounds),
            "inbox_us": statistics.median(full.total for _, full in rounds),
            "ratio": statistics.median(full.total / least.total for least, full in rounds),
        }
        if server is not None:
            served = statistics.median(full.server / least.server for least, full in rounds)
            found[step]["server_ratio"] = served
            found[step]["server_us"] = statistics.median(full.server for _, full in rounds)
    return found


class Fetching(NamedTuple):
    """A fetch of a hundred: milliseconds by the clock, and microseconds of processor time."""

    ms: float
    us: float


async def fetching(inbox: AsyncInbox, server: int | None, times: int) -> list[Fetching]:
    """Fetches one after another; what they find is finished in between, which does not count."""
    slots = dict.fromkeys(TARGETS, FETCHED // 10)
    taken = []
    for _ in range(times):
        own, served, began = own_cpu(), server_cpu(server), time.perf_counter()
        found = await inbox.fetch(slots, 60_000)
        ms = (time.perf_counter() - began) * 1000
        taken.append(Fetching(ms, (own_cpu() - own + server_cpu(server) - served) * 1e6))
        assert len(found) == FETCHED
        await inbox.finish([Result(one, Outcome.DELIVERED) for one in found])
    return taken


def middle(taken: list[Fetching]) -> Fetching:
    """The medians."""
    return Fetching(
        statistics.median(one.ms for one in taken), statistics.median(one.us for one in taken)
    )


FILL_EVENT = "INSERT INTO oncekey_inbox_event (id, source, type, key, headers, body) "
FILL_DELIVERY = (
    "INSERT INTO oncekey_inbox_delivery (id, target, due_at, tries, fence, held_by, status, error) "
)


async def fill_postgres(url: str, first: int, number: int) -> None:
    connection = await asyncpg.connect(url)
    try:
        span = f"FROM generate_series({first}::bigint, {first + number - 1}) AS i"
        await connection.execute(
            f"{FILL_EVENT} SELECT i, 'shop', 't', i::text, '', '{{}}' {span}", timeout=900
        )
        await connection.execute(
            f"{FILL_DELIVERY} SELECT i, 'target-' || i % 10, (i >> 20), 0, 0, '', 0, '' {span}",
            timeout=900,
        )
        await connection.execute("VACUUM ANALYZE oncekey_inbox_delivery", timeout=900)
    finally:
        await connection.close()


def fill_sqlite(path: str, first: int, number: int) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as on:
        on.execute("PRAGMA synchronous=OFF")
        on.execute("BEGIN")
        span = range(first, first + number)
        on.executemany(
            f"{FILL_EVENT} VALUES (?, 'shop', 't', ?, x'', x'7b7d')", ((i, str(i)) for i in span)
        )
        on.executemany(
            f"{FILL_DELIVERY} VALUES (?, ?, ?, 0, 0, '', 0, '')",
            ((i, f"target-{i % 10}", i >> 20) for i in span),
        )
        on.execute("COMMIT")


async def backlog(
    inbox: AsyncInbox,
    fill: Callable[[int, int], Awaitable[None]],
    most: int,
    server: int | None,
) -> Any:
    """A fetch with a short and a long backlog, the long one filled in behind the inbox's back."""
    now = await inbox.now()
    few: list[Fetching] = []
    for turn in range(FETCHES // 5):  # a thousand wait at the start of each turn, then fewer
        await fill((now - 3_600_000 + turn) << 20, SHORT if turn == 0 else 5 * FETCHED)
        await asyncio.sleep(FULL_LOOK)  # what was put in there is found then
        few += await fetching(inbox, server, 5)
    await fill((now - 7_200_000) << 20, most)
    await asyncio.sleep(FULL_LOOK)
    await fetching(inbox, server, 5)
    short, long = middle(few), middle(await fetching(inbox, server, FETCHES))
    return {
        "short_ms": short.ms,
        "long_ms": long.ms,
        "short_us": short.us,
        "long_us": long.us,
        "ratio": long.us / short.us,
        "deliveries": most,
    }


@contextlib.asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[AsyncInbox]:
    inbox = await open_inbox(url, **options)
    try:
        yield inbox
    finally:
        await inbox.aclose()


async def on_sqlite(directory: str, most: int) -> dict[str, Any]:
    path = os.path.join(directory, "inbox.db")
    async with opened(f"sqlite:///{path}") as inbox:
        found = await compared(BareFile(os.path.join(directory, "bare.db")), Ours(inbox), None)

        async def fill(first: int, number: int) -> None:
            await asyncio.to_thread(fill_sqlite, path, first, number)

        found["backlog"] = await backlog(inbox, fill, most, None)
    return found


async def on_postgres(directory: str, most: int) -> dict[str, Any]:
    with servers.postgres(directory) as url:
        connection = await asyncpg.connect(url)
        await connection.execute(BARE_SCHEMA)
        file = await connection.fetchval("SELECT pg_read_file('postmaster.pid')")
        server = int(file.split()[0])
        async with opened(url, create=True) as inbox:
            found = await compared(Bare(connection), Ours(inbox), server)

            async def fill(first: int, number: int) -> None:
                await fill_postgres(url, first, number)

            found["backlog"] = await backlog(inbox, fill, most, server)
        await connection.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="What an event costs an inbox.")
    parser.add_argument("databases", nargs="*", default=["sqlite", "postgres"])
    parser.add_argument("--backlog", type=int, default=1_000_000)
    parser.add_argument("--keep", action="store_true", help="keep benchmarks/inbox.json")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for name in arguments.databases:
        with tempfile.TemporaryDirectory(prefix="oncekey-bench-inbox-") as directory:
            os.chmod(directory, 0o755)
            run = on_sqlite if name == "sqlite" else on_postgres
            found[name] = asyncio.run(run(directory, arguments.backlog))
        for step in ("ingest", "fetch and finish"):
            one = found[name][step]
            verdict = "PASS" if one["ratio"] <= COST else "MISS"
            served = ""
            if "server_ratio" in one:
                served = f"; the server's {one['server_us']:.1f}, ratio {one['server_ratio']:.2f}"
            print(
                f"{name:9} {step:17} {one['inbox_us']:7.1f} us CPU, bare {one['bare_us']:6.1f}, "
                f"ratio {one['ratio']:.2f} (at most {COST}) {verdict}{served}"
            )
        one = found[name]["backlog"]
        verdict = "PASS" if one["ratio"] <= FLAT else "MISS"
        print(
            f"{name:9} a fetch of {FETCHED}: {one['long_us']:.0f} us CPU with "
            f"{one['deliveries']:,} waiting, {one['short_us']:.0f} with {SHORT:,}, ratio "
            f"{one['ratio']:.2f} (at most {FLAT}) {verdict}; {one['long_ms']:.1f} and "
            f"{one['short_ms']:.1f} ms"
        )
    if arguments.keep:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
