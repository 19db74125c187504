"""Fixtures with PostgreSQL: one server for each pytest process, a fresh database for each test.

``ONCEKEY_TEST_PG_URL`` names another server for the tests that neither crash it, nor move its
clock, nor make roles in it. It must be a superuser's, or one's who may create databases.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
from tests.servers.postgres import make_database, running

from oncekey.models import Key, Scope, Terms
from oncekey.stores.postgres import PostgresStore

__all__ = [
    "SCOPE",
    "TERMS",
    "Databases",
    "eventually",
    "key",
    "own_postgres",
    "own_url",
    "pg_url",
    "postgres",
    "sessions",
    "sql",
    "timed_postgres",
    "timed_url",
]

TERMS = Terms(lease_ms=30_000, ttl_ms=86_400_000)
SCOPE = Scope("once", "postgres")
PATIENCE = 30.0
OURSELVES = "oncekey-tests"  # the server still knows a connection for a while after it was closed


def key(name: object) -> Key:
    """A key of the tests' own scope."""
    return Key(SCOPE, str(name))


RESET = """
    DO $$ DECLARE name text; BEGIN
        FOR name IN SELECT nspname FROM pg_namespace
            WHERE nspname !~ '^pg_' AND nspname <> 'information_schema'
        LOOP EXECUTE format('DROP SCHEMA %I CASCADE', name); END LOOP;
        EXECUTE format('ALTER DATABASE %I RESET ALL', current_database());
    END $$;
    CREATE SCHEMA public AUTHORIZATION pg_database_owner;
    GRANT USAGE ON SCHEMA public TO PUBLIC;
"""


class Databases:
    """Empty databases of one server: emptied and used again, as making one is slow and large."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._free: list[str] = []
        self._taken: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def database(self) -> str:
        """An empty database for this test; gives its address."""
        name = self._free.pop() if self._free else make_database(self._server.url())
        self._taken.append(name)
        return str(self._server.url(name))

    def tidy(self) -> None:
        """Empty what was handed out."""
        while self._taken:
            name = self._taken.pop()
            # Not through the database itself: it may be set to read-only or to time out.
            sql(
                self._server.url(),
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                f"WHERE datname = '{name}'",
                f"ALTER DATABASE {name} RESET ALL",
            )
            sql(self._server.url(name), RESET)
            self._free.append(name)


class Given:
    """A server that is there already."""

    def __init__(self, url: str) -> None:
        self._url = url

    def url(self, database: str = "postgres") -> str:
        return urlunsplit(urlsplit(self._url)._replace(path=f"/{database}"))


@pytest.fixture(scope="session")
def _own() -> Iterator[Databases]:
    for server in running(fsync="off", max_connections="400"):
        yield Databases(server)


@pytest.fixture
def own_postgres(_own: Databases) -> Iterator[Databases]:
    """A server of our own, with the machine's clock; we are superuser and may change it."""
    yield _own
    _own.tidy()


@pytest.fixture(scope="session")
def _given() -> Databases | None:
    url = os.environ.get("ONCEKEY_TEST_PG_URL")
    return Databases(Given(url)) if url else None


@pytest.fixture
def postgres(request: pytest.FixtureRequest, _given: Databases | None) -> Iterator[Databases]:
    """Any server: our own, or the one that the environment names."""
    if _given is None:
        yield request.getfixturevalue("own_postgres")
        return
    yield _given
    _given.tidy()


@pytest.fixture(scope="session")
def _timed() -> Iterator[Databases]:
    for server in running(moved_clock=True, fsync="off"):
        yield Databases(server)


@pytest.fixture
def timed_postgres(_timed: Databases) -> Iterator[Databases]:
    """A server whose clock tests may move; right again afterwards."""
    _timed.clock("+0")
    yield _timed
    _timed.clock("+0")
    _timed.tidy()


@pytest.fixture
def pg_url(postgres: Databases) -> str:
    """A fresh database with the schema."""
    return _with_schema(postgres.database())


@pytest.fixture
def own_url(own_postgres: Databases) -> str:
    """A fresh database with the schema, on our own server."""
    return _with_schema(own_postgres.database())


@pytest.fixture
def timed_url(timed_postgres: Databases) -> str:
    """A fresh database with the schema, on the server whose clock can be moved."""
    return _with_schema(timed_postgres.database())


def _with_schema(url: str) -> str:
    with PostgresStore(url) as store:
        store.create_schema()
    return url


def sql(url: str, *statements: str, args: Any = None) -> list[tuple[Any, ...]]:
    """Run statements, each on its own; the rows of the last."""
    import psycopg

    rows: list[tuple[Any, ...]] = []
    with psycopg.connect(url, autocommit=True, application_name=OURSELVES) as connection:
        for statement in statements:
            found = connection.execute(statement, args)
            rows = found.fetchall() if found.description else []
    return rows


def sessions(url: str) -> list[tuple[int, str]]:
    """Who is connected to this database beside the tests: process ids and last statements."""
    return [
        (row[0], row[1])
        for row in sql(
            url,
            "SELECT pid, query FROM pg_stat_activity WHERE datname = current_database() "
            "AND application_name <> %s AND backend_type = 'client backend'",
            args=[OURSELVES],
        )
    ]


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """Wait for something that another process does; fails after long patience."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        with contextlib.suppress(Exception):
            found = condition()
            if found:
                return found
        time.sleep(0.01)
    raise AssertionError(f"{what} did not happen")
