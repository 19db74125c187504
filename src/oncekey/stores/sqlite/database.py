"""One SQLite file: connections, schema, transactions, sweeping, and errors with names.

Knows records and the transition tables; knows nothing of threads or event loops beyond its locks.
How callers share a commit is in ``commits.py``.
"""

from __future__ import annotations

import copy
import os
import sqlite3
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from oncekey._core import transitions
from oncekey._core.forks import Forking, watch_forks
from oncekey._core.transitions import Event
from oncekey.abc import Clock
from oncekey.errors import (
    StoreClosedError,
    StoreConfigError,
    StoreError,
    StoreUnavailableError,
)
from oncekey.instrument.events import EventKind, emit, listening
from oncekey.models import ClaimReply, ClaimVerdict, Key, Record, State, Terms
from oncekey.policy import check_seconds
from oncekey.stores._batching import Job
from oncekey.stores._sql import load_migrations, load_statements
from oncekey.stores._waiters import Waiters
from oncekey.stores.sqlite import files
from oncekey.stores.sqlite.files import check_row, create_private, is_busy, named, patiently, undo
from oncekey.stores.sqlite.lending import Line, OwnConnection
from oncekey.stores.sqlite.together import Together

__all__ = ["Database"]

SQL: Final = load_statements("statements.sql", "oncekey.stores.sqlite")
MIGRATIONS: Final = load_migrations("oncekey.stores.sqlite")
SWEEP_EVERY: Final = 128  # writes between two looks for expired records
SWEEP_ROWS: Final = 256  # rows a look passes over: two for each write, so that garbage stays small
GRACE_MS: Final = 60_000
RUN: Final = 64  # after so many new keys in a row none is looked up before it is inserted
SLICE: Final = 0.1  # seconds

Executor = sqlite3.Connection | sqlite3.Cursor
_STATES: Final = tuple(State)
_READ, _INSERT, _MARK, _UPDATE = SQL["read"], SQL["insert"], SQL["mark"], SQL["update"]


def _make(job: Job, on: Executor) -> None:
    try:
        job.result = job.method(on, *job.args)
    except (StoreError, ValueError, TypeError, ArithmeticError) as error:
        job.error = error  # its own; it wrote nothing yet


class Database(Forking):
    """A database file in WAL mode, with one connection that writes and one that reads.

    Every change is a static method that takes first what it runs on: a cursor of ours inside a
    shared commit, or the caller's connection inside the caller's own transaction.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, durability: str, busy_timeout: float, clock: Clock
    ) -> None:
        check_seconds(busy_timeout=busy_timeout)
        if not isinstance(path, (str, os.PathLike)):
            unset = ". Is the environment variable set that it comes from?" if path is None else ""
            raise StoreConfigError(
                f"the path of a SQLite file must be text, got {type(path).__name__}{unset}"
            )
        path = os.fspath(path)
        if not path or path == ":memory:":
            raise StoreConfigError(
                "a SQLite store needs a file, as in sqlite:///oncekey.db; for records that may "
                "vanish with the process use memory://"
            )
        if durability not in ("full", "normal"):
            raise StoreConfigError(
                f"durability must be 'full' (an acknowledged answer survives power loss) or "
                f"'normal' (it survives a crash of the process), got {durability!r}"
            )
        if "\0" in path:
            raise StoreConfigError("the path of a SQLite file can't hold a NUL character")
        if path.startswith("sqlite:"):
            raise StoreConfigError(f"{path!r} is a URL, not a path: pass it to connect()")
        if os.path.isdir(path):
            raise StoreConfigError(f"{path} is a directory: name a file in it")
        self.path = os.path.abspath(path)
        self.durability = durability
        self.busy_timeout = busy_timeout
        self.clocks: list[Clock] = [clock]
        self._sweep_from = b""
        self._writes = 0
        self._together = Together()
        self.new_in_a_row = 0  # keys that were looked up in vain since the last one that was there
        self._inherited: list[Any] = []
        self._reset()
        self.closed = False
        self.writer()  # open now, so that a bad path or file fails here and not at the first call
        watch_forks(self)

    def _reset(self) -> None:
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self.write_lock = threading.RLock()
        self.read_lock = threading.Lock()
        self.waiters = Waiters()
        self.line = Line()
        self.lent: OwnConnection | None = None  # for transactions; whoever is first in the line
        self.lent_async: Any = None

    def before_fork(self) -> None:
        """Let what is under way finish, then close: no child may inherit an open database."""
        self.read_lock.acquire()  # before the other, as in read()
        self.write_lock.acquire()
        self._close_connections()

    def after_fork_in_parent(self) -> None:
        """Open again at the next call."""
        self.write_lock.release()
        self.read_lock.release()

    def after_fork_in_child(self) -> None:
        """Open anew at the next call, with locks of our own."""
        self._inherited += [self.lent, self.lent_async]  # in use by a thread of the parent's
        self._reset()

    # Connections

    def open(self, kind: type[sqlite3.Connection] = sqlite3.Connection) -> Any:
        """A new connection."""
        if self.closed:
            raise StoreClosedError(f"the store on {self.path} is closed: connect again")
        connection = sqlite3.connect(
            self.path,
            timeout=min(SLICE, self.busy_timeout),
            isolation_level=None,
            check_same_thread=False,
            factory=kind,
        )
        pragma = "PRAGMA synchronous=" + self.durability.upper()
        try:
            # It reads the file, which a process that makes it may hold for itself meanwhile.
            patiently(lambda: connection.execute(pragma), time.monotonic() + self.busy_timeout)
        except BaseException:
            connection.close()
            raise
        return connection

    def writer(self) -> sqlite3.Connection:
        """The connection that writes. Hold ``write_lock`` while it is used."""
        connection = self._writer
        if connection is None or self.closed:
            with self.write_lock:
                connection = self._writer
                if connection is None or self.closed:
                    connection = self._prepare()
                    self._writer = connection
        return connection

    def reader(self) -> sqlite3.Connection:
        """The connection that reads, beside whatever is being written. Hold ``read_lock``."""
        connection = self._reader
        if connection is None or self.closed:
            self.writer()
            connection = self._reader = self.open()
        return connection

    def _prepare(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = None
        try:
            create_private(self.path)
            opened: sqlite3.Connection = self.open()
            connection = opened
            patiently(lambda: self._set_up(opened), time.monotonic() + self.busy_timeout)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, sqlite3.Error):
                raise self.named(error) from error
            raise
        return opened

    def _set_up(self, connection: sqlite3.Connection) -> None:
        mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()
        if mode[0] != "wal":
            raise StoreConfigError(
                f"{self.path} can't be put in WAL mode (it says {mode[0]!r}): use a local disk "
                "that you may write to, not a network share"
            )
        self._migrate(connection)
        # Whether it can be written at all is better known now than at the first call.
        connection.execute(SQL["probe"])

    def _migrate(self, connection: sqlite3.Connection) -> None:
        newest = MIGRATIONS[-1][0]
        found = 0
        tables = {row[0] for row in connection.execute(SQL["tables"])}
        if "oncekey_schema" in tables:
            found = self._version(connection)
        elif "oncekey_records" in tables:
            raise StoreConfigError(
                f"{self.path} has a table oncekey_records but no oncekey_schema that says which "
                "version it is: restore it from a backup, or use another file"
            )
        if found < newest:
            files.migrate(connection, SQL, MIGRATIONS, lambda: self._version(connection))
        elif found > newest:
            raise StoreConfigError(
                f"{self.path} has schema version {found}, this oncekey knows {newest}: upgrade "
                "oncekey, or use another file"
            )
        have = {row[0] for row in connection.execute(SQL["columns"])}
        missing = {"key", "scope", *Record._fields} - have
        if missing:
            raise StoreConfigError(
                f"the table oncekey_records in {self.path} lacks {', '.join(sorted(missing))}: "
                "restore it from a backup, or use another file"
            )

    def _version(self, connection: sqlite3.Connection) -> int:
        columns = {row[1] for row in connection.execute("PRAGMA table_info(oncekey_schema)")}
        if "version" not in columns:
            raise StoreConfigError(
                f"the table oncekey_schema in {self.path} is not ours: rename it, or use another "
                "file"
            )
        return int(connection.execute(SQL["version"]).fetchone()[0])

    def begin(self, connection: sqlite3.Connection, begun: float | None = None) -> None:
        """Begin to write, within ``busy_timeout`` of when the call came."""
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if not is_busy(error):
                raise
            begun = time.monotonic() if begun is None else begun
            patiently(lambda: connection.execute("BEGIN IMMEDIATE"), begun + self.busy_timeout)

    def __del__(self) -> None:
        if not getattr(self, "closed", True):
            self.close()

    def close(self) -> None:
        """Close both connections. Closing twice does nothing."""
        with self.read_lock, self.write_lock:
            self.closed = True
            self._close_connections()

    def _close_connections(self) -> None:
        for connection in (self._writer, self._reader):
            if connection is not None:
                connection.close()
        self._writer = self._reader = None
        lent, self.lent = self.lent, None
        if lent is not None:
            if len(self.line) and not self.closed:
                self.lent = lent  # a transaction is under way on it
            else:
                lent.close()

    def named(self, error: sqlite3.Error) -> StoreError:
        """The error with a name, a reason and a fix."""
        return named(error, self.path, self.busy_timeout, self.closed)

    # Transactions

    def commit(self, jobs: Sequence[Job]) -> None:
        """Run ``jobs`` in one durable transaction. All of them hold after it, or none.

        What is neither SQLite's nor ours, such as an interrupt, is raised.
        """
        try:
            with self.write_lock:
                self._commit(jobs)
        except StoreError as error:
            self._fail(jobs, error, None)
        except sqlite3.Error as error:
            named = self.named(error)
            if len(jobs) > 1 and not isinstance(named, StoreUnavailableError):
                for job in jobs:  # one bad change must not take its neighbours down
                    self.commit([job])
            else:
                self._fail(jobs, named, error)

    def _commit(self, jobs: Sequence[Job]) -> None:
        connection = self.writer()
        undo(connection)  # if an interrupt came while another was being undone
        try:
            self.begin(connection, jobs[0].begun)
            on = connection.cursor()
            if len(jobs) == 1 or not self._together.made(on, jobs, self.begin):
                for job in jobs:
                    _make(job, on)
            if self.count_writes(len(jobs)):
                self.sweep_some(on)
            connection.execute("COMMIT")
        except BaseException:
            undo(connection)
            raise

    def count_writes(self, number: int) -> bool:
        """Take note of changes. True: it is time to sweep a little."""
        self._writes += number
        if self._writes < SWEEP_EVERY:
            return False
        self._writes = 0
        return True

    def sweep_some(self, on: Executor) -> None:
        """Pass over the next few rows, wherever the last step ended."""
        # Views of this file may run on other clocks: the one furthest behind decides.
        cutoff = int(min(clock() for clock in self.clocks) * 1000) - GRACE_MS
        _, self._sweep_from = self.sweep_step(on, cutoff, self._sweep_from)

    @staticmethod
    def _fail(jobs: Sequence[Job], error: StoreError, cause: BaseException | None) -> None:
        emit(EventKind.STORE_ERROR, operation="commit", error=type(error).__name__)
        for job in jobs:
            job.error = copy.copy(error)
            job.error.__cause__ = cause

    # Reading

    def read(self, digest: bytes) -> Record | None:
        """The record of a key, without taking the write lock."""
        try:
            try:
                row = self._read(digest)
            except sqlite3.OperationalError as error:
                if not is_busy(error):
                    raise
                row = patiently(lambda: self._read(digest), time.monotonic() + self.busy_timeout)
        except sqlite3.Error as error:
            raise self.named(error) from error
        return None if row is None else self.record(row)

    def _read(self, digest: bytes) -> Any:
        with self.read_lock:
            return self.reader().execute(_READ, (digest,)).fetchone()

    def peek(
        self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms, now_us: int
    ) -> ClaimReply | None:
        """A claim's answer if nothing needs to be written for it, else ``None``."""
        record = self.read(key.digest)
        if record is None:
            self.new_in_a_row += 1
            return None
        self.new_in_a_row = 0
        reply, change = transitions.claim(record, owner, fingerprint, terms, now_us)
        return None if change is not None or reply.verdict is ClaimVerdict.WON else reply

    def seen(self, key: Key, terms: Terms, clock: Clock) -> bool:
        """Whether a key is there, so that a mark would write nothing."""
        record = self.read(key.digest)
        if record is None:
            self.new_in_a_row += 1
            return False
        self.new_in_a_row = 0
        return transitions.mark(record, terms, int(clock() * 1_000_000)) is None

    @property
    def looks(self) -> bool:
        """Whether a key is looked up before it is inserted: not where all have been new for long.

        A look beside a writer costs more than the insert, as each commit makes it read its pages
        anew. Who is not looked up is found by the insert, which then writes nothing; it has to
        wait for the file's writers for that, and so the next keys are looked up again.
        """
        return self.new_in_a_row < RUN

    def settled(self, digest: bytes) -> bool:
        """Whether there is nothing to wait for. What a transaction has in hand can't be seen."""
        record = self.read(digest)
        return record is not None and record.state is not State.PENDING

    # Changes, each inside a transaction that holds the write lock

    @staticmethod
    def load(on: Executor, digest: bytes) -> Record | None:
        """The record as this transaction sees it."""
        row = on.execute(_READ, (digest,)).fetchone()
        return None if row is None else Database.record(row)

    @staticmethod
    def record(row: tuple[Any, ...]) -> Record:
        """A row as a record.

        Raises:
            StoreCorruptError: No oncekey writes such a row.
        """
        check_row(row)
        return Record(_STATES[row[0]], *row[1:])

    @staticmethod
    def claim(
        on: Executor,
        key: Key,
        owner: bytes,
        fingerprint: bytes,
        terms: Terms,
        clock: Clock,
    ) -> ClaimReply:
        """Claim a key: most are new, so the insert is tried before anything is read."""
        digest = key.digest
        now_us = int(clock() * 1_000_000)  # read now that the lock is held, however long that took
        reply, record = transitions.claim(None, owner, fingerprint, terms, now_us)
        if on.execute(_INSERT, (digest, key.scope.label, *record)).rowcount:  # type: ignore[misc]
            return reply
        found = Database.load(on, digest)
        reply, record = transitions.claim(found, owner, fingerprint, terms, now_us)
        if record is not None:
            on.execute(_UPDATE, (*record, digest))
        return reply

    @staticmethod
    def settle(
        on: Executor,
        digest: bytes,
        event: Event,
        owner: bytes,
        fence: int | None,
        terms: Terms,
        clock: Clock,
        answer: bytes | None = None,
    ) -> bool:
        """Complete, renew or release a claim."""
        now = int(clock() * 1000)
        found = Database.load(on, digest)
        held, record = transitions.settle(found, event, owner, fence, terms, now, answer)
        if record is not None:
            on.execute(_UPDATE, (*record, digest))
        return held

    @staticmethod
    def mark(on: Executor, key: Key, terms: Terms, clock: Clock) -> bool:
        """First-seen: one insert for a new key."""
        digest = key.digest
        now_us = int(clock() * 1_000_000)
        expires_at = now_us // 1000 + terms.ttl_ms
        fence = transitions.mark_fence(expires_at)
        values = (digest, key.scope.label, fence, expires_at, expires_at)
        if on.execute(_MARK, values).rowcount:
            return True
        record = transitions.mark(Database.load(on, digest), terms, now_us)
        if record is None:
            return False
        on.execute(_UPDATE, (*record, digest))
        return True

    @staticmethod
    def write(on: Executor, key: Key, record: Record) -> None:
        """Put a record over whatever is there; its fence still rises."""
        digest = key.digest
        if on.execute(_INSERT, (digest, key.scope.label, *record)).rowcount:
            return
        old = Database.load(on, digest)
        if old is not None:
            record = record._replace(fence=max(old.fence + 1, record.fence))
        on.execute(_UPDATE, (*record, digest))

    @staticmethod
    def clear(on: Executor) -> None:
        """Remove every record."""
        on.execute(SQL["clear"])

    @staticmethod
    def sweep_step(on: Executor, cutoff: int, start: bytes) -> tuple[int, bytes]:
        """Pass over the next few rows in key order and remove those past their time.

        Walking the table needs no index on the expiry, so that inserts stay cheap, and a step
        takes the same time however many rows there are.

        Returns:
            How many were removed, and where the next step starts (empty: at the beginning).
        """
        row = on.execute(SQL["sweep_end"], (start, SWEEP_ROWS - 1)).fetchone()
        end: bytes = row[0] if row else b""
        where = "sweep_rest" if row is None else "sweep_range"
        span = (cutoff, start, end) if row else (cutoff, start)
        oldest: int | None = None
        if listening():
            oldest = on.execute(SQL["oldest_" + where], span).fetchone()[0]
        removed = on.execute(SQL[where], span).rowcount
        if removed:
            lag = None if oldest is None else (cutoff - oldest) / 1000
            emit(EventKind.SWEPT, None, "sweep", count=removed, store="sqlite", lateness=lag)
        return removed, end
