"""Interleavings under a seeded loop: a broken store is caught, ours shows no race.

To replay a failure, run its seed again: the loop, the jitter and the scenario all come from it.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.core.seeded_loop import DeadlockError, SeededLoop, run_seeded, virtual_plans
from tests.scale import scaled

from oncekey import (
    AsyncOnce,
    AsyncSQLiteStore,
    AsyncStore,
    CachedResponse,
    IdempotencyBackend,
    IdempotencyConflictError,
    IdempotencyInFlightError,
    IdempotencyStore,
    MemoryBackend,
    ToolContext,
    WebhookDedupStore,
)
from oncekey.instrument import Event, subscribe
from oncekey.models import ClaimReply, Key, Scope, State, Terms
from oncekey.stores.legacy import LegacyStore

MakeStore = Callable[[SeededLoop], AsyncStore]


@pytest.fixture(autouse=True)
def _virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    virtual_plans(monkeypatch)


# The loop itself


async def _meet(loop: SeededLoop) -> list[str]:
    """Three tasks that take turns."""
    seen: list[str] = []

    async def turn(name: str) -> None:
        for _ in range(3):
            seen.append(name)
            await asyncio.sleep(0)

    await asyncio.gather(*(turn(name) for name in "abc"))
    return seen


def test_a_seed_decides_the_order() -> None:
    """The same seed gives the same order, and seeds together give many orders."""
    orders = {seed: "".join(run_seeded(seed, _meet)) for seed in range(200)}
    assert orders == {seed: "".join(run_seeded(seed, _meet)) for seed in range(200)}
    assert len(set(orders.values())) > 100


def test_time_is_virtual_and_timers_keep_their_order() -> None:
    """Waiting for days takes no time, and no timer fires early or out of turn."""

    async def main(loop: SeededLoop) -> list[tuple[float, float]]:
        fired: list[tuple[float, float]] = []

        async def sleeper(seconds: float) -> None:
            await asyncio.sleep(seconds)
            fired.append((seconds, loop.time()))

        delays = [86_400.0 * 7, 0.005, 3.0, 3.5, 60.0]
        await asyncio.gather(*map(sleeper, delays))
        return fired

    for seed in range(50):
        fired = run_seeded(seed, main)
        assert fired == sorted(fired)
        assert all(when == delay for delay, when in fired)


def test_a_deadlock_is_an_error_not_a_hang() -> None:
    """Waiting for what can't happen raises at once."""

    async def main(loop: SeededLoop) -> None:
        await loop.create_future()

    with pytest.raises(DeadlockError):
        run_seeded(1, main)


# A store with the classic fault


class CheckThenPut(MemoryBackend):
    """Broken on purpose: looks first, lets others run, then puts as if nothing had happened."""

    async def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        if await self.read(key) is None:
            await asyncio.sleep(0)
            await self.clear()  # nobody was there when we looked
        return await super().claim(key, owner, fingerprint, terms)

    async def first_seen(self, key: Key, terms: Terms) -> bool:
        if await self.read(key) is not None:
            return False
        await asyncio.sleep(0)
        await self.clear()
        return await super().first_seen(key, terms)


Api = Callable[[AsyncStore, Callable[[], Any]], Callable[[], Any]]


def _once(store: AsyncStore, effect: Callable[[], Any]) -> Callable[[], Any]:
    @AsyncOnce(store, scope="race")(key="name", name=None)
    async def work(name: str) -> int:
        await asyncio.sleep(0)
        effect()
        return 1

    return lambda: work("k")


def _wrap(store: AsyncStore, effect: Callable[[], Any]) -> Callable[[], Any]:
    @IdempotencyStore(store).wrap
    async def create(params: dict[str, Any], context: ToolContext) -> dict[str, Any]:
        await asyncio.sleep(0)
        effect()
        return {"id": 1}

    return lambda: create({"idempotency_key": "k"}, ToolContext("buyer"))


def _webhook(store: AsyncStore, effect: Callable[[], Any]) -> Callable[[], Any]:
    dedup = WebhookDedupStore(store)  # type: ignore[arg-type]

    async def receive() -> None:
        if await dedup.check_and_record("sender", "evt"):
            effect()

    return receive


APIS = [
    pytest.param(_once, id="AsyncOnce"),
    pytest.param(_wrap, id="IdempotencyStore.wrap"),
    pytest.param(_webhook, id="check_and_record"),
]


def _copies(seed: int, store: type[MemoryBackend], api: Api) -> tuple[int, list[Event]]:
    """Four copies of one call that come at slightly different moments: effects, and the trace."""

    async def main(loop: SeededLoop) -> int:
        effects: list[int] = []
        call = api(store(clock=loop.epoch), lambda: effects.append(1))
        moments = random.Random(seed)

        async def copy() -> None:
            for _ in range(moments.randrange(12)):
                await asyncio.sleep(0)
            try:
                await call()
            except Exception:
                pass  # a broken store may break a call in any way; what counts is the effects

        await asyncio.gather(*(copy() for _ in range(4)))
        return len(effects)

    trace: list[Event] = []
    with subscribe(trace.append):
        return run_seeded(seed, main), trace


@pytest.mark.parametrize("api", APIS)
def test_check_then_put_is_caught_and_replays(api: Api) -> None:
    """Some seeds show two effects for one key on a broken store, and show them again on replay."""
    caught = [seed for seed in range(200) if _copies(seed, CheckThenPut, api)[0] > 1]
    assert caught, "200 seeds did not find a race that is there"
    assert len(caught) < 200, "the race must depend on the order, else any test would find it"
    for seed in caught[:5]:
        effects, trace = _copies(seed, CheckThenPut, api)
        assert effects > 1
        assert _copies(seed, CheckThenPut, api) == (effects, trace)


@pytest.mark.parametrize("api", APIS)
def test_the_same_storm_has_one_effect_on_ours(api: Api) -> None:
    """The seeds that break the broken store show exactly one effect on a true one."""
    assert {_copies(seed, MemoryBackend, api)[0] for seed in range(200)} == {1}


# Ours, under everything at once


@dataclass
class Story:
    """What happened to one key."""

    running: int = 0
    overlaps: int = 0
    started: int = 0
    failed: int = 0
    cancelled: int = 0
    payloads: set[str] = field(default_factory=set)
    done: list[dict[str, Any]] = field(default_factory=list)


class HandlerFailed(Exception):
    """What a failing handler raises."""


LEASE = 30.0
NAMES = ["a", "b", "c"]


def _storm(seed: int, make: MakeStore) -> tuple[list[str], list[Event]]:
    """One seed's scenario, checked. Gives how each caller ended, and the trace of events."""
    plan = random.Random(f"storm-{seed}")
    retry_safe = plan.random() < 0.3
    use_request_api = plan.random() < 0.3 and not retry_safe
    stories: dict[str, Story] = defaultdict(Story)
    failures = {name: plan.choice([0, 0, 1, 2]) for name in NAMES}
    sent_cancel: set[int] = set()

    async def pause(how: random.Random) -> None:
        if how.random() < 0.7:
            for _ in range(how.randrange(4)):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(how.random() * 20)

    async def handler(name: str, payload: str, how: random.Random) -> dict[str, Any]:
        story = stories[name]
        story.started += 1
        story.payloads.add(payload)
        attempt = story.started
        story.running += 1
        story.overlaps += story.running > 1
        try:
            await pause(how)
            if attempt <= failures[name]:
                story.failed += 1
                raise HandlerFailed(name)
            await pause(how)
        except asyncio.CancelledError:
            story.cancelled += 1
            raise
        finally:
            story.running -= 1
        answer = {"name": name, "payload": payload, "attempt": attempt}
        story.done.append(answer)
        return answer

    async def main(loop: SeededLoop) -> list[str]:
        store = make(loop)
        once = AsyncOnce(store, scope="storm", lease=LEASE, retry_safe=retry_safe)
        guards = {
            wait: once(key="name", name=None, ignore=["how"], wait=wait)(handler)
            for wait in (0, 100)
        }
        requests = {
            wait: IdempotencyStore(store, wait_seconds=wait, lease_seconds=LEASE)
            for wait in (0, 100)
        }
        current: dict[str, random.Random] = {}

        def wrapped(wait: int) -> Callable[..., Any]:
            @requests[wait].wrap
            async def request(params: dict[str, Any], context: ToolContext) -> dict[str, Any]:
                name = params["idempotency_key"]
                return await handler(name, params["payload"], current[name])

            return request

        handlers = {wait: wrapped(wait) for wait in (0, 100)}

        async def caller(name: str, payload: str, wait: int, how: random.Random) -> Any:
            await pause(how)
            if use_request_api:
                current[name] = how
                params = {"idempotency_key": name, "payload": payload}
                return await handlers[wait](params, ToolContext("buyer"))
            return await guards[wait](name, payload, how)

        async def canceller(victim: asyncio.Task[Any], number: int, how: random.Random) -> None:
            for _ in range(how.randrange(25)):
                await asyncio.sleep(0)
            if how.random() < 0.3:
                await asyncio.sleep(how.random() * 25)
            if victim.cancel():
                sent_cancel.add(number)

        calls: list[tuple[str, str, int]] = []
        tasks: list[asyncio.Task[Any]] = []
        for number in range(plan.randint(4, 9)):
            name = plan.choice(NAMES)
            payload = "other" if plan.random() < 0.15 else "first"
            wait = 0 if plan.random() < 0.25 else 100
            how = random.Random(f"{seed}-{number}")
            calls.append((name, payload, wait))
            tasks.append(loop.create_task(caller(name, payload, wait, how)))
        cancels = [
            loop.create_task(canceller(tasks[number], number, random.Random(f"{seed}-x{number}")))
            for number in range(len(tasks))
            if plan.random() < 0.25
        ]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*cancels)
        for one in requests.values():  # handlers go on without a caller that was cancelled
            assert await one.drain(1000) == 0, f"seed {seed}: a handler never ended"
        await asyncio.wait([loop.create_task(asyncio.sleep(1))])  # background releases end

        endings: list[str] = []
        answers: dict[str, list[Any]] = defaultdict(list)
        for number, ((name, payload, wait), result) in enumerate(zip(calls, results, strict=True)):
            where = f"seed {seed}, caller {number} of {name!r} ended with {result!r}"
            if isinstance(result, dict):
                answers[name].append(result)
                assert result["payload"] == payload, f"{where}: another payload's answer"
            elif isinstance(result, asyncio.CancelledError):
                assert number in sent_cancel, f"{where}: nobody cancelled it"
            elif isinstance(result, IdempotencyInFlightError):
                # A patient caller outlasts any lease here: 100 s against 30.
                assert wait == 0, f"{where}: it was to wait"
                assert 1 <= (result.retry_after or 0) <= LEASE, where
            elif isinstance(result, IdempotencyConflictError):
                # A caller cancelled while it claimed held the key for a moment, and never ran.
                held = {calls[n][1] for n in sent_cancel if calls[n][0] == name}
                rivals = (stories[name].payloads | held) - {payload}
                assert rivals, f"{where}: no other payload ever held the key"
            else:
                assert isinstance(result, HandlerFailed), where
            kind = "answer" if isinstance(result, dict) else type(result).__name__
            endings.append(f"{name}:{kind}")
        for name in {name for name, _, _ in calls}:
            story = stories[name]
            where = f"seed {seed}, key {name!r}: {story}"
            assert not story.overlaps, f"two handlers ran at once: {where}"
            assert len(story.done) <= 1, f"two effects: {where}"
            assert story.started == story.failed + story.cancelled + len(story.done), where
            assert all(answer == story.done[0] for answer in answers[name]), f"answers: {where}"
            key = keys(name)
            record = await store.read(key)
            if record is None:
                assert story.started == 0, where
            elif story.done:
                assert record.state is State.COMPLETED, f"an effect without a record: {where}"
            elif record.state is State.PENDING:
                # Only what a cancelled handler did is unknown; its lease decides.
                assert story.cancelled, f"left pending: {where}"
                assert not retry_safe, f"retry-safe, but left pending: {where}"
            else:
                assert record.state is State.RELEASED, where
        return endings

    def keys(name: str) -> Key:
        return Key(Scope("request", "buyer") if use_request_api else Scope("once", "storm"), name)

    trace: list[Event] = []
    with subscribe(trace.append):
        return run_seeded(seed, main), trace


def _memory(loop: SeededLoop) -> AsyncStore:
    return MemoryBackend(clock=loop.epoch)


@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_no_interleaving_breaks_the_memory_backend(first: int) -> None:
    """Over all seeds of duplicates, failures, cancellations and waits: one effect, one answer."""
    endings: dict[str, int] = defaultdict(int)
    for seed in range(first, first + scaled(500)):
        for ending in _storm(seed, _memory)[0]:
            endings[ending.split(":")[1]] += 1
    # The scenarios are worth something only if they reach every kind of ending.
    assert set(endings) == {
        "answer",
        "CancelledError",
        "HandlerFailed",
        "IdempotencyConflictError",
        "IdempotencyInFlightError",
    }
    assert min(endings.values()) >= scaled(120), dict(endings)


def test_no_interleaving_breaks_the_sqlite_backend(tmp_path: Path) -> None:
    """The same holds on SQLite with commits in the loop, over up to 200 seeds."""
    for seed in range(scaled(200)):
        with_file = tmp_path / f"{seed}.db"
        stores: list[AsyncSQLiteStore] = []

        def make(
            loop: SeededLoop, path: Path = with_file, stores: list[AsyncSQLiteStore] = stores
        ) -> AsyncStore:
            store = AsyncSQLiteStore(path, durability="normal", commit="inline", clock=loop.epoch)
            stores.append(store)
            return store

        _storm(seed, make)
        asyncio.run(stores[0].aclose())


class GetAndPut(IdempotencyBackend):
    """A third party's backend: nothing but answers, and every call lets others run."""

    def __init__(self, loop: SeededLoop) -> None:
        self.loop = loop
        self.entries: dict[tuple[str, str], CachedResponse] = {}

    async def get(self, scope_key: str, key: str) -> CachedResponse | None:
        await asyncio.sleep(0)
        entry = self.entries.get((scope_key, key))
        await asyncio.sleep(0)
        return entry

    async def put(self, scope_key: str, key: str, entry: CachedResponse) -> None:
        await asyncio.sleep(0)
        self.entries[scope_key, key] = entry
        await asyncio.sleep(0)

    async def delete_expired(self, now_epoch: float | None = None) -> int:
        return 0


def test_no_interleaving_breaks_a_get_and_put_backend() -> None:
    """In one process a backend that can't claim is as safe as the others, over up to 500 seeds."""
    for seed in range(scaled(500)):
        _storm(seed, lambda loop: LegacyStore(GetAndPut(loop), clock=loop.epoch))


@pytest.mark.parametrize("kind", ["memory", "get-and-put"])
def test_a_conflicting_copy_disturbs_no_valid_one(kind: str) -> None:
    """On a completed key the first payload always replays, whatever else is asked meanwhile."""

    async def main(loop: SeededLoop) -> None:
        store: AsyncStore = (
            MemoryBackend(clock=loop.epoch)
            if kind == "memory"
            else LegacyStore(GetAndPut(loop), clock=loop.epoch)
        )

        @AsyncOnce(store, scope="calm")(key="name", name=None)
        async def work(name: str, payload: str) -> str:
            return payload

        assert await work("k", "first") == "first"
        payloads = ["first", "other", "first", "other", "first"]
        told = await asyncio.gather(*(work("k", p) for p in payloads), return_exceptions=True)
        for payload, result in zip(payloads, told, strict=True):
            if payload == "first":
                assert result == "first"
            else:
                assert isinstance(result, IdempotencyConflictError)

    for seed in range(100):
        run_seeded(seed, main)


def test_a_replayed_seed_gives_the_identical_trace() -> None:
    """A seed's events come back the same: kinds, keys, fences, attempts and durations."""
    traces = {}
    for seed in range(60):
        endings, trace = _storm(seed, _memory)
        assert trace, "a storm without events shows nothing"
        assert (endings, trace) == _storm(seed, _memory)
        traces[seed] = tuple(trace)
    assert len(set(traces.values())) == len(traces), "seeds must differ, else one would do"
