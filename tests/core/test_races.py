"""Sixty-four callers on each of many keys: one effect a key, and the same bytes for all."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.scale import scaled

from oncekey import (
    AsyncOnce,
    AsyncSQLiteStore,
    AsyncStore,
    IdempotencyStore,
    MemoryBackend,
    MemoryStore,
    Once,
    SQLiteStore,
    Store,
    SyncWebhookDedupStore,
    ToolContext,
    WebhookDedupStore,
)
from oncekey.models import Key, Record, Scope, State, Terms
from oncekey.testing import ManualClock

CALLERS = 64
KEYS = [f"key-{number:03}" for number in range(scaled(100))]
BUYER = ToolContext(caller_identity="buyer")


class Effects:
    """Counts what handlers did; every run of a handler gives another answer."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()
        self._lock = threading.Lock()

    def happen(self, name: str) -> dict[str, Any]:
        with self._lock:
            self.of[name] += 1
        return {"key": name, "token": uuid.uuid4().hex, "text": "žluť 🎉", "ratio": 0.1}


def check(
    effects: Effects, answers: dict[str, list[Any]], stored: dict[str, Record | None]
) -> None:
    """One effect a key; every caller has the answer whose bytes are in the store."""
    from oncekey._core.codec import Codec

    assert effects.of == Counter(dict.fromkeys(KEYS, 1))
    for name in KEYS:
        record = stored[name]
        assert record is not None
        assert (record.state, record.attempts) == (State.COMPLETED, 1)
        assert {Codec().encode(answer) for answer in answers[name]} == {record.answer}
        assert len(answers[name]) == CALLERS


SyncApi = Callable[[Store, Effects], tuple[Callable[[str], Any], Callable[[str], Key]]]
AsyncApi = Callable[[AsyncStore, Effects], tuple[Callable[[str], Awaitable[Any]], Any]]


def _request_key(name: str) -> Key:
    return Key(Scope("request", "buyer"), name)


def _once_key(name: str) -> Key:
    return Key(Scope("once", "race"), name)


def sync_once(store: Store, effects: Effects) -> tuple[Callable[[str], Any], Callable[[str], Key]]:
    @Once(store, scope="race")(key="name", name=None)
    def work(name: str) -> dict[str, Any]:
        return effects.happen(name)

    return work, _once_key


def sync_wrap(store: Store, effects: Effects) -> tuple[Callable[[str], Any], Callable[[str], Key]]:
    @IdempotencyStore(store).wrap
    def create(params: dict[str, Any], context: ToolContext) -> dict[str, Any]:
        return effects.happen(params["idempotency_key"])

    return lambda name: create({"idempotency_key": name}, BUYER), _request_key


def async_once(store: AsyncStore, effects: Effects) -> tuple[Callable[[str], Awaitable[Any]], Any]:
    @AsyncOnce(store, scope="race")(key="name", name=None)
    async def work(name: str) -> dict[str, Any]:
        await asyncio.sleep(0)
        answer = effects.happen(name)
        await asyncio.sleep(0)
        return answer

    return work, _once_key


def async_wrap(store: AsyncStore, effects: Effects) -> tuple[Callable[[str], Awaitable[Any]], Any]:
    @IdempotencyStore(store).wrap
    async def create(params: dict[str, Any], context: ToolContext) -> dict[str, Any]:
        await asyncio.sleep(0)
        answer = effects.happen(params["idempotency_key"])
        await asyncio.sleep(0)
        return answer

    return lambda name: create({"idempotency_key": name}, BUYER), _request_key


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with MemoryStore() if request.param == "memory" else SQLiteStore(tmp_path / "race.db") as store:
        yield store


@pytest.fixture(params=["memory", "sqlite-thread", "sqlite-inline"])
def make_backend(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], AsyncStore]:
    def make() -> AsyncStore:
        if request.param == "memory":
            return MemoryBackend()
        return AsyncSQLiteStore(tmp_path / "race.db", commit=request.param.partition("-")[2])

    return make


@pytest.mark.parametrize("api", [sync_once, sync_wrap])
def test_threads_race(store: Store, api: SyncApi) -> None:
    """64 threads that start together on each key: one runs, all get its bytes."""
    effects = Effects()
    call, key_of = api(store, effects)
    together = threading.Barrier(CALLERS)
    answers: dict[str, list[Any]] = {name: [] for name in KEYS}

    def caller() -> None:
        try:
            for name in KEYS:
                together.wait()
                answers[name].append(call(name))
        except BaseException:
            together.abort()  # let the others fail too, instead of waiting
            raise

    with ThreadPoolExecutor(CALLERS) as pool:
        for future in [pool.submit(caller) for _ in range(CALLERS)]:
            future.result()
    check(effects, answers, {name: store.read(key_of(name)) for name in KEYS})


@pytest.mark.parametrize("api", [async_once, async_wrap])
async def test_tasks_race(make_backend: Callable[[], AsyncStore], api: AsyncApi) -> None:
    """6,400 tasks of one loop, 64 on each key: one runs, all get its bytes."""
    effects = Effects()
    async with make_backend() as backend:
        call, key_of = api(backend, effects)

        async def all_of(name: str) -> list[Any]:
            return await asyncio.gather(*(call(name) for _ in range(CALLERS)))

        answers = dict(zip(KEYS, await asyncio.gather(*map(all_of, KEYS)), strict=True))
        check(effects, answers, {name: await backend.read(key_of(name)) for name in KEYS})


@pytest.mark.parametrize("api", [async_once, async_wrap])
def test_loops_race(make_backend: Callable[[], AsyncStore], api: AsyncApi) -> None:
    """Eight event loops in eight threads, with eight tasks each, share one backend safely."""
    effects = Effects()
    backend = make_backend()
    call, key_of = api(backend, effects)
    loops = 8
    together = threading.Barrier(loops)
    answers: dict[str, list[Any]] = {name: [] for name in KEYS}

    async def main() -> None:
        for name in KEYS:
            answers[name] += await asyncio.gather(*(call(name) for _ in range(CALLERS // loops)))

    def thread() -> None:
        together.wait()
        asyncio.run(main())

    with ThreadPoolExecutor(loops) as pool:
        for future in [pool.submit(thread) for _ in range(loops)]:
            future.result()

    async def stored() -> dict[str, Record | None]:
        async with backend:
            return {name: await backend.read(key_of(name)) for name in KEYS}

    check(effects, answers, asyncio.run(stored()))


def test_threads_race_for_the_first_sight(store: Store) -> None:
    """Of 64 threads that ask about each delivery together, exactly one is told that it is new."""
    dedup = SyncWebhookDedupStore(store)
    together = threading.Barrier(CALLERS)

    def caller() -> list[str]:
        news = []
        for name in KEYS:
            together.wait()
            if dedup.check_and_record("sender", name):
                news.append(name)
        return news

    with ThreadPoolExecutor(CALLERS) as pool:
        futures = [pool.submit(caller) for _ in range(CALLERS)]
    told = Counter(name for future in futures for name in future.result())
    assert told == Counter(dict.fromkeys(KEYS, 1))


async def test_tasks_race_for_the_first_sight(make_backend: Callable[[], AsyncStore]) -> None:
    """Of 64 tasks that ask about each delivery at once, exactly one is told that it is new."""
    async with make_backend() as backend:
        dedup = WebhookDedupStore(backend)  # type: ignore[arg-type]
        for name in KEYS:
            told = await asyncio.gather(
                *(dedup.check_and_record("sender", name) for _ in range(CALLERS))
            )
            assert sum(told) == 1


class Meddled(dict[str, Any]):
    """A dict of the memory store's table: something happens after a look, or before an insert."""

    after_look: dict[int, Callable[[], object]]
    looks: int = 0

    def get(self, name: str, default: Any = None) -> Any:
        found = super().get(name, default)
        self._meddle()
        return found

    def setdefault(self, name: str, value: Any = None) -> Any:
        self._meddle()
        return super().setdefault(name, value)

    def _meddle(self) -> None:
        self.looks += 1
        happens = self.after_look.pop(self.looks, None)
        if happens is not None:
            happens()


@pytest.mark.parametrize("method", ["claim", "first_seen"])
@pytest.mark.parametrize("rival_after", [1, 2, 3])
@pytest.mark.parametrize("found", ["absent", "expired"])
def test_nothing_between_two_looks_makes_a_second_winner(
    method: str, rival_after: int, found: str
) -> None:
    """Of two callers that look at one key, swept meanwhile or never there, only one wins."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    key, terms = Key(Scope("race", "sweep"), "k"), Terms(lease_ms=100, ttl_ms=100)

    def ask(owner: bytes) -> bool:
        if method == "claim":
            return store.claim(key, owner, b"", terms).verdict == "won"
        return store.first_seen(key, terms)

    if found == "expired":
        assert ask(b"first")
        clock.advance(60)
    wins: list[bytes] = []
    threads: list[threading.Thread] = []

    def beside(work: Callable[[], object]) -> Callable[[], None]:
        """Do ``work`` in another thread; if it needs a lock that is held here, it comes later."""

        def start() -> None:
            threads.append(threading.Thread(target=work))
            threads[-1].start()
            threads[-1].join(0.2)

        return start

    def rival() -> None:
        if ask(b"rival"):
            wins.append(b"rival")

    def sweep_then_maybe_rival() -> None:
        store.sweep()
        if rival_after == 1:
            rival()

    table = store._table
    table.shards[:] = [Meddled(slots) for slots in table.shards]
    for slots in table.shards:
        slots.after_look = {1: beside(sweep_then_maybe_rival)}  # type: ignore[attr-defined]
        if rival_after > 1:
            slots.after_look[rival_after] = beside(rival)  # type: ignore[attr-defined]
    if ask(b"slow"):
        wins.append(b"slow")
    for thread in threads:
        thread.join()
    assert len(threads) >= 1, "nothing came between: look at how the table is read now"
    assert len(wins) == 1
