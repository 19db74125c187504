"""Measures how many bytes a key takes in each store, for ``oncekey plan``.

    python benchmarks/bytes_a_key.py [--keys 5000] [--check]

Claims and completes that many keys on real servers for some sizes of answers, from eight threads,
and writes ``src/oncekey/operate/measured.json``: bytes in memory and on disk at rest, and bytes
written to disk for each key. ``--check`` compares with what is there instead, and fails if a figure
differs by more than a quarter.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import sqlite3
import sys
import tempfile
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

import servers  # noqa: E402
from oncekey import connect  # noqa: E402
from oncekey._core.flows import new_owner  # noqa: E402
from oncekey.models import Key, Scope, Terms  # noqa: E402

TABLE = Path(__file__).parents[1] / "src" / "oncekey" / "operate" / "measured.json"
SIZES = (0, 200, 1000, 4000, 16_000)
TERMS = Terms(lease_ms=30_000, ttl_ms=86_400_000)
THREADS = 8


def use(store: Any, number: int, size: int, first: int = 0) -> None:
    """Claim and complete ``number`` keys, from a few threads. Answers can't be compressed."""
    scope = Scope("once", "plan", "app.orders.charge")

    def one(name: int) -> None:
        key, owner = Key(scope, f"{size}-order-{name:012d}"), new_owner()
        fence = store.claim(key, owner, os.urandom(32).hex().encode(), TERMS).fence
        store.complete(key, owner, fence, os.urandom(size), TERMS)

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(one, range(first, first + number)):
            pass


def on_memory(number: int, size: int) -> tuple[float, float, float]:
    """What the second half takes: the table itself is there by then."""
    with connect("memory://") as store:
        use(store, number, size)
        gc.collect()
        tracemalloc.start()
        use(store, number, size, number)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    return taken / number, 0, 0


def written_here() -> int:
    """Bytes that this process gave to the system to write."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def on_sqlite(number: int, size: int, directory: str) -> tuple[float, float, float]:
    path = Path(tempfile.mkdtemp(dir=directory)) / "plan.db"
    with connect(f"sqlite:///{path}") as store:
        empty, before = 24_576, written_here()
        use(store, number, size)
        written = written_here() - before
    disk = path.stat().st_size - empty
    assert sqlite3.connect(path).execute("SELECT count(*) FROM oncekey_records").fetchone() == (
        number,
    )
    return 0, disk / number, written / number


def on_postgres(number: int, size: int, url: str) -> tuple[float, float, float]:
    import psycopg

    with psycopg.connect(url, autocommit=True) as other, connect(url) as store:

        def asked(sql: str) -> int:
            return int(other.execute(sql).fetchone()[0])  # type: ignore[arg-type, index]

        total = "SELECT pg_total_relation_size('oncekey_records')"
        other.execute("TRUNCATE oncekey_records")
        other.execute("CHECKPOINT")
        disk, wal = asked(total), asked("SELECT pg_current_wal_lsn() - '0/0'")
        use(store, number, size)
        written = asked("SELECT pg_current_wal_lsn() - '0/0'") - wal
        return 0, (asked(total) - disk) / number, written / number


def on_redis(number: int, size: int, url: str) -> tuple[float, float, float]:
    import redis

    client = redis.Redis.from_url(url)
    client.config_set("appendonly", "yes")
    client.flushall()
    rewrite(client)

    def info(name: str) -> int:
        return int(client.info()[name])  # type: ignore[index]

    memory, log = info("used_memory"), info("aof_current_size")
    with connect(url) as store:
        use(store, number, size)
        memory, written = info("used_memory") - memory, info("aof_current_size") - log
    rewrite(client)
    disk = info("aof_current_size")
    client.close()
    return memory / number, disk / number, written / number


def rewrite(client: Any) -> None:
    """Let the server rewrite its log, and wait for it."""
    for begin in (lambda: None, client.bgrewriteaof):
        begin()
        while True:
            time.sleep(0.2)
            state = client.info()
            if not (state["aof_rewrite_in_progress"] or state["aof_rewrite_scheduled"]):
                break


def measure(number: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        with servers.postgres(directory) as pg, servers.redis(directory) as redis:
            with connect(pg) as store:
                store.create_schema()  # type: ignore[attr-defined]
            ways = {
                "memory": lambda size: on_memory(number, size),
                "sqlite": lambda size: on_sqlite(number, size, directory),
                "postgresql": lambda size: on_postgres(number, size, pg),
                "redis": lambda size: on_redis(number, size, redis),
            }
            for name, way in ways.items():
                rows = [way(size) for size in SIZES]
                columns = zip(*rows, strict=True)
                parts = zip(("memory", "disk", "written"), columns, strict=True)
                found[name] = {
                    "sizes": list(SIZES),
                    **{part: [round(one) for one in column] for part, column in parts},
                }
                print(name, json.dumps(found[name]), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=5_000, help="keys for each size of answer")
    parser.add_argument("--check", action="store_true", help="compare with the table instead")
    arguments = parser.parse_args()
    found = measure(arguments.keys)
    if arguments.check:
        kept = json.loads(TABLE.read_text("utf-8"))["backends"]
        off = [
            f"{name} {part} at {size}: {new} now, {old} in the table"
            for name, row in kept.items()
            for part in ("memory", "disk", "written")
            for size, old, new in zip(row["sizes"], row[part], found[name][part], strict=True)
            if abs(new - old) > 0.25 * max(old, 100)
        ]
        print("\n".join(off) or "all within a quarter of the table")
        return 1 if off else 0
    table = {
        "made_by": f"python benchmarks/bytes_a_key.py --keys {arguments.keys}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "about": "bytes for each key, by the size of its answer; written: to disk, by 8 callers",
        "backends": found,
    }
    TABLE.write_text(json.dumps(table, indent=2) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
