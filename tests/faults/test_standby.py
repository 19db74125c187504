"""A PostgreSQL primary dies under load, and its standby is promoted."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest
from tests.servers.fixtures_pg import eventually, sql
from tests.servers.postgres import Postgres

from oncekey.errors import StoreError, StoreUnavailableError
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


class Load:
    """Threads that claim and complete, and remember what they were told."""

    def __init__(self, store: PostgresStore) -> None:
        self.store = store
        self.acknowledged: dict[str, bytes] = {}
        self.errors: list[BaseException] = []
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self._work) for _ in range(4)]
        for thread in self.threads:
            thread.start()

    def _work(self) -> None:
        while not self.stop.is_set():
            name, owner = os.urandom(8).hex(), os.urandom(16)
            try:
                won = self.store.claim(key(name), owner, b"f", TERMS)
                if self.store.complete(key(name), owner, won.fence, owner, TERMS):
                    self.acknowledged[name] = owner
            except StoreError as error:
                self.errors.append(error)
                self.stop.wait(0.05)

    def more(self, count: int) -> None:
        target = len(self.acknowledged) + count
        eventually(lambda: len(self.acknowledged) >= target, "more acknowledged work")

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()


def test_a_promoted_standby_is_found_and_has_all(pair: tuple[Postgres, Postgres]) -> None:
    """The primary is killed under load: the same store goes on at the standby, nothing is lost."""
    primary, standby = pair
    with PostgresStore(_url(primary, standby), timeout=3) as store:
        store.create_schema()
        load = Load(store)
        try:
            load.more(50)
            assert primary.process is not None
            primary.process.send_signal(signal.SIGQUIT)  # immediate: as if the power had gone
            primary.process.wait()
            standby.control("promote")
            load.more(50)
        finally:
            load.end()
        assert {type(error) for error in load.errors if not error.retryable} == set()  # type: ignore[attr-defined]
        for name, answer in load.acknowledged.items():
            reply = store.claim(key(name), os.urandom(16), b"f", TERMS)
            assert (reply.verdict, reply.answer) == (Verdict.REPLAY, answer)


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
