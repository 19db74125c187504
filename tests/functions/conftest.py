"""Stores of every kind for these tests, sync and async, and the servers under them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oncekey import (
    AsyncSQLiteStore,
    MemoryBackend,
    MemoryStore,
    PgBackend,
    PgStore,
    RedisBackend,
    RedisStore,
    SQLiteStore,
)

KINDS = ["memory", "sqlite", "postgres", "redis"]
MakeStore = Callable[..., Any]


@pytest.fixture(params=KINDS)
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[MakeStore, MakeStore]]:
    """How to open sync and async stores on one place, on each kind of backend."""
    if request.param == "memory":
        name = os.urandom(4).hex()
        with MemoryStore(name):  # records of a name live as long as one store of it
            yield lambda: MemoryStore(name), lambda: MemoryBackend(name)
    else:
        yield _places(request, tmp_path)


def _places(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[MakeStore, MakeStore]:
    if request.param == "sqlite":
        path = tmp_path / "records.db"
        return lambda: SQLiteStore(path), lambda: AsyncSQLiteStore(path)
    if request.param == "postgres":
        url = request.getfixturevalue("pg_url")
        return lambda **more: PgStore(url, **more), lambda **more: PgBackend(url, **more)
    url = request.getfixturevalue("redis_url")
    prefix = os.urandom(4).hex()
    options: dict[str, Any] = {"prefix": prefix, "check": "off"}
    return lambda: RedisStore(url, **options), lambda: RedisBackend(url, **options)


@pytest.fixture
def store(places: tuple[MakeStore, MakeStore]) -> Iterator[Any]:
    """A sync store of each kind."""
    with places[0]() as opened:
        yield opened
