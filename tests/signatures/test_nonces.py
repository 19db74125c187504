"""Nonces: used once, on every kind of store, and never more than the caps allow."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from oncekey import AsyncSQLiteStore, MemoryBackend, MemoryStore, SQLiteStore
from oncekey.errors import BackendMismatchError, PolicyError, StoreUnavailableError
from oncekey.models import Key, Scope
from oncekey.signatures.nonces import Nonces
from oncekey.signatures.verdict import Nonce
from oncekey.testing import ManualClock


def nonce(value: object = "n1", key_id: str = "k1", lasts_ms: int = 360_000) -> Nonce:
    return Nonce(key_id, str(value), lasts_ms)


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    with MemoryStore() if request.param == "memory" else SQLiteStore(tmp_path / "n.db") as opened:
        yield opened


@pytest.fixture(params=["memory", "sqlite"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    opened = MemoryBackend() if request.param == "memory" else AsyncSQLiteStore(tmp_path / "n.db")
    async with opened:
        yield opened


def test_a_nonce_is_fresh_once(store: Any) -> None:
    """The second use is a replay, also through another object on the same store."""
    first, second = Nonces(store), Nonces(store)
    assert first.use(nonce()) == "fresh"
    assert first.use(nonce()) == "replayed"
    assert second.use(nonce()) == "replayed"


async def test_a_nonce_is_fresh_once_async(backend: Any) -> None:
    """The asynchronous form says the same."""
    first, second = Nonces(backend), Nonces(backend)
    assert await first.ause(nonce()) == "fresh"
    assert await first.ause(nonce()) == "replayed"
    assert await second.ause(nonce()) == "replayed"


def test_keys_and_namespaces_are_apart(store: Any) -> None:
    """The same value of another key, or in another namespace, is another nonce."""
    assert Nonces(store).use(nonce()) == "fresh"
    assert Nonces(store).use(nonce(key_id="k2")) == "fresh"
    assert Nonces(store, namespace="other").use(nonce()) == "fresh"


def test_nonces_have_a_scope_of_their_own() -> None:
    """A webhook's key of the same name and sender is another record."""
    store = MemoryStore()
    Nonces(store, namespace="a").use(nonce("n", "s"))
    assert store.read(Key(Scope("webhook", "a", "s"), "n")) is None
    assert store.read(Key(Scope("nonce", "a", "s"), "n")) is not None


def test_a_nonce_lasts_as_long_as_its_signature(clock: ManualClock) -> None:
    """A mark is there until the last millisecond, then the nonce could be used again."""
    nonces = Nonces(MemoryStore(clock=clock), clock=clock)
    assert nonces.use(nonce(lasts_ms=1000)) == "fresh"
    clock.advance(0.998)
    assert nonces.use(nonce(lasts_ms=1000)) == "replayed"
    clock.advance(0.003)
    assert nonces.use(nonce(lasts_ms=1000)) == "fresh"


def test_a_key_over_its_cap_is_refused() -> None:
    """Nothing is forgotten to make room: old nonces stay replays, other keys go on."""
    nonces = Nonces(MemoryStore(), per_key=3)
    assert [nonces.use(nonce(n)) for n in range(5)] == ["fresh"] * 3 + ["full"] * 2
    assert nonces.is_full("k1")
    assert not nonces.is_full("k2")
    assert nonces.use(nonce(0)) == "full"
    assert nonces.use(nonce(0, "k2")) == "fresh"


def test_all_keys_together_have_a_cap() -> None:
    """Many keys of a few nonces each are bounded as well."""
    nonces = Nonces(MemoryStore(), total=4)
    used = [nonces.use(nonce(n, f"k{n}")) for n in range(6)]
    assert used == ["fresh"] * 4 + ["full"] * 2
    assert nonces.is_full("k9")


def test_replays_take_no_room() -> None:
    """A thousand copies of one delivery count as one nonce."""
    nonces = Nonces(MemoryStore(), per_key=2)
    assert nonces.use(nonce()) == "fresh"
    assert {nonces.use(nonce()) for _ in range(1000)} == {"replayed"}
    assert nonces.use(nonce("n2")) == "fresh"
    assert nonces.is_full("k1")


def test_room_comes_back_with_time(clock: ManualClock) -> None:
    """A nonce whose signature is over counts no more, for its key and for all."""
    nonces = Nonces(MemoryStore(clock=clock), per_key=2, total=3, clock=clock)
    assert nonces.use(nonce(1, lasts_ms=10_000)) == "fresh"
    assert nonces.use(nonce(2, lasts_ms=20_000)) == "fresh"
    assert nonces.use(nonce(3, "k2", lasts_ms=30_000)) == "fresh"
    assert nonces.is_full("k1")
    assert nonces.is_full("k3")
    clock.advance(10)
    assert not nonces.is_full("k1")
    assert not nonces.is_full("k3")
    assert nonces.use(nonce(4)) == "fresh"
    assert nonces.is_full("k1")
    clock.advance(600)
    assert not nonces.is_full("k1")
    assert not nonces._counts
    assert not nonces._ending
    assert nonces._live == 0


def test_a_full_store_is_full() -> None:
    """Where the store refuses for want of room, the nonce is refused, and counted nowhere."""
    nonces = Nonces(MemoryStore(max_entries=1))
    assert nonces.use(nonce(1)) == "fresh"
    assert nonces.use(nonce(2)) == "full"
    assert nonces._live == 1


def test_a_store_that_fails_leaves_no_count() -> None:
    """An error of the store comes through, and the room that was reserved is given back."""

    class Broken(MemoryStore):
        def first_seen(self, key: Any, terms: Any) -> bool:
            raise StoreUnavailableError("down")

    nonces = Nonces(Broken(), per_key=1)
    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            nonces.use(nonce())
    assert not nonces.is_full("k1")


async def test_a_cancelled_use_leaves_no_count() -> None:
    """A task that is cancelled while the store is asked gives its room back."""

    class Slow(MemoryBackend):
        async def first_seen(self, key: Any, terms: Any) -> bool:
            await asyncio.Event().wait()
            return True

    nonces = Nonces(Slow(), per_key=1)
    task = asyncio.create_task(nonces.ause(nonce()))
    await asyncio.sleep(0)
    assert nonces.is_full("k1")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not nonces.is_full("k1")


def test_threads_get_one_fresh_nonce_and_an_exact_cap() -> None:
    """Eight threads with the same nonces: each is fresh once, and the cap is not passed."""
    nonces = Nonces(MemoryStore(), per_key=40)
    outcomes: list[str] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        outcomes.extend(nonces.use(nonce(n)) for n in range(50))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("fresh") == 40
    assert len(outcomes) == 400


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_can_use_nonces() -> None:
    """A lock that another thread held at the fork does not hang the child."""
    nonces = Nonces(MemoryStore())
    with nonces._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if nonces.use(nonce()) == "fresh" else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_the_wrong_kind_of_store_is_refused() -> None:
    """Neither form waits for what it can't wait for."""
    with pytest.raises(BackendMismatchError, match="ause"):
        Nonces(MemoryBackend()).use(nonce())
    with pytest.raises(BackendMismatchError, match="need a Store"):
        Nonces({})  # type: ignore[arg-type]


async def test_the_wrong_kind_of_store_is_refused_async() -> None:
    """A sync store is not awaited."""
    with pytest.raises(BackendMismatchError, match="use"):
        await Nonces(MemoryStore()).ause(nonce())


@pytest.mark.parametrize("options", [{"per_key": 0}, {"total": 0}, {"namespace": ""}])
def test_options_that_can_not_work_are_refused(options: dict[str, Any]) -> None:
    """A cap of nothing would refuse everything."""
    with pytest.raises(PolicyError):
        Nonces(MemoryStore(), **options)
