"""Connections of ``sqlite3`` and ``aiosqlite``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oncekey.drivers import Calls, DriverConnection, ended_refused, wrong_world
from oncekey.errors import StoreError

__all__ = ["SQLiteConnection", "connect"]


def connect(
    on: Any, close: Callable[[Any], Any] | None, timeout: float | None, awaits: bool
) -> Calls[DriverConnection]:
    """The connection itself: neither library has pools."""
    if type(on).__module__.startswith("aiosqlite") is not awaits:
        raise wrong_world(on, awaits)
    return SQLiteConnection(on, close, awaits)
    yield  # a generator like the others


class SQLiteConnection(DriverConnection):
    """A connection to a file, which has one writer at a time."""

    flavour = "sqlite"
    never_cancels = True
    _begun = False
    _committed = False
    _points = 0

    def begin(self) -> Calls[None]:
        # Each note before what it tells of, so that an interrupt between leaves nothing open.
        self.joined = self.target.in_transaction
        if not self.joined:
            self._begun = True
            # A store's own connections begin, and set the savepoint too, in one step: or along with
            # the first statement, where each is a change of threads.
            begin = getattr(self.target, "begin_immediate", None)
            if begin is not None:
                yield (begin,)
                self._points = 1
                return
            if self._own is not None:
                self._own.begins = True
                self._points = 1
                return
            yield self.target.execute, "BEGIN IMMEDIATE"
        yield from self.savepoint()  # if it is gone at the end, somebody else ended the transaction

    def execute(self, sql: str, args: list[Any]) -> Calls[list[Any]]:
        rows: list[Any] = yield self._arows if self.awaits else self._rows, sql, args
        return rows

    @property
    def _own(self) -> Any:
        """What is behind a connection of aiosqlite that a store has made."""
        return getattr(self.target, "own", None)

    def execute_last(self, sql: str, args: list[Any]) -> Calls[list[Any]]:
        own = self._own
        if own is None or self.joined or self.target.row_factory is not None:
            return (yield from self.execute(sql, args))
        own.ends = True
        try:
            rows = yield from self.execute(sql, args)
        except StoreError as error:
            self._refuse_ended(error)
            raise
        finally:
            own.ends = False
        self._committed = own.released is True
        return rows

    def _refuse_ended(self, error: StoreError) -> None:
        """Raise what it means if a transaction could not be committed since it was not there."""
        if getattr(self._own or self.target, "released", False) is False:
            raise ended_refused("connection") from error

    def _rows(self, sql: str, args: list[Any]) -> list[Any]:
        cursor = self.target.cursor()
        try:
            cursor.row_factory = None
            rows: list[Any] = cursor.execute(sql, args).fetchall()
            return rows
        finally:
            cursor.close()  # a statement that was interrupted can't be rolled back

    async def _arows(self, sql: str, args: list[Any]) -> list[Any]:
        if self.target.row_factory is None:
            return list(await self.target.execute_fetchall(sql, args))
        async with await self.target.cursor() as cursor:
            cursor.row_factory = None
            await cursor.execute(sql, args)
            return list(await cursor.fetchall())

    def must_be_open(self) -> None:
        if not self.target.in_transaction:
            raise ended_refused("connection")

    def savepoint(self) -> Calls[None]:
        # One that is set but not counted does no harm: it goes with those around it.
        yield self.target.execute, f"SAVEPOINT oncekey_{self._points + 1}"
        self._points += 1

    def undo(self) -> Calls[None]:
        yield self.target.execute, f"ROLLBACK TO oncekey_{self._points}"
        yield self.target.execute, f"RELEASE oncekey_{self._points}"
        self._points -= 1

    def commit(self) -> Calls[None]:
        points, self._points = self._points, 0  # from here on it is the caller's, if we joined
        if self._committed:
            self._begun = False
            yield from self._give_back()
            return
        end = None if self.joined else getattr(self.target, "end_own", None)
        if self._own is not None:
            self._own.released = False  # or we would not be here
        try:
            yield (end,) if end is not None else (self.target.execute, "RELEASE oncekey_1")
        except StoreError as error:
            self._points = points
            self._refuse_ended(error)
            raise  # by the commit
        if not self.joined:
            if end is None:
                yield self.target.execute, "COMMIT"
            self._begun = False
        yield from self._give_back()

    def rollback(self) -> Calls[None]:
        try:
            if (self._begun or self._points) and self.target.in_transaction:
                yield from self._end()
        finally:
            self._begun, self._points = False, 0
            if self._own is not None:
                self._own.begins = False  # of a first statement that never came
            yield from self._give_back()

    def _give_back(self) -> Calls[None]:
        if self.close is not None:
            yield self.close, self.target
            self.close = None  # only now: an interrupt before would keep it for ever

    def _end(self) -> Calls[None]:
        if self.joined:
            try:
                yield self.target.execute, "ROLLBACK TO oncekey_1"
                yield self.target.execute, "RELEASE oncekey_1"
                return
            except StoreError:
                pass  # see below
        # Ours; or one that began by itself, after somebody had ended the caller's.
        yield self.target.execute, "ROLLBACK"
