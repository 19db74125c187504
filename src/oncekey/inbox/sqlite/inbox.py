"""``AsyncSQLiteInbox``: one thread writes, and whoever comes meanwhile shares its next commit."""

from __future__ import annotations

import asyncio
import functools
import re
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from oncekey._core.drive import drive
from oncekey.abc import Clock
from oncekey.errors import StoreClosedError, StoreConfigError
from oncekey.inbox import views
from oncekey.inbox.actions import LOCK_ORDER
from oncekey.inbox.base import InboxBase, checked_arrival, checked_results
from oncekey.inbox.models import Arrival, Delivery, Ingested, Result
from oncekey.inbox.sqlite import schema
from oncekey.inbox.sqlite.writing import Writing
from oncekey.policy import Duration
from oncekey.stores.sqlite.commits import WriterCommit
from oncekey.stores.sqlite.database import Database

__all__ = ["AsyncSQLiteInbox", "open_url"]

T = TypeVar("T")

_STEP = 200  # events that one step of pruning looks at
_REMEMBERED = "SELECT answer FROM oncekey_records WHERE key = ?1"


async def open_url(
    url: str,
    *,
    remember: Duration,
    node: str | None = None,
    busy_timeout: float = 10.0,
    clock: Clock = time.time,
    create: bool = False,
) -> AsyncSQLiteInbox:
    """Open the inbox in a file; see ``open_inbox``. The file is made if it is not there.

    ``create`` brings an older one up to date, which is refused else.
    """
    read = re.fullmatch(r"sqlite:///([^?#]+)", url)
    if read is None:
        raise StoreConfigError(
            "the URL of a SQLite inbox is sqlite:///inbox.db, or sqlite:////var/lib/inbox.db with "
            "the path from the root"
        )
    loop = asyncio.get_running_loop()
    make = functools.partial(_database, read.group(1), busy_timeout, clock, create)
    database = await loop.run_in_executor(None, make)
    return AsyncSQLiteInbox(url, database, remember=remember, node=node, clock=clock)


def _database(path: str, busy_timeout: float, clock: Clock, create: bool) -> Database:
    database = Database(path, durability="full", busy_timeout=busy_timeout, clock=clock)
    try:
        with database.write_lock:
            ready = schema.migrate if create else schema.make
            ready(database.writer(), database.path)
            quick = schema.is_large(database.writer())
            schema.check(database.writer(), database.path, quick=quick)
    except sqlite3.Error as error:
        database.close()
        raise database.named(error) from error
    except BaseException:
        database.close()
        raise
    return database


class AsyncSQLiteInbox(InboxBase):
    """An inbox in a SQLite file, for the processes of one machine.

    Its keys are records in the same file: ``connect("sqlite:///inbox.db")`` sees them.

    Attributes:
        path: Where the file is.
    """

    def __init__(
        self,
        url: str,
        database: Database,
        *,
        remember: Duration,
        node: str | None,
        clock: Clock,
    ) -> None:
        super().__init__(url, remember=remember, node=node)
        self.path = database.path
        self._database = database
        self._clock = clock
        self._writer = WriterCommit(database, gathers=True)
        self._writing = Writing(self.node, self.remember_ms, clock)
        self._readers = ThreadPoolExecutor(1, "oncekey-inbox-reader")
        self._reader: sqlite3.Connection | None = None

    # Events come in, and leave

    async def ingest(self, arrival: Arrival) -> Ingested:
        checked_arrival(arrival)
        kept: Ingested = await self._submit(self._writing.ingest, arrival)
        self._count("received", arrival.source)
        if not kept.new:
            self._count("duplicate", arrival.source)
        elif arrival.routes:
            self._wake()
        return kept

    async def fetch(self, slots: Mapping[str, int], lease_ms: int) -> list[Delivery]:
        if not any(number > 0 for number in slots.values()):
            return []
        found: list[Delivery] = await self._submit(self._writing.fetch, dict(slots), lease_ms)
        return found

    async def finish(self, results: Sequence[Result]) -> list[bool]:
        if not results:
            return []
        held: list[bool] = await self._submit(self._writing.finish, checked_results(results))
        self._count_results(results, held)
        if any(result.delivery.order_key is not None for result in results):
            self._wake()
        return held

    async def hand_back(self, deliveries: Sequence[Delivery]) -> list[bool]:
        held: list[bool] = await self._submit(self._writing.hand_back, list(deliveries))
        self._wake()
        return held

    async def renew(self, deliveries: Sequence[Delivery], lease_ms: int) -> list[bool]:
        held: list[bool] = await self._submit(self._writing.renew, list(deliveries), lease_ms)
        return held

    # Running

    def _submit(self, method: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        if self._closed:
            raise _closed()
        return self._writer.submit(method, args)

    async def _write(self, flow: views.Flow[T]) -> T:
        # A flow may fail halfway, for reasons of its own: then its neighbours' changes hold.
        made: T = await self._submit(self._in_savepoint, flow)
        return made

    def _in_savepoint(self, on: sqlite3.Cursor, flow: views.Flow[T]) -> T:
        on.execute("SAVEPOINT oncekey_flow")
        try:
            return drive(flow, functools.partial(self._step, on))
        except BaseException:
            on.execute("ROLLBACK TO oncekey_flow")
            raise
        finally:
            on.execute("RELEASE oncekey_flow")

    async def _read(self, flow: views.Flow[T]) -> T:
        if self._closed:
            raise _closed()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, self._look, flow)

    def _look(self, flow: views.Flow[T]) -> T:
        try:
            reader = self._reader
            if reader is None:
                reader = self._reader = self._database.open()
                reader.execute("PRAGMA query_only=1")
            on = reader.cursor()
            on.execute("BEGIN")  # one snapshot, so that what a page says goes together
            try:
                return drive(flow, functools.partial(self._step, on))
            finally:
                on.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise self._database.named(error) from error

    def _step(self, on: sqlite3.Cursor, step: tuple[str, list[Any]]) -> list[Any]:
        sql, args = step
        if sql == views.NOW:
            return [(int(self._clock() * 1000),)]
        if sql == LOCK_ORDER:
            return []  # there is one writer
        text = _REMEMBERED if sql == views.REMEMBERED else _numbered(sql)
        return on.execute(text, args).fetchall()

    # Housekeeping

    async def prune(self, keep_ms: int) -> int:
        cutoff = max(await self.now() - keep_ms, 0)
        removed, place = 0, -1
        while place is not None:
            step = await self._submit(self._writing.prune_some, place, cutoff << 20, _STEP)
            removed += step[0]
            place = step[1]
        while await self._submit(self._writing.prune_strays, cutoff << 20, _STEP):
            pass
        await self._write(_pruned_counts(cutoff))
        return removed

    async def set_up(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._on_writer, schema.migrate)

    async def check(self, *, quick: bool = False) -> None:
        loop = asyncio.get_running_loop()
        look = functools.partial(schema.check, quick=quick)
        await loop.run_in_executor(None, self._on_writer, look)
        await self._check_room()

    def _on_writer(self, action: Callable[[sqlite3.Connection, str], None]) -> None:
        if self._closed:
            raise _closed()
        try:
            with self._database.write_lock:
                action(self._database.writer(), self.path)
        except sqlite3.Error as error:
            raise self._database.named(error) from error

    async def aclose(self) -> None:
        if self._closed:
            return
        await self._stop_counting()
        self._closed = True
        await self._writer.aclose()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._readers, self._close_reader)
        self._readers.shutdown()
        self._database.close()

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _pruned_counts(cutoff: int) -> views.Flow[None]:
    yield views.SQL["prune_counts"], [cutoff]


@functools.lru_cache(maxsize=512)
def _numbered(sql: str) -> str:
    """``$1`` as ``?1``."""
    return re.sub(r"\$(\d+)", r"?\1", sql)


def _closed() -> StoreClosedError:
    return StoreClosedError("this inbox is closed: open it again")
