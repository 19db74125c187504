"""What a call costs in a store that holds ever more keys: it should stay the same.

    python benchmarks/bench_growth.py                    # to ten million keys: 8 GB of disk
    python benchmarks/bench_growth.py --limit 100000     # a first impression
    python benchmarks/bench_growth.py sqlite redis       # some stores
    python benchmarks/bench_growth.py --write            # keep growth.json, and draw it

At each size single calls are timed: a claim of a new key and its completion. Every store runs in a
process of its own, whose memory is the memory store's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import harness
import plots
from bench_sqlite import in_tasks
from harness import new_keys

import servers
from oncekey import AsyncMemoryStore, AsyncPostgresStore, AsyncRedisStore, AsyncSQLiteStore
from oncekey.models import Key, Scope, Terms

RESULTS = Path(__file__).with_name("growth.json")
SIZES = (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
MOST = {"memory": 5_000_000}
SCOPE = Scope("once", "bench")
TERMS = Terms(30_000, 7 * 86_400_000)
TIMED, WARM, CHUNK, CALLERS = 2_000, 200, 20_000, 500


class Grown(NamedTuple):
    """A store that can be filled, and says how much room it takes."""

    store: Any
    fill: Callable[[int, int], Awaitable[None]]
    room: Callable[[], Awaitable[float | None]]


def filled_by(store: Any) -> Callable[[int, int], Awaitable[None]]:
    """Through the store itself, by many callers at a time."""

    async def mark(name: str) -> bool:
        return bool(await store.first_seen(Key(SCOPE, name), TERMS))

    async def fill(start: int, end: int) -> None:
        for at in range(start, end, CHUNK):
            await in_tasks(mark, new_keys(min(CHUNK, end - at), ("fill", at)), CALLERS)

    return fill


@contextlib.asynccontextmanager
async def memory(directory: str) -> AsyncIterator[Grown]:
    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    async def room() -> float:
        gc.collect()
        return resident() - base

    backend = AsyncMemoryStore()
    await filled_by(AsyncMemoryStore())(0, CHUNK)  # warm
    gc.collect()
    base = resident()
    yield Grown(backend, filled_by(backend), room)


@contextlib.asynccontextmanager
async def sqlite(directory: str) -> AsyncIterator[Grown]:
    path = Path(directory) / "growth.db"

    async def room() -> float:
        return sum(file.stat().st_size for file in path.parent.glob("growth.db*"))

    # Not synced, so that the time of a look-up is not lost in that of a sync.
    async with AsyncSQLiteStore(path, commit="inline", durability="normal") as backend:
        yield Grown(backend, filled_by(backend), room)


@contextlib.asynccontextmanager
async def postgres(directory: str) -> AsyncIterator[Grown]:
    import asyncpg

    fill_sql = """INSERT INTO oncekey_records
        (key, scope, state, owner, fence, fingerprint, lease_until, expires_at, purge_at, attempts,
         answer)
    SELECT sha256(n::text::bytea), 'once:bench', 1, '', n, '', 0, $1::bigint, $1::bigint, 1, 'j1'
    FROM generate_series($2::int, $3::int) n"""
    with servers.postgres(directory) as url:
        async with AsyncPostgresStore(url) as backend:
            await backend.create_schema()
            plain = await asyncpg.connect(url)
            later = await backend.now() + TERMS.ttl_ms

            async def fill(start: int, end: int) -> None:
                for at in range(start, end, 500_000):
                    await plain.execute(fill_sql, later, at + 1, min(at + 500_000, end))
                await plain.execute("VACUUM ANALYZE oncekey_records")

            async def room() -> float:
                query = "SELECT pg_total_relation_size('oncekey_records')"
                return float(await plain.fetchval(query))

            try:
                yield Grown(backend, fill, room)
            finally:
                await plain.close()


@contextlib.asynccontextmanager
async def redis(directory: str) -> AsyncIterator[Grown]:
    import redis.asyncio

    with servers.redis(directory) as url:
        async with (
            AsyncRedisStore(url, check="off") as backend,
            redis.asyncio.Redis.from_url(url) as client,
        ):

            async def room() -> float:
                return float((await client.info("memory"))["used_memory"])

            yield Grown(backend, filled_by(backend), room)


STORES: dict[str, Callable[[str], contextlib.AbstractAsyncContextManager[Grown]]] = {
    "memory": memory,
    "sqlite": sqlite,
    "postgres": postgres,
    "redis": redis,
}


async def timed(store: Any, names: list[str]) -> list[float]:
    """Microseconds of each claim and completion, one after another."""
    taken = []
    for name in names:
        key, owner = Key(SCOPE, name), name[:16].encode()
        start = time.perf_counter_ns()
        reply = await store.claim(key, owner, b"f", TERMS)
        done = await store.complete(key, owner, reply.fence, b"janswer", TERMS)
        taken.append((time.perf_counter_ns() - start) / 1e3)
        if not done:
            raise SystemExit("a claim was lost")
    return taken


async def grow(name: str, sizes: list[int], directory: str) -> list[dict[str, Any]]:
    """Fill a store step by step, and time calls at each."""
    found, have = [], 0
    async with STORES[name](directory) as grown:
        empty = await grown.room() or 0
        for size in sizes:
            start = time.perf_counter()
            await grown.fill(have, size)
            have = size
            room = await grown.room()
            calls = await timed(grown.store, new_keys(TIMED + WARM, ("timed", size)))
            found.append(
                {
                    "keys": size,
                    "p50_us": harness.percentile(calls[WARM:], 50),
                    "p99_us": harness.percentile(calls[WARM:], 99),
                    "bytes_a_key": None if room is None else (room - empty) / size,
                    "filled_in_s": time.perf_counter() - start,
                }
            )
            print(f"{name}: {json.dumps(found[-1])}", file=sys.stderr, flush=True)
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
            f"{row['p50_us'] / steps[0]['p50_us']:.2f}",
            f"{row['bytes_a_key']:.0f}",
        )
        for name, steps in found.items()
        for row in steps
    ]
    header = ("store", "live keys", "claim, complete: p50", "p99", "times the first", "bytes a key")
    return harness.markdown(header, rows, text_columns=1)


def main() -> None:
    """Grow the stores that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stores", nargs="*", metavar="STORE", help=f"of: {', '.join(STORES)}")
    parser.add_argument("--limit", type=int, default=SIZES[-1], help="at most so many keys")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where files go")
    parser.add_argument("--write", action="store_true", help=f"keep {RESULTS.name} and its plot")
    given = parser.parse_args()
    unknown = set(given.stores) - set(STORES)
    if unknown:
        parser.error(f"no store {', '.join(sorted(unknown))}: choose from {', '.join(STORES)}")
    found = measured(given.stores or list(STORES), given.limit, given.dir)
    print(table(found))
    if given.write:
        kept = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps({**kept, **found}, indent=1) + "\n", "utf-8")
        plots.draw()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        what, steps, where = sys.argv[2:]
        print(json.dumps(asyncio.run(grow(what, json.loads(steps), where))))
    else:
        main()
