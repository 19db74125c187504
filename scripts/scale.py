"""Sizing of a gateway: the arithmetic of docs/explanation/scale.md, and a simulation beside it.

    python scripts/scale.py                    # all steps, the arithmetic beside the simulation
    python scripts/scale.py --seed 7           # other arrivals
    python scripts/scale.py --bytes            # what an event takes on disk, on both databases

The arithmetic is Little's law and sums. The simulation knows neither: events arrive at random, each
target has slots, attempts take their time and fail by chance, failures are tried again by the
policy of the gateway itself, a target goes away and comes back, another becomes slow.
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
from oncekey.operate import plan

REMEMBERED = 7 * 86_400  # seconds that keys are known
BUSY = 0.7  # of slots and cores: above it a queue grows long at every gust

# Microseconds of processor time an event, by benchmarks/bench_gateway.py: see the page.
TAKE, SEND = 660.0, 620.0  # of the gateway: ingest, and each attempt
STORE_TAKE, STORE_SEND = 67.0, 60.0  # of PostgreSQL: ingest, and fetch and finish of each attempt
EVENT_BYTES = 376.0  # that an event and its attempt take beside its body, by --bytes


@dataclass(frozen=True)
class Load:
    """What comes in, and who it goes to.

    Attributes:
        rate: Events in a second.
        targets: To how many targets each goes.
        seconds: How long an attempt takes.
        fails: Which part of the attempts fails.
        body: Bytes of an event.
    """

    rate: float
    targets: int = 1
    seconds: float = 0.1
    fails: float = 0.02
    body: int = 1_000


@dataclass(frozen=True)
class Sizing:
    """What a load needs, by arithmetic.

    Attributes:
        attempts: Of each delivery.
        in_flight: Attempts at a time, for each target.
        slots: What ``concurrency`` times nodes should be, for each target.
        gateway_cores: Of the gateways.
        store_cores: Of PostgreSQL.
        disk_a_day: Bytes of events and their history.
        records: Bytes of the keys, remembered for a week, as ``oncekey plan`` has it.
    """

    attempts: float
    in_flight: float
    slots: int
    gateway_cores: float
    store_cores: float
    disk_a_day: float
    records: float


def attempts_of(fails: float, tries: int) -> float:
    """How often a delivery is tried, if each try fails by the same chance."""
    return float(tries) if fails >= 1 else (1 - fails**tries) / (1 - fails)


def sized(load: Load, policy: TargetPolicy | None = None) -> Sizing:
    """The arithmetic."""
    attempts = attempts_of(load.fails, (policy or TargetPolicy()).tries)
    in_flight = load.rate * attempts * load.seconds
    sent = load.targets * attempts
    return Sizing(
        attempts,
        in_flight,
        math.ceil(in_flight / BUSY),
        load.rate * (TAKE + sent * SEND) / 1e6 / BUSY,
        load.rate * (STORE_TAKE + sent * STORE_SEND) / 1e6 / BUSY,
        load.rate * 86_400 * (load.body + EVENT_BYTES * sent),
        next(
            one.disk_bytes for one in plan(load.rate, REMEMBERED, 22) if one.backend == "postgresql"
        ),
    )


def backlog_after(load: Load, outage: float, slots: int) -> tuple[float, float]:
    """What waits when a target comes back, and the seconds until nothing does any more."""
    capacity = slots / (load.seconds * attempts_of(load.fails, TargetPolicy().tries))
    waits = load.rate * outage
    return waits, waits / (capacity - load.rate) if capacity > load.rate else math.inf


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
        load: Load,
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
    """Print what an event takes beside its body; its key is a record, which ``plan`` counts."""
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
    "100 a second": (Load(100), 60.0, 1),
    "10,000 a second": (Load(10_000), 10.0, 1),
    "1,000,000 a second, one of 100 partitions": (Load(10_000), 10.0, 100),
}


def report(seed: int) -> bool:
    """Print the arithmetic beside the simulation; whether they agree."""
    agree = True
    for name, (load, seconds, parts) in STEPS.items():
        size = sized(load)
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
            f"{size.store_cores * parts:,.1f}; disk {size.disk_a_day * parts / 1e9:,.0f} GB a day "
            f"of history, {size.records * parts / 1e9:,.0f} GB of keys for 7 days"
        )
    load, outage, slots = Load(100), 60.0, 20
    waits, drains = backlog_after(load, outage, slots)
    (lane,) = Simulation(load, slots, seed, away=(30.0, 30.0 + outage)).run(400.0)
    took = lane.drained_at - 30.0 - outage
    close = abs(lane.most_waiting / waits - 1) < 0.1 and abs(took / drains - 1) < 0.25
    agree = agree and close
    print(f"a target that was away for {outage:.0f} s: {'agrees' if close else 'DIFFERS'}")
    print(f"  waiting {waits:,.0f}, simulated {lane.most_waiting:,}")
    print(f"  seconds until nothing waits {drains:.0f}, simulated {took:.0f}")
    calm = Simulation(Load(100, targets=2), 20, seed).run(60.0)[1]
    beside = Simulation(Load(100, targets=2), 20, seed, slow=1).run(60.0)
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
