"""Servers for these tests."""

from __future__ import annotations

from tests.servers.fixtures_pg import (
    _given,
    _own,
    _timed,
    own_postgres,
    own_url,
    pg_url,
    postgres,
    timed_postgres,
    timed_url,
)
from tests.servers.redis import _plain_server, make_server, redis_server

__all__ = [
    "_given",
    "_own",
    "_plain_server",
    "_timed",
    "make_server",
    "own_postgres",
    "own_url",
    "pg_url",
    "postgres",
    "redis_server",
    "timed_postgres",
    "timed_url",
]
