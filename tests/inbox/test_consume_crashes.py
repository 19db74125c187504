"""Consumers killed at every step, on every library: the effect is there once, by somebody."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.inbox.dying import ELSEWHERE, HERE
from tests.inbox.test_consume import (
    EFFECTS,
    QUICK,
    come,
    consuming,
    drained,
    effects,
    handler_of,
    options_of,
    passed,
)
from tests.servers.fixtures_pg import Databases, sql
from tests.transactions.conftest import close_store, make_store
from tests.transactions.routes import Caller, Place, Route

from oncekey import PostgresStore
from oncekey.inbox import DeliveryState, open_inbox
from oncekey.inbox.consume import Consumer

PATIENCE = 60.0
REPOSITORY = Path(__file__).parents[2]
DYING = [
    Route("pg", "sync", "psycopg", "connection"),
    Route("pg", "async", "psycopg", "pool"),
    Route("pg", "async", "asyncpg", "pool"),
    Route("pg", "sync", "sqlalchemy+psycopg", "session"),
    Route("pg", "async", "sqlalchemy+asyncpg", "sessionmaker"),
    Route("pg", "sync", "django", "connection"),
    Route("sqlite", "sync", "sqlite3", "connection"),
    Route("sqlite", "async", "aiosqlite", "connection"),
    Route("sqlite", "sync", "sqlalchemy+pysqlite", "engine"),
    Route("sqlite", "sync", "django", "connection"),
]
Order = Callable[..., int]


@pytest.fixture(scope="module")
def order_death() -> Iterator[Order]:
    """Has a process consume a delivery and kill itself at a step; gives its exit code."""
    command = [sys.executable, "-m", "tests.inbox.dying"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        asked, told = program.stdin, program.stdout

        def order(*what: Any) -> int:
            print(json.dumps(what), file=asked, flush=True)
            return int(told.readline())

        yield order
        asked.close()
        assert program.wait(PATIENCE) == 0


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
@pytest.mark.parametrize("route", DYING, ids=lambda route: route.id)
async def test_a_consumer_that_is_killed_has_its_effect_once(
    route: Route, elsewhere: bool, tmp_path: Path, postgres: Databases, order_death: Order
) -> None:
    """kill -9 at any step, the inbox in the app's database or elsewhere: the next one knows."""
    place = _place(route, tmp_path, postgres)
    url = place.url or f"sqlite:///{place.file}"
    if elsewhere:  # in the other kind of database
        url = f"sqlite:///{tmp_path / 'inbox.db'}" if place.url else postgres.database()
        if place.url:
            with PostgresStore(place.url) as made:
                made.create_schema()
    opened: list[Any] = []
    store = make_store(route, place) if elsewhere else None
    steps = ELSEWHERE if elsewhere else HERE
    async with (
        await open_inbox(url, **({} if url.startswith("sqlite") else {"create": True})) as inbox,
        Caller(route, place).opened(**options_of(route)) as caller,
    ):
        consumer = Consumer(inbox, "app", on=passed(caller, opened), store=store, policy=QUICK)
        consumer(handler_of(caller))
        for step in steps:
            (event,) = await come(inbox, step)
            assert order_death(url, route, place, step, elsewhere) == -signal.SIGKILL
            assert effects(place, route.flavour).count(step) == (step == "committed")
            async with consuming(consumer):
                await drained(inbox)
            found = await inbox.event(event)
            assert found is not None
            outcomes = [one.outcome for one in found.attempts if one.outcome != "lost"]
            assert outcomes == ["delivered"]
            assert found.deliveries[0].state is DeliveryState.DELIVERED
        assert effects(place, route.flavour) == sorted(steps)
    for connection in opened:
        connection.close()
    if store is not None:
        await close_store(store)


def _place(route: Route, folder: Path, postgres: Databases) -> Place:
    """Where the app writes: a database of its own, with its table."""
    if route.flavour == "pg":
        url = postgres.database()
        sql(url, EFFECTS)
        return Place(url, "")
    file = str(folder / "app.db")
    with contextlib.closing(sqlite3.connect(file)) as made:
        made.execute(EFFECTS)
    return Place("", file)
