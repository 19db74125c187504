"""``AsyncPostgresInbox``: one statement for each batch of calls that come at the same time."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from oncekey._core.drive import adrive
from oncekey.errors import StoreClosedError, StoreUnavailableError
from oncekey.inbox import views
from oncekey.inbox.actions import LOCK_ORDER
from oncekey.inbox.base import InboxBase, checked_arrival, checked_results, shown
from oncekey.inbox.models import (
    Arrival,
    Delivery,
    Ingested,
    Outcome,
    Result,
    event_id,
    event_key,
    event_number,
)
from oncekey.inbox.postgres import schema
from oncekey.inbox.postgres.pool import Pool, shown_url
from oncekey.inbox.search import PARKED
from oncekey.models import Key
from oncekey.policy import Duration
from oncekey.stores._batching import Job, LoopBatch
from oncekey.stores.postgres.store import AsyncPostgresStore

__all__ = ["AsyncPostgresInbox", "open_url"]

T = TypeVar("T")

SQL: Final = schema.SQL
_INGEST: Final = SQL["ingest"].format(due_at=SQL["part_due_at"])
_INGEST_IN_ORDER: Final = SQL["ingest"].format(due_at=SQL["part_due_in_order"])
_BATCH: Final = 256
_READS: Final = 3  # by people, at a time
_WRITES: Final = 2
_LARGEST: Final = 16_000_000  # bytes of bodies in one statement
_ROUNDS: Final = 10  # of an ingest whose keys others take and give back meanwhile
_FULL_LOOK: Final = 3.0  # seconds between looks without a floor
_SLACK_MS: Final = 2_000  # how much later a commit may be seen than it was due
_OWN: Final = {views.NOW: "now", views.REMEMBERED: "remembered", LOCK_ORDER: "lock_order"}


async def open_url(
    url: str,
    *,
    remember: Duration,
    node: str | None = None,
    timeout: float = 15.0,
    create: bool = False,
) -> AsyncPostgresInbox:
    """Open the inbox in a database; see ``open_inbox``. ``create`` makes the tables first."""
    pool = await Pool.open(url, timeout)
    try:
        if create:
            await schema.set_up(pool)
        await schema.check(pool)
        await schema.add_days(pool)
    except BaseException:
        await pool.close()
        raise
    return AsyncPostgresInbox(shown_url(url), pool, remember=remember, node=node)


class AsyncPostgresInbox(InboxBase):
    """An inbox in PostgreSQL, for any number of nodes.

    Its keys are records in the same database: a store on it sees them.
    """

    def __init__(self, url: str, pool: Pool, *, remember: Duration, node: str | None) -> None:
        super().__init__(url, remember=remember, node=node)
        self._pool = pool
        self._ingests = LoopBatch(self._ingest, _BATCH)
        self._finishes = LoopBatch(self._finish, _BATCH)
        self._floors: dict[str, int] = {}
        self._looked = 0.0
        self._offset: float | None = None  # the server's clock less our monotonic one, in ms
        self._sources: set[str] = set()
        # Of the pool's connections; the others are left to what comes in and goes out.
        self._reads = asyncio.Semaphore(_READS)
        self._writes = asyncio.Semaphore(_WRITES)

    # Events come in

    async def ingest(self, arrival: Arrival) -> Ingested:
        checked_arrival(arrival)
        if self._closed:
            raise _closed()
        kept: Ingested = await self._ingests.submit(
            event_key(arrival.source, arrival.key), (arrival,)
        )
        self._count("received", arrival.source)
        if not kept.new:
            self._count("duplicate", arrival.source)
        elif arrival.routes:
            self._wake()
        return kept

    async def _ingest(self, jobs: Sequence[Job]) -> None:
        asked: dict[bytes, Job] = {}
        for job in jobs:
            asked.setdefault(job.method.digest, job)
        known: dict[bytes, tuple[int, bytes]] = {}  # the event of a key, and its body's digest
        waiting = list(asked.values())
        for _ in range(_ROUNDS):
            for part in _parts(waiting):
                known |= await self._keep(part)
            waiting = [job for job in waiting if job.method.digest not in known]
            if not waiting:
                break
            await self._pool.fetch(SQL["forget"], [job.method.digest for job in waiting])
        for job in waiting:
            job.error = StoreUnavailableError(
                "other nodes took and gave back this key again and again: try once more"
            )
        copies = [job for job in jobs if asked[job.method.digest] is not job]
        if copies:
            await self._keep_copies(copies, asked, known)

    async def _keep(self, jobs: list[Job]) -> dict[bytes, tuple[int, bytes]]:
        """Ingest events of different keys; gives what is known of the keys now."""
        arrivals: list[Arrival] = [job.args[0] for job in jobs]
        routes = [
            (place, route.target, route.order_key)
            for place, arrival in enumerate(arrivals, 1)
            for route in arrival.routes
        ]
        args = _ingest_arguments([job.method for job in jobs], arrivals, self.remember_ms, routes)
        ordered = [(target, key) for _, target, key in routes if key is not None]
        async with self._pool.connection() as connection:
            await self._add_sources(connection, arrivals)
            if ordered:
                async with connection.transaction():
                    await connection.fetch(SQL["lock_order"], *_columns(ordered, 2))
                    rows = await connection.fetch(_INGEST_IN_ORDER, *args)
            else:
                rows = await connection.fetch(_INGEST, *args)
        known = {}
        for place, number, new, answer, fingerprint in rows:
            job = jobs[place - 1]
            found = number if new else views.number_in(answer)
            if found is not None:
                same = new or fingerprint == args[7][place - 1]
                job.result = Ingested(event_id(found), new, same)
                known[job.method.digest] = (found, fingerprint)
        return known

    async def _keep_copies(
        self,
        copies: list[Job],
        asked: dict[bytes, Job],
        known: dict[bytes, tuple[int, bytes]],
    ) -> None:
        """Copies that came in one batch with the first: they are known for what they are."""
        rows = []
        for job in copies:
            digest = job.method.digest
            if digest not in known:
                job.error = asked[digest].error
                continue
            number, fingerprint = known[digest]
            body = job.args[0].body
            same = hashlib.sha256(body).digest() == fingerprint
            job.result = Ingested(event_id(number), False, same)
            rows.append((number, None if same else body))
        if rows:
            await self._pool.fetch(SQL["add_copies"], *_columns(rows, 2))

    async def _add_sources(self, connection: Any, arrivals: list[Arrival]) -> None:
        new = {one.source for one in arrivals} - self._sources
        for source in new:
            await connection.execute(views.SQL["add_source"], source)
        self._sources |= new

    # and leave

    async def fetch(self, slots: Mapping[str, int], lease_ms: int) -> list[Delivery]:
        wanted = [(name, free) for name, free in slots.items() if free > 0]
        if not wanted:
            return []
        began = time.monotonic()
        if began - self._looked >= _FULL_LOOK:
            self._looked = began
            self._floors.clear()
        floors = [self._floors.get(name, 0) for name, _ in wanted]
        rows = await self._pool.fetch(
            SQL["fetch"], *_columns(wanted, 2), floors, lease_ms, self.node
        )
        self._raise_floors(wanted, rows, began, lease_ms)
        return [
            Delivery(
                event=views.as_event((row[0], *row[7:12])),
                target=row[1],
                attempt=row[2],
                fence=row[3],
                lease_until=row[4],
                order_key=row[5],
            )
            for row in rows
        ]

    def _raise_floors(
        self, wanted: list[tuple[str, int]], rows: list[Any], began: float, lease_ms: int
    ) -> None:
        """What is due before the last one taken was taken too: the next look starts there."""
        if rows:
            self._offset = rows[0][4] - lease_ms - time.monotonic() * 1000
        last: dict[str, int] = {}
        number: dict[str, int] = {}
        for row in rows:
            last[row[1]] = max(last.get(row[1], 0), row[6])
            number[row[1]] = number.get(row[1], 0) + 1
        for name, free in wanted:
            if number.get(name, 0) >= free:
                self._floors[name] = last[name] - _SLACK_MS
            elif self._offset is not None:
                self._floors[name] = int(began * 1000 + self._offset) - _SLACK_MS

    async def finish(self, results: Sequence[Result]) -> list[bool]:
        if not results:
            return []
        if self._closed:
            raise _closed()
        held: list[bool] = await self._finishes.submit(None, (checked_results(results),))
        self._count_results(results, held)
        if any(result.delivery.order_key is not None for result in results):
            self._wake()
        return held

    async def _finish(self, jobs: Sequence[Job]) -> None:
        asked: dict[tuple[int, str], Result] = {}
        places: list[list[tuple[int, str]]] = []
        for job in jobs:
            places.append([])
            for result in job.args[0]:
                delivery = result.delivery
                place = (event_number(delivery.event.id), delivery.target)
                places[-1].append(place)
                other = asked.get(place)
                # Of two fences of one delivery the higher is asked for: no other can be the last.
                if other is None or delivery.fence > other.delivery.fence:
                    asked[place] = result
        ended = await self._end(sorted(asked.items(), key=_by_place))
        for job, here in zip(jobs, places, strict=True):
            job.result = [
                place in ended and asked[place] is result
                for place, result in zip(here, job.args[0], strict=True)
            ]

    async def _end(self, asked: list[tuple[tuple[int, str], Result]]) -> set[tuple[int, str]]:
        """Finish deliveries, in one order whoever asks; gives those whose fence was the last."""
        ordered = [
            (result.delivery.target, result.delivery.order_key, result.outcome)
            for _, result in asked
            if result.delivery.order_key is not None
        ]
        sql, args = _finish_statement(asked)
        async with self._pool.connection() as connection:
            if ordered:
                async with connection.transaction():
                    await connection.fetch(SQL["lock_order"], *_columns(ordered, 3)[:2])
                    rows = await connection.fetch(sql, *args)
                    gone = [one[:2] for one in ordered if one[2] is not Outcome.RETRY]
                    await connection.fetch(SQL["promote_all"], *_columns(gone, 2), PARKED)
            else:
                rows = await connection.fetch(sql, *args)
        return {(row[0], row[1]) for row in rows}

    async def hand_back(self, deliveries: Sequence[Delivery]) -> list[bool]:
        held = await self._change(SQL["hand_back"], deliveries)
        self._wake()
        return held

    async def renew(self, deliveries: Sequence[Delivery], lease_ms: int) -> list[bool]:
        return await self._change(SQL["renew"], deliveries, lease_ms)

    async def _change(self, sql: str, deliveries: Sequence[Delivery], *more: int) -> list[bool]:
        places = [(event_number(one.event.id), one.target, one.fence) for one in deliveries]
        rows = await self._pool.fetch(sql, *_columns(places, 3), *more)
        done = {tuple(row) for row in rows}
        return [place in done for place in places]

    # Running

    async def _write(self, flow: views.Flow[T]) -> T:
        async with self._writes, self._pool.connection() as connection, connection.transaction():
            return await _driven(flow, connection)

    async def _read(self, flow: views.Flow[T]) -> T:
        async with (
            self._reads,
            self._pool.connection() as connection,
            connection.transaction(isolation="repeatable_read", readonly=True),
        ):
            return await _driven(flow, connection)

    # Housekeeping

    async def prune(self, keep_ms: int) -> int:
        cutoff = max(await self.now() - keep_ms, 0)
        await schema.add_days(self._pool)
        removed = await schema.drop_days(self._pool, cutoff)
        removed += await schema.prune_rest(self._pool, cutoff << 20)
        await self._pool.fetch(views.SQL["prune_counts"], cutoff)
        store = AsyncPostgresStore(self._pool.pool)
        try:
            await store.delete_expired()
        finally:
            await store.aclose()
        return removed

    async def set_up(self) -> None:
        await schema.set_up(self._pool)

    async def check(self, *, quick: bool = False) -> None:
        await schema.check(self._pool)
        await self._check_room()

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._ingests.drain()
        await self._finishes.drain()
        await self._stop_counting()
        await self._pool.close()


async def _driven(flow: views.Flow[T], connection: Any) -> T:
    async def step(asked: tuple[str, list[Any]]) -> list[Any]:
        sql, args = asked
        own = _OWN.get(sql)
        return list(await connection.fetch(sql if own is None else SQL[own], *args))

    return await adrive(flow, step)


def _parts(jobs: list[Job]) -> Iterator[list[Job]]:
    """Jobs whose bodies together are of a size that a message may have."""
    part: list[Job] = []
    size = 0
    for job in jobs:
        length = len(job.args[0].body)
        if part and size + length > _LARGEST:
            yield part
            part, size = [], 0
        part.append(job)
        size += length
    if part:
        yield part


def _columns(rows: Sequence[Any], number: int) -> list[list[Any]]:
    """Rows as one list for each column, as ``unnest`` wants them."""
    return [[row[column] for row in rows] for column in range(number)]


def _ingest_arguments(
    keys: list[Key], arrivals: list[Arrival], remember_ms: int, routes: list[Any]
) -> list[Any]:
    return [
        [key.digest for key in keys],
        [key.scope.label for key in keys],
        [one.source for one in arrivals],
        [one.type for one in arrivals],
        [one.key for one in arrivals],
        [views.written_headers(one.headers) for one in arrivals],
        [one.body for one in arrivals],
        [hashlib.sha256(one.body).digest() for one in arrivals],
        remember_ms,
        *_columns(routes, 3),
    ]


def _by_place(item: tuple[tuple[int, str], Result]) -> tuple[int, str]:
    return item[0]


def _finish_statement(asked: list[tuple[tuple[int, str], Result]]) -> tuple[str, list[Any]]:
    """Most are delivered, all of a batch: then less is said and looked at."""
    results = [result for _, result in asked]
    numbers, targets = _columns([place for place, _ in asked], 2)
    fences = [one.delivery.fence for one in results]
    times = [min(one.ms, 2**31 - 1) for one in results]
    statuses = [one.status for one in results]
    notes = [shown(one.note) for one in results]
    if all(one.outcome is Outcome.DELIVERED and not one.error for one in results):
        return SQL["finish_delivered"], [numbers, targets, fences, times, statuses, notes]
    outcomes = [one.outcome.value for one in results]
    errors = [shown(one.error) for one in results]
    waits = [one.retry_in_ms for one in results]
    args = [numbers, targets, fences, outcomes, times, statuses, errors, notes, waits]
    return SQL["finish"], args


def _closed() -> StoreClosedError:
    return StoreClosedError("this inbox is closed: open it again")
