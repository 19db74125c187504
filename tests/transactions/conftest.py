"""One PostgreSQL server and one SQLite file for all tests of transactions in a pytest process."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import pytest_asyncio
from tests.servers.postgres import Postgres, running
from tests.transactions.routes import Caller, Place, Route, done

from oncekey import AsyncSQLiteStore, PgBackend, PgStore, SQLiteStore
from oncekey._core import drive
from oncekey.models import Key, Scope

EFFECTS = "CREATE TABLE effects (name text)"
PATIENCE = 20.0
FOLDER = Path(__file__).parent


@pytest.fixture(autouse=True)
def may_wait_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are coroutines, and call sync libraries: in loops that have nothing else to do."""
    monkeypatch.setattr(drive, "_must_not_stall", lambda: None)


@pytest.fixture(scope="session")
def tx_server() -> Iterator[Postgres]:
    """A server; a test that crashes it starts it again."""
    yield from running(fsync="off", max_connections="300")


@pytest.fixture(scope="session")
def place(tx_server: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A database and a file, each with the tables of oncekey and one for effects."""
    url = tx_server.database()
    with PgStore(url) as store:
        store.create_schema()
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(EFFECTS)
    file = str(tmp_path_factory.mktemp("transactions") / "effects.db")
    SQLiteStore(file).close()
    raw = sqlite3.connect(file)
    raw.execute(EFFECTS)
    raw.commit()
    raw.close()
    return Place(url, file)


class Witness:
    """Looks at the databases from outside, by what is committed."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.pg: Any = psycopg.connect(place.url, autocommit=True)
        self.sqlite = sqlite3.connect(place.file, isolation_level=None, timeout=0)

    def look_again(self) -> None:
        """Connect anew, after a crash of the server."""
        self.pg.close()
        self.pg = psycopg.connect(self.place.url, autocommit=True)

    def effects(self, flavour: str, name: str) -> int:
        """How often ``name`` was written."""
        query = "SELECT count(*) FROM effects WHERE name = "
        if flavour == "pg":
            found = self.pg.execute(f"{query}%s", (name,)).fetchone()
        else:
            found = self.sqlite.execute(f"{query}?", (name,)).fetchone()
        return int(found[0])

    def record(self, flavour: str, name: str) -> tuple[Any, ...] | None:
        """The row of a key, with its version where there is one: it changes with every write."""
        digest = Key(Scope("once", "default"), name).digest
        query = "SELECT {} FROM oncekey_records WHERE key = {}"
        if flavour == "pg":
            sql = query.format("xmin::text, ctid::text, state, owner, answer", "%s")
            found: Any = self.pg.execute(sql, (digest,)).fetchone()
        else:
            sql = query.format("state, owner, fence, expires_at, answer", "?")
            found = self.sqlite.execute(sql, (digest,)).fetchone()
        return found  # type: ignore[no-any-return]

    def loose_ends(self, flavour: str = "pg") -> list[Any]:
        """Open transactions and locks that nobody should have now."""
        if flavour == "sqlite":
            try:
                self.sqlite.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                return [error]
            self.sqlite.execute("ROLLBACK")
            return []
        found: list[Any] = self.pg.execute(
            "SELECT pid, state, query FROM pg_stat_activity WHERE datname = current_database() "
            "AND state LIKE 'idle in transaction%' UNION ALL "
            "SELECT pid, 'advisory lock', '' FROM pg_locks WHERE locktype = 'advisory' "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        ).fetchall()
        return found

    def all_is_tidy(self, flavour: str = "pg") -> None:
        """No open transaction and no lock is left; one that is just being ended may end."""
        until = time.monotonic() + PATIENCE
        while self.loose_ends(flavour):
            assert time.monotonic() < until, self.loose_ends(flavour)
            time.sleep(0.01)

    def close(self) -> None:
        self.pg.close()
        self.sqlite.close()


@pytest.fixture(scope="session")
def witness(place: Place) -> Iterator[Witness]:
    """An onlooker."""
    found = Witness(place)
    yield found
    found.close()


def make_store(route: Route, place: Place, **options: Any) -> Any:
    """A store of the kind that a route needs."""
    if route.flavour == "sqlite":
        kind: Any = SQLiteStore if route.world == "sync" else AsyncSQLiteStore
        return kind(place.file, durability="normal", **options)
    if route.world == "sync":
        return PgStore(place.url, **options)
    driver = "psycopg" if "psycopg" in route.library else "asyncpg"
    return PgBackend(place.url, driver=driver, **options)


async def close_store(store: Any) -> None:
    """Close a store, sync or async."""
    await done(store.aclose() if hasattr(store, "aclose") else store.close())


class Shared:
    """Stores and callers for tests to use one after the other: connecting is slow."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._stores: dict[tuple[str, ...], Any] = {}
        self._callers: dict[Route, tuple[Caller, contextlib.AsyncExitStack]] = {}
        self.stale = False  # the server has crashed: connections are dead

    async def store(self, route: Route) -> Any:
        await self._refresh()
        kind = (route.flavour, route.world, route.library.replace("sqlalchemy+", ""))
        if kind not in self._stores:
            self._stores[kind] = make_store(route, self.place)
        return self._stores[kind]

    async def caller(self, route: Route) -> Caller:
        await self._refresh()
        if route not in self._callers:
            stack = contextlib.AsyncExitStack()
            opened = await stack.enter_async_context(Caller(route, self.place).opened())
            self._callers[route] = opened, stack
        return self._callers[route][0]

    async def discard(self, route: Route) -> None:
        """Not for the next test."""
        _, stack = self._callers.pop(route)
        with contextlib.suppress(Exception):
            await stack.aclose()

    async def _refresh(self) -> None:
        if self.stale:
            await self.close()
            self.stale = False

    async def close(self) -> None:
        for route in list(self._callers):
            await self.discard(route)
        while self._stores:
            await close_store(self._stores.popitem()[1])


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared(place: Place) -> AsyncIterator[Shared]:
    """What tests share, in one loop."""
    found = Shared(place)
    yield found
    await found.close()


@pytest_asyncio.fixture(loop_scope="session")
async def store(route: Route, shared: Shared, witness: Witness) -> AsyncIterator[Any]:
    """A store for the test's route. Nothing may be left open on its database afterwards."""
    yield await shared.store(route)
    witness.all_is_tidy(route.flavour)


@pytest_asyncio.fixture(loop_scope="session")
async def own_store(route: Route, place: Place, witness: Witness) -> AsyncIterator[Any]:
    """A store of the test's own, to be changed."""
    made = make_store(route, place)
    yield made
    await close_store(made)
    witness.all_is_tidy(route.flavour)


_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Remember failures for ``caller``."""
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


@pytest_asyncio.fixture(loop_scope="session")
async def caller(
    route: Route, shared: Shared, request: pytest.FixtureRequest
) -> AsyncIterator[Caller]:
    """A user of the test's route, with the connection of the last test if that left it well."""
    if route.library == "django":  # its connections belong to a context, not only to a thread
        async with Caller(route, shared.place).opened() as alone:
            yield alone
        return
    opened = await shared.caller(route)
    yield opened
    if request.node.stash.get(_failed, False) or (route.joins and opened.in_transaction()):
        await shared.discard(route)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run coroutines of this folder in one loop, as asynchronous connections belong to one."""
    for item in items:
        if item.path.parent == FOLDER and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A key that no other test uses."""
    return str(request.node.nodeid)[-200:]
