"""Connections and pools of psycopg 3, sync and async."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oncekey.drivers import (
    Calls,
    DriverConnection,
    aborted_refused,
    autocommit_refused,
    wrong_world,
)

__all__ = ["PsycopgConnection", "connect"]


def connect(
    on: Any, close: Callable[[Any], Any] | None, timeout: float | None, awaits: bool
) -> Calls[DriverConnection | None]:
    """The connection itself, or one of a pool."""
    pool = hasattr(on, "getconn")
    if not pool and not (hasattr(on, "pgconn") and hasattr(on, "cursor")):
        return None
    if hasattr(on, "__aenter__") is not awaits:
        raise wrong_world(on, awaits)
    if pool:
        return PsycopgConnection((yield on.getconn, timeout), on.putconn, awaits)
    return PsycopgConnection(on, close, awaits)


class PsycopgConnection(DriverConnection):
    """A ``Connection`` or ``AsyncConnection``."""

    flavour = "postgresql"

    def __init__(self, target: Any, close: Callable[[Any], Any] | None, awaits: bool) -> None:
        super().__init__(target, close, awaits)
        self.raw = target

    def begin(self) -> Calls[None]:
        from psycopg.pq import TransactionStatus

        connection = self.target
        status = connection.info.transaction_status
        if status == TransactionStatus.INERROR:
            raise aborted_refused()
        self.joined = status != TransactionStatus.IDLE
        if connection.autocommit and not self.joined and self.close is None:
            raise autocommit_refused("psycopg connection")
        yield from self.savepoint()

    def execute(self, sql: str, args: list[Any]) -> Calls[list[Any]]:
        import psycopg
        from psycopg.rows import tuple_row

        kind: Any = psycopg.AsyncRawCursor if self.awaits else psycopg.RawCursor
        cursor = kind(self.target, row_factory=tuple_row)
        rows: list[Any] = yield _arows if self.awaits else _rows, cursor, sql, args
        return rows

    # Psycopg itself refuses to commit inside its block; SQL that does is found later.

    def savepoint(self) -> Calls[None]:
        block = self.target.transaction()
        yield (block.__aenter__ if self.awaits else block.__enter__,)
        self._stack.append(block)

    def _leave(self, *error: Any) -> Calls[None]:
        block = self._stack.pop()
        yield block.__aexit__ if self.awaits else block.__exit__, *error

    def undo(self) -> Calls[None]:
        import psycopg

        yield from self._leave(psycopg.Rollback, psycopg.Rollback(), None)

    def commit(self) -> Calls[None]:
        while self._stack:
            yield from self._leave(None, None, None)
        yield from self._give_back()


def _rows(cursor: Any, sql: str, args: list[Any]) -> list[Any]:
    cursor.execute(sql, args, binary=True)
    rows: list[Any] = cursor.fetchall() if cursor.description else []
    return rows


async def _arows(cursor: Any, sql: str, args: list[Any]) -> list[Any]:
    await cursor.execute(sql, args, binary=True)
    rows: list[Any] = await cursor.fetchall() if cursor.description else []
    return rows
