"""Wrong URLs, wrong rights, a full disk, time-outs: typed errors that name the fix."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import re
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from tests.servers.fixtures_pg import SCOPE, TERMS, eventually, key, sql
from tests.servers.postgres import Postgres

from oncekey import aconnect, connect
from oncekey._core.flows import new_owner
from oncekey.errors import (
    StoreConfigError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    StoreUnavailableError,
)
from oncekey.models import Verdict
from oncekey.stores._batching import Job
from oncekey.stores.postgres import AsyncPostgresStore, PostgresStore

PASSWORD = "s3cr3t-w0rd"
KINDS = ["sync", "asyncpg", "psycopg"]
Open = Callable[..., Any]
HANG = 60


def do(store: Any, method: str, *args: Any) -> Any:
    """Call a method of a sync or async store, and close the store."""

    async def call() -> Any:
        try:
            return await getattr(store, method)(*args)
        finally:
            await store.aclose()

    if not isinstance(store, PostgresStore):
        return asyncio.run(call())
    try:
        return getattr(store, method)(*args)
    finally:
        store.close()


def mark(store: Any, name: str = "k") -> bool:
    return bool(do(store, "first_seen", key(name), TERMS))


def check_secret(error: BaseException) -> None:
    """Neither the error nor any error behind it may show the password."""
    shown = "".join(traceback.format_exception(error)) + repr(error) + str(error.args)
    lines = [line for line in shown.splitlines() if PASSWORD in line]
    assert not [line for line in lines if "PASSWORD" not in line], lines


@pytest.fixture(params=KINDS)
def open_store(request: pytest.FixtureRequest) -> Open:
    """Makes a store of each kind."""

    def make(url: Any, **options: Any) -> Any:
        if request.param == "sync":
            return PostgresStore(url, **options)
        return AsyncPostgresStore(url, driver=request.param, **options)

    return make


@pytest.fixture
def role(own_postgres: Postgres, own_url: str) -> Iterator[tuple[str, str]]:
    """A role without any rights: its name, and the URL of a database with the schema."""
    name = f"role_of_{own_url.rpartition('/')[2]}"
    sql(own_url, f"CREATE ROLE {name} LOGIN")
    yield name, own_url.replace("postgres@", f"{name}:{PASSWORD}@")
    sql(own_url, f"DROP OWNED BY {name}", f"DROP ROLE {name}")


def with_password(server: Postgres, url: str) -> str:
    """A URL that logs in with the wrong password, as a role that has another."""
    name = "with_password"
    rules = server.data / "pg_hba.conf"
    text = rules.read_text()
    if name not in text:
        rules.write_text(f"host all {name} 127.0.0.1/32 scram-sha-256\n{text}")
        sql(url, f"CREATE ROLE {name} LOGIN PASSWORD 'another'", "SELECT pg_reload_conf()")
    rows = "SELECT count(*) FROM pg_hba_file_rules WHERE user_name = ARRAY[%s] AND error IS NULL"
    assert sql(url, rows, args=[name]) == [(1,)]
    wrong = url.replace("postgres@", f"{name}:{PASSWORD}@")

    def refused() -> bool:
        try:
            psycopg.connect(wrong).close()
        except psycopg.OperationalError:
            return True
        return False  # the server has not read its rules yet

    eventually(refused, "refusing")
    return wrong


# Where the store is


def test_a_wrong_password_is_named(own_postgres: Postgres, own_url: str, open_store: Open) -> None:
    """A refused login says to check user and password, and does not show them."""
    url = with_password(own_postgres, own_url)

    with pytest.raises(StoreError, match="password") as caught:
        mark(open_store(url))
    check_secret(caught.value)


def test_a_missing_database_is_named(own_postgres: Postgres, open_store: Open) -> None:
    """A database that does not exist is told from a server that does not answer."""
    with pytest.raises(StoreError, match="database") as caught:
        mark(open_store(own_postgres.url("no_such", user=f"postgres:{PASSWORD}")))
    check_secret(caught.value)


def test_an_unknown_role_is_named(own_postgres: Postgres, open_store: Open) -> None:
    """A role that does not exist is a refused login."""
    with pytest.raises(StoreError, match="check user, password") as caught:
        mark(open_store(own_postgres.url(user=f"nobody_there:{PASSWORD}")))
    check_secret(caught.value)


def test_a_server_that_is_down_is_unavailable(open_store: Open) -> None:
    """Nobody listens there: worth a retry, and the error says what to check."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        url = f"postgresql://user:{PASSWORD}@127.0.0.1:{taken.getsockname()[1]}/db"
        with pytest.raises(StoreUnavailableError, match="check that the server runs") as caught:
            mark(open_store(url))
    assert caught.value.retryable
    check_secret(caught.value)


def test_a_host_that_is_not_there_is_unavailable(open_store: Open) -> None:
    """A name that nobody can resolve is an address to check."""
    with pytest.raises(StoreUnavailableError, match="its address"):
        mark(open_store(f"postgresql://user:{PASSWORD}@no-such-host.invalid/db"))


def test_too_many_connections_is_unavailable(role: tuple[str, str], open_store: Open) -> None:
    """A server without a free connection may have one later."""
    name, url = role
    sql(url.replace(f"{name}:{PASSWORD}@", "postgres@"), f"ALTER ROLE {name} CONNECTION LIMIT 0")
    with pytest.raises(StoreUnavailableError) as caught:
        mark(open_store(url))
    check_secret(caught.value)


def test_a_server_that_comes_back_is_used_again(own_postgres: Postgres) -> None:
    """While the server is down calls fail at once; when it is up again the same store works."""
    server = Postgres(fsync="off")
    try:
        server.start()
        url = server.database()
        with PostgresStore(url) as store:
            store.create_schema()
            assert store.first_seen(key("k"), TERMS)
            server.crash()
            for _ in range(2):
                with pytest.raises(StoreUnavailableError):
                    store.first_seen(key("k"), TERMS)
            server.start()
            assert not store.first_seen(key("k"), TERMS)
            assert store.first_seen(key("k2"), TERMS)
    finally:
        server.close()


# URLs and other things to be given


WRONG = [
    "",
    "nonsense",
    "mysql://user@host/db",
    "postgresql:/user@host/db",
    "sqlite:///x.db",
]


@pytest.mark.parametrize("url", WRONG)
def test_what_is_no_url_is_refused(url: str, open_store: Open) -> None:
    """Something that is not a PostgreSQL URL is refused before anything is opened."""
    with pytest.raises(StoreConfigError, match="postgresql://user:password@host:5432/database"):
        open_store(url)


MALFORMED = [
    f"postgresql://user:{PASSWORD}@host:port/db",
    f"postgresql://user:{PASSWORD}@host:99999999/db",
    f"postgresql://user:{PASSWORD}@[::1/db",
    f"postgresql://user:[{PASSWORD}@host/db",
    f"postgresql://user:{PASSWORD}@host/db?no_such_option=1",
    f"postgresql://user:{PASSWORD}@host/db?sslmode=perhaps",
    f"host=127.0.0.1 port=none password={PASSWORD}",
]


def check_malformed(error: StoreError) -> None:
    """An address may be wrong or not there yet; what a driver can't even read is wrong for good."""
    assert isinstance(error, (StoreConfigError, StoreUnavailableError))
    cause = error.__cause__
    if not isinstance(error, StoreConfigError):
        assert not isinstance(cause, (ValueError, psycopg.ProgrammingError)), repr(cause)
    check_secret(error)


@pytest.mark.parametrize("url", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_url_is_a_wrong_setting(url: str, open_store: Open) -> None:
    """A URL that the driver can't read is a setting to correct, not a server to wait for."""
    with pytest.raises(StoreError) as caught:
        mark(open_store(url))
    check_malformed(caught.value)


@pytest.mark.parametrize("opener", [connect, aconnect])
@pytest.mark.parametrize("url", MALFORMED[:6], ids=range(6))
def test_connect_names_a_malformed_url(url: str, opener: Any) -> None:
    """connect and aconnect give a typed error for it too."""
    with pytest.raises(StoreError) as caught:
        mark(opener(url))
    check_malformed(caught.value)


def test_other_things_are_refused() -> None:
    """What is neither a URL nor a pool nor an engine is named, with what would do."""
    import sqlalchemy
    from sqlalchemy.ext.asyncio import create_async_engine

    sync_engine = sqlalchemy.create_engine("postgresql+psycopg://host/db")
    async_engine = create_async_engine("postgresql+asyncpg://host/db")
    for wrong in (42, None, object(), {"url": "x"}, b"postgresql://host/db", async_engine, int):
        with pytest.raises(StoreConfigError, match=r"pass a URL, a psycopg_pool\.ConnectionPool"):
            PostgresStore(wrong)
    for wrong in (42, None, object(), sync_engine):
        with pytest.raises(StoreConfigError, match="pass a URL, an asyncpg Pool"):
            AsyncPostgresStore(wrong)
    with pytest.raises(StoreConfigError, match=r"make it with postgresql\+psycopg"):
        PostgresStore(sqlalchemy.create_engine("sqlite://"))


def test_wrong_options_are_named() -> None:
    """Options that can't be are refused with what they may be."""
    with pytest.raises(StoreConfigError, match="driver must be 'asyncpg' or 'psycopg'"):
        AsyncPostgresStore("postgresql://host/db", driver="pg8000")
    with pytest.raises(StoreConfigError, match="prepare must be true or false"):
        connect("postgresql://host/db?prepare=perhaps")
    with pytest.raises(StoreConfigError, match="asyncpg is asynchronous"):
        connect("postgresql+asyncpg://host/db")
    with pytest.raises(StoreConfigError, match="has no option 'no_such'; there are listen, prep"):
        connect("postgresql://host/db", no_such=1)
    with pytest.raises(StoreConfigError, match=r"write postgresql\+psycopg://"):
        connect("postgresql+psycopg2://host/db")


@pytest.mark.parametrize("kind", KINDS)
def test_options_in_a_url_reach_the_store(pg_url: str, kind: str) -> None:
    """tenant, prepare and listen may stand in the URL; what else is there goes to the driver."""
    url = f"{pg_url}?tenant=t&prepare=false&listen=false&application_name=ours"
    opened: Any = connect(url) if kind == "sync" else aconnect(url, driver=kind)
    assert opened.tenant == "t"
    assert mark(opened)
    assert sql(pg_url, "SELECT DISTINCT tenant FROM oncekey_records") == [("t",)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_space_in_a_url_reaches_the_driver(pg_url: str, kind: str) -> None:
    """Options of the server in the URL are passed on as they were."""
    sql(pg_url, "CREATE SCHEMA apart")
    url = f"{pg_url}?options=-c%20search_path%3Dapart"
    opened: Any = connect(url) if kind == "sync" else aconnect(url, driver=kind)
    do(opened, "create_schema")
    rows = sql(pg_url, "SELECT count(*) FROM pg_tables WHERE schemaname = 'apart'")
    assert rows == [(4,)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_socket_in_the_file_system(own_postgres: Postgres, own_url: str, kind: str) -> None:
    """A URL without a host, and the folder of a socket in its query, works."""
    database = own_url.rpartition("/")[2]
    url = (
        f"postgresql:///{database}?host={own_postgres.home}&port={own_postgres.port}&user=postgres"
    )
    opened: Any = connect(url) if kind == "sync" else aconnect(url, driver=kind)
    assert mark(opened)


@pytest.mark.parametrize("kind", KINDS)
def test_a_connection_string_of_pairs(own_postgres: Postgres, own_url: str, kind: str) -> None:
    """A string of key=value pairs works with psycopg; for asyncpg the error says to write a URL."""
    database = own_url.rpartition("/")[2]
    text = f"host=127.0.0.1 port={own_postgres.port} user=postgres dbname={database}"
    if kind == "asyncpg":
        with pytest.raises(StoreConfigError, match="postgresql://"):
            mark(AsyncPostgresStore(text, driver=kind))
    else:
        assert mark(
            PostgresStore(text) if kind == "sync" else AsyncPostgresStore(text, driver=kind)
        )


def test_a_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the driver the error says what to install."""
    find = importlib.util.find_spec

    def without(*names: str) -> None:
        def found(name: str, *rest: Any) -> Any:
            return None if name in names else find(name, *rest)

        monkeypatch.setattr(importlib.util, "find_spec", found)

    without("psycopg")
    with pytest.raises(StoreConfigError, match=r"pip install 'oncekey\[postgres\]'"):
        PostgresStore("postgresql://host/db")
    with pytest.raises(StoreConfigError, match=r"pip install 'oncekey\[postgres\]'"):
        connect("postgresql://host/db")
    with pytest.raises(StoreConfigError, match=r"pip install 'oncekey\[postgres\]'"):
        AsyncPostgresStore("postgresql://host/db", driver="psycopg")
    assert AsyncPostgresStore("postgresql://host/db").driver == "asyncpg"
    without("asyncpg")
    assert AsyncPostgresStore("postgresql://host/db").driver == "psycopg"
    with pytest.raises(StoreConfigError, match=r"pip install 'oncekey\[postgres\]'"):
        AsyncPostgresStore("postgresql+asyncpg://host/db")
    without("asyncpg", "psycopg")
    with pytest.raises(StoreConfigError, match=r"pip install 'oncekey\[postgres\]'"):
        aconnect("postgresql://host/db")


# Rights


def test_missing_tables_are_named(postgres: Postgres, open_store: Open) -> None:
    """A database without the tables: every kind of call names the command that makes them."""
    url = postgres.database()
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("first_seen", (key("k"), TERMS)),
        ("claim", (key("k"), new_owner(), b"", TERMS)),
        ("complete", (key("k"), new_owner(), 1, b"j1", TERMS)),
        ("read", (key("k"),)),
        ("write", (key("k"), b"", b"j1", 1)),
        ("wait", (key("k"), 0.05)),
        ("sweep", ()),
        ("clear", ()),
    ]
    for method, args in calls:
        with pytest.raises(StoreConfigError, match="oncekey migrate URL") as caught:
            do(open_store(url, listen=False if method != "wait" else None), method, *args)
        assert not caught.value.retryable


def test_a_role_without_rights_is_told_what_to_grant(
    role: tuple[str, str], own_url: str, open_store: Open
) -> None:
    """The error names the grants, and with just these everything works."""
    name, url = role
    with pytest.raises(StoreConfigError, match="GRANT") as caught:
        mark(open_store(url))
    check_secret(caught.value)
    granted = re.findall(
        r"((?:[A-Z]+, )*[A-Z]+(?: \(\w+\))?) ON ((?:oncekey_\w+, )*(?:and )?oncekey_\w+)",
        str(caught.value),
    )
    assert granted
    for rights, names in granted:
        sql(own_url, f"GRANT {rights} ON {names} TO {name}")
    for method, args in (
        ("first_seen", (key("k"), TERMS)),
        ("claim", (key("c"), new_owner(), b"", TERMS)),
        ("wait", (key("c"), 0.05)),
        ("sweep", ()),
        ("clear", ()),
    ):
        do(open_store(url), method, *args)


def test_a_role_that_may_not_create_is_told_so(
    role: tuple[str, str], own_url: str, open_store: Open
) -> None:
    """create_schema without the right to create tables says so."""
    _, url = role
    sql(own_url, "DROP TABLE oncekey_records, oncekey_waiters, oncekey_state, oncekey_schema")
    with pytest.raises(StoreConfigError, match="CREATE"):
        do(open_store(url), "create_schema")


def test_a_read_only_server_is_named(pg_url: str, open_store: Open) -> None:
    """A standby, or a session that may not write, has an error of its own with the way out."""
    sql(
        pg_url, f"ALTER DATABASE {pg_url.rpartition('/')[2]} SET default_transaction_read_only = on"
    )
    with pytest.raises(StoreReadOnlyError, match="target_session_attrs=read-write"):
        mark(open_store(pg_url))
    with pytest.raises(StoreReadOnlyError):
        do(open_store(pg_url), "claim", key("k"), new_owner(), b"", TERMS)


# Trouble on the server


RAISE = """
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = '{code}'; END $$;
    CREATE TRIGGER refuse BEFORE INSERT ON oncekey_records FOR EACH ROW EXECUTE FUNCTION refuse();
"""


@pytest.mark.parametrize(
    "code, kind",
    [
        ("53100", StoreFullError),  # the disk
        ("53200", StoreFullError),  # memory
        ("40001", StoreUnavailableError),
        ("57014", StoreUnavailableError),
        ("55P03", StoreUnavailableError),
        ("XX000", StoreError),
    ],
)
def test_errors_of_the_server_have_types(
    pg_url: str, open_store: Open, code: str, kind: type[StoreError]
) -> None:
    """The server's code decides the type; when the trouble is over the key is still free."""
    sql(pg_url, RAISE.format(code=code))
    with pytest.raises(kind) as caught:
        do(open_store(pg_url), "claim", key("k"), new_owner(), b"f", TERMS)
    assert type(caught.value) is kind or issubclass(kind, StoreUnavailableError)
    assert caught.value.retryable == (kind is not StoreError)
    sql(pg_url, "DROP TRIGGER refuse ON oncekey_records")
    reply = do(open_store(pg_url), "claim", key("k"), new_owner(), b"f", TERMS)
    assert reply.verdict is Verdict.WON


def test_one_bad_call_does_not_take_others_down(pg_url: str) -> None:
    """A batch in which one call is refused: the others get their answers."""
    bad = key("bad").digest.hex()
    sql(
        pg_url,
        RAISE.format(code="53100").replace(
            "FOR EACH ROW", f"FOR EACH ROW WHEN (NEW.key = '\\x{bad}')"
        ),
    )
    names = ["one", "bad", "two"]
    with PostgresStore(pg_url) as store:
        jobs = [Job("claim", (key(name), new_owner(), b"f", TERMS)) for name in names]
        store._run("claim", jobs)
        assert isinstance(jobs[1].error, StoreFullError)
        assert [jobs[n].outcome().verdict for n in (0, 2)] == [Verdict.WON, Verdict.WON]


def test_an_error_does_not_show_what_is_stored(pg_url: str, open_store: Open) -> None:
    """A refused statement's error names no answer and no payload, as logs keep it."""
    sql(pg_url, "ALTER TABLE oncekey_records ADD COLUMN theirs int NOT NULL DEFAULT 1")
    own = new_owner()
    won = do(open_store(pg_url), "claim", key("k"), own, b"f", TERMS)
    sql(pg_url, "ALTER TABLE oncekey_records ADD CHECK (state <> 1)")
    with pytest.raises(StoreError) as caught:
        do(open_store(pg_url), "complete", key("k"), own, won.fence, b"private", TERMS)
    assert b"private".hex() not in str(caught.value)
    assert "private" not in str(caught.value)
    assert SCOPE.label not in str(caught.value)


def test_a_hidden_row_is_an_error(pg_url: str, open_store: Open) -> None:
    """A trigger swallows the record: the claim is not won by mistake, and the error says why."""
    swallow = RAISE.replace("RAISE EXCEPTION 'refused' USING ERRCODE = '{code}'", "RETURN NULL")
    sql(pg_url, swallow)
    with pytest.raises(StoreError, match="gave no row"):
        do(open_store(pg_url), "claim", key("k"), new_owner(), b"f", TERMS)


@pytest.mark.parametrize("setting", ["statement_timeout", "lock_timeout"])
def test_a_timeout_of_the_server_is_unavailable(
    pg_url: str, open_store: Open, setting: str
) -> None:
    """A row that somebody holds for long: the server's time-out ends the call, to be retried."""
    own = new_owner()
    won = do(open_store(pg_url), "claim", key("k"), own, b"f", TERMS)
    database = pg_url.rpartition("/")[2]
    sql(pg_url, f"ALTER DATABASE {database} SET {setting} = '50ms'")
    # Whoever holds it, and what comes after, has all the time.
    with psycopg.connect(pg_url, options=f"-c {setting}=0") as holder:
        holder.execute("SELECT FROM oncekey_records FOR UPDATE")
        with pytest.raises(StoreUnavailableError, match="try again"):
            do(open_store(pg_url), "complete", key("k"), own, won.fence, b"j1", TERMS)
        holder.rollback()
        holder.execute(f"ALTER DATABASE {database} RESET {setting}")
    assert do(open_store(pg_url), "complete", key("k"), own, won.fence, b"j1", TERMS)


def test_a_batch_outlives_a_deadlock(own_url: str) -> None:
    """A batch that is the victim of a deadlock falls apart into single calls, which succeed."""
    low, high = sorted(["a", "b"], key=lambda name: key(name).digest)
    lock = "SELECT FROM oncekey_records WHERE key = %s FOR UPDATE"
    with PostgresStore(own_url, timeout=HANG) as store, ThreadPoolExecutor(2) as threads:
        for _ in range(5):  # it is the server that chooses the victim
            own = new_owner()
            jobs = []
            store.clear()
            for name in (low, high):
                won = store.claim(key(name), own, b"f", TERMS)
                jobs.append(Job("complete", (key(name), own, won.fence, b"j1", TERMS)))
            sent: list[int] = []
            fetch = store._source.fetch

            def counted(
                lane: str, text: str, args: list[Any], fetch: Any = fetch, **options: Any
            ) -> Any:
                keys = args[1]
                sent.append(len(keys) if isinstance(keys, list) else 1)  # noqa: B023 - this turn's
                return fetch(lane, text, args, **options)

            with psycopg.connect(own_url) as other:
                other.execute("SET deadlock_timeout = '20s'")
                other.execute(lock, [key(high).digest])
                store._source.fetch = counted  # type: ignore[method-assign]
                batch = threads.submit(store._run, "settle", jobs)
                waits = (
                    "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() "
                    "AND wait_event_type = 'Lock'"
                )
                eventually(lambda: sql(own_url, waits), "waiting")  # noqa: B023
                other.execute(lock, [key(low).digest])  # now each waits for the other
                other.rollback()
            batch.result(HANG)
            store._source.fetch = fetch  # type: ignore[method-assign]
            assert [job.outcome() for job in jobs] == [True, True]
            if sent == [2, 1, 1]:
                return
    raise AssertionError(f"the batch was never the victim: {sent}")


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_stricter_isolation_by_default(pg_url: str, level: str) -> None:
    """A database whose transactions are stricter by default: races have one winner, no errors."""
    sql(
        pg_url,
        f"ALTER DATABASE {pg_url.rpartition('/')[2]} SET default_transaction_isolation = '{level}'",
    )
    start = threading.Barrier(6)

    def race(store: PostgresStore) -> list[Verdict]:
        start.wait(HANG)
        return [store.claim(key(n), new_owner(), b"f", TERMS).verdict for n in range(60)]

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(6) as threads:
        stores = [stack.enter_context(PostgresStore(pg_url)) for _ in range(6)]
        verdicts = list(threads.map(race, stores))
    for number in range(60):
        found = sorted(each[number] for each in verdicts)
        assert found == [Verdict.IN_FLIGHT] * 5 + [Verdict.WON]


@pytest.mark.parametrize("fence", [2**63, 2**70, -(2**70)])
def test_a_fence_that_can_not_be_holds_nothing(pg_url: str, open_store: Open, fence: int) -> None:
    """A fence out of a forged token is not held, like any other wrong one."""
    for method, rest in (("complete", (b"j1", TERMS)), ("renew", (TERMS,)), ("release", ())):
        assert do(open_store(pg_url), method, key("k"), new_owner(), fence, *rest) is False


def test_fences_and_no_fences_in_one_batch(pg_url: str) -> None:
    """Releases with and without a fence may share a statement."""
    with PostgresStore(pg_url) as store:
        own = new_owner()
        fences = [store.claim(key(n), own, b"f", TERMS).fence for n in range(4)]
        jobs = [Job("release", (key(n), own, None if n % 2 else fences[n])) for n in range(4)] + [
            Job("release", (key("none"), own, None))
        ]
        store._run("settle", jobs)
        assert [job.outcome() for job in jobs] == [True] * 4 + [False]


def test_no_secret_in_a_repr(own_url: str) -> None:
    """What a store shows of itself has no password in it."""
    url = own_url.replace("postgres@", f"postgres:{PASSWORD}@")
    with PostgresStore(url) as store:
        assert PASSWORD not in repr(store) + str(store)
    assert PASSWORD not in repr(AsyncPostgresStore(url))
    assert not inspect.isabstract(AsyncPostgresStore)


def _logins(kind: str, url: str) -> Any:
    """A store on a URL, by each driver, with and without an engine around it."""
    from sqlalchemy import create_engine
    from sqlalchemy.ext.asyncio import create_async_engine

    if kind == "psycopg":
        return PostgresStore(url)
    if kind == "sqlalchemy":
        return PostgresStore(create_engine(url.replace("postgresql:", "postgresql+psycopg:")))
    if kind == "sqlalchemy-asyncpg":
        address = url.replace("postgresql:", "postgresql+asyncpg:")
        return AsyncPostgresStore(create_async_engine(address))
    return AsyncPostgresStore(url, driver=kind.removeprefix("async-"))


@pytest.mark.parametrize(
    "kind", ["psycopg", "async-psycopg", "asyncpg", "sqlalchemy", "sqlalchemy-asyncpg"]
)
def test_a_login_that_fails_says_why_and_where(
    kind: str, own_postgres: Postgres, own_url: str
) -> None:
    """The server's own reason for a wrong database, user, password or port; never the password."""
    with_password(own_postgres, own_url)
    address, _, database = own_url.rpartition("/")
    secret = f":{PASSWORD}@"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        port = taken.getsockname()[1]
        wrong = {
            f"{address.replace('@', secret)}/no_such": 'database "no_such" does not exist',
            own_url.replace("postgres@", f"nobody_here{secret}"): 'role "nobody_here" does not',
            own_url.replace("postgres@", f"with_password{secret}"): 'failed for user "with_passw',
            f"postgresql://postgres{secret}127.0.0.1:{port}/{database}": str(port),
        }
        for url, reason in wrong.items():
            with pytest.raises(StoreError) as caught:
                do(_logins(kind, url), "read", key("c"))
            text = str(caught.value)
            assert reason in text, text
            assert "may or may not" not in text, text
            if kind != "sqlalchemy-asyncpg" or reason == str(port):
                assert "127.0.0.1" in text, text  # an engine's asyncpg does not say where
            check_secret(caught.value)
