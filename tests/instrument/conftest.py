"""Servers for metrics and audit trails that are kept by several processes."""

from __future__ import annotations

from tests.servers.fixtures_pg import _given, _own, own_postgres, pg_url, postgres
from tests.servers.redis import _plain_server, redis_server, redis_url

__all__ = [
    "_given",
    "_own",
    "_plain_server",
    "own_postgres",
    "pg_url",
    "postgres",
    "redis_server",
    "redis_url",
]
