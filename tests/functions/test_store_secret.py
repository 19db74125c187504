"""The secret that a store keeps, with which callers are hashed into it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.functions.conftest import MakeStore
from tests.http.doors import Calls, Door, WsgiDoor

from oncekey import MemoryBackend, MemoryStore, PolicyError, SQLiteStore
from oncekey._core.drive import arun, run
from oncekey._core.secret import StoreSecret
from oncekey.encryption import Keyring, encrypted
from oncekey.http import Settings
from oncekey.testing import ManualClock

BEARER = [("Authorization", "Bearer of-ann")]
PLAIN = hashlib.sha256(b"Bearer of-ann").hexdigest()


async def test_everybody_finds_the_same_secret(places: tuple[MakeStore, MakeStore]) -> None:
    """Eight threads at once, then an async process: one secret of 32 bytes in each store."""
    found: list[bytes] = []
    barrier = threading.Barrier(8)
    with places[0]() as store:

        def look() -> None:
            barrier.wait()
            found.append(run(StoreSecret().get(), store))

        threads = [threading.Thread(target=look) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    backend = places[1]()
    try:
        found.append(await arun(StoreSecret().get(), backend))
    finally:
        await backend.aclose()
    assert len(found) == 9
    assert len(set(found)) == 1
    assert len(found[0]) == 32


def labels(store: Any, **options: Any) -> list[str]:
    """The scopes under which a caller's keys are kept."""
    seen: list[str] = []
    claim = store.claim

    def look(key: Any, *args: Any) -> Any:
        seen.append(key.scope.label)
        return claim(key, *args)

    store.claim = look
    door = Door(WsgiDoor(Calls(), store, **options))
    assert [door.post(headers=BEARER).replayed for _ in range(2)] == [False, True]
    del store.claim
    return [label for label in seen if label.startswith("http:")]


def test_a_digest_of_credentials_can_not_be_made_outside(tmp_path: Path) -> None:
    """What is stored of one token differs from store to store, and is no plain hash of it."""
    stores = [SQLiteStore(tmp_path / "1.db"), SQLiteStore(tmp_path / "2.db")]
    one, two = (labels(store)[0] for store in stores)
    assert one != two
    again = Door(WsgiDoor(Calls(), stores[0]))  # another process, which asks the store
    assert again.post(headers=BEARER).replayed
    for store in stores:
        store.close()
    for name in ("1.db", "2.db"):
        with contextlib.closing(sqlite3.connect(tmp_path / name)) as database:
            assert PLAIN not in "\n".join(database.iterdump())


def test_a_secret_from_outside_needs_nothing_of_the_store() -> None:
    """With ``secret=`` two stores have the same digest, and keep no secret of their own."""
    stores = [MemoryStore(), MemoryStore()]
    found = {label for store in stores for label in labels(store, secret=b"of sixteen bytes")}
    assert len(found) == 1
    assert PLAIN not in found.pop()
    fresh = [run(StoreSecret().get(), store) for store in stores]
    assert fresh[0] != fresh[1]


def test_a_secret_is_not_shown_and_not_short() -> None:
    """It is in no repr; one that could be guessed is refused."""
    assert "sixteen" not in repr(Settings(secret="of sixteen bytes"))
    for short in ("", b"short"):
        with pytest.raises(PolicyError, match="secret"):
            Settings(secret=short)


def test_an_encrypted_store_keeps_its_secret_encrypted() -> None:
    """Whoever reads the records, but not the keyring, has no secret."""
    pytest.importorskip("cryptography")
    inner = MemoryStore()
    kept: list[bytes] = []
    complete = inner.complete

    def look(*args: Any) -> Any:
        kept.append(args[3])
        return complete(*args)

    inner.complete = look  # type: ignore[method-assign]
    ring = Keyring([Keyring.generate()])
    secret = run(StoreSecret().get(), encrypted(inner, ring))
    assert run(StoreSecret().get(), encrypted(inner, ring)) == secret
    assert len(kept) == 1
    assert secret not in kept[0]


def test_processes_agree_after_a_store_was_emptied() -> None:
    """Who knew the old secret looks again after a while, and finds the new one."""
    store = MemoryStore()
    one, two = StoreSecret(), StoreSecret()
    old = run(one.get(), store)
    store.clear()
    new = run(two.get(), store)
    assert (run(one.get(), store), new == old) == (old, False)  # its time is not up
    one.until = 0.0
    assert run(one.get(), store) == new


async def test_a_cancelled_request_does_not_keep_the_secret_from_others() -> None:
    """Who is cancelled while it makes the secret leaves it to the next, who need not wait."""
    store = MemoryBackend(clock=ManualClock())  # a lease would never end
    complete, begun = store.complete, asyncio.Event()

    async def hangs(*args: Any) -> bool:
        begun.set()
        await asyncio.Event().wait()
        return False

    store.complete = hangs  # type: ignore[method-assign]
    making = asyncio.create_task(arun(StoreSecret().get(), store))
    await begun.wait()
    making.cancel()
    await asyncio.wait([making])
    store.complete = complete  # type: ignore[method-assign]
    async with asyncio.timeout(30):
        assert len(await arun(StoreSecret().get(), store)) == 32
