"""Fail-overs and moving slots, under load: what is lost, and what refuses to be."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from tests.faults.under_load import load
from tests.servers.redis import ClusterGroup, Proxy, SentinelGroup, Server, eventually, synced

from oncekey.errors import StoreUnavailableError
from oncekey.models import Key, Scope, State, Terms, Verdict
from oncekey.stores.redis import RedisStore
from oncekey.stores.redis.topology import slot

TERMS = Terms(lease_ms=30_000, ttl_ms=86_400_000)
PRINT = b"f" * 64
A, B = b"a" * 16, b"b" * 16


def key(name: object = "") -> Key:
    return Key(Scope("once", "redis"), str(name) or os.urandom(8).hex())


# Replicas that lag


@pytest.fixture
def pair(
    make_server: Callable[..., Server], make_proxy: Callable[[int], Proxy]
) -> tuple[Server, Server, Proxy]:
    """A master, its replica, and what stands between the two."""
    master = make_server()
    between = make_proxy(master.port)
    replica = make_server(replicaof=f"127.0.0.1 {between.port}", repl_timeout=5)
    eventually(lambda: synced(replica), "the replica")
    return master, replica, between


def part(master: Server, between: Proxy) -> None:
    """Let nothing reach the replica any more."""
    between.close()

    def alone() -> bool:
        return bool(master.run("INFO", "replication")["connected_slaves"] == 0)

    eventually(alone, "the replica's loss")


def test_a_fail_over_can_forget_an_acknowledged_claim(
    pair: tuple[Server, Server, Proxy], open_redis: Callable[..., Any]
) -> None:
    """Without min_replicas a claim that the new master never heard of is won a second time."""
    master, replica, between = pair
    part(master, between)
    first = open_redis(master.url, prefix="p").claim(key("k"), A, PRINT, TERMS)
    assert first.verdict is Verdict.WON
    master.kill()
    replica.run("REPLICAOF", "NO", "ONE")
    second = open_redis(replica.url, prefix="p").claim(key("k"), B, PRINT, TERMS)
    assert (second.verdict, second.attempts) == (Verdict.WON, 1)


def test_min_replicas_refuses_what_a_fail_over_could_forget(
    pair: tuple[Server, Server, Proxy], open_redis: Callable[..., Any]
) -> None:
    """With min_replicas no claim, mark or completion is acknowledged that the replica lacks."""
    master, replica, between = pair
    store = open_redis(master.url, prefix="p", min_replicas=1, replica_timeout=0.05)
    won = store.claim(key("early"), A, PRINT, TERMS)
    assert won.verdict is Verdict.WON
    assert store.first_seen(key("seen"), TERMS) is True
    assert store.first_seen(key("seen"), TERMS) is False
    part(master, between)
    for call in (
        lambda: store.claim(key("k"), B, PRINT, TERMS),
        lambda: store.first_seen(key("m"), TERMS),
        lambda: store.complete(key("early"), A, won.fence, b"j", TERMS),
        lambda: store.complete(key("early"), A, won.fence, b"j", TERMS),
        lambda: store.write(key("w"), PRINT, b"j", 10**13),
    ):
        with pytest.raises(StoreUnavailableError, match="min_replicas=1") as caught:
            call()
        assert caught.value.retryable
    # What was refused is not left behind in a way that would hold others up.
    plain = open_redis(master.url, prefix="p")
    assert plain.read(key("k")).state is State.RELEASED
    assert plain.first_seen(key("m"), TERMS) is True
    # Duplicates can still be told.
    assert store.first_seen(key("seen"), TERMS) is False
    assert store.claim(key("early"), B, PRINT, TERMS).verdict is Verdict.REPLAY
    master.kill()
    replica.run("REPLICAOF", "NO", "ONE")
    new = open_redis(replica.url, prefix="p")
    assert new.claim(key("early"), B, PRINT, TERMS).verdict is Verdict.IN_FLIGHT
    assert new.first_seen(key("seen"), TERMS) is False
    assert new.claim(key("k"), B, PRINT, TERMS).verdict is Verdict.WON


def test_min_replicas_confirms_a_repetition(
    pair: tuple[Server, Server, Proxy],
    make_proxy: Callable[[int], Proxy],
    open_redis: Callable[..., Any],
) -> None:
    """A completion whose reply was lost is confirmed anew, not taken for confirmed."""
    master, replica, _ = pair
    wire = make_proxy(master.port)
    store = open_redis(wire.url, min_replicas=1, replica_timeout=0.05)
    won = store.claim(key("k"), A, PRINT, TERMS)
    other = store.claim(key("r"), A, PRINT, TERMS)
    replica.pause()  # connected still, as far as the master knows
    try:
        for call in (
            lambda: store.complete(key("k"), A, won.fence, b"j", TERMS),
            lambda: store.release(key("r"), A, other.fence),
            lambda: store.first_seen(key("m"), TERMS),
            lambda: store.claim(key("c"), A, PRINT, TERMS),
        ):
            wire.lose_replies(1)
            with pytest.raises(StoreUnavailableError, match="min_replicas=1"):
                call()
            assert wire._lose == 0
    finally:
        replica.resume()
    assert store.complete(key("k"), A, won.fence, b"j", TERMS) is True


# Sentinel


def test_a_fail_over_by_sentinel_under_load() -> None:
    """The master dies; the store finds the new one, and what replicas confirmed is all there."""
    group = SentinelGroup()
    try:
        with RedisStore(group.url, min_replicas=1, replica_timeout=0.5, timeout=2) as store:
            with load(store) as working:
                working.more()
                group.master.kill()
                eventually(
                    lambda: group.replica.run("ROLE")[0] == b"master", "the replica's promotion"
                )
                eventually(lambda: store.now(), "the store's finding the new master")
            # The new master has no replica: nothing more is confirmed, so look without that.
            with RedisStore(group.url) as plain:
                working.store = plain
                assert working.acknowledged
                assert {type(error) for error in working.errors} <= {StoreUnavailableError}
                working.check()
                with load(plain) as after:
                    after.more()
                assert not after.errors
                after.check()
    finally:
        group.remove()


def test_a_demoted_master_is_left(
    make_server: Callable[..., Server], open_redis: Callable[..., Any]
) -> None:
    """A store whose master became a replica asks Sentinel again instead of failing."""
    old, new, sentinel = make_server(), make_server(), make_server(sentinel=True)
    sentinel.run("SENTINEL MONITOR", "shop", "127.0.0.1", old.port, 1)
    store = open_redis(f"redis+sentinel://{sentinel.address}/shop")
    assert store.first_seen(key("before"), TERMS) is True
    sentinel.run("SENTINEL REMOVE", "shop")
    sentinel.run("SENTINEL MONITOR", "shop", "127.0.0.1", new.port, 1)
    old.run("REPLICAOF", "127.0.0.1", new.port)
    assert store.claim(key("k"), A, PRINT, TERMS).verdict is Verdict.WON
    assert store.first_seen(key("m"), TERMS) is True
    assert new.run("DBSIZE") == 2


def test_a_name_that_sentinel_does_not_know(
    make_server: Callable[..., Server], open_redis: Callable[..., Any]
) -> None:
    """An unknown service, and Sentinels that are not there, are named."""
    sentinel = make_server(sentinel=True)
    store = open_redis(f"redis+sentinel://127.0.0.1:1,{sentinel.address}/nosuch", timeout=1)
    with pytest.raises(StoreUnavailableError, match="no Sentinel names a master for 'nosuch'"):
        store.first_seen(key(), TERMS)


def test_a_client_made_by_sentinel_serves(
    make_server: Callable[..., Server], open_redis: Callable[..., Any]
) -> None:
    """What ``master_for`` gives lends the store its Sentinels, its service and its settings."""
    master, sentinel = make_server(), make_server(sentinel=True)
    sentinel.run("SENTINEL MONITOR", "shop", "127.0.0.1", master.port, 1)
    kind: Any = redis.asyncio if open_redis.is_async else redis  # type: ignore[attr-defined]
    manager = kind.sentinel.Sentinel([("127.0.0.1", 1), ("127.0.0.1", sentinel.port)])
    store = open_redis(manager.master_for("shop", db=1, decode_responses=True))
    assert store.first_seen(key("k"), TERMS) is True
    assert store.first_seen(key("k"), TERMS) is False
    assert master.run("DBSIZE", db=1) == 1


# Cluster


def move(group: ClusterGroup, number: int, chunk: int = 5) -> Iterator[None]:
    """Move a slot to another node in steps, as an operator would."""
    ids = {server.port: server.raw("CLUSTER MYID") for server in group.servers}
    (port,) = (
        master[1]
        for first, last, master, *_ in group.servers[0].raw("CLUSTER SLOTS")
        if first <= number <= last
    )
    source, target, third = sorted(group.servers, key=lambda server: server.port != port)
    target.raw("CLUSTER SETSLOT", number, "IMPORTING", ids[source.port])
    source.raw("CLUSTER SETSLOT", number, "MIGRATING", ids[target.port])
    yield
    while keys := source.raw("CLUSTER GETKEYSINSLOT", number, chunk):
        source.raw("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        yield
    for server in (target, source, third):
        server.raw("CLUSTER SETSLOT", number, "NODE", ids[target.port])
    yield


def test_a_slot_moves_under_load(redis_cluster: ClusterGroup) -> None:
    """While a slot moves, its keys are claimed, completed and marked: no error, nothing lost."""
    prefix = f"{{{os.urandom(4).hex()}}}"
    with RedisStore(redis_cluster.url, prefix=prefix) as store:
        with load(store) as working:
            working.more(20)
            for _ in move(redis_cluster, slot(prefix.encode()), chunk=20):
                working.more(5)
            working.more(20)
        assert working.errors == []
        working.check()


def test_a_slot_in_the_midst_of_moving(
    redis_cluster: ClusterGroup, open_redis: Callable[..., Any]
) -> None:
    """Keys that have moved and keys that have not are both found, and new ones are made once."""
    prefix = f"{{{os.urandom(4).hex()}}}"
    store = open_redis(redis_cluster.url, prefix=prefix)
    names = [key(n) for n in range(12)]
    fences = [store.claim(name, A, PRINT, TERMS).fence for name in names]
    steps = move(redis_cluster, slot(prefix.encode()))
    next(steps)
    next(steps)  # some keys are there, some still here
    replies = store.together([("claim", name, B, PRINT, TERMS) for name in names])
    assert {reply.verdict for reply in replies} == {Verdict.IN_FLIGHT}
    assert store.first_seen(key("new"), TERMS) is True
    assert store.first_seen(key("new"), TERMS) is False
    held = [
        store.complete(name, A, fence, b"j", TERMS)
        for name, fence in zip(names, fences, strict=True)
    ]
    assert held == [True] * 12
    for _ in steps:
        pass
    assert [store.read(name).answer for name in names] == [b"j"] * 12
    assert store.first_seen(key("new"), TERMS) is False
    store.clear()
    assert [store.read(name) for name in names] == [None] * 12


def test_a_cluster_is_learned_from_any_node(
    redis_cluster: ClusterGroup, open_redis: Callable[..., Any]
) -> None:
    """One address that works is enough; keys are spread over all masters and cleared from all."""
    last = redis_cluster.servers[-1]
    store = open_redis(f"redis+cluster://127.0.0.1:1,{last.address}")
    results = store.together([("first_seen", key(n), TERMS) for n in range(100)])
    assert results == [True] * 100
    assert all(server.run("DBSIZE") for server in redis_cluster.servers)
    store.clear()
    assert store.first_seen(key(1), TERMS) is True


def test_a_cluster_client_serves(
    redis_cluster: ClusterGroup, open_redis: Callable[..., Any]
) -> None:
    """A RedisCluster that the caller made gives the store its nodes and settings."""
    first = redis_cluster.servers[0]
    kind: Any = redis.asyncio if open_redis.is_async else redis  # type: ignore[attr-defined]
    client = kind.RedisCluster(host="127.0.0.1", port=first.port)
    store = open_redis(client)
    results = store.together([("first_seen", key(n), TERMS) for n in range(50)])
    assert results == [True] * 50
    if not open_redis.is_async:  # type: ignore[attr-defined]
        client.close()


def test_a_cluster_that_is_none(
    make_server: Callable[..., Server], open_redis: Callable[..., Any]
) -> None:
    """A server without cluster mode is named as what it is not."""
    store = open_redis(f"redis+cluster://{make_server().address}")
    with pytest.raises(StoreUnavailableError, match="cluster-enabled yes"):
        store.first_seen(key(), TERMS)
