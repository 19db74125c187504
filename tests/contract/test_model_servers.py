"""All four backends in lockstep with the model: real servers whose clock only the test moves."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.core.test_model import Lockstep
from tests.scale import scaled
from tests.servers.postgres import Postgres, stopped_clock
from tests.servers.redis import Server

from oncekey import AsyncPostgresStore, PostgresStore, RedisBackend, RedisStore

GRACE_MS = 60_000  # Redis drops a record that long after its time, by itself


class ServerLockstep(Lockstep):
    """The same steps, on servers too. Sweeping is as Redis does it: a minute late, by itself."""

    postgres: Postgres
    postgres_url: str
    redis: Server

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        servers: dict[str, Any] = {
            "PostgresStore": PostgresStore(self.postgres_url, tenant="sync"),
            "RedisStore": RedisStore(self.redis.url, prefix="sync", check="off"),
        }
        async_servers: dict[str, Any] = {
            "AsyncPostgresStore asyncpg": AsyncPostgresStore(
                self.postgres_url, tenant="a", driver="asyncpg"
            ),
            "AsyncPostgresStore psycopg": AsyncPostgresStore(
                self.postgres_url, tenant="p", driver="psycopg"
            ),
            "RedisBackend": RedisBackend(self.redis.url, prefix="async", check="off"),
        }
        self.sync_stores.update(servers)
        self.async_stores.update(async_servers)
        for store in servers.values():
            store.clear()
        for store in async_servers.values():
            self.runner.run(store.clear())

    def _pass(self, ms: int) -> None:
        super()._pass(ms)
        now = self.clock()
        self.postgres.clock(stopped_clock(now))
        self.redis.needs_clock().stand(now)
        if hasattr(self, "model"):
            cutoff = self.now - GRACE_MS - 1
            self.model.sweep(cutoff)
            for name, store in self.sync_stores.items():
                if "Redis" not in name:
                    store.sweep(sys.maxsize, cutoff)
            for name, backend in self.async_stores.items():
                if "Redis" not in name:
                    self.runner.run(backend.sweep(sys.maxsize, cutoff))

    def sweep(self) -> None:
        self._pass(1)


@pytest.fixture
def moved_redis() -> Iterator[Server]:
    """A server of its own, whose clock stands still where it is told to."""
    server = Server()
    yield server
    server.remove()


@pytest.fixture
def moved_postgres() -> Iterator[Postgres]:
    """A server of its own, whose clock stands still where it is told to."""
    server = Postgres(moved_clock=True)
    try:
        yield server.start()
    finally:
        server.close()


def test_all_backends_agree_with_the_model(
    tmp_path: Path, moved_postgres: Postgres, moved_redis: Server
) -> None:
    """Memory, SQLite, PostgreSQL and Redis, sync and async, do what the protocol says."""
    ServerLockstep.postgres, ServerLockstep.redis = moved_postgres, moved_redis
    ServerLockstep.postgres_url = moved_postgres.database()
    with PostgresStore(ServerLockstep.postgres_url) as store:
        store.create_schema()
    run_state_machine_as_test(
        lambda: ServerLockstep(tmp_path),
        settings=settings(
            max_examples=int(os.environ.get("ONCEKEY_MODEL_RUNS", "0")) or scaled(25),
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
