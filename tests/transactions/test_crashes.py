"""Whoever dies, and whenever: all of a block is there or nothing, and a retry completes it once."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.servers.drop_commit import CommitDropper
from tests.servers.postgres import Postgres
from tests.transactions.conftest import Shared, Witness, close_store, make_store
from tests.transactions.crashing import JOINED_STEPS, OWN_STEPS, follow, pay
from tests.transactions.routes import ROUTES, Caller, Place, Route

from oncekey import StoreError

PATIENCE = 60.0
REPOSITORY = Path(__file__).parents[2]


async def retried(store: Any, caller: Caller, witness: Witness, key: str, before: int) -> None:
    """Ask again: what had been committed is replayed, else it is done now; never twice."""
    flavour = caller.route.flavour
    first = "first" if before else "second"
    for replayed in (bool(before), True):
        assert await pay(store, caller, key, "second", lambda step: None) == (first, replayed)
        assert witness.effects(flavour, key) == 2


# The client


DYING = [
    Route("pg", "sync", "psycopg", "none"),
    Route("pg", "sync", "psycopg", "connection"),
    Route("pg", "sync", "sqlalchemy+psycopg", "session"),
    Route("pg", "sync", "django", "connection"),
    Route("pg", "async", "asyncpg", "none"),
    Route("pg", "async", "asyncpg", "connection"),
    Route("pg", "async", "sqlalchemy+asyncpg", "session"),
    Route("sqlite", "sync", "sqlite3", "none"),
    Route("sqlite", "sync", "sqlite3", "connection"),
    Route("sqlite", "sync", "sqlalchemy+pysqlite", "session"),
    Route("sqlite", "sync", "django", "connection"),
    Route("sqlite", "async", "aiosqlite", "connection"),
]

Order = Callable[[Route, Place, str, str], int]


@pytest.fixture(scope="module")
def order_death() -> Iterator[Order]:
    """Has a process run a block and kill itself at a step; gives its exit code."""
    command = [sys.executable, "-m", "tests.transactions.crashing"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:

        def order(route: Route, place: Place, key: str, step: str) -> int:
            assert program.stdin is not None
            assert program.stdout is not None
            print(json.dumps([route, place, key, step]), file=program.stdin, flush=True)
            return int(program.stdout.readline())

        yield order
        assert program.stdin is not None
        program.stdin.close()
        assert program.wait(PATIENCE) == 0


@pytest.mark.parametrize("route", DYING, ids=lambda route: route.id)
@pytest.mark.parametrize("step", [*OWN_STEPS, *JOINED_STEPS])
async def test_process_that_is_killed_leaves_all_or_nothing(
    route: Route,
    step: str,
    store: Any,
    caller: Caller,
    place: Place,
    witness: Witness,
    order_death: Order,
    name: str,
) -> None:
    """kill -9 at any step: nothing before the commit, all after it, and a retry knows which."""
    if step in JOINED_STEPS and not route.joins:
        pytest.skip("no transaction to join")
    assert order_death(route, place, name, step) == -signal.SIGKILL
    committed = step.endswith("committed")
    assert witness.effects(route.flavour, name) == (2 if committed else 0)
    first = "of the dead" if committed else "second"
    for replayed in (committed, True):
        got = await pay(store, caller, name, "second", lambda step: None)
        assert got == (first, replayed)
        assert witness.effects(route.flavour, name) == 2


# The server


SERVED = [route for route in ROUTES if route.flavour == "pg"]


class Crash:
    """One crash of the server for all routes, each of which stands at the same step."""

    def __init__(self, server: Postgres, routes: list[Route]) -> None:
        self.server = server
        self.routes = routes
        self.arrived = threading.Barrier(len(routes), action=self._crash)

    def _crash(self) -> None:
        self.server.crash()
        self.server.start()

    def outcomes(self, work: Callable[[Route, Callable[[], None]], Any]) -> list[Any]:
        """What ``work`` gave for each route, or raised; it calls its second argument to crash."""

        def one(route: Route) -> Any:
            try:
                return work(route, lambda: self.arrived.wait(PATIENCE) and None)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(self.routes)) as pool:
            return list(pool.map(one, self.routes))


@pytest.mark.parametrize("step", [*OWN_STEPS, *JOINED_STEPS])
def test_server_that_crashes_leaves_all_or_nothing(
    step: str, tx_server: Postgres, place: Place, shared: Shared, witness: Witness, name: str
) -> None:
    """The server is gone at any step: what the caller is told is true, and a retry completes it."""
    joined = step in JOINED_STEPS
    routes = [route for route in SERVED if route.joins or not joined]

    async def survive(route: Route, crash: Callable[[], None]) -> tuple[Any, Any]:
        key = f"{name} {route.id}"
        left = [step]

        def strike(reached: str) -> None:
            if reached in left:
                left.remove(reached)
                crash()

        store = make_store(route, place)
        follow(store, strike)
        kept = Caller(route, place)
        async with kept.opened():
            told: Any = None
            try:
                told, replayed = await pay(store, kept, key, "first", strike, joined)
                assert not replayed
            except Exception as error:
                told = error
            assert not left, told
            seen = Witness(place)
            before = seen.effects("pg", key)
            seen.all_is_tidy()
            if route.joins:  # the connection died with the server
                async with Caller(route, place).opened() as fresh:
                    await retried(store, fresh, seen, key, before)
            else:
                await retried(store, kept, seen, key, before)
            seen.close()
        await close_store(store)
        return told, before

    crash = Crash(tx_server, routes)
    found = crash.outcomes(lambda route, strike: asyncio.run(survive(route, strike)))
    witness.look_again()
    shared.stale = True
    for route, outcome in zip(routes, found, strict=True):
        assert isinstance(outcome, tuple), (route, outcome)
        told, before = outcome
        assert before == (2 if told == "first" else 0), (route, told)
        if step.endswith("committed"):
            assert told == "first", (route, told)
        elif step != "opened":  # so early that it may be begun anew, on a new connection
            assert isinstance(told, Exception), (route, told)


# The network between them


@pytest.fixture(scope="module")
def dropper(place: Place) -> Iterator[CommitDropper]:
    """A proxy that can lose a commit."""
    with CommitDropper(place.url) as found:
        yield found


@pytest.mark.parametrize("route", SERVED, ids=lambda route: route.id)
@pytest.mark.parametrize("lost", ["request", "reply"])
async def test_commit_that_is_lost_is_done_once_by_a_retry(
    route: Route, lost: str, place: Place, dropper: CommitDropper, witness: Witness, name: str
) -> None:
    """Nobody can tell a lost COMMIT from a lost reply; a retry with the key finds out."""
    far = place._replace(url=dropper.url)
    store = make_store(route, far)
    async with Caller(route, far).opened() as caller, Caller(route, far).opened() as fresh:
        dropper.drop_next(lost)
        before = dropper.dropped
        with pytest.raises(StoreError) as caught:
            await pay(store, caller, name, "first", lambda step: None)
        assert caught.value.retryable
        assert dropper.dropped == before + 1
        effects = witness.effects("pg", name)
        assert effects == (2 if lost == "reply" else 0)
        await retried(store, fresh if route.joins else caller, witness, name, effects)
    await close_store(store)
    witness.all_is_tidy()
