"""``postgresql://...``: durable, shared by all machines, and able to join your own transactions."""

from __future__ import annotations

import asyncio
import copy
import functools
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from oncekey._core.drive import adrive as core_adrive
from oncekey._core.drive import drive as core_drive
from oncekey._core.forks import Forking, watch_forks
from oncekey.abc import AsyncSweepable, AsyncTransactional, Loan, Store, Sweepable, Transactional
from oncekey.drivers import driver_error, in_one_transaction
from oncekey.drivers._deadlines import Deadline
from oncekey.errors import OncekeyError, StoreConfigError, StoreError
from oncekey.models import ClaimReply, Key, Record, State, Terms, Verdict
from oncekey.stores._answers import Answers
from oncekey.stores._batching import Job, LoopBatch, ThreadBatch
from oncekey.stores._waiters import Waiters
from oncekey.stores.postgres.async_connections import async_source
from oncekey.stores.postgres.calls import is_fence, run_jobs
from oncekey.stores.postgres.connections import sync_source
from oncekey.stores.postgres.face import (
    GRACE_MS,
    REGISTER_SECONDS,
    SWEEP_PAGES,
    WORTH_HEARING,
    Face,
    Round,
    Steps,
    adrive,
    drive,
    driver_of,
    held,
    need,
    not_made,
    own_options,
    plain,
)
from oncekey.stores.postgres.listening import AsyncListener, Listener
from oncekey.stores.postgres.schema import check, migrate
from oncekey.stores.postgres.statements import SQL, Statements
from oncekey.stores.postgres.transactions import PgTransactionRecords

__all__ = ["AsyncPostgresStore", "PostgresStore", "open_async", "open_sync"]


class PostgresStore(Face, Transactional, Store, Sweepable, Forking):
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
        need("psycopg", "postgres")
        if isinstance(source, str):
            source = plain(source)
        self._set_up(tenant, listen, timeout)
        self.source = source
        self._source = sync_source(source, prepare, self.timeout)
        self._claims = ThreadBatch(lambda jobs: self._run("claim", jobs))
        self._settles = ThreadBatch(lambda jobs: self._run("settle", jobs))
        dsn = self._listen_dsn(self._source, prepare)
        self._listener = Listener(dsn, self._noted) if dsn else None
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        """Nobody waits in the child yet."""
        self._waiters = Waiters()
        self._registered.clear()
        self._notes.clear()
        if self._listener is not None:
            self._listener.reset()

    # Running statements

    def _run(self, lane: str, jobs: Sequence[Job]) -> None:
        deadline = self._deadline(jobs)
        try:
            home = self._ready(deadline)
        except StoreError as error:
            for job in jobs:
                job.error = copy.copy(error)
            return
        self._drive(lane, run_jobs(home, self.tenant, jobs), deadline)

    def _drive(self, lane: str, steps: Steps, deadline: Deadline) -> Any:
        return drive(steps, functools.partial(self._source.fetch, lane, deadline=deadline))

    def _ready(self, deadline: Deadline | None = None) -> Statements:
        """The statements for where the tables are, once they were looked at."""
        if self._home is None:
            deadline = deadline or Deadline(self.timeout)
            self._store_id, self._home = self._drive("other", check(self.tenant), deadline)
        assert self._home is not None  # noqa: S101 - for the type checker
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
        loan = Loan()  # all of it on one connection, whatever the pool
        try:
            self.lend(loan)
            steps = migrate(step, partitions, row_security)
            flow = in_one_transaction(loan, self.timeout, False, steps)
            done = core_drive(flow, lambda call: call[0](*call[1:]))
        except Exception as error:
            if isinstance(error, OncekeyError):
                raise
            raise not_made(driver_error(error)) from error
        return [f"{one.version:03d} {one.name} ({one.step})" for one in done]

    # The contract

    def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        """See ``Store``. One statement; a replay writes nothing."""
        reply: ClaimReply = self._claims.submit("claim", (key, owner, fingerprint, terms))
        if reply.verdict is Verdict.WON:
            self._maybe_sweep()
        return reply

    def complete(self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms) -> bool:
        """See ``Store``. One statement."""
        if not is_fence(fence):
            return False
        args = (key, owner, fence, answer, terms)
        done: bool = self._settles.submit("complete", args)
        if not done:
            return held(self.read(key), owner, fence)
        self._heard(key.digest)
        return True

    def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        """See ``Store``. One statement."""
        if not is_fence(fence):
            return False
        done: bool = self._settles.submit("renew", (key, owner, fence, terms))
        return done

    def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        """See ``Store``. One statement.

        Without a fence, in the order of claims: it may be for one that is still under way.
        """
        if not is_fence(fence):
            return False
        batch = self._claims if fence is None else self._settles
        done: bool = batch.submit("release", (key, owner, fence))
        if done:
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
        digest = key.digest
        self._waiters.wait(digest, seconds, lambda: self._announced(key, seconds))

    def _announced(self, key: Key, seconds: float) -> bool:
        """Ask to be told of the outcome; True if it is there already."""
        if self._listener is None or seconds < WORTH_HEARING:
            return False
        self._listener.want()
        if not self._must_register(key.digest):
            return False
        args = [self.tenant, key.digest, REGISTER_SECONDS * 1000]
        try:
            rows = self._fetch("await_change", args)
            self._announced_by(rows[0][0], key.digest)
            record = self.read(key)
        except StoreError as error:
            self._registered.pop(key.digest, None)
            if not error.retryable:
                raise
            return False  # whoever waits looks for itself meanwhile
        if record is None or record.state is State.PENDING:
            return False
        self._heard(key.digest)  # also for those who wait because we had asked
        return True

    # Transactions of callers

    def records(self) -> PgTransactionRecords:
        """See ``Transactional``."""
        home = self._ready()
        return PgTransactionRecords(home, self.tenant, self._store_id)

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
        self._heard(key.digest)
        self._maybe_sweep()

    def _maybe_sweep(self) -> None:
        if self._time_to_sweep():
            try:
                args = [SWEEP_PAGES, None, GRACE_MS]
                self._swept(self._fetch("sweep", args))
            except StoreError:
                pass  # the call itself succeeded; a later step finds what this one left

    def sweep(self, limit: int = 1000, now: int | None = None) -> int:
        """See ``Sweepable``. One sweeper at a time; gives 0 while another is at it."""
        removed, cutoff, around = 0, self.now() if now is None else now, Round()
        while True:
            args = [SWEEP_PAGES * 8, cutoff, 0]
            dead, page, following = self._swept(self._fetch("sweep", args))
            removed += dead
            if around.over(page, following) or removed >= limit:
                return removed

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
        self.claims = LoopBatch(lambda jobs: store._run("claim", jobs))
        self.settles = LoopBatch(lambda jobs: store._run("settle", jobs))
        dsn = store._dsn
        self.listener = AsyncListener(dsn, store.driver, store._noted) if dsn else None


class AsyncPostgresStore(Face, AsyncTransactional, Answers, AsyncSweepable):
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
        if isinstance(source, str):
            driver = driver or driver_of(source)
            source = plain(source)
        if driver is None:
            driver = "asyncpg" if importlib.util.find_spec("asyncpg") else "psycopg"
        if driver not in ("asyncpg", "psycopg"):
            raise StoreConfigError(f"driver must be 'asyncpg' or 'psycopg', got {driver!r}")
        need(driver, "postgres")
        if driver == "asyncpg" and isinstance(source, str) and "://" not in source:
            raise StoreConfigError(
                "asyncpg takes a URL, not key=value pairs: write postgresql://user@host/database, "
                "or pass driver='psycopg'"
            )
        self._set_up(tenant, listen, timeout)
        self.driver = driver
        self.source = source
        self._source = async_source(source, driver, prepare, self.timeout)
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
        deadline = self._deadline(jobs)
        home = await self._ready(deadline)
        await self._drive(lane, run_jobs(home, self.tenant, jobs), deadline)

    async def _drive(self, lane: str, steps: Steps, deadline: Deadline) -> Any:
        return await adrive(steps, functools.partial(self._source.fetch, lane, deadline=deadline))

    async def _ready(self, deadline: Deadline | None = None) -> Statements:
        """The statements for where the tables are, once they were looked at."""
        if self._home is None:
            deadline = deadline or Deadline(self.timeout)
            found = await self._drive("other", check(self.tenant), deadline)
            self._store_id, self._home = found
        assert self._home is not None  # noqa: S101 - for the type checker
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
        loan = Loan()  # all of it on one connection, whatever the pool
        try:
            await self.lend(loan)
            steps = migrate(step, partitions, row_security)
            flow = in_one_transaction(loan, self.timeout, True, steps)
            done = await core_adrive(flow, lambda call: call[0](*call[1:]))
        except Exception as error:
            if isinstance(error, OncekeyError):
                raise
            raise not_made(driver_error(error)) from error
        return [f"{one.version:03d} {one.name} ({one.step})" for one in done]

    # The contract

    async def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        """See ``AsyncStore``. One statement; a replay writes nothing."""
        args = (key, owner, fingerprint, terms)
        reply: ClaimReply = await self._lanes().claims.submit("claim", args)
        if reply.verdict is Verdict.WON:
            self._maybe_sweep()
        return reply

    async def complete(
        self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> bool:
        """See ``AsyncStore``. One statement."""
        if not is_fence(fence):
            return False
        args = (key, owner, fence, answer, terms)
        done: bool = await self._lanes().settles.submit("complete", args)
        if not done:
            return held(await self.read(key), owner, fence)
        self._heard(key.digest)
        return True

    async def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        """See ``AsyncStore``. One statement."""
        if not is_fence(fence):
            return False
        args = (key, owner, fence, terms)
        done: bool = await self._lanes().settles.submit("renew", args)
        return done

    async def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        """See ``AsyncStore``. One statement.

        Without a fence, in the order of claims: it may be for one that is still under way.
        """
        if not is_fence(fence):
            return False
        lanes = self._lanes()
        batch = lanes.claims if fence is None else lanes.settles
        done: bool = await batch.submit("release", (key, owner, fence))
        if done:
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
        digest = key.digest
        await self._waiters.wait_async(digest, seconds, lambda: self._announced(key, seconds))

    async def _announced(self, key: Key, seconds: float) -> bool:
        """Ask to be told of the outcome; True if it is there already."""
        listener = self._lanes().listener
        if listener is None or seconds < WORTH_HEARING:
            return False
        listener.want()
        if not self._must_register(key.digest):
            return False
        args = [self.tenant, key.digest, REGISTER_SECONDS * 1000]
        try:
            rows = await self._fetch("await_change", args)
            self._announced_by(rows[0][0], key.digest)
            record = await self.read(key)
        except StoreError as error:
            self._registered.pop(key.digest, None)
            if not error.retryable:
                raise
            return False  # whoever waits looks for itself meanwhile
        if record is None or record.state is State.PENDING:
            return False
        self._heard(key.digest)  # also for those who wait because we had asked
        return True

    # Transactions of callers

    async def records(self) -> PgTransactionRecords:
        """See ``AsyncTransactional``."""
        home = await self._ready()
        return PgTransactionRecords(home, self.tenant, self._store_id)

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
        self._heard(key.digest)
        self._maybe_sweep()

    def _maybe_sweep(self) -> None:
        if self._time_to_sweep():
            task = asyncio.get_running_loop().create_task(self._sweep_a_little())
            self._sweeping.add(task)
            task.add_done_callback(self._sweeping.discard)

    async def _sweep_a_little(self) -> None:
        try:
            args = [SWEEP_PAGES, None, GRACE_MS]
            self._swept(await self._fetch("sweep", args))
        except StoreError:
            pass  # a later step finds what this one left

    async def sweep(self, limit: int = 1000, now: int | None = None) -> int:
        """See ``AsyncSweepable``. One sweeper at a time; gives 0 while another is at it."""
        removed, cutoff, around = 0, await self.now() if now is None else now, Round()
        while True:
            args = [SWEEP_PAGES * 8, cutoff, 0]
            rows = await self._fetch("sweep", args)
            dead, page, following = self._swept(rows)
            removed += dead
            if around.over(page, following) or removed >= limit:
                return removed

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
