"""The contract on real servers: alone, as a Cluster of three masters, and behind Sentinel."""

from __future__ import annotations

import os
import threading
from typing import Any, Self

import pytest
from tests.servers.redis import Group, Server, ServerClock

from oncekey.abc import Clock, ClockInjectable
from oncekey.conformance import CHECKS, Check, arun_check, run_check
from oncekey.stores.redis import RedisBackend, RedisStore

KINDS = ["redis_server", "redis_cluster", "redis_sentinel"]


class Follows(ClockInjectable):
    """Moves the server's clock along with a manual one, so that no check has to sleep."""

    server_clock: ServerClock
    _clock: Clock | None = None
    _shown: float | None = None
    _lock = threading.Lock()

    def with_clock(self, clock: Clock) -> Self:
        self._clock = clock
        return self

    def _do(self, *args: Any) -> Any:
        if self._clock is not None:
            with self._lock:
                now = self._clock()
                if now != self._shown:
                    self.server_clock.stand(now)
                    self._shown = now
        return super()._do(*args)  # type: ignore[misc]


class ClockedStore(Follows, RedisStore):
    """The sync store on a server whose clock the test moves."""


class ClockedBackend(Follows, RedisBackend):
    """The async store on a server whose clock the test moves."""


@pytest.fixture(params=KINDS)
def servers(request: pytest.FixtureRequest) -> Server | Group:
    found: Server | Group = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_sync_store_keeps_the_contract(servers: Server | Group, check: Check) -> None:
    """The sync store keeps every promise of the contract, on each kind of Redis."""

    def make() -> ClockedStore:
        store = ClockedStore(servers.url, prefix=os.urandom(4).hex())
        store.server_clock = servers.needs_clock()
        return store

    run_check(check, make)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_async_store_keeps_the_contract(servers: Server | Group, check: Check) -> None:
    """The async store keeps every promise of the contract, on each kind of Redis."""

    def make() -> ClockedBackend:
        store = ClockedBackend(servers.url, prefix=os.urandom(4).hex())
        store.server_clock = servers.needs_clock()
        return store

    await arun_check(check, make)
