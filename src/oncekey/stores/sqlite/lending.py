"""Connections for transactions on a SQLite file: lent to one at a time, in the order of asking.

SQLite has one writer, and lets those who wait for it sleep for up to 100 ms at a time, in no order.
Those of one store take turns instead, and so need one connection only, which stays open while it is
wanted. What other processes do SQLite sees to.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import sqlite3
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from oncekey.abc import Loan
from oncekey.errors import TransactionRefusedError
from oncekey.stores.sqlite.files import busy, patiently

if TYPE_CHECKING:
    from oncekey.stores.sqlite.database import Database

__all__ = ["Line", "OwnConnection", "lend", "lend_async"]

SLICE: Final = 0.05  # seconds: whoever is to wake a waiter may be interrupted before it does


class Line:
    """Who waits for the turn, the one who has it first.

    An interrupt may come between any two steps: to be in the line is one step, to leave it is one,
    and leaving twice does nothing.
    """

    def __init__(self) -> None:
        self._places: deque[_Place] = deque()

    def __len__(self) -> int:
        return len(self._places)

    def join(self, place: _Place) -> None:
        self._places.append(place)

    def is_first(self, place: _Place) -> bool:
        try:
            return self._places[0] is place
        except IndexError:
            return False

    def leave(self, place: _Place) -> None:
        with contextlib.suppress(ValueError):
            self._places.remove(place)
        with contextlib.suppress(IndexError):
            self._places[0].wake()

    def wait(self, place: _Place, seconds: float) -> bool:
        """Wait for the turn. False: it did not come in time."""
        if self.is_first(place):
            return True
        lock = place.lock = threading.Lock()
        lock.acquire()
        until = time.monotonic() + seconds
        while not self.is_first(place):
            left = until - time.monotonic()
            if left <= 0:
                return False
            lock.acquire(timeout=min(left, SLICE))
        return True

    async def wait_async(self, place: _Place, seconds: float) -> bool:
        """Wait for the turn in an event loop."""
        until = time.monotonic() + seconds
        while not self.is_first(place):
            future = place.future = asyncio.get_running_loop().create_future()
            left = until - time.monotonic()
            if left <= 0:
                return False
            if not self.is_first(place):
                await asyncio.wait((future,), timeout=min(left, SLICE * 20))
        return True


class _Place:
    """A place in the line, and how to wake who has it."""

    __slots__ = ("future", "lock")

    def __init__(self) -> None:
        self.lock: threading.Lock | None = None
        self.future: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.lock is not None:
            with contextlib.suppress(RuntimeError):  # it was woken already
                self.lock.release()
        future = self.future
        if future is not None and not future.done():
            loop = future.get_loop()
            if asyncio._get_running_loop() is loop:  # in this thread: no need to ring for it
                future.set_result(None)
            else:
                with contextlib.suppress(RuntimeError):  # it is closed
                    loop.call_soon_threadsafe(_awake, future)


def _awake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class _Turn:
    """A place in the line."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._place = _Place()

    def wait(self, seconds: float) -> bool:
        self._line.join(self._place)
        return self._line.wait(self._place, seconds)

    async def wait_async(self, seconds: float) -> bool:
        self._line.join(self._place)
        return await self._line.wait_async(self._place, seconds)

    @property
    def ours(self) -> bool:
        return self._line.is_first(self._place)

    def end(self) -> None:
        self._line.leave(self._place)


class _AsyncTurn(_Turn):
    """One that ends also when it is thrown away with its event loop."""

    def __del__(self) -> None:
        self.end()


# What a block may do to a connection that would be there for the next.
_LASTING: Final = frozenset(
    {
        sqlite3.SQLITE_ATTACH,
        sqlite3.SQLITE_DETACH,
        sqlite3.SQLITE_CREATE_TEMP_INDEX,
        sqlite3.SQLITE_CREATE_TEMP_TABLE,
        sqlite3.SQLITE_CREATE_TEMP_TRIGGER,
        sqlite3.SQLITE_CREATE_TEMP_VIEW,
    }
)


class OwnConnection(sqlite3.Connection):
    """The store's connection for transactions: waits for other processes, open to interrupts.

    Attributes:
        until: When to stop waiting, on the monotonic clock.
        changed: A block has set a pragma or attached something: not to be lent to another.
        released: Whether the savepoint was there that a transaction begins with; ``None``: nobody
            has looked yet.
        begins: The next statement begins a transaction first; and
        ends: it commits it, if it gives a row. So aiosqlite makes both in one change of threads.
    """

    until = math.inf
    changed = False
    released: bool | None = None
    begins = False
    ends = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        super().set_authorizer(self._noted)

    def _noted(self, action: int, what: str | None, value: str | None, *_: object) -> int:
        if action in _LASTING or (action == sqlite3.SQLITE_PRAGMA and value is not None):
            self.changed = True
        return sqlite3.SQLITE_OK

    def set_authorizer(self, authorizer_callback: Any) -> None:
        """A block's own: nobody keeps watch then."""
        self.changed = True
        super().set_authorizer(authorizer_callback)

    def execute(self, *statement: Any) -> Any:
        """A statement, and what is to be done along with it."""
        if self.begins:
            self.begins = False
            self.begin_immediate()
        if not self.ends:
            return super().execute(*statement)
        self.ends, self.released = False, None
        rows = super().execute(*statement).fetchall()
        if rows:
            self.end_own()
        return _Rows(rows)

    def begin_immediate(self) -> None:
        """Begin, and set the savepoint whose absence tells that somebody else ended it."""
        execute = super().execute
        patiently(lambda: execute("BEGIN IMMEDIATE"), self.until)
        execute("SAVEPOINT oncekey_1")

    def end_own(self) -> None:
        """Commit, if it is still the transaction that was begun."""
        self.released = False
        super().execute("RELEASE oncekey_1")
        self.released = True
        super().execute("COMMIT")

    @property
    def usable(self) -> bool:
        """Whether it may be lent: a block may have closed or changed it."""
        try:
            return self.total_changes >= 0 and not self.changed
        except sqlite3.ProgrammingError:
            return False


class _Rows(NamedTuple):
    """What a cursor gave whose transaction is over."""

    rows: list[Any]

    def fetchall(self) -> list[Any]:
        return self.rows


def lend(database: Database, loan: Loan) -> None:
    """Lend the connection for transactions when it is this thread's turn."""
    until = time.monotonic() + database.busy_timeout
    turn = _Turn(database.line)
    loan.close = functools.partial(_take_back, database, turn)  # before it has anything
    if not turn.wait(database.busy_timeout):
        raise busy(database.path, database.busy_timeout)
    connection = database.lent
    if connection is None or database.closed or not connection.usable:
        connection = database.lent = database.open(OwnConnection)
        connection.changed = False  # by the settings that every connection gets
    connection.until = until
    loan.source = connection


def _take_back(database: Database, turn: _Turn, connection: OwnConnection | None) -> None:
    if not turn.ours:
        return  # it is back already, and another may have it
    try:
        if connection is not None:
            if connection.in_transaction or connection.changed or database.closed:
                database.lent = None
                connection.close()
            else:  # as it was
                connection.row_factory, connection.text_factory = None, str
                connection.isolation_level = None
    finally:
        turn.end()


async def lend_async(database: Database, loan: Loan) -> None:
    """Lend a connection of aiosqlite, when it is this task's turn.

    It has a thread, so that it is closed when nobody waits for it.
    """
    until = time.monotonic() + database.busy_timeout
    turn = _AsyncTurn(database.line)
    loan.close = functools.partial(_take_back_async, database, turn)
    try:
        if not await turn.wait_async(database.busy_timeout):
            raise busy(database.path, database.busy_timeout)
        if database.lent_async is None:
            database.lent_async = await _opened(database)
        database.lent_async.own.until = until
        loan.source = database.lent_async
    except BaseException:
        turn.end()
        if not len(database.line):
            await close_async(database)
        raise


async def _take_back_async(database: Database, turn: _Turn, connection: Any) -> None:
    if not turn.ours:
        return
    try:
        if connection is not None:
            changed = connection.in_transaction or connection.own.changed
            if len(database.line) == 1 or changed or database.closed:
                await close_async(database)
            else:
                connection.row_factory, connection.text_factory = None, str
    finally:
        turn.end()


async def close_async(database: Database) -> None:
    """Close the connection of aiosqlite, if there is one."""
    connection, database.lent_async = database.lent_async, None
    if connection is not None:
        await connection.close()


async def _opened(database: Database) -> Any:
    try:
        import aiosqlite
    except ImportError:
        raise TransactionRefusedError(
            "an asynchronous SQLite transaction needs aiosqlite, or a connection of yours: "
            "run pip install 'oncekey[sqlite]', or pass on="
        ) from None

    made: list[OwnConnection] = []

    def own(*args: Any, **options: Any) -> OwnConnection:
        made.append(OwnConnection(*args, **options))
        return made[0]

    async def opened() -> Any:
        connection: Any = await aiosqlite.connect(
            database.path, timeout=database.busy_timeout, isolation_level=None, factory=own
        )
        await connection.execute(f"PRAGMA synchronous={database.durability.upper()}")
        connection.own = made[0]
        connection.own.changed = False
        return connection

    opening = asyncio.ensure_future(opened())
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        await (await opening).close()  # its thread would outlive us
        raise
