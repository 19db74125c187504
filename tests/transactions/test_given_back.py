"""A connection that goes back to its pool is another's from that moment on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import psycopg_pool
import pytest
from sqlalchemy import create_engine, event
from tests.transactions.conftest import PATIENCE
from tests.transactions.routes import Place

from oncekey import AsyncPostgresStore, PostgresStore
from oncekey.drivers._deadlines import Deadline, acall_in_time, call_in_time


class Next:
    """Whoever gets the connection next: in the midst of a call when it is given back for good."""

    def __init__(self) -> None:
        self._inside, self._go_on = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def takes(self, connection: Any) -> None:
        """Begin a call on it, which ends when we are told so."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._call, args=(connection,))
            self._thread.start()
            assert self._inside.wait(PATIENCE)

    def _call(self, connection: Any) -> None:
        def work() -> None:
            self._inside.set()
            assert self._go_on.wait(PATIENCE)
            assert connection.execute("SELECT 1").fetchone() == (1,)

        try:
            call_in_time(connection, Deadline(PATIENCE), work)
        except BaseException as error:
            self.error = error

    def ends(self) -> None:
        """Let the call end, and see that it was left alone."""
        assert self._thread is not None
        self._go_on.set()
        self._thread.join(PATIENCE)
        assert self.error is None


class Pool(psycopg_pool.ConnectionPool[Any]):
    """Gives a connection to whoever waits for it, within ``putconn``."""

    def __init__(self, url: str, following: Next) -> None:
        self.following = following
        super().__init__(url, min_size=1, max_size=1, open=True)

    def putconn(self, conn: Any) -> None:
        super().putconn(conn)
        self.following.takes(conn)


@pytest.mark.parametrize("kind", ["pool", "engine"])
def test_a_call_of_whoever_gets_it_next_is_left_alone(place: Place, kind: str) -> None:
    """The deadline of a transaction that ends is not on the next one's call, nor taken from it."""
    following = Next()
    with PostgresStore(place.url) as store:
        if kind == "pool":
            with Pool(place.url, following) as pool:
                with store.transaction(f"given back {kind}", on=pool) as tx:
                    tx.answer = 1
                following.ends()
            return
        engine = create_engine(place.url.replace("postgresql:", "postgresql+psycopg:"))
        event.listen(engine, "checkin", lambda raw, record: following.takes(raw))
        with store.transaction(f"given back {kind}", on=engine) as tx:
            tx.answer = 1
        following.ends()
        engine.dispose()


async def test_a_call_of_a_task_that_gets_it_next_is_left_alone(place: Place) -> None:
    """The same in an event loop."""
    inside, go_on = asyncio.Event(), asyncio.Event()
    following: list[asyncio.Task[Any]] = []

    class AsyncPool(psycopg_pool.AsyncConnectionPool[Any]):
        async def putconn(self, conn: Any) -> None:
            await super().putconn(conn)
            if not following:
                following.append(asyncio.create_task(call(conn)))
                await inside.wait()

    async def call(connection: Any) -> None:
        async def work() -> None:
            inside.set()
            await go_on.wait()
            assert await (await connection.execute("SELECT 1")).fetchone() == (1,)

        await acall_in_time(connection, Deadline(PATIENCE), work)

    async with (
        AsyncPool(place.url, min_size=1, max_size=1, open=False) as pool,
        AsyncPostgresStore(place.url) as store,
    ):
        async with store.transaction("given back in a loop", on=pool) as tx:
            tx.answer = 1
        go_on.set()
        await following[0]
