"""One PostgreSQL server and one SQLite file for all tests of transactions in a pytest process."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psycopg
import pytest
from tests.servers.postgres import Postgres, running
from tests.transactions.routes import Caller, Place, Route, done

from oncekey import PgBackend, PgStore, SQLiteBackend, SQLiteStore
from oncekey.models import Key, Scope

EFFECTS = "CREATE TABLE effects (name text)"
PATIENCE = 20.0


@pytest.fixture(scope="session")
def tx_server() -> Iterator[Postgres]:
    """A server that nobody crashes."""
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
        kind: Any = SQLiteStore if route.world == "sync" else SQLiteBackend
        return kind(place.file, durability="normal", **options)
    if route.world == "sync":
        return PgStore(place.url, **options)
    driver = "psycopg" if "psycopg" in route.library else "asyncpg"
    return PgBackend(place.url, driver=driver, **options)


async def close_store(store: Any) -> None:
    """Close a store, sync or async."""
    await done(store.aclose() if hasattr(store, "aclose") else store.close())


@pytest.fixture
async def store(route: Route, place: Place, witness: Witness) -> AsyncIterator[Any]:
    """The store of the test's route. Nothing may be left open on its database afterwards."""
    made = make_store(route, place)
    yield made
    await close_store(made)
    witness.all_is_tidy(route.flavour)


@pytest.fixture
async def caller(route: Route, place: Place) -> AsyncIterator[Caller]:
    """A user of the test's route."""
    async with Caller(route, place).opened() as opened:
        yield opened


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A key that no other test uses."""
    return str(request.node.nodeid)[-200:]


Look = Callable[[], int]
