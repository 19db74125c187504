"""The schema in PostgreSQL: migrations, drift, partitions, tenants, and bytes as they were."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg
import pytest
from tests.servers.fixtures_pg import TERMS, key, sql
from tests.servers.postgres import Postgres

from oncekey._core.flows import new_owner
from oncekey.cli import main
from oncekey.errors import InvalidKeyError, StoreConfigError, StoreError
from oncekey.models import Key, Scope, State, Verdict
from oncekey.stores.postgres import AsyncPostgresStore, PostgresStore, schema
from oncekey.stores.postgres.schema import MIGRATIONS, Migration
from oncekey.stores.postgres.statements import statements_in

FIRST = ["001 records (pre)", "002 notes (pre)"]


def use(store: PostgresStore, name: Key, answer: bytes = b"j1") -> None:
    won = store.claim(name, own := new_owner(), b"f", TERMS)
    assert won.verdict is Verdict.WON
    assert store.complete(name, own, won.fence, answer, TERMS)


def tables(url: str) -> list[str]:
    rows = sql(
        url, "SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') AND relname LIKE 'o%'"
    )
    return sorted(row[0] for row in rows)


# Migrations


def test_migrating_again_is_harmless(postgres: Postgres) -> None:
    """The second time nothing is done, and records stay."""
    with PostgresStore(postgres.database()) as store:
        assert store.create_schema() == FIRST
        use(store, key("k"))
        assert store.create_schema() == []
        assert store.create_schema(step="pre") == []
        assert store.create_schema(step="post") == []
        assert store.read(key("k")) is not None


MIGRATE = """
    import sys
    from oncekey.stores.postgres import PostgresStore

    with PostgresStore(sys.argv[1]) as store:
        store.now()
        print("ready", flush=True)
        sys.stdin.readline()
        print(store.create_schema())
"""


def test_processes_that_migrate_at_the_same_time(postgres: Postgres) -> None:
    """Of three processes that migrate at once one makes the tables; no other fails."""
    url = postgres.database()
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(MIGRATE), url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    said = sorted(worker.communicate(timeout=60)[0].strip() for worker in workers)
    assert said == sorted([str(FIRST), "[]", "[]"])
    assert [worker.returncode for worker in workers] == [0, 0, 0]


NEXT = [
    *MIGRATIONS,
    Migration(90, "pre", "note", "ALTER TABLE oncekey_records ADD COLUMN note text;\n"),
    Migration(
        90, "post", "note", "ALTER TABLE oncekey_records ALTER COLUMN note SET DEFAULT '';\n"
    ),
]


def run_migrations(
    store: PostgresStore, step: str | None, migrations: Sequence[Migration]
) -> list[str]:
    with mock.patch.object(schema, "MIGRATIONS", migrations):
        return store.create_schema(step=step)


def test_a_migration_comes_in_two_steps(pg_url: str) -> None:
    """After ``pre`` old code goes on, also with statements it had prepared; then comes ``post``."""
    with PostgresStore(pg_url) as old, PostgresStore(pg_url) as new:
        use(old, key("before"))
        assert run_migrations(new, "pre", NEXT) == ["090 note (pre)"]
        use(old, key("between"))
        with PostgresStore(pg_url) as fresh:
            use(fresh, key("a fresh old one"))
        assert run_migrations(new, "pre", NEXT) == []
        assert run_migrations(new, "post", NEXT) == ["090 note (post)"]
        assert run_migrations(new, None, NEXT) == []
        use(old, key("after"))


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_prepared_statements_outlive_a_migration(pg_url: str, driver: str) -> None:
    """A column and an index are added under a running async store: no call fails."""
    async with AsyncPostgresStore(pg_url, driver=driver) as store:
        for change in (
            "SELECT 1",
            "ALTER TABLE oncekey_records ADD COLUMN note text",
            "CREATE INDEX ON oncekey_records (purge_at)",
            "ALTER TABLE oncekey_records DROP COLUMN note",
        ):
            sql(pg_url, change)
            own = new_owner()
            won = await store.claim(key(change), own, b"f", TERMS)
            assert await store.renew(key(change), own, won.fence, TERMS)
            assert await store.complete(key(change), own, won.fence, b"j1", TERMS)
            again = await store.claim(key(change), new_owner(), b"f", TERMS)
            assert again.verdict is Verdict.REPLAY
            assert await store.first_seen(key(f"mark {change}"), TERMS)


def test_a_failed_migration_leaves_the_schema_as_it_was(pg_url: str) -> None:
    """Either all of the migrations are done or none, and the connection is not left in between."""
    wrong = [*NEXT, Migration(91, "pre", "wrong", "ALTER TABLE no_such ADD COLUMN a int;\n")]
    with PostgresStore(pg_url) as store:
        with pytest.raises(StoreError):
            run_migrations(store, None, wrong)
        rows = sql(pg_url, "SELECT version, step FROM oncekey_schema")
        assert sorted(rows) == [(1, "pre"), (2, "pre")]
        assert store.now()
        assert run_migrations(store, None, NEXT) == ["090 note (pre)", "090 note (post)"]


def test_a_wrong_step_or_number_of_partitions_is_named(pg_url: str, postgres: Postgres) -> None:
    """Wrong options of create_schema are errors that say what is allowed."""
    with PostgresStore(pg_url) as store:
        with pytest.raises(StoreConfigError, match="step must be 'pre', 'post' or left out"):
            store.create_schema(step="both")
    with PostgresStore(postgres.database()) as store:
        for number in (1, -4, 5000):
            with pytest.raises(StoreConfigError, match="partitions must be 2 to 1024"):
                store.create_schema(partitions=number)
        assert store.create_schema(partitions=2) == FIRST


# Drift

DRIFT = {
    "a column is gone": (
        "ALTER TABLE oncekey_records DROP COLUMN takeover",
        "no column takeover",
    ),
    "another type": (
        "ALTER TABLE oncekey_records ALTER COLUMN attempts TYPE bigint",
        "column attempts is bigint, not integer",
    ),
    "the answer became text": (
        "ALTER TABLE oncekey_records ALTER COLUMN answer TYPE text USING encode(answer, 'hex')",
        "column answer is text, not bytea",
    ),
    "no primary key": (
        "ALTER TABLE oncekey_records DROP CONSTRAINT oncekey_records_pkey",
        "the primary key is not (tenant, key)",
    ),
    "another primary key": (
        (
            "ALTER TABLE oncekey_records DROP CONSTRAINT oncekey_records_pkey, "
            "ADD PRIMARY KEY (key, tenant)"
        ),
        "the primary key is not (tenant, key)",
    ),
    "unlogged": ("ALTER TABLE oncekey_records SET UNLOGGED", "the table is UNLOGGED"),
    "tenant collates otherwise": (
        'ALTER TABLE oncekey_records ALTER COLUMN tenant TYPE text COLLATE "POSIX"',
        "column tenant is text, not text C",
    ),
    "scope collates otherwise": (
        'ALTER TABLE oncekey_records ALTER COLUMN scope TYPE text COLLATE "en_US.utf8"',
        "column scope is text, not text C",
    ),
    "records are gone": ("DROP TABLE oncekey_records", "no table oncekey_records"),
    "waiters are gone": ("DROP TABLE oncekey_waiters", "no table oncekey_waiters"),
    "state is gone": ("DROP TABLE oncekey_state", "no table oncekey_state"),
    "versions are gone": ("DROP TABLE oncekey_schema", "no table oncekey_schema"),
    "no state": ("DELETE FROM oncekey_state", "the table oncekey_state is empty"),
    "an older schema": ("DELETE FROM oncekey_schema", "the schema lacks records (1)"),
    "a newer schema": (
        "INSERT INTO oncekey_schema VALUES (99, 'pre'), (99, 'post')",
        "upgrade oncekey",
    ),
    "two faults": (
        "ALTER TABLE oncekey_records DROP COLUMN takeover, DROP COLUMN answer",
        "no column takeover; no column answer",
    ),
}


@pytest.mark.parametrize("change, named", DRIFT.values(), ids=DRIFT.keys())
def test_drift_is_named(pg_url: str, change: str, named: str) -> None:
    """A store refuses a schema that has drifted, and says what and how to mend it."""
    if "en_US" in change and not sql(
        pg_url, "SELECT 1 FROM pg_collation WHERE collname = 'en_US.utf8'"
    ):
        change = change.replace("en_US.utf8", "POSIX")
    sql(pg_url, change)
    with PostgresStore(pg_url) as store:
        with pytest.raises(StoreConfigError) as caught:
            store.claim(key("k"), new_owner(), b"", TERMS)
    assert named in str(caught.value)
    assert "oncekey migrate" in str(caught.value) or "upgrade" in str(caught.value)


async def test_drift_is_named_to_async_callers(pg_url: str) -> None:
    """Every call of a batch gets the error, and the next call looks again."""
    import asyncio

    sql(pg_url, "ALTER TABLE oncekey_records RENAME TO elsewhere")
    async with AsyncPostgresStore(pg_url) as store:
        calls = [store.claim(key(n), new_owner(), b"", TERMS) for n in range(5)]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, StoreConfigError)
            assert "no table oncekey_records" in str(error)
        sql(pg_url, "ALTER TABLE elsewhere RENAME TO oncekey_records")
        assert await store.first_seen(key("k"), TERMS)


def test_a_newer_schema_before_its_second_step_is_fine(pg_url: str) -> None:
    """Old code works on a schema that a newer version has prepared, not finished."""
    sql(pg_url, "INSERT INTO oncekey_schema VALUES (99, 'pre')")
    with PostgresStore(pg_url) as store:
        use(store, key("k"))


def test_unlogged_partitions_are_drift(postgres: Postgres) -> None:
    """A partition that a crash would empty is refused like a table that it would empty."""
    url = postgres.database()
    with PostgresStore(url) as store:
        store.create_schema(partitions=2)
    sql(url, "ALTER TABLE oncekey_records_1 SET UNLOGGED")
    with PostgresStore(url) as store, pytest.raises(StoreConfigError, match="UNLOGGED"):
        store.claim(key("k"), new_owner(), b"", TERMS)


# What is made


def test_text_columns_compare_by_bytes(pg_url: str) -> None:
    """Tenant and scope are COLLATE "C" whatever the database's own collation is."""
    rows = sql(
        pg_url,
        "SELECT c.relname, a.attname, l.collname FROM pg_attribute a JOIN pg_class c ON "
        "c.oid = a.attrelid JOIN pg_collation l ON l.oid = a.attcollation "
        "WHERE c.relname LIKE 'oncekey%' AND c.relkind = 'r' AND a.attnum > 0 ORDER BY 1, 2",
    )
    assert rows == [
        ("oncekey_records", "scope", "C"),
        ("oncekey_records", "tenant", "C"),
        ("oncekey_schema", "step", "C"),
        ("oncekey_waiters", "tenant", "C"),
    ]


def test_every_statement_for_a_key_names_tenant_key_and_scope() -> None:
    """No statement may find a record by less than tenant, key and scope."""
    whole_table = {"clear", "sweep", "inspect"}
    looks = 0
    home = statements_in("public")
    for name, text in [*home.sql.items(), *home.one.items(), *home.many.items()]:
        text = text.replace('"public".', "").replace("pg_catalog.", "")
        if "oncekey_records" not in text or name in whole_table:
            continue
        for part in re.split(r"FROM oncekey_records r\b", text)[1:]:
            where = part.split("OFFSET 0")[0]
            looks += 1
            for needed in ("r.tenant = $1::text", "r.key = a.key", "r.scope = a.scope"):
                assert needed in where, f"{name}: {needed} is missing in {where}"
        by_key = ("t.tenant = $1::text", "t.key = a.key", "t.scope = a.scope")
        for part in re.split(r"UPDATE oncekey_records t\b", text)[1:]:
            where = part.split("RETURNING")[0]
            if "t.ctid = a.place" in where:  # at the place of what was found and locked before
                where += text.partition("t.ctid AS place")[2].partition("FOR UPDATE")[0]
            looks += 1
            for needed in by_key:
                assert needed in where, f"{name}: {needed} is missing in {where}"
        assert "DELETE FROM oncekey_records" not in text, name
        for part in re.split(r"INSERT INTO oncekey_records\b", text)[1:]:
            assert re.match(r"\s+AS t\s+\(tenant, key, scope,", part), name
            assert "ON CONFLICT (tenant, key)" in part, name
    assert looks >= 12
    assert home.sql["clear"].endswith("WHERE tenant = $1::pg_catalog.text")


def test_partitions_are_made_and_used(postgres: Postgres) -> None:
    """Records spread over the hash partitions, each with the table's storage options."""
    url = postgres.database()
    with PostgresStore(url) as store:
        assert store.create_schema(partitions=4) == FIRST
        for number in range(64):
            use(store, key(number))
    rows = sql(
        url,
        "SELECT tableoid::regclass::text, count(*) FROM oncekey_records GROUP BY 1 ORDER BY 1",
    )
    assert [name for name, _ in rows] == [f"oncekey_records_{n}" for n in range(4)]
    assert sum(count for _, count in rows) == 64
    options = sql(url, "SELECT DISTINCT reloptions FROM pg_class WHERE relname ~ 'records_\\d$'")
    assert len(options) == 1
    assert "fillfactor=70" in options[0][0]


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg", "sync"])
async def test_answers_come_back_byte_by_byte(pg_url: str, driver: str) -> None:
    """All 256 bytes, nothing, a megabyte, and odd scopes: what was recorded is what is replayed."""
    import os

    answers = [bytes(range(256)) * 4, b"", b"\0", b"\\x00", os.urandom(1 << 20), b"j" + b"\xff" * 9]
    names = [Key(Scope("once", "söße", "日本", "🔑", '"\\'), f"{n}") for n in range(len(answers))]
    sql(pg_url, f"ALTER DATABASE {pg_url.rpartition('/')[2]} SET bytea_output = 'escape'")
    store: Any = (
        PostgresStore(pg_url) if driver == "sync" else AsyncPostgresStore(pg_url, driver=driver)
    )

    async def call(method: str, *args: Any) -> Any:
        found = getattr(store, method)(*args)
        return found if driver == "sync" else await found

    for name, answer in zip(names, answers, strict=True):
        own = new_owner()
        won = await call("claim", name, own, b"\0\xff'", TERMS)
        assert await call("complete", name, own, won.fence, answer, TERMS)
        reply = await call("claim", name, new_owner(), b"\0\xff'", TERMS)
        assert (reply.verdict, reply.answer) == (Verdict.REPLAY, answer)
        record = await call("read", name)
        assert (record.answer, record.owner, record.fingerprint) == (answer, own, b"\0\xff'")
    await call("close" if driver == "sync" else "aclose")
    stored = sql(pg_url, "SELECT answer FROM oncekey_records ORDER BY fence")
    assert [bytes(row[0]) for row in stored] == answers


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1", "UTF8"])
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg", "sync"])
async def test_databases_of_other_encodings(
    own_postgres: Postgres, encoding: str, driver: str
) -> None:
    """A store works, or names the fix, whatever encoding the database has."""
    name = f"in_{encoding}_{driver}".lower()
    sql(
        own_postgres.url(),
        f"DROP DATABASE IF EXISTS {name}",
        f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0 LOCALE 'C'",
    )
    url = own_postgres.url(name)
    store: Any = PostgresStore(url) if driver == "sync" else AsyncPostgresStore(url, driver=driver)

    async def call(method: str, *args: Any) -> Any:
        found = getattr(store, method)(*args)
        return found if driver == "sync" else await found

    named = ""
    try:
        await call("create_schema")
        for scope in (Scope("once", "plain"), Scope("once", "日本")):
            won = await call("claim", Key(scope, "k"), own := new_owner(), b"f", TERMS)
            assert await call("complete", Key(scope, "k"), own, won.fence, b"j1", TERMS)
            reply = await call("claim", Key(scope, "k"), new_owner(), b"f", TERMS)
            assert (reply.verdict, reply.answer) == (Verdict.REPLAY, b"j1")
    except StoreConfigError as error:
        named = str(error)
    finally:
        await call("close" if driver == "sync" else "aclose")
    assert not named or (encoding != "UTF8" and "UTF8" in named)


# Tenants, and row-level security


def test_tenants_are_apart(pg_url: str) -> None:
    """Two stores with a tenant each use one table and see nothing of each other."""
    with PostgresStore(pg_url, tenant="a") as a, PostgresStore(pg_url, tenant="b") as b:
        use(a, key("k"), b"ja")
        assert b.read(key("k")) is None
        use(b, key("k"), b"jb")
        assert a.first_seen(key("m"), TERMS)
        assert b.first_seen(key("m"), TERMS)
        a.clear()
        assert a.read(key("k")) is None
        found = b.claim(key("k"), new_owner(), b"f", TERMS)
        assert found.answer == b"jb"


@pytest.mark.parametrize("tenant", ["x" * 64, "nul\0", "\ud800"])
def test_a_tenant_that_can_not_be_is_refused(tenant: str) -> None:
    """A tenant that PostgreSQL could not keep is refused at once."""
    with pytest.raises(InvalidKeyError, match="tenant"):
        PostgresStore("postgresql://nowhere", tenant=tenant)


@pytest.fixture(params=[0, 4], ids=["plain", "partitioned"])
def secured(request: pytest.FixtureRequest, own_postgres: Postgres) -> Iterator[Any]:
    """A database with row-level security and two roles; gives the URL of a role."""
    admin = own_postgres.database()
    database = admin.rpartition("/")[2]
    roles = [f"alice_{database}", f"bob_{database}"]
    with PostgresStore(admin) as store:
        store.create_schema(row_security=True, partitions=request.param)
    for role in roles:
        sql(
            admin,
            f"CREATE ROLE {role} LOGIN",
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}",
        )
    yield [(role, own_postgres.url(database, user=role)) for role in roles], admin
    sql(admin, *(f"DROP OWNED BY {role}" for role in roles), f"DROP ROLE {', '.join(roles)}")


def test_roles_see_only_their_own_rows(secured: Any) -> None:
    """Two roles use the same scope and key: two records, and no way to the other's."""
    ((alice, alice_url), (bob, bob_url)), admin = secured
    with PostgresStore(alice_url, tenant=alice) as a, PostgresStore(bob_url, tenant=bob) as b:
        use(a, key("k"), b"jalice")
        use(b, key("k"), b"jbob")
        assert a.claim(key("k"), new_owner(), b"f", TERMS).answer == b"jalice"
        assert b.claim(key("k"), new_owner(), b"f", TERMS).answer == b"jbob"
        won = b.claim(key("mine"), own := new_owner(), b"f", TERMS)
        a.clear()
        assert a.sweep(now=9_000_000_000_000) == 0
        assert b.renew(key("mine"), own, won.fence, TERMS)
    parts = [
        row[0] for row in sql(admin, "SELECT relid::text FROM pg_partition_tree('oncekey_records')")
    ]
    for table in dict.fromkeys(["oncekey_records", *parts]):
        with psycopg.connect(alice_url, autocommit=True) as connection:
            mine = (alice,)
            for statement in (
                f"SELECT FROM {table} WHERE tenant <> %s",
                f"UPDATE {table} SET state = 2 WHERE tenant <> %s",
                f"DELETE FROM {table} WHERE tenant <> %s",
            ):
                assert connection.execute(statement, mine).rowcount == 0, statement
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(
                    f"INSERT INTO {table} (tenant, key, scope, state, owner, fence, fingerprint, "
                    "lease_until, expires_at, purge_at, attempts) VALUES "
                    "(%s, sha256('x'), '', 1, '', 1, '', 0, 1, 1, 1)",
                    (bob,),
                )
    assert sql(admin, "SELECT count(*) FROM oncekey_records WHERE tenant = %s", args=[bob]) == [
        (2,)
    ]


def test_the_wrong_tenant_is_named(secured: Any) -> None:
    """With row-level security a store must have its role's name as tenant; the error says so."""
    ((alice, alice_url), (bob, _)), _ = secured
    for tenant in ("", bob):
        with PostgresStore(alice_url, tenant=tenant) as store:
            with pytest.raises(StoreConfigError, match=f"pass tenant='{alice}'"):
                store.claim(key("k"), new_owner(), b"", TERMS)
            with pytest.raises(StoreConfigError, match=f"pass tenant='{alice}'"):
                store.write(key("k"), b"", b"j1", 4_000_000_000_000)


# Alembic


REVISION = """
    from alembic import op

    revision, down_revision = "1", None

    def upgrade():
        op.execute('''{sql}''')
"""
ENV = """
    from alembic import context
    from sqlalchemy import create_engine

    engine = create_engine(context.config.get_main_option("sqlalchemy.url"))
    with engine.connect() as connection:
        context.configure(connection=connection)
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()
"""


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What ``oncekey migrate --sql`` prints."""
    assert main(["migrate", "--sql", *options]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("options", [(), ("--partitions", "3")], ids=["plain", "partitioned"])
def test_alembic_makes_the_schema(
    postgres: Postgres, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    """A revision with the statements of ``oncekey migrate --sql`` makes what a store accepts."""
    from alembic import command
    from alembic.config import Config

    url = postgres.database()
    statements = printed(capsys, *options)
    (tmp_path / "versions").mkdir()
    (tmp_path / "env.py").write_text(textwrap.dedent(ENV))
    text = textwrap.dedent(REVISION).format(sql=statements)
    (tmp_path / "versions" / "1_oncekey.py").write_text(text)
    config = Config()
    config.set_main_option("script_location", str(tmp_path))
    config.set_main_option("sqlalchemy.url", url.replace("postgresql://", "postgresql+psycopg://"))
    command.upgrade(config, "head")
    with PostgresStore(url) as store:
        use(store, key("k"))
        assert store.create_schema() == []
        record = store.read(key("k"))
        assert record is not None
        assert record.state is State.COMPLETED


def test_printed_statements_are_all_that_is_needed(
    postgres: Postgres, capsys: pytest.CaptureFixture[str]
) -> None:
    """What ``oncekey migrate --sql`` prints makes a schema with which nothing is left to do."""
    url = postgres.database()
    with psycopg.connect(url) as connection:
        connection.execute(printed(capsys))
    with PostgresStore(url) as store:
        assert store.create_schema() == []
        use(store, key("k"))


def test_the_command_migrates(postgres: Postgres, capsys: pytest.CaptureFixture[str]) -> None:
    """``oncekey migrate URL`` makes the tables, says so, and does nothing the second time."""
    url = postgres.database()
    assert main(["migrate", url]) == 0
    assert "001 records (pre)" in capsys.readouterr().out
    assert main(["migrate", url]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert main(["migrate", "--check", url]) == 0
    sql(url, "ALTER TABLE oncekey_records DROP COLUMN takeover")
    assert main(["migrate", "--check", url]) == 2
    assert "no column takeover" in capsys.readouterr().err
    assert "oncekey_records" in tables(url)
