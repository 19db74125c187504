"""The memory store: bounds, expiry in small steps, sharing, and no silent eviction."""

from __future__ import annotations

import gc
import threading

import pytest

import oncekey
from oncekey import AsyncMemoryStore, MemoryStore, StoreError, connect
from oncekey._core import transitions
from oncekey.abc import AsyncStore
from oncekey.errors import StoreClosedError, StoreFullError
from oncekey.models import Key, Record, Scope, Terms, Verdict
from oncekey.stores import _memory_table as memory
from oncekey.testing import ManualClock

SCOPE = Scope("webhook", "test", "sender")
TERMS = Terms(lease_ms=1000, ttl_ms=60_000)


def test_a_full_store_refuses_and_never_evicts(clock: ManualClock) -> None:
    """At its bound the store refuses new keys by name; live ones stay; expired ones make room."""
    store = MemoryStore(max_entries=100, clock=clock)
    for number in range(100):
        assert store.first_seen(Key(SCOPE, str(number)), TERMS)
    for refuse in (
        lambda: store.first_seen(Key(SCOPE, "new"), TERMS),
        lambda: store.claim(Key(SCOPE, "new"), b"o", b"", TERMS),
        lambda: store.write(Key(SCOPE, "new"), b"", b"j", store.now() + 1000),
    ):
        with pytest.raises(StoreFullError, match="max_entries"):
            refuse()
    assert not any(store.first_seen(Key(SCOPE, str(number)), TERMS) for number in range(100))
    clock.advance(60)
    assert store.first_seen(Key(SCOPE, "new"), TERMS)


def test_a_claim_looks_at_few_records(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many keys live, expiry costs a few looks a claim, and no claim pays for all."""
    looks = 0
    worst = 0
    real = memory._purge_at

    def counting(slot: object) -> int:
        nonlocal looks
        looks += 1
        return real(slot)  # type: ignore[arg-type]

    monkeypatch.setattr(memory, "_purge_at", counting)
    store = MemoryStore(clock=clock)
    total = 60_000
    for number in range(total):
        before = looks
        store.first_seen(Key(SCOPE, str(number)), TERMS)
        worst = max(worst, looks - before)
        if number % 1000 == 0:
            clock.advance(1)
    assert looks <= 3 * total
    assert worst <= 4 * total / memory.SHARDS + 100


def test_expired_records_go_by_themselves(clock: ManualClock) -> None:
    """Inserting alone keeps the garbage bounded: nobody has to call sweep."""
    store = MemoryStore(clock=clock)
    short = Terms(lease_ms=1000, ttl_ms=1000)
    for batch in range(6):
        for number in range(40_000):
            store.first_seen(Key(SCOPE, f"{batch}-{number}"), short)
        clock.advance(120)
    assert store._table.count < 120_000


def test_the_collector_does_not_see_settled_records() -> None:
    """Completed records and marks are not tracked by the garbage collector."""
    store = MemoryStore()
    gc.collect()
    before = len(gc.get_objects())
    for number in range(5000):
        key = Key(SCOPE, str(number))
        if number % 2:
            store.first_seen(key, TERMS)
        else:
            fence = store.claim(key, b"owner", b"print", TERMS).fence
            store.complete(key, b"owner", fence, b"janswer", TERMS)
    gc.collect()
    assert len(gc.get_objects()) - before < 500


def test_records_survive_packing() -> None:
    """What is packed into bytes comes out as it went in."""
    record = Record(
        memory.State.RELEASED, b"o" * 16, 2**62, b"f" * 64, 0, -5, 2**61, 2**32 - 1, None
    )
    for one in (record, record._replace(answer=b""), record._replace(answer=b"\0x", owner=b"")):
        assert memory.unpack(memory.pack(one)) == one
        assert memory._purge_at(memory.pack(one)) == 2**61


def test_stores_of_one_name_share_their_records() -> None:
    """memory://name is one table for sync and async; memory:// is its own."""
    first, second = connect("memory://shared-name"), connect("memory://shared-name")
    assert first.first_seen(Key(SCOPE, "k"), TERMS)
    assert not second.first_seen(Key(SCOPE, "k"), TERMS)
    with MemoryStore("shared-name") as third:
        assert third._table is AsyncMemoryStore("shared-name")._table
        assert third._table is first._table  # type: ignore[attr-defined]
    assert connect("memory://").first_seen(Key(SCOPE, "k"), TERMS)


def test_the_last_to_close_forgets() -> None:
    """Closing one store of a name leaves the records to the others."""
    first, second = MemoryStore("counted"), MemoryStore("counted")
    assert first.first_seen(Key(SCOPE, "k"), TERMS)
    first.close()
    first.close()
    assert not second.first_seen(Key(SCOPE, "k"), TERMS)
    second.close()
    with MemoryStore("counted") as third:
        assert third.first_seen(Key(SCOPE, "k"), TERMS)


def test_a_full_store_refuses_quickly(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused key does not make each further one look through all records again."""
    store = MemoryStore(max_entries=500, clock=clock)
    for number in range(500):
        store.first_seen(Key(SCOPE, str(number)), TERMS)
    scans = 0
    real = store._table.find_room

    def counting(now: int) -> bool:
        nonlocal scans
        scans += 1
        return real(now)

    monkeypatch.setattr(store._table, "find_room", counting)
    for number in range(100):
        with pytest.raises(StoreFullError):
            store.first_seen(Key(SCOPE, f"new{number}"), TERMS)
    assert scans == 1


def test_a_closed_store_says_so() -> None:
    """After close, new keys are refused."""
    store = MemoryStore()
    store.close()
    store.close()
    with pytest.raises(StoreClosedError, match="connect again"):
        store.first_seen(Key(SCOPE, "k"), TERMS)


def test_many_scopes_stay_apart_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scopes past the short names still have names of their own."""
    monkeypatch.setattr(memory, "SHORT_SCOPES", 10)
    store = MemoryStore()
    scopes = [Scope("webhook", "n", f"sender-{number}") for number in range(50)]
    assert all(store.first_seen(Key(scope, "k"), TERMS) for scope in scopes)
    assert not any(store.first_seen(Key(scope, "k"), TERMS) for scope in scopes)
    assert len(store._table.scopes) == 10


def test_threads_share_one_store() -> None:
    """Claims from many threads: one winner a key, and the count is right."""
    store = MemoryStore()
    wins: list[int] = []
    start = threading.Barrier(16)

    def work() -> None:
        start.wait()
        for number in range(500):
            reply = store.claim(
                Key(SCOPE, str(number)), threading.get_ident().to_bytes(8), b"", TERMS
            )
            if reply.verdict is Verdict.WON and reply.attempts == 1:
                wins.append(number)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(wins) == list(range(500))
    assert store._table.count == 500


def test_a_bound_of_nothing_is_refused() -> None:
    """max_entries must leave room for a key."""
    with pytest.raises(ValueError, match="max_entries"):
        MemoryStore(max_entries=0)


async def test_backend_counts_and_clears(clock: ManualClock) -> None:
    """delete_expired gives how many it removed; clear removes the rest."""
    backend = AsyncMemoryStore(clock=clock)
    for number in range(10):
        await backend.first_seen(Key(SCOPE, str(number)), TERMS)
    clock.advance(59)
    assert await backend.delete_expired() == 0
    assert await backend.delete_expired(clock() + 1) == 10
    await backend.first_seen(Key(SCOPE, "k"), TERMS)
    await backend.clear()
    assert await backend._size() == 0
    await backend.aclose()
    with pytest.raises(StoreError):
        await backend.first_seen(Key(SCOPE, "k"), TERMS)


def test_the_earlier_name_of_the_async_store_stays() -> None:
    """Code that says MemoryBackend goes on, as does the name that the source documents use."""
    assert oncekey.MemoryBackend is AsyncMemoryStore
    assert issubclass(AsyncMemoryStore, AsyncStore)


@pytest.mark.parametrize(
    "terms",
    [
        TERMS,
        Terms(lease_ms=1000, ttl_ms=60_000, sticky=True),
        Terms(lease_ms=1000, ttl_ms=60_000, skew_ms=7, remember_ms=900),
    ],
)
def test_the_short_way_to_complete_is_the_tables_way(terms: Terms) -> None:
    """It writes what the tables decide, and leaves to them whatever is not a plain completion."""
    _, pending = transitions.first(b"me", b"payload", terms, 5_000_000)
    for now in (5_000, 5_400, 90_000):
        held, record = transitions.settle(
            pending, transitions.Event.COMPLETE, b"me", pending.fence, terms, now, b"answer"
        )
        assert held
        assert record is not None
        short = memory.completed(pending, b"me", pending.fence, b"answer", terms, now)
        assert short == memory.pack(record)
    done = memory.pack(record)
    for slot, owner, fence in (
        (pending, b"other", pending.fence),
        (pending, b"me", pending.fence + 1),
        (done, b"me", pending.fence),
        (90_000, b"me", pending.fence),
        (None, b"me", pending.fence),
    ):
        assert memory.completed(slot, owner, fence, b"answer", terms, 5_000) is None
