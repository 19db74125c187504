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


# Whatever changes a definition writes a row of one of these.
DEFINITIONS = (
    *("pg_attrdef", "pg_attribute", "pg_class", "pg_constraint", "pg_db_role_setting"),
    *("pg_default_acl", "pg_event_trigger", "pg_extension", "pg_index", "pg_namespace"),
    *("pg_policy", "pg_proc", "pg_publication", "pg_rewrite", "pg_statistic"),
    *("pg_statistic_ext", "pg_trigger", "pg_type"),
)
SEEN = "SELECT " + ", ".join(
    f"(SELECT (count(*), max(xmin::text::bigint))::text FROM {name})" for name in DEFINITIONS
)
TABLES = """
    SELECT c.oid::regclass::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition
    AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema' ORDER BY 1
"""


class Tables:
    """The tables of a database, as they were made: emptied again if nobody changed them."""

    def __init__(self, url: str) -> None:
        with _connected(url) as connection:
            self._names = [name for (name,) in connection.execute(TABLES)]
            self._rows = self._read(connection)
            self._seen = connection.execute(SEEN).fetchone()

    def _read(self, connection: Any) -> list[str]:
        """A digest of what stands in each; of an empty one it is empty."""
        every = (
            f"SELECT coalesce(md5(string_agg(t::text, ' ')), '') FROM {n} t" for n in self._names
        )
        return [digest for (digest,) in connection.execute(" UNION ALL ".join(every))]

    def put_back(self, url: str) -> bool:
        """Empty what was empty. False: that is not enough."""
        with _connected(url) as connection:
            if connection.execute(SEEN).fetchone() != self._seen:
                return False
            found = zip(self._names, self._rows, self._read(connection), strict=True)
            written = {name: was for name, was, now in found if now != was}
            if any(written.values()):
                return False
            if written:
                connection.execute(f"TRUNCATE {', '.join(written)} RESTART IDENTITY")
                self._seen = connection.execute(SEEN).fetchone()
        return True


class Databases:
    """Empty databases of one server: emptied and used again, as making one is slow and large."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._free: list[str] = []
        self._taken: list[str] = []
        self._ready: list[str] = []
        self._tables: dict[str, Tables] = {}
        self._kept: Any = None

    def close(self) -> None:
        """Let the server go."""
        if self._kept is not None:
            self._kept.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def database(self) -> str:
        """An empty database for this test; gives its address."""
        name = self._free.pop() if self._free else make_database(self._server.url())
        self._taken.append(name)
        return str(self._server.url(name))

    def with_schema(self) -> str:
        """A database with the tables of oncekey, and nothing in them; gives its address."""
        if self._ready:
            self._taken.append(self._ready.pop())
            return str(self._server.url(self._taken[-1]))
        url = _with_schema(self.database())
        self._tables[self._taken[-1]] = Tables(url)
        return url

    def tidy(self) -> None:
        """Empty what was handed out."""
        while self._taken:
            name = self._taken.pop()
            self._clear(name)
            url = self._server.url(name)
            if name in self._tables and self._tables[name].put_back(url):
                self._ready.append(name)
                continue
            self._tables.pop(name, None)
            sql(url, RESET)
            self._free.append(name)

    def _clear(self, name: str) -> None:
        """End whatever is connected, and forget what was set.

        Not through the database itself: it may be set to read-only or to time out. The connection
        is kept for the next time, unless a test ended the server in between.
        """
        import psycopg

        ended = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s"
        for _ in range(2):
            if self._kept is None:
                self._kept = _connected(self._server.url())
            try:
                self._kept.execute(ended, [name])
                self._kept.execute(f"ALTER DATABASE {name} RESET ALL")
            except psycopg.OperationalError:
                self._kept.close()
                self._kept = None
            else:
                return
        raise AssertionError("the server ends connections at once")


class Given:
    """A server that is there already."""

    def __init__(self, url: str) -> None:
        self._url = url

    def url(self, database: str = "postgres") -> str:
        return urlunsplit(urlsplit(self._url)._replace(path=f"/{database}"))


def databases_of(**options: Any) -> Iterator[Databases]:
    """The databases of a server of our own; closed before it is ended."""
    for server in running(**options):
        databases = Databases(server)
        yield databases
        databases.close()


@pytest.fixture(scope="session")
def _own() -> Iterator[Databases]:
    yield from databases_of(fsync="off", max_connections="400")


@pytest.fixture
def own_postgres(_own: Databases) -> Iterator[Databases]:
    """A server of our own, with the machine's clock; we are superuser and may change it."""
    yield _own
    _own.tidy()


@pytest.fixture(scope="session")
def _given() -> Iterator[Databases | None]:
    url = os.environ.get("ONCEKEY_TEST_PG_URL")
    databases = Databases(Given(url)) if url else None
    yield databases
    if databases is not None:
        databases.close()


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
    yield from databases_of(moved_clock=True, fsync="off")


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
    return postgres.with_schema()


@pytest.fixture
def own_url(own_postgres: Databases) -> str:
    """A fresh database with the schema, on our own server."""
    return own_postgres.with_schema()


@pytest.fixture
def timed_url(timed_postgres: Databases) -> str:
    """A fresh database with the schema, on the server whose clock can be moved."""
    return timed_postgres.with_schema()


def _with_schema(url: str) -> str:
    with PostgresStore(url) as store:
        store.create_schema()
    return url


def _connected(url: str) -> Any:
    import psycopg

    return psycopg.connect(url, autocommit=True, application_name=OURSELVES)


def sql(url: str, *statements: str, args: Any = None) -> list[tuple[Any, ...]]:
    """Run statements, each on its own; the rows of the last."""
    rows: list[tuple[Any, ...]] = []
    with _connected(url) as connection:
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
