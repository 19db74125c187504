"""Connections and pools of asyncpg."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oncekey.drivers import (
    Calls,
    DriverConnection,
    aborted_refused,
    ended_refused,
    wrong_world,
)
from oncekey.drivers._deadlines import Watch
from oncekey.errors import StoreUnavailableError, TransactionRefusedError

__all__ = ["AsyncpgConnection", "connect"]


def connect(
    on: Any, close: Callable[[Any], Any] | None, timeout: float | None, awaits: bool
) -> Calls[DriverConnection]:
    """The connection itself, or one of a pool."""
    if not awaits:
        raise wrong_world(on, awaits)
    if hasattr(on, "acquire"):
        return AsyncpgConnection((yield _acquire, on, timeout), on.release, awaits)
    return AsyncpgConnection(on, close, awaits)


async def _acquire(pool: Any, timeout: float | None) -> Any:
    return await pool.acquire(timeout=timeout)


class AsyncpgConnection(DriverConnection):
    """An asyncpg ``Connection``."""

    flavour = "postgresql"
    never_cancels = True

    def __init__(self, target: Any, close: Callable[[Any], Any] | None, awaits: bool) -> None:
        super().__init__(target, close, awaits)
        self.raw = target
        self.watch = Watch(target)

    def begin(self) -> Calls[None]:
        if self.target.is_closed():
            raise StoreUnavailableError("this asyncpg connection is closed: pass an open one")
        self.joined = self.target.is_in_transaction()
        yield (self._begin,)

    async def _begin(self) -> None:
        import asyncpg

        try:
            await self._push()
        except asyncpg.InterfaceError as error:
            raise TransactionRefusedError(
                "this asyncpg connection is in a transaction that was begun by a BEGIN of its own: "
                "use 'async with connection.transaction()' instead"
            ) from error
        except asyncpg.InFailedSQLTransactionError as error:
            raise aborted_refused() from error

    async def _push(self) -> None:
        block = self.target.transaction()
        await block.start()
        self._stack.append(block)

    def execute(self, sql: str, args: list[Any]) -> Calls[list[Any]]:
        return (yield self.target.fetch, sql, *args)  # type: ignore[no-any-return]

    def must_be_open(self) -> None:
        if not self.target.is_in_transaction():
            raise ended_refused("connection")

    def savepoint(self) -> Calls[None]:
        yield (self._push,)

    def undo(self) -> Calls[None]:
        yield (self._stack.pop().rollback,)

    def commit(self) -> Calls[None]:
        self.must_be_open()
        while self._stack:
            yield (self._stack.pop().commit,)
        yield from self._give_back()

    def _give_back(self) -> Calls[None]:
        try:
            yield from super()._give_back()
        finally:
            self.watch.stop()
