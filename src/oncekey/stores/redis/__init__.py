"""``redis://``: Redis and Valkey, alone, behind Sentinel, or as a Cluster.

A call is read in this order: ``store`` (the public classes), ``threads`` or ``loop`` (calls that
come together share a round trip), ``batch`` (a batch from end to end, written once as a flow),
``operations`` (what each operation sends and gets) and ``wire`` (one connection). Beside them:
``address`` (URLs and clients), ``topology`` (where the keys are), ``inbox`` (waking waiters),
``check`` (the look at a server before it is trusted), ``record`` and ``lua`` (what is kept).
"""

from __future__ import annotations

from oncekey.stores.redis.store import (
    AsyncRedisStore,
    RedisBackend,
    RedisStore,
    open_async,
    open_sync,
)

__all__ = ["AsyncRedisStore", "RedisBackend", "RedisStore", "open_async", "open_sync"]
