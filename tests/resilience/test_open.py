"""``on_outage="open"``: calls go on without the store, and it is made whole afterwards."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.resilience.conftest import TERMS, Away, key

from oncekey import (
    AsyncOnce,
    AsyncSQLiteStore,
    AsyncWebhookDedup,
    IdempotencyStore,
    MemoryStore,
    Once,
    SQLiteStore,
    ToolContext,
    WebhookDedup,
)
from oncekey.errors import (
    BackendMismatchError,
    IdempotencyConflictError,
    PolicyError,
    StoreFullError,
    StoreUnavailableError,
)
from oncekey.instrument import Event, EventKind, subscribe
from oncekey.models import State, Verdict
from oncekey.resilience import Breaker, Reconciled, reconcile, resilient
from oncekey.resilience.journal import pages
from oncekey.testing import ManualClock

PATIENCE = 30.0


def eventually(condition: Callable[[], Any]) -> None:
    """Wait for what another thread does."""
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


class Shop:
    """A guarded function that counts its effects, on a store whose breaker has a clock of ours."""

    def __init__(self, opened: Any, journal: Path, **options: Any) -> None:
        self.clock = ManualClock(1000.0)
        self.store = resilient(
            opened,
            on_outage="open",
            journal=journal,
            breaker=Breaker(failures=1, successes=1, clock=self.clock),
            **options,
        )
        self.effects: list[str] = []
        once = Once(self.store, wait=0)

        @once(key="order", name="charge")
        def charge(order: str, cents: int = 1) -> dict[str, Any]:
            self.effects.append(order)
            return {"order": order, "cents": cents}

        self.charge = charge

    def recover(self) -> None:
        """Let the next call try the store."""
        self.clock.advance(60)


@pytest.fixture
def shop(opened: Any, tmp_path: Path) -> Iterator[Shop]:
    """A shop with a journal."""
    made = Shop(opened, tmp_path / "journal")
    return made


def test_calls_go_on_and_copies_replay(shop: Shop, away: Away) -> None:
    """Without the store a key runs once in this process; its copies get the answer."""
    away.begin()
    assert shop.charge("o-1") == shop.charge("o-1") == {"order": "o-1", "cents": 1}
    with pytest.raises(IdempotencyConflictError):
        shop.charge("o-1", 2)
    assert shop.effects == ["o-1"]


def test_each_is_an_event(shop: Shop, away: Away) -> None:
    """Whoever listens hears of every call that went past the store, and of each replay."""
    away.begin()
    seen: list[Event] = []
    with subscribe(seen.append):
        shop.charge("o-1")
        shop.charge("o-1")
        with pytest.raises(IdempotencyConflictError):
            shop.charge("o-1", 2)
        dedup = WebhookDedup(shop.store)
        assert [dedup.check_and_record("s", "e-1") for _ in range(2)] == [True, False]
    assert EventKind.BREAKER in [one.kind for one in seen]
    past = [one.operation for one in seen if one.kind is EventKind.BYPASS]
    assert past == ["claim", "replay", "conflict", "first_seen", "replay"]


def test_the_store_is_made_whole(shop: Shop, away: Away, opened: Any) -> None:
    """When it is back, what was done without it is in it, and nobody does it again."""
    away.begin()
    shop.charge("o-1")
    shop.charge("o-2")
    away.end()
    shop.recover()
    seen: list[Event] = []
    with subscribe(seen.append):
        shop.charge("o-3")  # the first call that the store answers starts it
        eventually(lambda: any(one.kind is EventKind.RECONCILED for one in seen))
    assert [one.count for one in seen if one.kind is EventKind.RECONCILED] == [2]
    fresh = Shop(opened, Path(shop.store._fallback.directory) / "other")  # type: ignore[union-attr]
    assert fresh.charge("o-1") == {"order": "o-1", "cents": 1}
    assert fresh.effects == []
    assert shop.store.findings is not None
    assert shop.store.findings.list() == []


def test_a_key_of_the_outage_is_settled_before_it_is_asked_for(
    shop: Shop, away: Away, opened: Any
) -> None:
    """A copy that comes right after the outage replays, before any reconciliation has run."""
    away.begin()
    shop.charge("o-1")
    away.end()
    shop.recover()
    shop.store._start = lambda fallback: None  # type: ignore[method-assign]
    assert shop.charge("o-1") == {"order": "o-1", "cents": 1}
    assert shop.effects == ["o-1"]


def test_a_claim_of_the_store_is_completed_without_it(shop: Shop, away: Away, opened: Any) -> None:
    """An outage in the middle of a handler costs nothing: its outcome goes in afterwards."""
    store = shop.store
    one, owner = key("o-1"), b"o" * 16
    reply = store.claim(one, owner, b"f", TERMS)
    away.begin()
    assert store.renew(one, owner, reply.fence, TERMS)
    assert store.complete(one, owner, reply.fence, b'j"done"', TERMS)
    away.end()
    made = store.reconcile()
    assert (made.inserted, made.duplicates) == (1, 0)
    record = opened.read(one)
    assert (record.state, record.owner, record.answer) == (State.COMPLETED, owner, b'j"done"')
    assert record.fingerprint == b"f"


def test_what_slipped_is_told_with_both_sides(opened: Any, away: Away, tmp_path: Path) -> None:
    """A key that the store had done before is done again in an outage, and that is reported."""
    shop = Shop(opened, tmp_path / "journal")
    before = time.time()
    shop.charge("o-1")
    away.begin()
    again = Shop(opened, tmp_path / "journal")  # another process would know as little
    again.charge("o-1")
    away.end()
    seen: list[Event] = []
    with subscribe(seen.append):
        assert again.store.reconcile() == Reconciled(duplicates=1, files=1)
    assert EventKind.SLIPPED in [one.kind for one in seen]
    findings = again.store.findings
    assert findings is not None
    (found,) = findings.list()
    assert found.kind == "duplicate"
    assert found.same_payload is True
    assert len(found.key) == 64
    ours, theirs = found.sides
    assert (ours.where, theirs.where) == ("journal", "store")
    assert ours.process.endswith(f":{os.getpid()}")
    assert (ours.state, theirs.state) == ("completed", "completed")
    assert before - 1 <= theirs.began <= ours.began <= ours.ended <= time.time()
    assert ours.owner != theirs.owner
    assert findings.settle([found.id], "refunded") == 1
    assert findings.list() == []
    (settled,) = findings.list(settled=True)
    assert settled.note == "refunded"
    assert settled.settled_at is not None
    assert findings.settle([found.id]) == 0


def test_another_payload_is_told_as_such(opened: Any, away: Away, tmp_path: Path) -> None:
    """Of a duplicate that slipped it is known whether it had the same payload."""
    Shop(opened, tmp_path / "journal").charge("o-1", 1)
    away.begin()
    shop = Shop(opened, tmp_path / "journal")
    shop.charge("o-1", 2)
    away.end()
    shop.store.reconcile()
    assert shop.store.findings is not None
    (found,) = shop.store.findings.list()
    assert found.same_payload is False


def test_marks_go_on_and_go_in(opened: Any, away: Away, tmp_path: Path) -> None:
    """``first_seen`` is true once in this process, and the store knows it afterwards."""
    store = resilient(opened, on_outage="open", journal=tmp_path, breaker=Breaker(failures=1))
    assert store.first_seen(key("before"), TERMS)
    away.begin()
    assert store.first_seen(key("m"), TERMS)
    assert not store.first_seen(key("m"), TERMS)
    assert store.first_seen(key("before"), TERMS)  # nobody here knows better
    away.end()
    made = store.reconcile()
    assert (made.inserted, made.duplicates) == (1, 1)
    assert not opened.first_seen(key("m"), TERMS)


def test_a_handler_that_fails_frees_the_key(shop: Shop, away: Away, opened: Any) -> None:
    """Without the store too: the next attempt runs, and nothing of the first goes in."""
    once = Once(shop.store, wait=0)
    outcomes = iter([ValueError("no"), None])

    @once(key="order", name="try")
    def attempt(order: str) -> str:
        if error := next(outcomes):
            raise error
        return order

    away.begin()
    with pytest.raises(ValueError, match="no"):
        attempt("o-1")
    assert attempt("o-1") == "o-1"
    away.end()
    assert shop.store.reconcile().inserted == 1


def test_the_table_is_bounded(opened: Any, away: Away, tmp_path: Path) -> None:
    """What was done longest ago is forgotten first; its second run is told afterwards."""
    shop = Shop(opened, tmp_path / "journal", entries=2)
    away.begin()
    for order in ("a", "b", "c", "a"):
        shop.charge(order)
    assert shop.effects == ["a", "b", "c", "a"]
    away.end()
    made = shop.store.reconcile()
    assert (made.inserted, made.duplicates) == (3, 1)
    assert shop.store.findings is not None
    (found,) = shop.store.findings.list()
    assert found.sides[0].process == found.sides[1].process != ""


def test_a_full_journal_closes_the_door(opened: Any, away: Away, tmp_path: Path) -> None:
    """When no more can be written down, calls fail rather than leave no trace."""
    shop = Shop(opened, tmp_path / "journal", journal_bytes=800)
    away.begin()

    def fill() -> None:
        for number in range(20):
            shop.charge(str(number))

    with pytest.raises(StoreFullError):
        fill()
    done = len(shop.effects)
    away.end()
    assert shop.store.reconcile().inserted == done


def test_a_guard_may_have_another_word(opened: Any, away: Away, tmp_path: Path) -> None:
    """One store and one breaker; each guard says for itself what an outage means."""
    store = resilient(opened, journal=tmp_path, breaker=Breaker(failures=1))
    shut, wide = Once(store, wait=0), Once(store, wait=0, on_outage="open")
    away.begin()
    with pytest.raises(StoreUnavailableError), shut.guard("k"):
        pass
    with wide.guard("k") as claim:
        claim.answer = 1
    with pytest.raises(StoreUnavailableError), shut.guard("k"):
        pass
    assert wide.store.breaker is store.breaker


def test_words_that_cannot_work_are_refused(opened: Any, tmp_path: Path) -> None:
    """Each says what to write instead."""
    with pytest.raises(PolicyError, match="journal="):
        Once(opened, on_outage="open")
    with pytest.raises(PolicyError, match="on_outage"):
        Once(opened, on_outage="ajar")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="journal= is for"):
        Once(opened, journal=tmp_path)
    with pytest.raises(PolicyError, match="journal"):
        Once(resilient(opened), on_outage="open")
    with pytest.raises(PolicyError, match="already"):
        resilient(resilient(opened))
    with pytest.raises(BackendMismatchError, match="in this process"):
        Once(MemoryStore(), on_outage="open", journal=tmp_path)


def test_the_async_form_does_the_same(aopened: Any, away: Away, tmp_path: Path) -> None:
    """In an event loop, with many tasks at once, which share one table and one journal."""

    async def main() -> None:
        clock = ManualClock(1000.0)
        store = resilient(
            aopened,
            on_outage="open",
            journal=tmp_path / "journal",
            breaker=Breaker(failures=1, successes=1, clock=clock),
        )
        once = AsyncOnce(store, wait=5)
        effects: list[str] = []

        @once(key="order", name="charge")
        async def charge(order: str) -> str:
            effects.append(order)
            await asyncio.sleep(0)
            return order

        await charge("before")
        away.begin()
        found = await asyncio.gather(*(charge(f"o-{number % 4}") for number in range(16)))
        assert sorted(set(found)) == ["o-0", "o-1", "o-2", "o-3"]
        assert len(effects) == 5
        away.end()
        clock.advance(60)
        seen: list[Event] = []
        with subscribe(seen.append):
            await charge("after")
            async with asyncio.timeout(PATIENCE):
                while not any(one.kind is EventKind.RECONCILED for one in seen):
                    await asyncio.sleep(0.005)
        reply = await aopened.claim(*_claim_of("o-1", once))
        assert reply.verdict is Verdict.REPLAY
        await store.aclose()

    def _claim_of(name: str, once: AsyncOnce) -> Any:
        from oncekey.models import Key, Scope

        return Key(Scope("once", "", "charge"), name), b"x" * 16, b"", TERMS

    asyncio.run(main())


def test_a_reconciliation_that_was_cut_short_is_done_again(
    shop: Shop, away: Away, opened: Any, tmp_path: Path
) -> None:
    """Run twice over the same journal, it finds its own records and adds no finding."""
    Shop(opened, tmp_path / "other").charge("o-2")
    away.begin()
    shop.charge("o-1")
    shop.charge("o-2")
    away.end()
    journal = tmp_path / "journal"
    (path,) = pages(journal)
    raw = path.read_bytes()
    first = shop.store.reconcile()
    assert (first.inserted, first.duplicates) == (1, 1)
    path.write_bytes(raw)  # as if it had died before it put the file away
    second = reconcile(journal, opened)
    assert (second.present, second.duplicates) == (1, 1)
    assert shop.store.findings is not None
    assert len(shop.store.findings.list()) == 1


def test_journals_of_another_store_are_refused(shop: Shop, away: Away, tmp_path: Path) -> None:
    """Outcomes of one store never go into another kind of store."""
    away.begin()
    shop.charge("o-1")
    shop.store.close()
    with pytest.raises(PolicyError, match="directory of its own"):
        reconcile(tmp_path / "journal", MemoryStore())


def test_sealed_answers_stay_sealed(opened: Any, away: Away, tmp_path: Path) -> None:
    """With an encrypted store the journal has nothing that could be read, and replays work."""
    from oncekey.encryption import Keyring, encrypted

    store = encrypted(opened, Keyring([os.urandom(32)]))
    once = Once(store, wait=0, on_outage="open", journal=tmp_path / "journal")
    away.begin()
    for _ in range(2):
        with once.guard("k", 1) as claim:
            if not claim.replayed:
                claim.answer = "very private"
        assert claim.answer == "very private"
    (path,) = pages(tmp_path / "journal")  # once the store is back it may go at any time
    assert b"very private" not in path.read_bytes()
    away.end()
    inner: Any = once.store
    inner.store.reconcile()
    assert not list(pages(tmp_path / "journal"))
    with Once(store, wait=0).guard("k", 1) as claim:
        assert claim.replayed
        assert claim.answer == "very private"


def test_the_other_guards_take_the_same_words(
    opened: Any, aopened: Any, away: Away, tmp_path: Path
) -> None:
    """``IdempotencyStore`` and the dedup of deliveries go on, or not, by the same word."""
    caller = ToolContext(caller_identity="buyer")
    shut = IdempotencyStore(opened)
    wide = IdempotencyStore(opened, on_outage="open", journal=tmp_path / "one")

    def buy(params: dict[str, Any], context: Any = None) -> dict[str, Any]:
        return {"bought": True}

    away.begin()
    with pytest.raises(StoreUnavailableError):
        shut.wrap(operation="buy")(buy)({"idempotency_key": "k-1"}, caller)
    assert wide.wrap(operation="buy")(buy)({"idempotency_key": "k-1"}, caller) == {"bought": True}

    assert WebhookDedup(opened).check_and_record("s", "e")  # counts as new, with a warning
    with pytest.raises(StoreUnavailableError):
        WebhookDedup(opened, on_outage="closed").check_and_record("s", "e")
    dedup = WebhookDedup(opened, on_outage="open", journal=tmp_path / "two")
    assert [dedup.check_and_record("s", "e") for _ in range(2)] == [True, False]

    async def main() -> None:
        adedup = AsyncWebhookDedup(aopened, on_outage="open", journal=tmp_path / "three")
        assert [await adedup.check_and_record("s", "e") for _ in range(2)] == [True, False]

    asyncio.run(main())


def test_a_restarted_process_reconciles_what_it_finds(
    shop: Shop, away: Away, opened: Any, tmp_path: Path
) -> None:
    """Journals of processes that are gone go in with the first call that the store answers."""
    away.begin()
    shop.charge("o-1")
    shop.store._fallback._journal.close()  # type: ignore[union-attr]
    away.end()
    fresh = Shop(opened, tmp_path / "journal")
    fresh.charge("o-2")
    eventually(lambda: not list(pages(tmp_path / "journal")))
    assert fresh.charge("o-1") == {"order": "o-1", "cents": 1}
    assert fresh.effects == ["o-2"]


def test_the_outage_ends_while_the_work_is_done(shop: Shop, away: Away, opened: Any) -> None:
    """What began without the store ends without it, copies wait for it, and then it goes in."""
    away.begin()
    reply = shop.store.claim(key("k"), b"o" * 16, b"f", TERMS)
    away.end()
    shop.recover()
    assert shop.store.claim(key("k"), b"p" * 16, b"f", TERMS).verdict is Verdict.IN_FLIGHT
    assert shop.store.renew(key("k"), b"o" * 16, reply.fence, TERMS)
    assert shop.store.complete(key("k"), b"o" * 16, reply.fence, b"j1", TERMS)
    shop.store.reconcile()
    assert opened.read(key("k")).owner == b"o" * 16
    assert opened.read(key("k")).answer == b"j1"


def test_a_child_goes_on_with_a_journal_of_its_own(
    shop: Shop, away: Away, opened: Any, tmp_path: Path
) -> None:
    """After a fork in an outage the child replays what was done before it, and writes its own."""
    away.begin()
    shop.charge("o-1")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            shop.charge("o-1")
            shop.charge("o-2")
            code = 0 if shop.effects == ["o-1", "o-2"] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list(pages(tmp_path / "journal"))) == 2
    away.end()
    made = shop.store.reconcile()
    assert (made.inserted, made.duplicates, made.files) == (2, 0, 2)


@pytest.mark.parametrize("on_outage", ["closed", "open"])
def test_it_keeps_the_contract_of_stores(tmp_path: Path, on_outage: Any) -> None:
    """The suite that every store must pass, on the store around one, in both forms."""
    from oncekey.conformance import arun_all, run_all

    def path(kind: str) -> str:
        return str(tmp_path / f"{kind}.db")

    journal = tmp_path / "journal"
    results = run_all(
        lambda: resilient(SQLiteStore(path("sync")), on_outage=on_outage, journal=journal)
    )
    results += asyncio.run(
        arun_all(
            lambda: resilient(AsyncSQLiteStore(path("async")), on_outage=on_outage, journal=journal)
        )
    )
    assert len(results) > 20
    assert [(one.name, one.error) for one in results if one.error] == []
