"""``postgresql://...``: durable, shared by all machines, and able to join your own transactions."""

from __future__ import annotations

import asyncio
import copy
import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

from oncekey._core.drive import adrive, arun, drive, run
from oncekey._core.forks import Forking, watch_forks
from oncekey.abc import AsyncSweepable, AsyncTransactional, Loan, Store, Sweepable, Transactional
from oncekey.drivers._deadlines import Deadline
from oncekey.errors import StoreConfigError, StoreError
from oncekey.models import ClaimReply, Key, Record, Terms
from oncekey.stores._answers import Answers
from oncekey.stores._batching import Job, LoopBatch, ThreadBatch
from oncekey.stores.postgres.addresses import chosen_driver, driver_of, need, own_options, plain
from oncekey.stores.postgres.async_connections import async_source
from oncekey.stores.postgres.browsing import AsyncBrowsing, Browsing
from oncekey.stores.postgres.calls import PgTransactionRecords, is_fence, run_jobs
from oncekey.stores.postgres.connections import sync_source
from oncekey.stores.postgres.counting import AsyncCounting, Counting
from oncekey.stores.postgres.flows import SWEEP_EVERY, Flows, migrated
from oncekey.stores.postgres.listening import AsyncListener, Listener
from oncekey.stores.postgres.schema import check, migrate
from oncekey.stores.postgres.statements import SQL, Statements

__all__ = ["AsyncPostgresStore", "PostgresStore", "open_async", "open_sync"]


class PostgresStore(Browsing, Counting, Flows, Transactional, Store, Sweepable, Forking):
    """The synchronous PostgreSQL store, on psycopg 3.

    Promises: atomic for everybody who uses the database, by the server's clock. With the server's
    ``synchronous_commit`` on (its default) an acknowledged change survives a crash; with
    ``transaction()`` your own writes, the claim and the answer commit together. A fail-over to an
    asynchronous replica can lose what it had not received.

    Threads that call at the same time share one statement. Works after a fork.

    Args:
        source: A URL, a ``psycopg_pool.ConnectionPool``, a SQLAlchemy ``Engine`` or a
            ``sessionmaker``. What was passed in is left open.
        tenant: Sets stores that share the table apart. With row-level security: the role's name.
        prepare: Use prepared statements and LISTEN. Off behind a transaction pooler.
        listen: A URL to listen on for outcomes, where it is not that of ``source``; False: don't,
            look at the records instead.
        timeout: Seconds after which a call that got no answer is given up.

    Raises:
        StoreConfigError: The URL is wrong, or ``source`` is something else.
    """

    def __init__(
        self,
        source: Any,
        *,
        tenant: str = "",
        prepare: bool = True,
        listen: str | bool | None = None,
        timeout: float = 5.0,
    ) -> None:
        need("psycopg")
        self.source = plain(source)
        self._set_up(tenant, listen, timeout)
        self._source = sync_source(self.source, prepare, self.timeout)
        self._claims = ThreadBatch(lambda jobs: self._run("claim", jobs))
        self._settles = ThreadBatch(lambda jobs: self._run("settle", jobs))
        dsn = self._listen_dsn(self._source, prepare)
        self._listener = Listener(dsn, self._noted) if dsn else None
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        """Nobody waits in the child yet."""
        self._start_over()
        if self._listener is not None:
            self._listener.reset()

    # Running statements

    def _run(self, lane: str, jobs: Sequence[Job]) -> None:
        # In time for the oldest call; and a tenth of it even so, to get anywhere after a hang.
        seconds = self.timeout
        until = max(jobs[0].begun + seconds, time.monotonic() + seconds / 10)
        deadline = Deadline(seconds, until)
        try:
            home = self._home or self._ready(deadline)
        except StoreError as error:
            for job in jobs:
                job.error = copy.copy(error)
            return
        steps = run_jobs(home, self.tenant, jobs, self._recent)
        drive(steps, lambda step: self._source.fetch(lane, *step, deadline=deadline))

    def _ready(self, deadline: Deadline | None = None) -> Statements:
        """The statements for where the tables are, once they were looked at."""
        if self._home is None:
            until = deadline or Deadline(self.timeout)
            fetch = functools.partial(self._source.fetch, "other", deadline=until)
            found = drive(check(self.tenant), lambda step: fetch(*step))
            self._store_id, self._home = found
        return self._home

    def _fetch(self, name: str, args: list[Any]) -> list[Any]:
        rows: list[Any] = self._source.fetch("other", self._ready().sql[name], args)
        return rows

    @property
    def store_id(self) -> str:
        """Which store this is: the same for all that share its tables."""
        self._ready()
        return self._store_id

    def create_schema(
        self, *, step: str | None = None, partitions: int = 0, row_security: bool = False
    ) -> list[str]:
        """Make or bring up to date the tables, and say what was done. Doing it again is harmless.

        Args:
            step: ``pre`` before new code is deployed, ``post`` after; both by default.
            partitions: Make ``oncekey_records`` with so many hash partitions.
            row_security: Let each role see only rows whose tenant is its name.
        """
        flow = migrated(self, migrate(step, partitions, row_security), False)
        return drive(flow, lambda call: call[0](*call[1:]))

    # The contract

    def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        """See ``Store``. One statement; a replay writes nothing."""
        reply: ClaimReply = self._claims.submit("claim", (key, owner, fingerprint, terms))
        if self._recent.claimed(reply):
            self._maybe_sweep()
        return reply

    def complete(self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms) -> bool:
        """See ``Store``. One statement."""
        return self._settle("complete", key, owner, fence, answer, terms)

    def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        """See ``Store``. One statement."""
        return self._settle("renew", key, owner, fence, terms)

    def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        """See ``Store``. One statement."""
        return self._settle("release", key, owner, fence)

    def _settle(self, kind: str, key: Key, owner: bytes, fence: int | None, *rest: Any) -> bool:
        if not is_fence(fence):
            return False
        # A release without a fence goes the way of claims: it may be for one that is under way.
        batch = self._claims if fence is None else self._settles
        done: bool = batch.submit(kind, (key, owner, fence, *rest))
        if done and kind != "renew" and (self._registered or self._waiters._waiting):
            self._heard(key.digest)
        return done

    def first_seen(self, key: Key, terms: Terms) -> bool:
        """See ``Store``. One statement; a duplicate writes nothing."""
        first: bool = self._claims.submit("mark", (key, terms))
        if first:
            self._maybe_sweep()
        return first

    def read(self, key: Key) -> Record | None:
        """See ``Store``."""
        record: Record | None = self._claims.submit("read", (key,))
        return record

    def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> None:
        """See ``Store``."""
        args = [self.tenant, key.digest, key.scope.label, fingerprint, answer, expires_at]
        self._fetch("write", args)
        self._heard(key.digest)

    def now(self) -> int:
        """See ``Store``. The server's clock."""
        return int(self._source.fetch("other", SQL["now"], [])[0][0])

    def wait(self, key: Key, seconds: float) -> None:
        """See ``Store``. Holds no connection; woken by this process and, with LISTEN, by others."""
        self._waiters.wait(
            key.digest, seconds, lambda: run(self._announced(self._listener, key, seconds), self)
        )

    # Transactions of callers

    def records(self) -> PgTransactionRecords:
        """See ``Transactional``."""
        home = self._ready()
        return PgTransactionRecords(home, self.tenant, self._store_id, self._recent)

    def lend(self, loan: Loan) -> None:
        """See ``Transactional``."""
        if isinstance(self.source, str):
            loan.source, loan.close = self._source.borrow(), self._source.give_back
        else:
            loan.source = self.source

    def peek(self, key: Key, fingerprint: bytes, terms: Terms) -> ClaimReply | None:
        """See ``Transactional``."""
        reply: ClaimReply | None = self._claims.submit("peek", (key, fingerprint, terms))
        return reply

    def settled_here(self, key: Key) -> None:
        """See ``Transactional``."""
        if self._registered or self._waiters._waiting:
            self._heard(key.digest)
        self._maybe_sweep()

    def _maybe_sweep(self) -> None:
        self._new_records += 1
        if self._new_records >= SWEEP_EVERY:
            self._new_records = 0
            run(self._step_of_sweeping(), self)

    def sweep(self, limit: int = 1000, now: int | None = None) -> int:
        """See ``Sweepable``. One sweeper at a time; gives 0 while another is at it."""
        return run(self._round_of_sweeping(limit, now), self)

    def clear(self) -> None:
        """Remove every record of this tenant. For tests."""
        self._fetch("clear", [self.tenant])

    def close(self) -> None:
        """Close what this store opened."""
        if self._listener is not None:
            self._listener.close()
        self._source.close()


class _Lanes:
    """What belongs to one event loop."""

    def __init__(self, store: AsyncPostgresStore) -> None:
        stepped = store._source.stepped
        self.claims = LoopBatch(functools.partial(store._run, "claim"), stepped=stepped)
        self.settles = LoopBatch(functools.partial(store._run, "settle"), stepped=stepped)
        dsn = store._dsn
        self.listener = AsyncListener(dsn, store.driver, store._noted) if dsn else None


class AsyncPostgresStore(
    AsyncBrowsing, AsyncCounting, Flows, AsyncTransactional, Answers, AsyncSweepable
):
    """The asynchronous PostgreSQL store; ``PostgresStore`` is its synchronous twin.

    Promises what ``PostgresStore`` promises. Calls that come while a statement is under way
    share the next one.

    Args:
        source: A URL, an ``asyncpg.Pool``, a ``psycopg_pool.AsyncConnectionPool``, a SQLAlchemy
            ``AsyncEngine`` or an ``async_sessionmaker``. What was passed in is left open.
        tenant: Sets stores that share the table apart. With row-level security: the role's name.
        driver: ``asyncpg`` or ``psycopg`` for a URL. Default: asyncpg where it is installed.
        prepare: Use prepared statements and LISTEN. Off behind a transaction pooler.
        listen: A URL to listen on for outcomes, where it is not that of ``source``; False: don't.
        timeout: Seconds after which a call that got no answer is given up.

    Raises:
        StoreConfigError: The URL is wrong, or ``source`` is something else.
    """

    def __init__(
        self,
        source: Any,
        *,
        tenant: str = "",
        driver: str | None = None,
        prepare: bool = True,
        listen: str | bool | None = None,
        timeout: float = 5.0,
    ) -> None:
        self.source = plain(source)
        self.driver = chosen_driver(source, driver)
        self._set_up(tenant, listen, timeout)
        self._source = async_source(self.source, self.driver, prepare, self.timeout)
        self._dsn = self._listen_dsn(self._source, prepare)
        self._loops: dict[asyncio.AbstractEventLoop, _Lanes] = {}
        self._sweeping: set[asyncio.Task[None]] = set()

    def _lanes(self) -> _Lanes:
        loop = asyncio.get_running_loop()
        lanes = self._loops.get(loop)
        if lanes is None:
            for old in [old for old in self._loops if old.is_closed()]:
                del self._loops[old]
            lanes = self._loops[loop] = _Lanes(self)
        return lanes

    # Running statements

    async def _run(self, lane: str, jobs: Sequence[Job]) -> None:
        # In time for the oldest call; and a tenth of it even so, to get anywhere after a hang.
        seconds = self.timeout
        until = max(jobs[0].begun + seconds, time.monotonic() + seconds / 10)
        deadline = Deadline(seconds, until)
        home = self._home or await self._ready(deadline)
        steps = run_jobs(home, self.tenant, jobs, self._recent)
        await adrive(steps, lambda step: self._source.fetch(lane, *step, deadline=deadline))

    async def _ready(self, deadline: Deadline | None = None) -> Statements:
        """The statements for where the tables are, once they were looked at."""
        if self._home is None:
            until = deadline or Deadline(self.timeout)
            fetch = functools.partial(self._source.fetch, "other", deadline=until)
            found = await adrive(check(self.tenant), lambda step: fetch(*step))
            self._store_id, self._home = found
        return self._home

    async def _fetch(self, name: str, args: list[Any]) -> list[Any]:
        home = await self._ready()
        rows: list[Any] = await self._source.fetch("other", home.sql[name], args)
        return rows

    async def store_id(self) -> str:
        """Which store this is: the same for all that share its tables."""
        await self._ready()
        return self._store_id

    async def create_schema(
        self, *, step: str | None = None, partitions: int = 0, row_security: bool = False
    ) -> list[str]:
        """Make or bring up to date the tables. See ``PostgresStore.create_schema``."""
        flow = migrated(self, migrate(step, partitions, row_security), True)
        return await adrive(flow, lambda call: call[0](*call[1:]))

    # The contract

    async def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        """See ``AsyncStore``. One statement; a replay writes nothing."""
        args = (key, owner, fingerprint, terms)
        lanes = self._loops.get(asyncio.get_running_loop()) or self._lanes()
        reply: ClaimReply = await lanes.claims.submit("claim", args)
        if self._recent.claimed(reply):
            self._maybe_sweep()
        return reply

    async def complete(
        self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> bool:
        """See ``AsyncStore``. One statement."""
        return await self._settle("complete", key, owner, fence, answer, terms)

    async def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        """See ``AsyncStore``. One statement."""
        return await self._settle("renew", key, owner, fence, terms)

    async def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        """See ``AsyncStore``. One statement."""
        return await self._settle("release", key, owner, fence)

    async def _settle(
        self, kind: str, key: Key, owner: bytes, fence: int | None, *rest: Any
    ) -> bool:
        if not is_fence(fence):
            return False
        lanes = self._loops.get(asyncio.get_running_loop()) or self._lanes()
        # A release without a fence goes the way of claims: it may be for one that is under way.
        batch = lanes.claims if fence is None else lanes.settles
        done: bool = await batch.submit(kind, (key, owner, fence, *rest))
        if done and kind != "renew" and (self._registered or self._waiters._waiting):
            self._heard(key.digest)
        return done

    async def first_seen(self, key: Key, terms: Terms) -> bool:
        """See ``AsyncStore``. One statement; a duplicate writes nothing."""
        first: bool = await self._lanes().claims.submit("mark", (key, terms))
        if first:
            self._maybe_sweep()
        return first

    async def read(self, key: Key) -> Record | None:
        """See ``AsyncStore``."""
        record: Record | None = await self._lanes().claims.submit("read", (key,))
        return record

    async def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> None:
        """See ``AsyncStore``."""
        args = [self.tenant, key.digest, key.scope.label, fingerprint, answer, expires_at]
        await self._fetch("write", args)
        self._heard(key.digest)

    async def now(self) -> int:
        """See ``AsyncStore``. The server's clock."""
        return int((await self._source.fetch("other", SQL["now"], []))[0][0])

    async def wait(self, key: Key, seconds: float) -> None:
        """See ``AsyncStore``. Holds no connection; woken by this process and by others."""
        listener = self._lanes().listener
        await self._waiters.wait_async(
            key.digest, seconds, lambda: arun(self._announced(listener, key, seconds), self)
        )

    # Transactions of callers

    async def records(self) -> PgTransactionRecords:
        """See ``AsyncTransactional``."""
        home = await self._ready()
        return PgTransactionRecords(home, self.tenant, self._store_id, self._recent)

    async def lend(self, loan: Loan) -> None:
        """See ``AsyncTransactional``."""
        if isinstance(self.source, str):
            loan.source, loan.close = await self._source.borrow(), self._source.give_back
        else:
            loan.source = self.source

    async def peek(self, key: Key, fingerprint: bytes, terms: Terms) -> ClaimReply | None:
        """See ``AsyncTransactional``."""
        args = (key, fingerprint, terms)
        reply: ClaimReply | None = await self._lanes().claims.submit("peek", args)
        return reply

    def settled_here(self, key: Key) -> None:
        """See ``AsyncTransactional``."""
        if self._registered or self._waiters._waiting:
            self._heard(key.digest)
        self._maybe_sweep()

    def _maybe_sweep(self) -> None:
        self._new_records += 1
        if self._new_records >= SWEEP_EVERY:
            self._new_records = 0
            task = asyncio.ensure_future(arun(self._step_of_sweeping(), self))
            self._sweeping.add(task)
            task.add_done_callback(self._sweeping.discard)

    async def sweep(self, limit: int = 1000, now: int | None = None) -> int:
        """See ``AsyncSweepable``. One sweeper at a time; gives 0 while another is at it."""
        return await arun(self._round_of_sweeping(limit, now), self)

    async def delete_expired(self, now_epoch: float | None = None) -> int:
        """Remove every record past its time."""
        cutoff = None if now_epoch is None else int(now_epoch * 1000)
        return await self.sweep(sys.maxsize, cutoff)

    async def clear(self) -> None:
        """Remove every record of this tenant. For tests."""
        await self._fetch("clear", [self.tenant])

    async def aclose(self) -> None:
        """Finish what is under way, then close what this store opened."""
        lanes = self._loops.pop(asyncio.get_running_loop(), None)
        if lanes is not None:
            await lanes.claims.drain()
            await lanes.settles.drain()
            if lanes.listener is not None:
                await lanes.listener.aclose()
        if self._sweeping:
            await asyncio.wait(list(self._sweeping))
        await self._source.aclose()


def open_sync(url: str, options: dict[str, Any]) -> PostgresStore:
    """``postgresql://user:password@host:5432/database``."""
    url = own_options(url, options)
    if driver_of(url) == "asyncpg":
        raise StoreConfigError("asyncpg is asynchronous: use aconnect(), or postgresql+psycopg://")
    return PostgresStore(url, **options)


def open_async(url: str, options: dict[str, Any]) -> AsyncPostgresStore:
    """``postgresql://user:password@host:5432/database``."""
    url = own_options(url, options)
    return AsyncPostgresStore(url, **options)
