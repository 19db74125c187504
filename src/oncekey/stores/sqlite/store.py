"""``sqlite:///file.db``: the embedded default. Durable, shared by the processes of one machine."""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from typing import Any, Self
from urllib.parse import parse_qsl

from oncekey._core.transitions import Event
from oncekey.abc import (
    AsyncSweepable,
    AsyncTransactional,
    Clock,
    ClockInjectable,
    Loan,
    Store,
    Sweepable,
    Transactional,
)
from oncekey.errors import StoreConfigError, StoreError
from oncekey.models import ClaimReply, ClaimVerdict, Key, Record, State, Terms
from oncekey.policy import did_you_mean
from oncekey.stores._answers import Answers
from oncekey.stores._batching import ThreadBatch
from oncekey.stores.sqlite.browsing import AsyncBrowsing, Browsing
from oncekey.stores.sqlite.commits import TickCommit, WriterCommit
from oncekey.stores.sqlite.database import Database
from oncekey.stores.sqlite.lending import close_async, lend, lend_async
from oncekey.stores.sqlite.transactions import SQLiteTransactionRecords

__all__ = ["AsyncSQLiteStore", "SQLiteStore"]

_NO_TERMS = Terms(lease_ms=0, ttl_ms=0)
_OPTIONS = ("busy_timeout", "commit", "durability")  # of a URL


def _written(fingerprint: bytes, answer: bytes, expires_at: int, now_us: int) -> Record:
    return Record(State.COMPLETED, b"", now_us, fingerprint, 0, expires_at, expires_at, 1, answer)


class _Face(ClockInjectable):
    """What the sync and the async store have in common: a file, and a clock to see it by."""

    poll_seconds = 0.25
    one_writer = True
    _database: Database
    _commit: Any
    _clock: Clock

    @property
    def path(self) -> str:
        """Where the database file is."""
        return self._database.path

    def with_clock(self, clock: Clock) -> Self:
        """The same file and connections, seen by another clock."""
        view = object.__new__(type(self))
        view._database = self._database
        view._commit = self._commit
        view._database.clocks.append(clock)
        view._clock = clock
        return view

    def settled_here(self, key: Key) -> None:
        """See ``Transactional``. Transactions of callers count towards sweeping too."""
        self._database.waiters.wake(key.digest)
        if self._database.count_writes(1):
            self._sweep_a_little()

    def _sweep_a_little(self) -> None:
        raise NotImplementedError

    def _peek(self, key: Key, fingerprint: bytes, terms: Terms) -> ClaimReply | None:
        now_us = int(self._clock() * 1_000_000)
        return self._database.peek(key, b"", fingerprint, terms, now_us)


class SQLiteStore(Browsing, _Face, Transactional, Store, Sweepable):
    """The synchronous SQLite store.

    Promises: atomic for all threads and processes that open the file on one machine. With
    ``durability="full"`` (the default) an acknowledged change survives kill -9 and power loss;
    with ``"normal"`` a power loss may take the last changes, kill -9 does not. The file must lie
    on a local disk: network file systems break SQLite's locks.

    Threads that call at the same time share one commit. Works after a fork.

    Args:
        path: The database file. It may hold your own tables too.
        durability: ``full`` or ``normal``.
        busy_timeout: Seconds to wait for another process that holds the file.
        clock: Seconds since 1970; inject one in tests.

    Raises:
        StoreConfigError: The file can't be opened, or was made by a newer oncekey.
        StoreCorruptError: The file is not a SQLite database.
        StoreReadOnlyError: The file or its directory can't be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        durability: str = "full",
        busy_timeout: float = 60.0,
        clock: Clock = time.time,
    ) -> None:
        self._database = Database(
            path, durability=durability, busy_timeout=busy_timeout, clock=clock
        )
        self._commit = ThreadBatch(self._database.commit)
        self._clock = clock

    def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        """See ``Store``. A replay reads and writes nothing."""
        database = self._database
        if database.looks and not self._commit.busy:  # the next commit is about to look anyway
            now_us = int(self._clock() * 1_000_000)
            reply = database.peek(key, owner, fingerprint, terms, now_us)
            if reply is not None:
                return reply
        claimed: ClaimReply = self._commit.submit(
            database.claim, (key, owner, fingerprint, terms, self._clock)
        )
        if claimed.verdict is not ClaimVerdict.WON:
            database.new_in_a_row = 0
        return claimed

    def _settle(
        self,
        key: Key,
        event: Event,
        owner: bytes,
        fence: int | None,
        terms: Terms,
        answer: bytes | None = None,
    ) -> bool:
        args = (key.digest, event, owner, fence, terms, self._clock, answer)
        held: bool = self._commit.submit(self._database.settle, args)
        if held and event is not Event.RENEW:
            self._database.waiters.wake(key.digest)
        return held

    def complete(self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms) -> bool:
        """See ``Store``."""
        return self._settle(key, Event.COMPLETE, owner, fence, terms, answer)

    def complete_on(
        self,
        connection: sqlite3.Connection,
        key: Key,
        owner: bytes,
        fence: int,
        answer: bytes,
        terms: Terms,
    ) -> bool:
        """Complete inside the caller's own transaction, so that it commits with its writes.

        False: another owner has the key, and the caller must roll back.

        Raises:
            StoreConfigError: The connection has no transaction open, or is to another file.
        """
        if not connection.in_transaction:
            raise StoreConfigError(
                "complete_on needs an open transaction: execute BEGIN IMMEDIATE before the first "
                "write, so that the effect and its record commit together"
            )
        files = [row[2] for row in connection.execute("PRAGMA database_list") if row[1] == "main"]
        if not files or not files[0] or not os.path.samefile(files[0], self.path):
            raise StoreConfigError(
                f"complete_on needs a connection to {self.path}: only one file commits at once"
            )
        args = (key.digest, Event.COMPLETE, owner, fence, terms, self._clock, answer)
        return Database.settle(connection, *args)

    def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        """See ``Store``."""
        return self._settle(key, Event.RENEW, owner, fence, terms)

    def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        """See ``Store``."""
        return self._settle(key, Event.RELEASE, owner, fence, _NO_TERMS)

    def first_seen(self, key: Key, terms: Terms) -> bool:
        """See ``Store``. A duplicate reads and writes nothing."""
        database = self._database
        if database.looks and not self._commit.busy and database.seen(key, terms, self._clock):
            return False
        first: bool = self._commit.submit(database.mark, (key, terms, self._clock))
        if not first:
            database.new_in_a_row = 0
        return first

    def read(self, key: Key) -> Record | None:
        """See ``Store``."""
        return self._database.read(key.digest)

    def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> None:
        """See ``Store``."""
        record = _written(fingerprint, answer, expires_at, self.now() * 1000)
        self._commit.submit(self._database.write, (key, record))
        self._database.waiters.wake(key.digest)

    def now(self) -> int:
        """See ``Store``."""
        return int(self._clock() * 1000)

    def wait(self, key: Key, seconds: float) -> None:
        """See ``Store``. Wakes at once for changes of this process, else by looking again."""
        database, digest = self._database, key.digest
        database.waiters.wait(digest, seconds, lambda: database.settled(digest))

    def _sweep_a_little(self) -> None:
        try:
            self._commit.submit(self._database.sweep_some, ())
        except StoreError:
            pass  # the call itself succeeded; a later step finds what this one left

    def records(self) -> SQLiteTransactionRecords:
        """See ``Transactional``."""
        return SQLiteTransactionRecords(self._database, self._clock)

    def lend(self, loan: Loan) -> None:
        """See ``Transactional``."""
        lend(self._database, loan)

    def peek(self, key: Key, fingerprint: bytes, terms: Terms) -> ClaimReply | None:
        """See ``Transactional``."""
        return self._peek(key, fingerprint, terms)

    def sweep(self, limit: int = 1000, now: int | None = None) -> int:
        """See ``Sweepable``."""
        cutoff = self.now() if now is None else now
        removed, start = 0, b""
        while True:  # small transactions, so that others get in between
            dead: int
            dead, start = self._commit.submit(self._database.sweep_step, (cutoff, start))
            removed += dead
            if not start or removed >= limit:
                return removed

    def clear(self) -> None:
        """Remove every record. For tests."""
        self._commit.submit(self._database.clear, ())

    def close(self) -> None:
        """Close the connections that this store opened."""
        self._database.close()


class AsyncSQLiteStore(AsyncBrowsing, _Face, AsyncTransactional, Answers, AsyncSweepable):
    """The asynchronous SQLite store; ``SQLiteStore`` is its synchronous twin.

    Promises what ``SQLiteStore`` promises. Look-ups read from the page cache in place; changes are
    committed by a thread of the store's own, so that the event loop never waits for the disk.
    With ``commit="inline"`` they are committed in the loop, once a tick: more throughput, and the
    loop stands still for each sync to disk.

    Args:
        path: The database file. It may hold your own tables too.
        durability: ``full`` or ``normal``.
        commit: ``thread`` or ``inline``.
        busy_timeout: Seconds to wait for another process that holds the file.
        clock: Seconds since 1970; inject one in tests.

    Raises:
        StoreConfigError: The file can't be opened, or was made by a newer oncekey.
        StoreCorruptError: The file is not a SQLite database.
        StoreReadOnlyError: The file or its directory can't be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        durability: str = "full",
        commit: str = "thread",
        busy_timeout: float = 60.0,
        clock: Clock = time.time,
    ) -> None:
        if commit not in ("thread", "inline"):
            raise StoreConfigError(f"commit must be 'thread' or 'inline', got {commit!r}")
        self._database = Database(
            path, durability=durability, busy_timeout=busy_timeout, clock=clock
        )
        self._commit: WriterCommit | TickCommit = (
            WriterCommit(self._database) if commit == "thread" else TickCommit(self._database)
        )
        self._clock = clock

    async def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        """See ``AsyncStore``. A replay reads and writes nothing."""
        database = self._database
        if database.looks and not self._commit.busy:  # the next commit is about to look anyway
            now_us = int(self._clock() * 1_000_000)
            reply = database.peek(key, owner, fingerprint, terms, now_us)
            if reply is not None:
                return reply
        claimed: ClaimReply = await self._commit.submit(
            database.claim, (key, owner, fingerprint, terms, self._clock)
        )
        if claimed.verdict is not ClaimVerdict.WON:
            database.new_in_a_row = 0
        return claimed

    async def _settle(
        self,
        key: Key,
        event: Event,
        owner: bytes,
        fence: int | None,
        terms: Terms,
        answer: bytes | None = None,
    ) -> bool:
        args = (key.digest, event, owner, fence, terms, self._clock, answer)
        held: bool = await self._commit.submit(self._database.settle, args)
        if held and event is not Event.RENEW:
            self._database.waiters.wake(key.digest)
        return held

    async def complete(
        self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> bool:
        """See ``AsyncStore``."""
        return await self._settle(key, Event.COMPLETE, owner, fence, terms, answer)

    async def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        """See ``AsyncStore``."""
        return await self._settle(key, Event.RENEW, owner, fence, terms)

    async def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        """See ``AsyncStore``."""
        return await self._settle(key, Event.RELEASE, owner, fence, _NO_TERMS)

    async def first_seen(self, key: Key, terms: Terms) -> bool:
        """See ``AsyncStore``. A duplicate reads and writes nothing."""
        database = self._database
        if database.looks and not self._commit.busy and database.seen(key, terms, self._clock):
            return False
        first: bool = await self._commit.submit(database.mark, (key, terms, self._clock))
        if not first:
            database.new_in_a_row = 0
        return first

    async def read(self, key: Key) -> Record | None:
        """See ``AsyncStore``."""
        return self._database.read(key.digest)

    async def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> None:
        """See ``AsyncStore``."""
        record = _written(fingerprint, answer, expires_at, int(self._clock() * 1000) * 1000)
        await self._commit.submit(self._database.write, (key, record))
        self._database.waiters.wake(key.digest)

    async def now(self) -> int:
        """See ``AsyncStore``."""
        return int(self._clock() * 1000)

    async def wait(self, key: Key, seconds: float) -> None:
        """See ``AsyncStore``. Wakes at once for changes of this process, else by looking again."""
        database, digest = self._database, key.digest
        await database.waiters.wait_async(digest, seconds, lambda: database.settled(digest))

    def _sweep_a_little(self) -> None:
        # A later step finds what this one leaves: nobody waits for it, and nobody minds its errors.
        swept = self._commit.submit(self._database.sweep_some, ())
        swept.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def records(self) -> SQLiteTransactionRecords:
        """See ``AsyncTransactional``."""
        return SQLiteTransactionRecords(self._database, self._clock)

    async def lend(self, loan: Loan) -> None:
        """See ``AsyncTransactional``. Connections of the store's own need aiosqlite."""
        await lend_async(self._database, loan)

    async def peek(self, key: Key, fingerprint: bytes, terms: Terms) -> ClaimReply | None:
        """See ``AsyncTransactional``."""
        return self._peek(key, fingerprint, terms)

    async def sweep(self, limit: int = 1000, now: int | None = None) -> int:
        """See ``AsyncSweepable``."""
        cutoff = int(self._clock() * 1000) if now is None else now
        removed, start = 0, b""
        while True:  # small transactions, so that others get in between
            dead: int
            dead, start = await self._commit.submit(self._database.sweep_step, (cutoff, start))
            removed += dead
            if not start or removed >= limit:
                return removed

    async def delete_expired(self, now_epoch: float | None = None) -> int:
        """Remove every record past its time."""
        cutoff = self._clock() if now_epoch is None else now_epoch
        return await self.sweep(sys.maxsize, int(cutoff * 1000))

    async def clear(self) -> None:
        """Remove every record. For tests."""
        await self._commit.submit(self._database.clear, ())

    async def aclose(self) -> None:
        """Finish what is queued, then close the connections that this store opened."""
        await self._commit.aclose()
        await close_async(self._database)
        self._database.close()


def _path(url: str, options: dict[str, Any]) -> str:
    """The file that a URL names; the options in its query are added to ``options``."""
    rest = url.partition("://")[2]
    path, _, query = rest.partition("?")
    if not path.startswith("/") or path == "/":
        raise StoreConfigError(
            f"sqlite://{rest} names no file: write sqlite:///file.db for a relative path, "
            "sqlite:////dir/file.db for an absolute one"
        )
    for name, value in parse_qsl(query):
        if name not in _OPTIONS:
            near = did_you_mean(name, _OPTIONS)
            raise StoreConfigError(f"sqlite has no option {name!r}{near} {', '.join(_OPTIONS)}")
        if name == "busy_timeout" and not value.replace(".", "", 1).isdigit():
            raise StoreConfigError(f"busy_timeout must be seconds, got {value!r}")
        options.setdefault(name, float(value) if name == "busy_timeout" else value)
    return path[1:]


def open_sync(url: str, options: dict[str, Any]) -> SQLiteStore:
    """``sqlite:///file.db``."""
    path = _path(url, options)
    return SQLiteStore(path, **options)


def open_async(url: str, options: dict[str, Any]) -> AsyncSQLiteStore:
    """``sqlite:///file.db``."""
    path = _path(url, options)
    return AsyncSQLiteStore(path, **options)
