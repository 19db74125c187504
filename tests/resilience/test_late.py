"""Late arrivals and collisions: told in the stream, and what is late in a queue to be settled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.receiver.test_receiver import DAY, JSON, deliver, event, receiver_of

from oncekey import AsyncMemoryStore, MemoryStore
from oncekey.instrument import Event, EventKind, subscribe
from oncekey.receiver import AsyncWebhookReceiver, RetentionWarning, WebhookReceiver
from oncekey.resilience import Findings
from oncekey.signatures import provider
from oncekey.testing import ManualClock


def told(seen: list[Event], kind: EventKind) -> list[str]:
    """The states of the events of a kind."""
    return [one.state for one in seen if one.kind is kind]


def test_a_late_event_is_in_the_queue_until_it_is_settled(
    clock: ManualClock, tmp_path: Path
) -> None:
    """Both times are known: when it was handled first, and when it came again."""
    handled: list[bool] = []
    with pytest.warns(RetentionWarning):
        receiver = receiver_of(
            lambda one: handled.append(one.late),
            MemoryStore(clock=clock),
            retention=DAY,
            findings=str(tmp_path / "findings.db"),
        )
    deliver(receiver, event())
    first = clock()
    clock.advance(DAY + 1)
    seen: list[Event] = []
    with subscribe(seen.append):
        assert deliver(receiver, event()).outcome == "handled"
        assert deliver(receiver, event()).outcome == "duplicate"
    assert handled == [False, True]
    assert len(told(seen, EventKind.LATE)) == 1
    queue = Findings(str(tmp_path / "findings.db"))
    (found,) = queue.list()
    assert found.kind == "late"
    assert found.sides[0].began == pytest.approx(first, abs=1)
    assert found.sides[1].where == "receiver"
    assert queue.settle([found.id], "looked at") == 1
    assert queue.list() == []


def test_a_queue_that_fails_loses_no_event(
    clock: ManualClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The event is handled all the same, and the log says what is not in the queue."""
    handled: list[bool] = []
    with pytest.warns(RetentionWarning):
        receiver = receiver_of(
            lambda one: handled.append(one.late),
            MemoryStore(clock=clock),
            retention=DAY,
            findings=str(tmp_path / "none" / "findings.db"),
        )
    deliver(receiver, event())
    clock.advance(DAY + 1)
    assert deliver(receiver, event()).outcome == "handled"
    assert handled == [False, True]
    assert "could not be put into the queue" in caplog.text


def test_the_async_receiver_does_the_same(clock: ManualClock, tmp_path: Path) -> None:
    """It is one flow."""
    queue = Findings(str(tmp_path / "findings.db"))
    stripe = provider("stripe", secret="whsec_test")

    async def main() -> None:
        store = AsyncMemoryStore(clock=clock)
        with pytest.warns(RetentionWarning):
            receiver = AsyncWebhookReceiver(stripe, store, retention=DAY, findings=queue)
        receiver.on()(lambda one: None)
        request = stripe.sign("POST", "https://x.example/h", JSON, event())
        await receiver.receive(*request)
        clock.advance(DAY + 1)
        await receiver.receive(*request)

    asyncio.run(main())
    assert [found.kind for found in queue.list()] == ["late"]


def test_another_payload_under_a_key_is_told() -> None:
    """A changed payload is a collision, and not handled."""
    receiver = receiver_of(lambda one: None, on_changed="reject")
    seen: list[Event] = []
    with subscribe(seen.append):
        deliver(receiver, event(amount=1))
        deliver(receiver, event(amount=2))
    assert told(seen, EventKind.COLLISION) == ["payload"]
    assert len(told(seen, EventKind.CONFLICT)) == 1


def test_one_id_from_two_senders_is_told_and_both_are_handled() -> None:
    """Their keys are apart: neither can silence the other, and somebody hears of it."""
    handled: list[Any] = []
    seen: list[Event] = []
    store = MemoryStore()
    with subscribe(seen.append):
        for account in ("shop-a", "shop-b", "shop-b"):
            receiver = WebhookReceiver(provider("stripe", secret="s", account=account), store)
            receiver.on()(handled.append)
            deliver(receiver, event("of-two"))
    assert told(seen, EventKind.COLLISION) == ["sender"]
    assert [one.sender.account for one in handled] == ["shop-a", "shop-b"]
