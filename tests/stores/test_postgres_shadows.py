"""Copies of oncekey's tables in a caller's way, and tenants in each other's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from tests.servers.fixtures_pg import TERMS, key, sql
from tests.servers.postgres import Postgres
from tests.servers.sources_pg import with_driver

from oncekey._core.flows import new_owner
from oncekey.models import Verdict
from oncekey.stores.postgres import AsyncPostgresStore, PostgresStore
from oncekey.stores.postgres.calls import lock_number
from oncekey.stores.postgres.statements import SQL, statements_in

HANG = 30
TABLES = ("oncekey_records", "oncekey_waiters", "oncekey_state", "oncekey_schema")


def copied(schema: str, *tables: str) -> list[str]:
    """Statements that copy tables of ours, with what is in them."""
    kind, where = ("TEMP TABLE", "") if schema == "pg_temp" else ("TABLE", f"{schema}.")
    made = []
    for table in tables:
        like = f"(LIKE public.{table} INCLUDING ALL)"
        made.append(f"CREATE {kind} {where}{table} {like}")
    return made


FULL = "INSERT INTO {where}oncekey_state SELECT * FROM public.oncekey_state"
SHADOWS = {
    "records": ["CREATE SCHEMA evil", *copied("evil", "oncekey_records")],
    "an empty state": ["CREATE SCHEMA evil", *copied("evil", *TABLES)],
    "a full state": ["CREATE SCHEMA evil", *copied("evil", *TABLES), FULL.format(where="evil.")],
    "temporary": copied("pg_temp", *TABLES),
    "temporary, full": [*copied("pg_temp", *TABLES), FULL.format(where="")],
    "types": ["CREATE TEMP TABLE bytea (n int)", "CREATE TEMP TABLE text (n int)"],
    "functions": [
        "CREATE SCHEMA evil",
        (
            "CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE sql "
            "AS $$SELECT timestamptz '1999-01-01'$$"
        ),
        (
            "CREATE FUNCTION evil.pg_try_advisory_xact_lock(bigint) RETURNS boolean LANGUAGE sql "
            "AS 'SELECT false'"
        ),
        "SET search_path = evil, pg_catalog, public",
    ],
}


async def run_on(library: str, url: str, shadow: list[str], name: str) -> bool:
    """Work in a transaction on a connection with ``shadow``; True if its effect was written."""
    path = "SET search_path = evil, public"
    effect = f"INSERT INTO public.effects VALUES ('{name}')"
    if library == "asyncpg":
        import asyncpg

        connection = await asyncpg.connect(url)
        try:
            await connection.execute(path)
            for statement in shadow:
                await connection.execute(statement)
            async with AsyncPostgresStore(url) as backend:
                async with backend.transaction(name, on=connection) as tx:
                    if not tx.replayed:
                        await connection.execute(effect)
                return not tx.replayed
        finally:
            await connection.close()
    with PostgresStore(url) as store:
        if library == "psycopg":
            with psycopg.connect(url, autocommit=True) as on:
                for statement in (path, *shadow):
                    on.execute(statement)
                on.autocommit = False
                with store.transaction(name, on=on) as tx:
                    if not tx.replayed:
                        on.execute(effect)
                return not tx.replayed
        engine = sa.create_engine(with_driver(url, "psycopg"))
        with engine.connect() as connection:
            for statement in (path, *shadow):
                connection.exec_driver_sql(statement)
            connection.commit()
            with store.transaction(name, on=connection) as tx:
                if not tx.replayed:
                    connection.exec_driver_sql(effect)
        engine.dispose()
        return not tx.replayed


@pytest.mark.parametrize("library", ["psycopg", "asyncpg", "sqlalchemy"])
@pytest.mark.parametrize("shadow", SHADOWS.values(), ids=SHADOWS.keys())
async def test_copies_on_a_callers_connection_change_nothing(
    pg_url: str, library: str, shadow: list[str]
) -> None:
    """Whatever its search_path shows: the effect is written once, here and on others."""
    sql(pg_url, "CREATE TABLE effects (name text)")
    assert await run_on(library, pg_url, shadow, "k") is True
    assert await run_on(library, pg_url, [], "k") is False
    left = [line for line in shadow if "TEMP" in line or line.startswith("SET")]
    if "TEMP" in "".join(shadow):
        left = shadow
    assert await run_on(library, pg_url, left, "k") is False
    assert sql(pg_url, "SELECT count(*) FROM effects") == [(1,)]
    records = "SELECT count(*) FROM public.oncekey_records WHERE state = 1"
    assert sql(pg_url, records) == [(1,)]


def test_a_pool_with_temporary_copies_finds_the_tables(pg_url: str) -> None:
    """A store looks for its own tables where temporary ones would be found first."""
    from psycopg_pool import ConnectionPool

    def spoiled(connection: Any) -> None:
        for statement in copied("pg_temp", *TABLES):
            connection.execute(statement)
        connection.commit()

    with ConnectionPool(pg_url, min_size=1, max_size=1, configure=spoiled) as pool:
        with PostgresStore(pool) as store, PostgresStore(pg_url) as other:
            assert store.first_seen(key("k"), TERMS)
            assert not other.first_seen(key("k"), TERMS)
            store.sweep()


@pytest.mark.parametrize("name", ['we"ird', "it's", "Mixed Case", "percent%s"])
async def test_a_schema_of_any_name(pg_url: str, name: str) -> None:
    """Tables in a schema whose name has to be quoted are found by its search_path, then by name."""
    quoted = '"' + name.replace('"', '""') + '"'
    database = pg_url.rpartition("/")[2]
    sql(
        pg_url,
        f"CREATE SCHEMA {quoted}",
        f"ALTER DATABASE {database} SET search_path = {quoted}, public",
        "DROP TABLE public.oncekey_records, public.oncekey_waiters, public.oncekey_state, "
        "public.oncekey_schema",
    )
    with PostgresStore(pg_url) as store:
        store.create_schema()
        assert store.first_seen(key("k"), TERMS)
        assert store.sweep() == 0
        engine = sa.create_engine(with_driver(pg_url, "psycopg"))
        with engine.connect() as on:
            on.exec_driver_sql("SET search_path = pg_catalog")
            on.commit()
            with store.transaction("t", on=on) as tx:
                tx.answer = 1
        engine.dispose()
    async with AsyncPostgresStore(pg_url, driver="asyncpg") as backend:
        assert not await backend.first_seen(key("k"), TERMS)
        async with backend.transaction("t") as atx:
            assert atx.replayed
    assert sql(pg_url, f"SELECT count(*) FROM {quoted}.oncekey_records") == [(2,)]


def test_no_name_is_left_to_the_search_path() -> None:
    """Tables, functions and types of every statement on records are qualified."""
    import re

    home = statements_in("here")
    every = [*home.one.values(), *home.many.values()]
    every += [home.claim_in, home.claim_in_new, home.complete_in]
    every += [home.sql[name] for name in ("write", "await_change", "sweep", "clear", "now")]
    keywords = r"greatest|least|coalesce|in|on|any|array|values|exists|select|as|and|or|not|from"
    keywords += r"|set|do|conflict|materialized|lateral|where|then|else|when|limit|oncekey_\w+"
    for text in every:
        code = re.sub(r"--.*|'[^']*'", "", text)
        assert not re.search(r'(?<!"here"\.)\boncekey_', code)
        assert not re.search(r"::(bytea|text|uuid|tid|regclass)", code)
        for found in re.finditer(r"(?<![\w.\"])([a-z_]+)\(", code):
            assert re.fullmatch(keywords, found[1]), found[0]
    assert "pg_catalog.to_regclass(" in SQL["inspect"]


# Tenants


@pytest.fixture
def tenants(own_postgres: Postgres) -> Iterator[tuple[list[tuple[str, str]], str]]:
    """Two roles with the rights that the page on PostgreSQL grants, and the owner's address."""
    admin = own_postgres.database()
    database = admin.rpartition("/")[2]
    roles = [f"ann_{database}", f"ben_{database}"]
    with PostgresStore(admin) as store:
        store.create_schema(row_security=True)
    page = Path(__file__).parents[2] / "docs" / "howto" / "use-postgresql.md"
    grants = page.read_text("utf-8").partition("```sql\nGRANT")[2].partition("```")[0]
    for role in roles:
        script = "GRANT" + grants.replace(" TO app;", f" TO {role};")
        sql(admin, f"CREATE ROLE {role} LOGIN", script)
    yield [(role, own_postgres.url(database, user=role)) for role in roles], admin
    sql(admin, *(f"DROP OWNED BY {role}" for role in roles), f"DROP ROLE {', '.join(roles)}")


def test_a_tenant_has_no_more_rights_than_it_needs(tenants: Any) -> None:
    """It works, and can change neither the store's id nor whose record a row is."""
    ((ann, ann_url), _), _ = tenants
    with PostgresStore(ann_url, tenant=ann) as store:
        won = store.claim(key("k"), own := new_owner(), b"f", TERMS)
        assert store.renew(key("k"), own, won.fence, TERMS)
        assert store.complete(key("k"), own, won.fence, b"j1", TERMS)
        with store.transaction("t") as tx:
            tx.answer = 1
        store.wait(key("w"), 0.05)
        store.sweep()
    with psycopg.connect(ann_url, autocommit=True) as connection:
        for attack in (
            "UPDATE oncekey_state SET store_id = gen_random_uuid()",
            "UPDATE oncekey_state SET only_one = true",
            "DELETE FROM oncekey_state",
            "UPDATE oncekey_records SET key = sha256('x')",
            "UPDATE oncekey_records SET tenant = 'ben'",
            "UPDATE oncekey_records SET scope = 'another'",
            "UPDATE oncekey_waiters SET key = sha256('x')",
            "UPDATE oncekey_waiters SET note = gen_random_uuid()",
            "DELETE FROM oncekey_schema",
            "TRUNCATE oncekey_records",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(attack)


@pytest.mark.parametrize("page", [-1, -(2**62), 2**31, 2**62, 7])
def test_a_page_that_can_not_be_does_no_harm(tenants: Any, page: int) -> None:
    """A tenant may write the page of the sweep: whatever it writes, the other's rows are swept."""
    ((_, ann_url), (ben, ben_url)), admin = tenants
    with PostgresStore(ben_url, tenant=ben) as store:
        for number in range(20):
            assert store.first_seen(key(number), TERMS)
        sql(ann_url, f"UPDATE oncekey_state SET page = {page}")
        assert store.sweep(now=4_000_000_000_000) == 20
        store._new_records = 10_000
        store._maybe_sweep()
        found = sql(admin, "SELECT page FROM oncekey_state")[0][0]
    assert 0 <= found < 1000


@pytest.mark.parametrize("secured", [False, True], ids=["by name", "by role"])
def test_tenants_don_t_wait_for_each_other(tenants: Any, pg_url: str, secured: bool) -> None:
    """A key that one tenant's transaction has in hand is free for the other, in every mode."""
    ((ann, ann_url), (ben, ben_url)), _ = tenants
    if not secured:
        ann_url = ben_url = pg_url
    with PostgresStore(ann_url, tenant=ann) as one, PostgresStore(ben_url, tenant=ben) as other:
        with one.transaction("k"), ThreadPoolExecutor(1) as thread:

            def work() -> bool:
                with other.transaction("k", wait=0) as tx:
                    tx.answer = 1
                return tx.replayed

            assert thread.submit(work).result(HANG) is False
        with psycopg.connect(pg_url) as busy:
            numbers = {lock_number(tenant, key("m").digest) for tenant in (ann, ben, "")}
            assert len(numbers) == 3
            busy.execute("SELECT pg_advisory_xact_lock(%s)", [lock_number(ann, key("m").digest)])
            if not secured:
                assert other.first_seen(key("m"), TERMS)


async def test_what_is_announced_says_nothing_to_others(tenants: Any) -> None:
    """Another tenant that listens learns no digest; the one who waits is woken."""
    ((_, ann_url), (ben, ben_url)), _ = tenants
    with psycopg.connect(ann_url, autocommit=True) as eavesdropper:
        eavesdropper.execute("LISTEN oncekey")
        async with (
            AsyncPostgresStore(ben_url, tenant=ben) as waiter,
            AsyncPostgresStore(ben_url, tenant=ben) as worker,
        ):
            woken: list[bytes] = []
            heard = waiter._heard
            waiter._heard = lambda digest: (woken.append(digest), heard(digest))[1]  # type: ignore[method-assign]
            won = await worker.claim(key("k"), own := new_owner(), b"f", TERMS)
            assert won.verdict is Verdict.WON
            waiting = asyncio.ensure_future(waiter.wait(key("k"), HANG))
            while not waiter._notes:
                await asyncio.sleep(0.01)
            assert not waiting.done()
            listening = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'LISTEN%%'"
            while len(await asyncio.to_thread(sql, ben_url, listening)) < 1:
                await asyncio.sleep(0.01)
            assert await worker.complete(key("k"), own, won.fence, b"j1", TERMS)
            await asyncio.wait_for(waiting, HANG)
            assert set(woken) == {key("k").digest}  # by the word, perhaps by its own look too
        said = [note.payload for note in eavesdropper.notifies(timeout=5, stop_after=1)]
    assert len(said) == 1
    assert key("k").digest.hex() not in said[0]
    assert said[0] not in key("k").digest.hex()
