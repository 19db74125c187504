"""Sizing of a gateway: the arithmetic of docs/explanation/scale.md, and a simulation beside it.

    python scripts/scale.py                    # all steps, the arithmetic beside the simulation
    python scripts/scale.py --seed 7           # other arrivals
    python scripts/scale.py --bytes            # what an event takes on disk, on both databases

The arithmetic is that of ``oncekey plan --gateway``: Little's law and sums. The simulation knows
neither: events arrive at random, each target has slots, attempts take their time and fail by
chance, failures are tried again by the policy of the gateway itself, a target goes away and comes
back, another becomes slow.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import itertools
import math
import os
import random
import sqlite3
import sys
import tempfile
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oncekey.inbox import TargetPolicy
from oncekey.operate import GatewayLoad, plan_gateway
from oncekey.operate.sizing import backlog_after

# ------------------------------------------------------------------------------------- simulation


@dataclass
class Lane:
    """A target: its slots, what waits for it, and how it fares."""

    slots: int
    seconds: float
    fails: float
    away: tuple[float, float] = (math.inf, math.inf)
    ready: deque[tuple[float, int]] = field(default_factory=deque)
    running: int = 0
    attempts: int = 0
    done: list[float] = field(default_factory=list)
    dead: int = 0
    most_waiting: int = 0
    busy: float = 0.0  # seconds of attempts, in all
    drained_at: float = math.nan


class Simulation:
    """One target or several, each with its lane, as the worker has them.

    Args:
        load: What comes.
        slots: Of each target, on all nodes together.
        seed: Of all chance.
        slow: How many of the targets take a hundred times as long.
        away: From when to when the first target can't be reached; the breaker leaves it alone.
        policy: How failures are tried again.
    """

    def __init__(
        self,
        load: GatewayLoad,
        slots: int,
        seed: int = 1,
        *,
        slow: int = 0,
        away: tuple[float, float] = (math.inf, math.inf),
        policy: TargetPolicy | None = None,
    ) -> None:
        self._load = load
        self._policy = policy or TargetPolicy()
        self._random = random.Random(seed)
        self._coming: list[tuple[float, int, str, Any]] = []
        self._order = itertools.count()
        self.lanes = [
            Lane(
                slots,
                load.seconds * (100 if number < slow else 1),
                load.fails,
                away if number == 0 else (math.inf, math.inf),
            )
            for number in range(load.targets)
        ]

    def run(self, seconds: float) -> list[Lane]:
        """Let events come for so long, then until all is delivered or dead."""
        self._at(self._random.expovariate(self._load.rate), "arrives", None)
        for lane in self.lanes:
            if math.isfinite(lane.away[1]):
                self._at(lane.away[1], "returns", lane)
        while self._coming:
            now, _, what, about = heapq.heappop(self._coming)
            if what == "arrives":
                for lane in self.lanes:
                    self._queue(lane, now, (now, 1))
                then = now + self._random.expovariate(self._load.rate)
                if then < seconds:
                    self._at(then, "arrives", None)
            elif what == "returns":
                self._start(about, now)
            elif what == "due":
                self._queue(about[0], now, about[1])
            else:
                self._ended(now, *about)
        return self.lanes

    def _at(self, when: float, what: str, about: Any) -> None:
        heapq.heappush(self._coming, (when, next(self._order), what, about))

    def _queue(self, lane: Lane, now: float, delivery: tuple[float, int]) -> None:
        lane.ready.append(delivery)
        lane.most_waiting = max(lane.most_waiting, len(lane.ready))
        self._start(lane, now)

    def _start(self, lane: Lane, now: float) -> None:
        if lane.away[0] <= now < lane.away[1]:
            return
        while lane.ready and lane.running < lane.slots:
            delivery = lane.ready.popleft()
            takes = self._random.expovariate(1 / lane.seconds)
            lane.running += 1
            lane.attempts += 1
            lane.busy += takes
            self._at(now + takes, "ends", (lane, delivery))
        if not lane.ready and now >= lane.away[1] and math.isnan(lane.drained_at):
            lane.drained_at = now

    def _ended(self, now: float, lane: Lane, delivery: tuple[float, int]) -> None:
        came, number = delivery
        lane.running -= 1
        if self._random.random() >= lane.fails:
            lane.done.append(now - came)
        elif number >= self._policy.tries:
            lane.dead += 1
        else:
            wait = self._policy.delay_ms(number, chance=self._random.random()) / 1000
            self._at(now + wait, "due", (lane, (came, number + 1)))
        self._start(lane, now)


def percentile(values: list[float], percent: float) -> float:
    """Of some values."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(len(ranked) * percent / 100))]


# ----------------------------------------------------------------------------------------- report


# ------------------------------------------------------------------------------------------ bytes


async def bytes_an_event(url: str, number: int = 5_000, body: int = 1_000) -> None:
    """Keep and deliver some events, so that their bytes can be counted."""
    from oncekey.inbox import Arrival, Outcome, Result, Route, open_inbox

    kind, routes = (("content-type", "application/json"),), (Route("app"),)
    inbox = await open_inbox(url, **({"create": True} if url.startswith("postgresql") else {}))
    try:
        for start in range(0, number, 500):
            names = [f"evt_{one:024d}" for one in range(start, start + 500)]
            made = [
                Arrival("shop", name, "invoice.paid", random.randbytes(body), kind, routes)
                for name in names
            ]
            await asyncio.gather(*(inbox.ingest(one) for one in made))
            found = await inbox.fetch({"app": 500}, 60_000)
            await inbox.finish([Result(one, Outcome.DELIVERED, 50, 200) for one in found])
    finally:
        await inbox.aclose()


def measured_bytes(number: int = 5_000, body: int = 1_000) -> None:
    """Print what an event takes beside its body; and its key's record."""
    root = Path(__file__).parents[1]
    sys.path.insert(0, str(root))
    from tests.servers.fixtures_pg import sql
    from tests.servers.postgres import make_database, running

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/inbox.db"
        asyncio.run(bytes_an_event(f"sqlite:///{path}", number, body))
        with contextlib.closing(sqlite3.connect(path)) as file:
            file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            whole = os.path.getsize(path)
            file.execute("DROP TABLE oncekey_records")
            file.execute("VACUUM")
        print(f"sqlite: {os.path.getsize(path) / number - body:,.0f} bytes beside the body", end="")
        print(f", {(whole - os.path.getsize(path)) / number:,.0f} for its key")
    with contextlib.contextmanager(running)() as server:
        url = server.url(make_database(server.url()))
        asyncio.run(bytes_an_event(url, number, body))
        tables = "SELECT relname, pg_total_relation_size(oid) FROM pg_class WHERE relkind = 'r'"
        sizes = dict(sql(url, tables))
        events = sum(
            size
            for name, size in sizes.items()
            if name.startswith(("oncekey_inbox_event", "oncekey_inbox_attempt"))
        )
        keys = sum(size for name, size in sizes.items() if name.startswith("oncekey_records"))
        print(f"postgresql: {events / number - body:,.0f} bytes beside the body", end="")
        print(f", {keys / number:,.0f} for its key")


STEPS = {
    "100 a second": (GatewayLoad(100), 60.0, 1),
    "10,000 a second": (GatewayLoad(10_000), 10.0, 1),
    "1,000,000 a second, one of 100 partitions": (GatewayLoad(10_000), 10.0, 100),
}


def report(seed: int) -> bool:
    """Print the arithmetic beside the simulation; whether they agree."""
    agree = True
    for name, (load, seconds, parts) in STEPS.items():
        size = plan_gateway(load)
        (lane,) = Simulation(load, size.slots, seed).run(seconds)
        number = len(lane.done) + lane.dead
        attempts, in_flight = lane.attempts / number, lane.busy / seconds
        close = abs(attempts / size.attempts - 1) < 0.02 and (
            abs(in_flight / size.in_flight - 1) < 0.1
        )
        agree = agree and close
        print(f"{name}: {'agrees' if close else 'DIFFERS'}")
        print(f"  attempts a delivery {size.attempts:.3f}, simulated {attempts:.3f}")
        print(f"  in flight {size.in_flight:.1f}, simulated {in_flight:.1f}; slots {size.slots}")
        print(
            f"  delay of a delivery: p50 {percentile(lane.done, 50):.2f} s"
            f", p95 {percentile(lane.done, 95):.2f} s; most waiting {lane.most_waiting}"
        )
        print(
            f"  cores: gateways {size.gateway_cores * parts:,.1f}, PostgreSQL "
            f"{size.store_cores * parts:,.1f}; disk {size.events_a_day * parts / 1e9:,.0f} GB a "
            f"day of history, {size.keys * parts / 1e9:,.0f} GB of keys for 7 days"
        )
    load, outage, slots = GatewayLoad(100), 60.0, 20
    waits, drains = backlog_after(load, outage, slots)
    (lane,) = Simulation(load, slots, seed, away=(30.0, 30.0 + outage)).run(400.0)
    took = lane.drained_at - 30.0 - outage
    close = abs(lane.most_waiting / waits - 1) < 0.1 and abs(took / drains - 1) < 0.25
    agree = agree and close
    print(f"a target that was away for {outage:.0f} s: {'agrees' if close else 'DIFFERS'}")
    print(f"  waiting {waits:,.0f}, simulated {lane.most_waiting:,}")
    print(f"  seconds until nothing waits {drains:.0f}, simulated {took:.0f}")
    calm = Simulation(GatewayLoad(100, targets=2), 20, seed).run(60.0)[1]
    beside = Simulation(GatewayLoad(100, targets=2), 20, seed, slow=1).run(60.0)
    slow, healthy = beside
    ratio = percentile(healthy.done, 95) / percentile(calm.done, 95)
    agree = agree and ratio < 1.5
    print(f"beside a target that takes 100 times as long: {'agrees' if ratio < 1.5 else 'DIFFERS'}")
    print(
        f"  p95 of the healthy one {ratio:.2f} times; {slow.most_waiting:,} wait for the slow one"
    )
    return agree


def main() -> int:
    """Print it."""
    parser = argparse.ArgumentParser(
        description="Sizing of a gateway, by arithmetic and by chance."
    )
    parser.add_argument("--seed", type=int, default=1, help="of the simulation; 1")
    parser.add_argument("--bytes", action="store_true", help="measure what an event takes on disk")
    given = parser.parse_args()
    if given.bytes:
        measured_bytes()
        return 0
    return 0 if report(given.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
