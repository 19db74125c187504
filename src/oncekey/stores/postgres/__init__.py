"""``postgresql://...``: durable, shared by all machines, and able to join your own transactions."""

from __future__ import annotations

from oncekey.stores.postgres.store import (
    AsyncPostgresStore,
    PostgresStore,
    open_async,
    open_sync,
)

__all__ = [
    "AsyncPostgresStore",
    "PgBackend",
    "PgStore",
    "PostgresStore",
    "open_async",
    "open_sync",
]

PgStore = PostgresStore
"""The former name of ``PostgresStore``, which goes on working."""

PgBackend = AsyncPostgresStore
"""The former name of ``AsyncPostgresStore``, which goes on working."""
