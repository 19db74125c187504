"""What a call costs in a store that holds ever more keys: it should stay the same.

    python benchmarks/bench_growth.py                    # to ten million keys: under half an hour
    python benchmarks/bench_growth.py --limit 100000     # a first impression
    python benchmarks/bench_growth.py sqlite redis       # some stores

Two stores of a kind stand beside each other: one keeps the first size, the other grows. At each
size claims and completions of new keys are timed in both by turns, so that what else the machine
does hits both alike; the ratio within a round counts, by the clock and in processor time, of this
process and of the server's that serves it. Every kind runs in a process of its own, whose memory is
the memory store's. Stores are filled by the fastest way there is, with rows as they write them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import sqlite3
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import bench_redis
import harness
import plots
from harness import in_tasks, new_keys

import servers
from oncekey import AsyncMemoryStore, AsyncPostgresStore, AsyncRedisStore, AsyncSQLiteStore
from oncekey._core.transitions import mark_fence
from oncekey.models import Key, Scope, Terms
from oncekey.stores.sqlite.database import SQL

RESULTS = Path(__file__).with_name("growth.json")
SIZES = (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
MOST = {"memory": 5_000_000}
SCOPE = Scope("once", "bench")
TERMS = Terms(30_000, 7 * 86_400_000)
ROUNDS, WARM = 11, 200
LONGEST = 40.0  # seconds of a comparison, unless three rounds take longer
TIMED = {"memory": 3_000, "sqlite": 500, "postgres": 250, "redis": 500}  # calls of a round
FLAT = 1.5  # times what it cost with the fewest keys: more is not flat


class Grown(NamedTuple):
    """A store that can be filled, says how much room it takes, and which processes serve it."""

    store: Any
    fill: Callable[[int, int], Awaitable[None]]
    room: Callable[[], Awaitable[float]]
    processes: Callable[[], Awaitable[list[int]]]


async def nobody() -> list[int]:
    """No process but this one."""
    return []


@contextlib.asynccontextmanager
async def memory(directory: str) -> AsyncIterator[Grown]:
    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    async def room() -> float:
        gc.collect()
        return resident() - base

    backend = AsyncMemoryStore()

    async def mark(name: str) -> bool:
        return bool(await backend.first_seen(Key(SCOPE, name), TERMS))

    async def fill(start: int, end: int) -> None:
        for at in range(start, end, 100_000):
            await in_tasks(mark, new_keys(min(100_000, end - at), ("fill", at, directory)), 1)

    gc.collect()
    base = resident()
    yield Grown(backend, fill, room, nobody)


@contextlib.asynccontextmanager
async def sqlite(directory: str) -> AsyncIterator[Grown]:
    path = Path(directory) / "growth.db"

    async def room() -> float:
        return sum(file.stat().st_size for file in path.parent.glob("growth.db*"))

    # Not synced, so that the time of a look-up is not lost in that of a sync.
    async with AsyncSQLiteStore(path, commit="inline", durability="normal") as backend:

        async def fill(start: int, end: int) -> None:
            expires = await backend.now() + TERMS.ttl_ms
            rest = (SCOPE.label, mark_fence(expires), expires, expires)
            random_bytes = random.Random(f"{start} {directory}").randbytes
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
                connection.execute("PRAGMA cache_size=-1500000")
                connection.execute("PRAGMA synchronous=OFF")
                connection.execute("BEGIN")
                rows = ((random_bytes(32), *rest) for _ in range(start, end))
                connection.executemany(SQL["mark"], rows)
                connection.execute("COMMIT")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

        yield Grown(backend, fill, room, nobody)


@contextlib.asynccontextmanager
async def postgres(directory: str) -> AsyncIterator[Grown]:
    import asyncpg

    fill_sql = """INSERT INTO oncekey_records
        (key, scope, state, owner, fence, fingerprint, lease_until, expires_at, purge_at, attempts,
         answer)
    SELECT sha256(n::text::bytea), $4, 1, '', $1::bigint * 1000 - 1, '', 0, $1::bigint,
        $1::bigint, 1, NULL
    FROM generate_series($2::int, $3::int) n"""
    with servers.postgres(directory) as url:
        async with AsyncPostgresStore(url) as backend:
            await backend.create_schema()
            plain = await asyncpg.connect(url)
            await plain.execute("SET synchronous_commit = off")
            expires = await backend.now() + TERMS.ttl_ms

            async def fill(start: int, end: int) -> None:
                for at in range(start, end, 500_000):
                    last = min(at + 500_000, end)
                    await plain.execute(fill_sql, expires, at + 1, last, SCOPE.label)
                await plain.execute("VACUUM ANALYZE oncekey_records")
                await plain.execute("CHECKPOINT")

            async def room() -> float:
                query = "SELECT pg_total_relation_size('oncekey_records')"
                return float(await plain.fetchval(query))

            async def processes() -> list[int]:
                query = """SELECT pid FROM pg_stat_activity WHERE datname = current_database()
                    AND backend_type = 'client backend' AND pid <> pg_backend_pid()"""
                given = os.environ.get("ONCEKEY_TEST_PG_URL")  # who knows which machine it is on
                return [] if given else [row[0] for row in await plain.fetch(query)]

            try:
                yield Grown(backend, fill, room, processes)
            finally:
                await plain.close()


@contextlib.asynccontextmanager
async def redis(directory: str) -> AsyncIterator[Grown]:
    import redis.asyncio

    with servers.redis(directory) as url, bench_redis.connected(url) as client:
        async with (
            AsyncRedisStore(url, check="off") as backend,
            redis.asyncio.Redis.from_url(url) as asking,
        ):

            async def fill(start: int, end: int) -> None:
                expires = await backend.now() + TERMS.ttl_ms
                value = struct.pack(">cq", b"M", expires)
                random_bytes = random.Random(f"{start} {directory}").randbytes
                command = (
                    b"*5\r\n$3\r\nSET\r\n$40\r\noncekey:%b\r\n$25\r\n"
                    + value.replace(b"%", b"%%")
                    + b"%b\r\n$4\r\nPXAT\r\n$13\r\n"
                    + b"%d\r\n" % (expires + 60_000)
                )
                for at in range(start, end, 10_000):
                    count = min(10_000, end - at)
                    keys = [(random_bytes(32), random_bytes(16)) for _ in range(count)]
                    client.sendall(b"".join([command % key for key in keys]))
                    left = 5 * count  # each is answered by +OK and the end of the line
                    while left:
                        left -= len(client.recv(65_536))

            async def room() -> float:
                return float((await asking.info("memory"))["used_memory"])

            async def processes() -> list[int]:
                given = os.environ.get("ONCEKEY_TEST_REDIS_URL")
                return [] if given else [(await asking.info("server"))["process_id"]]

            yield Grown(backend, fill, room, processes)


STORES: dict[str, Callable[[str], contextlib.AbstractAsyncContextManager[Grown]]] = {
    "memory": memory,
    "sqlite": sqlite,
    "postgres": postgres,
    "redis": redis,
}


def server_time(processes: list[int]) -> int:
    """Nanoseconds that processes were on a processor, where the system tells."""
    try:
        return sum(
            int(Path(f"/proc/{pid}/schedstat").read_text("ascii").split()[0]) for pid in processes
        )
    except OSError:
        return 0


async def timed(grown: Grown, names: list[str]) -> tuple[list[float], float]:
    """Microseconds of each claim and completion, one after another; and of processor time."""
    store, taken = grown.store, []
    processes = await grown.processes()
    gc.collect()
    spent = time.process_time_ns() + server_time(processes)
    for name in names:
        key, owner = Key(SCOPE, name), name[:16].encode()
        start = time.perf_counter_ns()
        reply = await store.claim(key, owner, b"f", TERMS)
        done = await store.complete(key, owner, reply.fence, b"janswer", TERMS)
        taken.append((time.perf_counter_ns() - start) / 1e3)
        if not done:
            raise SystemExit("a claim was lost")
    spent = time.process_time_ns() + server_time(processes) - spent
    return taken, spent / 1e3 / len(names)


async def compared(name: str, small: Grown, grown: Grown, size: int) -> dict[str, Any]:
    """Time both by turns."""
    walls: list[float] = []
    by_clock, by_processor, costs = [], [], []
    end = time.monotonic() + LONGEST
    for number in range(-1, ROUNDS):
        if number > 2 and time.monotonic() > end:
            break
        found = {}
        for what in random.Random(f"{size} {number}").sample(["small", "grown"], 2):
            names = new_keys(WARM if number < 0 else TIMED[name], (what, size, number))
            found[what] = await timed(small if what == "small" else grown, names)
        if number < 0:  # warm
            continue
        walls += found["grown"][0]
        costs.append(found["grown"][1])
        medians = {what: statistics.median(taken) for what, (taken, _) in found.items()}
        by_clock.append(medians["grown"] / medians["small"])
        by_processor.append(found["grown"][1] / found["small"][1])
    return {
        "keys": size,
        "p50_us": harness.percentile(walls, 50),
        "p99_us": harness.percentile(walls, 99),
        "processor_us": statistics.median(costs),
        "times": statistics.median(by_clock),
        "times_processor": statistics.median(by_processor),
    }


async def grow(name: str, sizes: list[int], directory: str) -> list[dict[str, Any]]:
    """Fill a store step by step, and time calls at each beside one that stays small."""
    found, have = [], 0
    folders = [Path(directory) / which for which in ("small", "grown")]
    for folder in folders:
        folder.mkdir()
        folder.chmod(0o755)
    async with STORES[name](str(folders[0])) as small:
        await small.fill(0, sizes[0])
        async with STORES[name](str(folders[1])) as grown:
            empty = await grown.room()
            for size in sizes:
                start = time.perf_counter()
                await grown.fill(have, size)
                filled, have = time.perf_counter() - start, size
                room = (await grown.room() - empty) / size
                row = await compared(name, small, grown, size)
                found.append({**row, "bytes_a_key": room, "filled_in_s": filled})
                shown = {what: round(value, 2) for what, value in found[-1].items()}
                print(f"{name}: {json.dumps(shown)}", file=sys.stderr, flush=True)
    return found


def measured(names: list[str], limit: int, directory: str) -> dict[str, list[dict[str, Any]]]:
    """Each store in a process of its own."""
    found = {}
    for name in names:
        most = min(limit, MOST.get(name, SIZES[-1]))
        sizes = [size for size in SIZES if size < most] + [most]
        with tempfile.TemporaryDirectory(prefix="oncekey-growth-", dir=directory) as folder:
            Path(folder).chmod(0o755)
            command = [sys.executable, __file__, "--child", name, json.dumps(sizes), folder]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the growth of {name} failed")
        found[name] = json.loads(done.stdout)
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """One row a store and size."""
    rows = [
        (
            name,
            f"{row['keys']:,}",
            f"{row['p50_us']:.1f} us",
            f"{row['p99_us']:.1f} us",
            f"{row['times']:.2f}",
            f"{row['processor_us']:.1f} us",
            f"{row['times_processor']:.2f}",
            f"{row['bytes_a_key']:.0f}",
            "flat" if max(row["times"], row["times_processor"]) <= FLAT else "**grows**",
        )
        for name, steps in found.items()
        for row in steps
    ]
    header = ("store", "live keys", "claim, complete: p50", "p99", "times the first")
    more = ("processor time", "times the first", "bytes a key", f"at most {FLAT}")
    return harness.markdown((*header, *more), rows, text_columns=1)


def main() -> None:
    """Grow the stores that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stores", nargs="*", metavar="STORE", help=f"of: {', '.join(STORES)}")
    parser.add_argument("--limit", type=int, default=SIZES[-1], help="at most so many keys")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where files go")
    parser.add_argument("--write", action="store_true", help="keep a run of less than all, too")
    given = parser.parse_args()
    unknown = set(given.stores) - set(STORES)
    if unknown:
        parser.error(f"no store {', '.join(sorted(unknown))}: choose from {', '.join(STORES)}")
    found = measured(given.stores or list(STORES), given.limit, given.dir)
    print(table(found))
    if given.write or (len(found) == len(STORES) and given.limit >= SIZES[-1]):
        kept = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps({**kept, **found}, indent=1) + "\n", "utf-8")
        plots.draw()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        what, steps, where = sys.argv[2:]
        print(json.dumps(asyncio.run(grow(what, json.loads(steps), where))))
    else:
        main()
