"""``get`` and ``put`` of every backend, as the documents of the ``adcp`` package name them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from oncekey import (
    AsyncPostgresStore,
    AsyncSQLiteStore,
    CachedResponse,
    IdempotencyStore,
    MemoryBackend,
    RedisBackend,
    ToolContext,
    canonical_json_sha256,
)
from oncekey.encryption import Keyring, encrypted

KEY = "key-0123456789abcdef"


@pytest.fixture(params=["memory", "sqlite", "postgres", "redis", "encrypted"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    if request.param == "postgres":
        async with AsyncPostgresStore(request.getfixturevalue("postgres").database()) as postgres:
            await postgres.create_schema()
            yield postgres
        return
    made: Any = MemoryBackend()
    if request.param == "sqlite":
        made = AsyncSQLiteStore(str(tmp_path / "entries.db"))
    elif request.param == "redis":
        made = RedisBackend(request.getfixturevalue("redis_url"))
    elif request.param == "encrypted":
        made = encrypted(made, Keyring([bytes(range(32))]))
    async with made as opened:
        yield opened


async def test_entries_are_had_by_either_name_of_their_owner(backend: Any) -> None:
    """``principal_id`` and ``scope_key`` are the same, by keyword and by position."""
    entry = CachedResponse("hash", {"id": 1}, time.time() + 60)
    await backend.put(principal_id="alice", key=KEY, entry=entry)
    assert await backend.get(principal_id="alice", key=KEY) == entry
    assert await backend.get(scope_key="alice", key=KEY) == entry
    assert await backend.get("alice", KEY) == entry
    assert await backend.get(principal_id="bob", key=KEY) is None
    await backend.put(scope_key="bob", key=KEY, entry=entry)
    assert await backend.get(principal_id="bob", key=KEY) == entry
    for wrong in ({"key": KEY}, {"principal_id": "a", "scope_key": "a", "key": KEY}):
        with pytest.raises(TypeError, match="either scope_key or principal_id"):
            await backend.get(**wrong)
    with pytest.raises(TypeError, match="a key"):
        await backend.put(principal_id="alice", entry=entry)
    with pytest.raises(TypeError, match="CachedResponse"):
        await backend.put(principal_id="alice", key=KEY)


async def test_the_end_of_an_entry_survives_to_the_microsecond(backend: Any) -> None:
    """What is read back ends when it was said to, and replays through ``wrap`` all the same."""
    base = int(time.time()) + 3600
    for n, part in enumerate((0.0, 0.5, 0.123, 0.123456, 0.000001, 0.999999, 0.1234567)):
        entry = CachedResponse("hash", {"n": n}, base + part)
        await backend.put("alice", f"k-{n}", entry)
        assert await backend.get("alice", f"k-{n}") == entry

    store = IdempotencyStore(backend)

    @store.wrap
    async def create(params: Any, context: Any = None) -> dict[str, int]:
        raise AssertionError("must not run")

    params = {"idempotency_key": "k-planted"}
    entry = CachedResponse(canonical_json_sha256(params), {"n": 7}, base + 0.123456)
    await backend.put("alice", "k-planted", entry)
    assert await create(params, ToolContext("alice")) == {"n": 7}
