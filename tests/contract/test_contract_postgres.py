"""The contract on PostgreSQL, through everything that a store can be given."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from tests.scale import SHORT
from tests.servers import sources_pg
from tests.servers.pooler import TransactionPooler
from tests.servers.postgres import ClockedPgBackend, ClockedPostgresStore, Postgres, make_database
from tests.servers.sources_pg import label

from oncekey.conformance import CHECKS, Check, arun_check, run_check
from oncekey.stores.postgres import PostgresStore

_urls: dict[tuple[int, int], str] = {}


def _url(server: Postgres, partitions: int = 0) -> str:
    """A database of this process, made once."""
    at = server.port, partitions
    if at not in _urls:
        _urls[at] = server.url(make_database(server.url()))
        with PostgresStore(_urls[at]) as store:
            store.create_schema(partitions=partitions)
    return _urls[at]


@contextlib.contextmanager
def pooler(url: str) -> Iterator[Any]:
    with TransactionPooler(url) as made:
        yield made.url, {"prepare": False}


@contextlib.asynccontextmanager
async def pooler_asyncpg(url: str) -> AsyncIterator[Any]:
    with TransactionPooler(url) as made:
        yield made.url, {"prepare": False, "driver": "asyncpg"}


@contextlib.asynccontextmanager
async def pooler_psycopg(url: str) -> AsyncIterator[Any]:
    with TransactionPooler(url) as made:
        yield made.url, {"prepare": False, "driver": "psycopg"}


# The checks that differ most. They are enough for a factory of sessions, which gives us its engine;
# and in `make test` for what lends connections of a driver that another source has shown in full.
FEW = [
    check
    for check in CHECKS
    if check.__name__
    in (
        "completed_key_replays_the_same_bytes",
        "lapsed_claim_is_taken_over",
        "racing_claims_have_one_winner",
    )
]
ENOUGH = {sources_pg.sessionmaker, sources_pg.async_sessionmaker}
if SHORT:
    ENOUGH |= {sources_pg.connection_pool, sources_pg.asyncpg_pool, pooler_psycopg}
    ENOUGH |= {sources_pg.async_connection_pool, sources_pg.engine_psycopg}
SYNC, ASYNC = (
    [
        pytest.param(source, check, id=f"{label(source)}-{label(check)}")
        for source in sources
        for check in (FEW if source in ENOUGH else CHECKS)
    ]
    for sources in (
        [*sources_pg.SYNC, pooler],
        [*sources_pg.ASYNC, pooler_asyncpg, pooler_psycopg],
    )
)


def run_sync(given: Any, options: dict[str, Any], check: Check, server: Postgres) -> None:
    def make() -> ClockedPostgresStore:
        store = ClockedPostgresStore(given, **options)
        store.server = server
        return store

    run_check(check, make)


@pytest.mark.parametrize("source, check", SYNC)
def test_sync_store_keeps_the_contract(
    source: Callable[..., Any], check: Check, timed_postgres: Postgres
) -> None:
    """The sync store keeps every promise on whatever it was given."""
    with source(_url(timed_postgres)) as (given, options):
        run_sync(given, options, check, timed_postgres)


@pytest.mark.parametrize("source, check", ASYNC)
async def test_async_store_keeps_the_contract(
    source: Callable[..., Any], check: Check, timed_postgres: Postgres
) -> None:
    """The async store keeps every promise on whatever it was given."""
    async with source(_url(timed_postgres)) as (given, options):

        def make() -> ClockedPgBackend:
            store = ClockedPgBackend(given, **options)
            store.server = timed_postgres
            return store

        await arun_check(check, make)


@pytest.mark.parametrize("check", CHECKS, ids=label)
def test_a_partitioned_table_keeps_the_contract(check: Check, timed_postgres: Postgres) -> None:
    """The table may be made of hash partitions."""
    run_sync(_url(timed_postgres, partitions=4), {}, check, timed_postgres)
