"""Events about time: store calls, handlers that run, deliveries, sweeps; and who hears of them."""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

import pytest

from oncekey import AsyncOnce, MemoryStore, Once, StoreError, SyncWebhookDedupStore, connect
from oncekey.instrument import Event, EventKind, events, subscribe, timings
from oncekey.receiver import WebhookReceiver
from oncekey.signatures import provider
from oncekey.testing import ManualClock


def kinds(told: list[Event]) -> list[str]:
    return [event.kind.value for event in told]


def test_a_call_is_timed_step_by_step() -> None:
    """Claim, handler and completion are told in their order; a copy has a claim only."""
    told: list[Event] = []
    once = Once("memory://")

    @once(key="order")
    def charge(order: str) -> str:
        running = timings.oldest(charge.__qualname__)
        assert running is not None
        assert abs(running.since - time.time()) < 60
        return "ok"

    with subscribe(told.append, timings=True):
        charge("o-1")
        charge("o-1")
    assert kinds(told) == [
        *("store_call", "first", "started", "ended", "store_call", "completed"),
        *("store_call", "replay"),
    ]
    assert [e.operation for e in told if e.kind is EventKind.STORE_CALL] == [
        "claim",
        "complete",
        "claim",
    ]
    assert {e.store for e in told if e.kind is EventKind.STORE_CALL} == {"memory"}
    assert timings.oldest(charge.__qualname__) is None


async def test_an_async_call_is_timed_the_same() -> None:
    """The async form tells the same story, and a handler that raises says what."""
    told: list[Event] = []
    once = AsyncOnce("memory://")

    @once(key="order")
    async def charge(order: str) -> str:
        await asyncio.sleep(0)
        raise ValueError(order)

    with subscribe(told.append, timings=True):
        with pytest.raises(ValueError):
            await charge("o-1")
    assert kinds(told) == ["store_call", "first", "started", "ended", "store_call", "released"]
    assert [e.error for e in told if e.kind is EventKind.ENDED] == ["ValueError"]
    assert timings.oldest(charge.__qualname__) is None


def test_a_handler_inside_an_except_block_has_no_error() -> None:
    """The error that a caller is handling is not the handler's own."""
    told: list[Event] = []
    once = Once("memory://")
    with subscribe(told.append, timings=True):
        try:
            raise KeyError("outer")
        except KeyError:
            with once.guard("k"):
                pass
    assert [e.error for e in told if e.kind is EventKind.ENDED] == [""]


@pytest.mark.parametrize("fails", [False, True])
def test_a_transaction_is_timed(tmp_path: Any, fails: bool) -> None:
    """A block in a transaction begins and ends as others do, and its commit is a completion."""
    told: list[Event] = []
    store: Any = connect(f"sqlite:///{tmp_path}/t.db")
    with subscribe(told.append, timings=True):
        try:
            with store.transaction("k") as tx:
                tx.answer = 1
                if fails:
                    raise ValueError
        except ValueError:
            pass
    store.close()
    assert kinds(told) == (
        ["store_call", "first", "started", "ended", "released"]
        if fails
        else ["store_call", "first", "started", "ended", "store_call", "completed"]
    )
    assert [e.error for e in told if e.kind is EventKind.ENDED] == ["ValueError" if fails else ""]


def test_a_store_call_that_fails_says_so() -> None:
    """The class of the error stands with the call."""

    class Down(MemoryStore):
        def first_seen(self, *args: object) -> bool:  # type: ignore[override]
            raise StoreError("down")

    told: list[Event] = []
    with subscribe(told.append, timings=True):
        SyncWebhookDedupStore(Down()).check_and_record("s", "k")
    assert [(e.kind.value, e.operation, e.error) for e in told] == [
        ("store_call", "first_seen", "StoreError"),
        ("store_error", "check_and_record", "StoreError"),
    ]


def test_timings_are_for_those_who_ask() -> None:
    """A plain subscription hears of outcomes only, and nothing is timed for it."""
    told: list[Event] = []
    with subscribe(told.append):
        with Once("memory://").guard("k"):
            assert timings.oldest("guard") is None
    assert kinds(told) == ["first", "completed"]
    with subscribe(told.append, timings=True):
        assert events._timers
    assert not events._timers


def test_who_listens_late_hears_no_end_without_a_begin() -> None:
    """A handler that began before anybody listened is not told of when it ends."""
    told: list[Event] = []
    with Once("memory://").guard("k"):
        subscription = subscribe(told.append, timings=True)
    subscription.close()
    assert EventKind.ENDED not in {e.kind for e in told}


def test_a_forked_child_runs_nothing() -> None:
    """What the parent has running is not running in its child."""
    with subscribe(lambda event: None, timings=True), Once("memory://").guard("k"):
        assert timings.oldest("guard") is not None
        child = os.fork()
        if child == 0:
            os._exit(timings.oldest("guard") is not None)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_delivery_knows_how_late_it_is() -> None:
    """From the provider's signature to the effect and to the answer; unknown where none is told."""
    told: list[Event] = []
    now = 1_800_000_000.0
    for name in ("stripe", "github"):
        receiver = WebhookReceiver(provider(name, secret="whsec_test"), "memory://")
        receiver.on()(lambda event: None)
        body = json.dumps({"id": "evt_1", "type": "t"}).encode()
        headers = {"Content-Type": "application/json"}
        if name == "github":
            headers |= {"X-GitHub-Event": "push", "X-GitHub-Delivery": "d-1"}
        sent = receiver.provider.sign("POST", "https://x.example/h", headers, body, now=now)
        with subscribe(told.append):
            assert receiver.receive(*sent, now=now + 7).outcome == "handled"
            assert receiver.receive(*sent, now=now + 9).outcome == "duplicate"
            assert receiver.receive(*sent[:3], b"{}", now=now).outcome == "rejected"
    seen = [
        (e.kind.value, e.operation, e.state, e.lateness)
        for e in told
        if e.kind in (EventKind.DELIVERY, EventKind.EFFECT)
    ]
    assert seen == [
        ("effect", "webhook stripe", "handled", 7.0),
        ("delivery", "webhook stripe", "handled", 7.0),
        ("delivery", "webhook stripe", "duplicate", 9.0),
        ("delivery", "webhook stripe", "rejected", None),
        ("effect", "webhook github", "handled", None),
        ("delivery", "webhook github", "handled", None),
        ("delivery", "webhook github", "duplicate", None),
        ("delivery", "webhook github", "rejected", None),
    ]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_sweep_knows_how_far_behind_it_is(kind: str, tmp_path: Any) -> None:
    """The lag is how long ago the oldest record ended that was still there."""
    clock = ManualClock()
    url = "memory://" if kind == "memory" else f"sqlite:///{tmp_path}/s.db"
    store: Any = connect(url).with_clock(clock)  # type: ignore[attr-defined]
    once = Once(store, ttl=100)
    with once.guard("a"):
        pass
    clock.advance(50)
    with once.guard("b"):
        pass
    clock.advance(100)
    told: list[Event] = []
    with subscribe(told.append):
        store.sweep()
    store.close()
    [swept] = told
    assert (swept.store, swept.count) == (kind, 2)
    assert swept.lateness == pytest.approx(50, abs=5)
