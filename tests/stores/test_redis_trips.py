"""Round trips, counted on the wire."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.servers.redis import Proxy, Server, eventually

from oncekey.models import Key, Scope, Terms, Verdict
from oncekey.stores.redis import RedisStore

TERMS = Terms(lease_ms=30_000, ttl_ms=86_400_000)
MARK = b"f" * 64


def key(name: object = "") -> Key:
    return Key(Scope("once", "redis"), str(name) or os.urandom(8).hex())


@pytest.fixture
def wire(redis_server: Server, make_proxy: Callable[[int], Proxy]) -> Proxy:
    return make_proxy(redis_server.port)


def warm(store: Any) -> None:
    """Connect, look at the server, and load every script."""
    owner = os.urandom(16)
    name = key()
    won = store.claim(name, owner, MARK, TERMS)
    store.renew(name, owner, won.fence, TERMS)
    store.complete(name, owner, won.fence, b"j", TERMS)
    store.release(name, owner, won.fence)
    store.write(name, MARK, b"j", 1)
    store.read(name)
    store.first_seen(name, TERMS)  # over an old record: by script
    store.first_seen(key(), TERMS)


def test_each_operation_is_one_round_trip(wire: Proxy, open_redis: Callable[..., Any]) -> None:
    """Claim, complete, replay, renew, release, first-seen, its duplicate, read: one trip each."""
    store = open_redis(wire.url)
    warm(store)
    trips = {}

    def count(what: str, call: Callable[[], Any]) -> Any:
        before = wire.trips
        result = call()
        trips[what] = wire.trips - before
        return result

    one, two, seen, owner = key(), key(), key(), os.urandom(16)
    won = count("claim", lambda: store.claim(one, owner, MARK, TERMS))
    count("in flight", lambda: store.claim(one, os.urandom(16), MARK, TERMS))
    count("renew", lambda: store.renew(one, owner, won.fence, TERMS))
    count("complete", lambda: store.complete(one, owner, won.fence, b"jx", TERMS))
    replay = count("replay", lambda: store.claim(one, os.urandom(16), MARK, TERMS))
    assert (replay.verdict, replay.answer) == (Verdict.REPLAY, b"jx")
    other = store.claim(two, owner, MARK, TERMS)
    count("release", lambda: store.release(two, owner, other.fence))
    assert count("first seen", lambda: store.first_seen(seen, TERMS)) is True
    assert count("duplicate", lambda: store.first_seen(seen, TERMS)) is False
    assert count("seen by a claim", lambda: store.first_seen(one, TERMS)) is False
    count("read", lambda: store.read(one))
    count("write", lambda: store.write(one, MARK, b"j", 10**13))
    count("now", store.now)
    assert set(trips.values()) == {1}, trips


def test_first_seen_alone_needs_no_script(wire: Proxy, open_redis: Callable[..., Any]) -> None:
    """A lone first-seen call is sent as plain commands."""
    store = open_redis(wire.url)
    warm(store)
    wire.chunks.clear()
    assert store.first_seen(key(), TERMS) is True
    assert b"".join(wire.chunks).count(b"EVALSHA") == 0


async def test_calls_of_one_tick_share_round_trips(wire: Proxy) -> None:
    """A hundred claims of one tick need three round trips at most, as do a hundred marks."""
    from oncekey.stores.redis import RedisBackend

    async with RedisBackend(wire.url) as store:
        import asyncio

        await asyncio.gather(*(store.first_seen(key(), TERMS) for _ in range(10)))
        await asyncio.gather(*(store.claim(key(), b"o", MARK, TERMS) for _ in range(10)))
        wire.trips = 0
        replies = await asyncio.gather(
            *(store.claim(key(), os.urandom(16), MARK, TERMS) for _ in range(100))
        )
        assert {reply.verdict for reply in replies} == {Verdict.WON}
        assert wire.trips <= 3
        wire.trips = 0
        assert all(await asyncio.gather(*(store.first_seen(key(), TERMS) for _ in range(100))))
        assert wire.trips <= 3


def test_threads_share_round_trips(wire: Proxy) -> None:
    """Claims of 31 threads that come while one is under way share the next round trip."""
    with RedisStore(wire.url) as store:
        warm(store)
        wire.trips = 0
        wire.open_gate.clear()
        won: list[Any] = []
        threads = [
            threading.Thread(
                target=lambda: won.append(store.claim(key(), os.urandom(16), MARK, TERMS))
            )
            for _ in range(32)
        ]
        threads[0].start()
        assert wire.arrived.acquire(timeout=30)
        for thread in threads[1:]:
            thread.start()
        eventually(
            lambda: len(store._lanes._lanes[None][1]._gathering.waiting) == 31,
            "the others' queueing",
        )
        wire.open_gate.set()
        for thread in threads:
            thread.join()
        assert len(won) == 32
        assert wire.trips == 2
