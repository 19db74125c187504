"""The contract on encrypted stores: every backend, sync and async."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.contract.test_contract_redis import ClockedBackend, ClockedStore
from tests.servers.postgres import ClockedPgBackend, ClockedPostgresStore, Postgres
from tests.servers.redis import Server

from oncekey import AsyncSQLiteStore, MemoryBackend, MemoryStore, PgStore, SQLiteStore
from oncekey.conformance import CHECKS, Check, arun_check, run_check
from oncekey.encryption import Keyring, encrypted

RING = Keyring([Keyring.generate(), Keyring.generate()])
named = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
_urls: dict[int, str] = {}


@pytest.fixture
def database(_timed: Any) -> str:
    """A database of this process, made once."""
    if _timed.port not in _urls:
        _urls[_timed.port] = _timed._server.database()
        with PgStore(_urls[_timed.port]) as store:
            store.create_schema()
    return _urls[_timed.port]


@named
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_embedded_stores_keep_the_contract(kind: str, check: Check, tmp_path: Path) -> None:
    """An encrypted memory or SQLite store keeps every promise."""
    numbers = iter(range(100))

    def sync() -> Any:
        inner = MemoryStore() if kind == "memory" else SQLiteStore(tmp_path / f"{next(numbers)}.db")
        return encrypted(inner, RING)

    def backend() -> Any:
        made: Any = MemoryBackend()
        if kind == "sqlite":
            made = AsyncSQLiteStore(tmp_path / f"{next(numbers)}.db")
        return encrypted(made, RING)

    run_check(check, sync)
    await arun_check(check, backend)


@named
async def test_postgres_keeps_the_contract(
    check: Check, timed_postgres: Postgres, database: str
) -> None:
    """An encrypted PostgreSQL store keeps every promise."""

    def clocked(store: Any) -> Any:
        store.server = timed_postgres
        return encrypted(store, RING)

    run_check(check, lambda: clocked(ClockedPostgresStore(database, tenant="sync")))
    timed_postgres.clock("+0")
    await arun_check(check, lambda: clocked(ClockedPgBackend(database, tenant="async")))


@named
async def test_redis_keeps_the_contract(check: Check, redis_server: Server) -> None:
    """An encrypted Redis store keeps every promise."""

    def clocked(kind: Any) -> Any:
        store = kind(redis_server.url, prefix=os.urandom(4).hex(), check="off")
        store.server_clock = redis_server.needs_clock()
        return encrypted(store, RING)

    run_check(check, lambda: clocked(ClockedStore))
    await arun_check(check, lambda: clocked(ClockedBackend))
