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

__all__ = [
    "_given",
    "_own",
    "_timed",
    "own_postgres",
    "own_url",
    "pg_url",
    "postgres",
    "timed_postgres",
    "timed_url",
]
