"""A node of a Redis Cluster dies, and its replica takes its slots over."""

from __future__ import annotations

import os
from collections.abc import Callable

from tests.faults.under_load import load
from tests.servers.redis import Server, eventually, synced

from oncekey.errors import StoreUnavailableError
from oncekey.stores.redis import RedisStore
from oncekey.stores.redis.topology import slot

NODE_TIMEOUT_MS = 2000
BOUNDS = [0, 5461, 10_923, 16_384]


def test_a_replica_takes_over_under_load(make_server: Callable[..., Server]) -> None:
    """The keys' master is killed: the store finds its replica, and nothing confirmed is lost."""
    nodes = [
        make_server(cluster_enabled="yes", cluster_node_timeout=NODE_TIMEOUT_MS) for _ in range(4)
    ]
    *masters, replica = nodes
    for number, server in enumerate(masters):
        server.run("CLUSTER SET-CONFIG-EPOCH", number + 1)
        server.run("CLUSTER ADDSLOTS", *range(BOUNDS[number], BOUNDS[number + 1]))
    for server in nodes[1:]:
        nodes[0].run("CLUSTER MEET", "127.0.0.1", server.port)
    doomed = masters[0]
    identity = doomed.raw("CLUSTER MYID")
    eventually(lambda: replica.run("CLUSTER REPLICATE", identity), "the replica's following")
    eventually(lambda: synced(replica), "the replica")
    for server in nodes:
        eventually(
            lambda server=server: b"cluster_state:ok" in server.raw("CLUSTER INFO"), "the Cluster"
        )
    prefix = next(
        tag
        for tag in (f"{{{os.urandom(4).hex()}}}" for _ in range(10_000))
        if slot(tag.encode()) < BOUNDS[1]
    )
    url = "redis+cluster://" + ",".join(server.address for server in nodes)
    with RedisStore(url, prefix=prefix, min_replicas=1, replica_timeout=0.5, timeout=2) as store:
        with load(store) as working:
            working.more()
            doomed.kill()
            eventually(lambda: replica.run("ROLE")[0] == b"master", "the replica's promotion")
        assert working.acknowledged
        assert {type(error) for error in working.errors} <= {StoreUnavailableError}
    # The new master has no replica: nothing more is confirmed, so look without that.
    with RedisStore(url, prefix=prefix, timeout=2) as plain:
        eventually(plain.now, "the store's finding the new master")
        working.store = plain
        eventually(lambda: working.check() is None, "all that was confirmed")
        with load(plain) as after:
            after.more()
        assert not after.errors
        after.check()
