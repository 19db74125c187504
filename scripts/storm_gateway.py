"""Kills gateways with -9 under load and counts: ``make storm-gateway``.

    python scripts/storm_gateway.py                      # 50 kills on SQLite, 50 of three nodes
    python scripts/storm_gateway.py --kills 10 sqlite    # fewer, on one store
    python scripts/storm_gateway.py --seed 7             # other moments

It passes if every event that a node acknowledged was delivered, the idempotent app had each once,
and the consumer's table has each exactly once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sqlite3
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.server.storm import Counted, storm  # noqa: E402
from tests.servers.fixtures_pg import sql  # noqa: E402
from tests.servers.postgres import make_database, running  # noqa: E402

from oncekey.inbox import open_inbox  # noqa: E402

STORES = {"sqlite": 1, "postgres": 3}  # and how many nodes


def on_sqlite(folder: Path, kills: int) -> Counted:
    """One node, one file, in which the consumer writes too."""
    file = folder / "inbox.db"
    with contextlib.closing(sqlite3.connect(file)) as made:
        made.execute("CREATE TABLE effects (name text NOT NULL)")
    return asyncio.run(storm(folder, f"sqlite:///{file}", str(file), STORES["sqlite"], kills))


def on_postgres(folder: Path, kills: int) -> Counted:
    """Three nodes and two consumers on one server."""

    async def run(url: str) -> Counted:
        await (await open_inbox(url, create=True)).aclose()
        return await storm(folder, url, url, STORES["postgres"], kills)

    with contextlib.contextmanager(running)() as server:
        url = server.url(make_database(server.url()))
        sql(url, "CREATE TABLE effects (name text NOT NULL)")
        return asyncio.run(run(url))


def main() -> int:
    """Run them, and say what was lost."""
    parser = argparse.ArgumentParser(description="Kill gateways under load, and count.")
    parser.add_argument("stores", nargs="*", metavar="STORE", help=f"of {', '.join(STORES)}")
    parser.add_argument("--kills", type=int, default=50, help="on each store; 50")
    parser.add_argument("--seed", type=int, default=1, help="of the moments and choices")
    given = parser.parse_args()
    if unknown := set(given.stores) - set(STORES):
        parser.error(f"no store {', '.join(sorted(unknown))}: choose from {', '.join(STORES)}")
    failed = False
    for name in given.stores or STORES:
        random.seed(f"{name} {given.seed}")
        with tempfile.TemporaryDirectory(prefix="oncekey-storm-") as directory:
            run = on_sqlite if name == "sqlite" else on_postgres
            counted = run(Path(directory), given.kills)
        verdict = "FAIL" if counted.faults else "PASS"
        print(f"{verdict} {name}, {STORES[name]} nodes: {counted}", flush=True)
        for fault in counted.faults:
            print(f"     {fault}", flush=True)
        failed = failed or bool(counted.faults)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
