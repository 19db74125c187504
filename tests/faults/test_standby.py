"""A PostgreSQL primary dies under load, and its standby is promoted."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Iterator

import pytest
from tests.faults.under_load import load
from tests.servers.fixtures_pg import eventually, sql
from tests.servers.postgres import Postgres

from oncekey.errors import StoreUnavailableError
from oncekey.models import Key, Scope, Terms, Verdict
from oncekey.stores.postgres import AsyncPostgresStore, PostgresStore

TERMS = Terms(lease_ms=30_000, ttl_ms=86_400_000)


def key(name: object) -> Key:
    return Key(Scope("once", "standby"), str(name))


@pytest.fixture
def pair() -> Iterator[tuple[Postgres, Postgres]]:
    """A primary, and a standby that confirms every commit before it is acknowledged."""
    with contextlib.ExitStack() as ends:
        primary = Postgres(fsync="off", wal_level="replica", max_wal_senders="4")
        ends.callback(primary.close)
        primary.start()
        standby = Postgres(fsync="off", hot_standby="on")
        ends.callback(standby.close)
        subprocess.run(
            [
                primary.bin / "pg_basebackup",
                "-D",
                standby.data,
                "-d",
                primary.url(),
                "-R",
                "-X",
                "stream",
                "-c",
                "fast",
            ],
            env=primary.env,
            check=True,
            capture_output=True,
            **primary.as_user,
        )
        standby.start()
        sql(
            primary.url(),
            "ALTER SYSTEM SET synchronous_standby_names = '*'",
            "ALTER SYSTEM SET synchronous_commit = 'on'",
            "SELECT pg_reload_conf()",
        )
        eventually(
            lambda: sql(
                primary.url(), "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"
            ),
            "the standby's following",
        )
        yield primary, standby


def _url(primary: Postgres, standby: Postgres) -> str:
    hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
    return f"postgresql://postgres@{hosts}/postgres?target_session_attrs=read-write"


def test_a_promoted_standby_is_found_and_has_all(pair: tuple[Postgres, Postgres]) -> None:
    """The primary is killed under load: the same store goes on at the standby, nothing is lost."""
    primary, standby = pair
    with PostgresStore(_url(primary, standby), timeout=3) as store:
        store.create_schema()
        with load(store) as working:
            working.more()
            assert primary.process is not None
            primary.process.send_signal(signal.SIGQUIT)  # immediate: as if the power had gone
            primary.process.wait()
            standby.control("promote")
            working.more()
        assert [error for error in working.errors if not error.retryable] == []
        working.check()


async def test_an_async_store_finds_a_promoted_standby(pair: tuple[Postgres, Postgres]) -> None:
    """Async: a claim from before the promotion is held after it, and its owner completes it."""
    primary, standby = pair
    async with AsyncPostgresStore(_url(primary, standby), timeout=3) as store:
        await store.create_schema()
        won = await store.claim(key("k"), b"a" * 16, b"f", TERMS)
        primary.crash()
        shutil.rmtree(primary.data / "pg_wal", ignore_errors=True)  # it is not to come back
        standby.control("promote")
        for _ in range(40):
            try:
                reply = await store.claim(key("k"), b"b" * 16, b"f", TERMS)
                break
            except StoreUnavailableError:
                continue
        assert reply.verdict is Verdict.IN_FLIGHT
        assert await store.complete(key("k"), b"a" * 16, won.fence, b"j1", TERMS)
