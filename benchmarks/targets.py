"""What we hold ourselves to: ratios within one run on a quiet machine."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

import harness


class Target(NamedTuple):
    """What is wanted.

    Attributes:
        part: The part of the run.
        operation: What is done.
        case: Who does it.
        reference: Whom it is held against, or what is looked at if it stands for itself: one of
            ``ABSOLUTE``.
        wanted: How many times as fast it should be; or at least or at most so much.
    """

    part: str
    operation: str
    case: str
    reference: str
    wanted: float


RATE, COST, TAIL = "calls a second", "ms of processor time", "p99 by p50"
ABSOLUTE = {RATE: "at least", COST: "at most", TAIL: "at most"}


class Verdict(NamedTuple):
    """A target beside what was measured, in each round."""

    target: Target
    measured: list[float]

    @property
    def reached(self) -> float:
        """1: just what is wanted; more is better."""
        middle, wanted = statistics.median(self.measured), self.target.wanted
        return wanted / middle if self.bound == "at most" else middle / wanted

    @property
    def bound(self) -> str:
        return ABSOLUTE.get(self.target.reference, "at least")

    @property
    def met(self) -> bool:
        return self.reached >= 1


def _each(
    part: str, operation: str, callers: tuple[int, ...], case: str, other: str, *wanted: float
) -> Iterator[Target]:
    for number, least in zip(callers, wanted, strict=True):
        yield Target(part, f"{operation}, {number} at a time", case, other, least)


PG, SQLITE, REDIS = (1, 16, 64), (1, 16, 128), (1, 16, 128)
OURS = "**oncekey**"

# What ``Once`` was of its floor before it was made shorter, and 1.4 times that is wanted.
ONCE_BEFORE = {
    "sync: fresh": 0.06,
    "sync: replay": 0.10,
    "async: fresh": 0.06,
    "async: replay": 0.12,
}
TRANSACTIONS_BEFORE = 169  # a second, of 16 callers on SQLite; four times that is wanted

TARGETS = (
    *(
        Target(
            "calls",
            f"Once, {what}",
            f"{OURS} Once",
            "floor: lock, dict, function" if what.startswith("sync") else "floor: dict, function",
            round(1.4 * before, 3),
        )
        for what, before in ONCE_BEFORE.items()
    ),
    Target("calls", "import: cold", f"{OURS} import MemoryBackend", COST, 60),
    *(
        Target("calls", f"wrap, {size}: {what}", f"{OURS} wrap", "adcp wrap", least)
        for size in ("small", "usual")
        for what, least in (("fresh", 1.6), ("replay", 1.5))
    ),
    Target(
        "memory", "first seen: one of each", f"{OURS} check_and_record", "adcp put_if_absent", 2.6
    ),
    *(
        Target(
            "memory",
            f"claim and complete: {what}",
            f"{OURS} claim, complete",
            "adcp claim, complete",
            least,
        )
        for what, least in (("new key", 3.4), ("duplicate", 3))
    ),
    Target("http", "fresh key", f"{OURS} on Starlette", "limit: bare Starlette", 0.65),
    Target("http", "replay", f"{OURS} on Starlette", "limit: bare Starlette", 1.5),
    Target("http", "fresh key", f"{OURS} on Starlette", "asgi-idempotency-header on Starlette", 1),
    Target("http", "replay", f"{OURS} on Starlette", "asgi-idempotency-header on Starlette", 1),
    Target("receiver", "first delivery", OURS, "limit: bare, a durable insert", 0.75),
    Target("receiver", "duplicate", OURS, "limit: bare endpoint", 0.5),
    Target(
        "gateway",
        "ingest, processor time",
        f"{OURS[:-2]} serve**",
        "limit: raw ASGI, a durable insert",
        0.7,
    ),
    Target("gateway", "delivery, processor time", f"{OURS} worker", "limit: bare aiohttp", 0.8),
    *(
        Target(
            "gateway",
            f"{what} on {store}, processor time",
            f"{OURS} inbox",
            "limit: the least statements",
            0.8,  # at most 1.25 times the cost
        )
        for what in ("ingest", "fetch and finish")
        for store in ("SQLite", "PostgreSQL")
    ),
    *(
        Target(
            "gateway",
            f"fetch of 100 on {store}, processor time",
            f"{OURS} a long backlog",
            "few waiting",
            0.667,  # at most 1.5 times the cost
        )
        for store in ("SQLite", "PostgreSQL")
    ),
    *_each(
        "postgres",
        "first seen",
        PG,
        f"{OURS} asyncpg",
        "limit: one statement for all",
        *(0.85, 0.6, 0.5),
    ),
    Target("postgres", "first seen, 64 at a time", f"{OURS} asyncpg", "adcp", 10),
    Target("postgres", "first seen, 64 at a time", f"{OURS} asyncpg", "idemkit", 10),
    *_each(
        "postgres",
        "claim, complete",
        PG,
        f"{OURS} asyncpg",
        "limit: asyncpg, one by one",
        *(0.75, 1.7, 3),
    ),
    Target("postgres", "claim, complete, 64 at a time", f"{OURS} asyncpg", "idemkit", 9),
    *_each(
        "postgres",
        "replay",
        PG,
        f"{OURS} asyncpg",
        "limit: asyncpg, one by one",
        *(0.85, 1.6, 2.5),
    ),
    *_each(
        "postgres",
        "transaction",
        (1, 16),
        f"{OURS} asyncpg",
        "limit: by hand, asyncpg",
        *(0.75, 0.7),
    ),
    *_each(
        "sqlite",
        "first seen",
        SQLITE,
        f'{OURS} async, commit="inline"',
        "limit: sqlite3",
        *(0.88, 0.7, 0.55),
    ),
    Target("sqlite", "first seen, 16 at a time", f"{OURS} sync, threads", "limit: sqlite3", 0.5),
    *(
        Target("sqlite", f"transaction, 16 callers, {world}", f"{OURS} transaction", *wanted)
        for world in ("sync", "async")
        for wanted in ((RATE, 4 * TRANSACTIONS_BEFORE), (TAIL, 5))
    ),
    *_each(
        "redis",
        "claim, complete",
        REDIS,
        f"{OURS} async",
        "limit: auto-pipelined, unfenced",
        *(0.7, 0.7, 0.85),
    ),
    *_each("redis", "claim, complete", REDIS, f"{OURS} async", "idemkit", 1.6, 6, 15),
)


def judged(part: str, samples: harness.Samples) -> Iterator[Verdict]:
    """The targets of a part that could be measured."""
    for target in TARGETS:
        found = samples.get(target.operation, {})
        if target.part != part or target.case not in found:
            continue
        taken = found[target.case]
        if target.reference == RATE:
            yield Verdict(target, [1 / one for one in taken])
        elif target.reference == COST:
            yield Verdict(target, [one * 1e3 for one in taken])
        elif target.reference == TAIL:
            single = harness.LATENCIES[part][target.operation][target.case]
            yield Verdict(
                target,
                [harness.percentile(one, 99) / harness.percentile(one, 50) for one in single],
            )
        elif target.reference in found:
            yield Verdict(target, harness.ratios(taken, found[target.reference]))


def table(part: str) -> str:
    """A row for each target: what was wanted, what was measured, and whether that is enough."""
    rows = [
        (
            verdict.target.operation,
            f"{verdict.target.case}, {verdict.target.reference}"
            if verdict.target.reference in ABSOLUTE
            else f"{verdict.target.case}, of {verdict.target.reference}",
            f"{verdict.bound} {verdict.target.wanted:g}",
            harness.ratio(verdict.measured),
            "met" if verdict.met else "**missed**",
        )
        for verdict in judged(part, harness.RECORDED.get(part, {}))
    ]
    return harness.markdown(("operation", "target", "wanted", "measured", ""), rows)
