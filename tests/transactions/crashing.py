"""A block that is struck at a chosen step; and, run as a program, processes that die there.

The program reads one order a line, forks a process that carries it out, and says how that ended:
a fork of a process that has everything loaded is quick, and a fork of pytest would be unsafe.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Generator
from typing import Any

from tests.transactions.conftest import close_store, make_store
from tests.transactions.routes import Caller, Place, Route, block

# Before the claim, after it, between two writes, before the commit, and after it.
OWN_STEPS = ["opened", "claimed", "written", "completed", "committed"]
# In a transaction of the caller's: after the block, and after the caller's commit.
JOINED_STEPS = ["joined, block left", "joined, committed"]

Strike = Callable[[str], None]


def follow(store: Any, strike: Strike) -> None:
    """Have ``strike`` called after each step of the store's transactions."""
    make = store.records

    def records() -> Any:
        made = make()
        return _later(made, strike) if inspect.isawaitable(made) else _Followed(made, strike)

    store.records = records


async def _later(made: Any, strike: Strike) -> _Followed:
    return _Followed(await made, strike)


class _Followed:
    """The records of one transaction, and the steps of it that are seen from there."""

    def __init__(self, records: Any, strike: Strike) -> None:
        self._records = records
        self._strike = strike

    def __getattr__(self, name: str) -> Any:
        return getattr(self._records, name)

    def claim(self, on: Any, *args: Any) -> Generator[Any, Any, Any]:
        self._strike("opened")
        on.commit = self._after(on.commit, "committed")
        return (yield from self._after(self._records.claim, "claimed")(on, *args))

    def complete(self, on: Any, *args: Any) -> Generator[Any, Any, Any]:
        return (yield from self._after(self._records.complete, "completed")(on, *args))

    def _after(self, method: Callable[..., Any], step: str) -> Callable[..., Any]:
        def followed(*args: Any) -> Generator[Any, Any, Any]:
            value = yield from method(*args)
            self._strike(step)
            return value

        return followed


async def pay(
    store: Any, caller: Caller, key: str, answer: str, strike: Strike, joined: bool = False
) -> tuple[Any, bool]:
    """Write two effects under ``key``; the answer, and whether it was there before."""
    if joined:
        await caller.begin()
    async with block(store, key, {"key": key}, on=caller.on, wait=30) as tx:
        if not tx.replayed:
            await caller.write(tx.connection, key)
            strike("written")
            await caller.write(tx.connection, key)
            tx.answer = answer
    if joined:
        strike("joined, block left")
        await caller.commit()
        strike("joined, committed")
    return tx.answer, tx.replayed


async def _die(route: Route, place: Place, key: str, step: str) -> None:
    def strike(reached: str) -> None:
        if reached == step:
            os.kill(os.getpid(), signal.SIGKILL)

    store = make_store(route, place)
    follow(store, strike)
    async with Caller(route, place).opened() as caller:
        await pay(store, caller, key, "of the dead", strike, joined=step in JOINED_STEPS)
    await close_store(store)


LOADED = [
    *("aiosqlite", "asyncpg", "psycopg_pool", "oncekey.stores.postgres"),
    *("django.db.backends.postgresql.base", "django.db.backends.sqlite3.base"),
    *("sqlalchemy.dialects.postgresql.psycopg", "sqlalchemy.dialects.postgresql.asyncpg"),
]


def main() -> None:
    """Carry out orders until there are no more."""
    for module in LOADED:  # what a process would load by itself, once for all of them
        importlib.import_module(module)
    for line in sys.stdin:
        route, place, key, step = json.loads(line)
        child = os.fork()
        if child == 0:
            asyncio.run(_die(Route(*route), Place(*place), key, step))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
