"""Events of a type that no handler takes: told, counted, and refused where that is asked for."""

from __future__ import annotations

import json
import logging

import pytest

from oncekey.instrument import Event, EventKind, subscribe
from oncekey.receiver import AsyncWebhookReceiver, WebhookReceiver, WebhookResponse
from oncekey.receiver.unhandled_types import MOST_TOLD
from oncekey.signatures import hmac_provider, provider

STRIPE = provider("stripe", secret="whsec_test")
JSON = {"Content-Type": "application/json"}


def deliver(receiver: WebhookReceiver, kind: str, number: int = 1) -> WebhookResponse:
    body = json.dumps({"id": f"evt_{number}", "type": kind}).encode()
    return receiver.receive(*receiver.provider.sign("POST", "https://x.example/h", JSON, body))


def test_a_type_without_a_handler_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """One warning a type, naming the handler it may be a misspelling of; a header; an event."""
    receiver = WebhookReceiver(STRIPE, "memory://")
    receiver.on("invoice.payed")(lambda event: None)
    told: list[Event] = []
    with caplog.at_level(logging.WARNING, "oncekey"), subscribe(told.append):
        answers = [deliver(receiver, "invoice.paid", number) for number in range(3)]
        deliver(receiver, "zebra")
    assert [(one.status, one.outcome) for one in answers] == [(200, "ignored")] * 3
    assert all(one.headers["Oncekey-Outcome"] == "ignored" for one in answers)
    assert [(one.kind, one.operation) for one in told] == [
        (EventKind.IGNORED, "webhook stripe"),
        (EventKind.DELIVERY, "webhook stripe"),
    ] * 4
    first, second = [record.getMessage() for record in caplog.records]
    assert "no handler takes Stripe events of type 'invoice.paid'" in first
    assert "there is one for 'invoice.payed', a typing error?" in first
    assert "'zebra': they are ignored. Add @receiver.on('zebra')" in second
    assert "Oncekey-Outcome" not in deliver(receiver, "invoice.payed").headers


async def test_strict_types_refuse_so_that_no_event_is_lost() -> None:
    """The sender is told to come back; once there is a handler, the event is handled."""
    receiver = AsyncWebhookReceiver(STRIPE, "memory://", strict_types=True)
    body = b'{"id": "evt_1", "type": "paid"}'
    request = STRIPE.sign("POST", "https://x.example/h", JSON, body)
    refused = await receiver.receive(*request)
    assert (refused.status, refused.outcome, refused.code) == (503, "unhandled", "paid")
    assert int(refused.headers["Retry-After"]) >= 1
    receiver.on("paid")(lambda event: None)
    assert (await receiver.receive(*request)).outcome == "handled"


def test_a_batch_with_one_unhandled_type_is_refused_as_a_whole() -> None:
    """What has a handler is handled; the sender sends all of it again, as duplicates."""
    acme = hmac_provider(
        "acme", secret="s", header="X-Sig", event_id="id", event_type="type", batch="$"
    )
    receiver = WebhookReceiver(acme, "memory://", strict_types=True)
    receiver.on("a")(lambda event: None)
    body = json.dumps([{"id": "1", "type": "a"}, {"id": "2", "type": "b"}]).encode()
    request = acme.sign("POST", "https://x.example/h", JSON, body)
    assert receiver.receive(*request).outcomes == ("handled", "unhandled")
    again = receiver.receive(*request)
    assert (again.status, again.outcomes) == (503, ("duplicate", "unhandled"))


def test_types_that_a_sender_makes_up_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """As many warnings as types may be told, each on one line of plain ASCII."""
    receiver = WebhookReceiver(STRIPE, "memory://", per_key=None)
    with caplog.at_level(logging.WARNING, "oncekey"):
        for number in range(MOST_TOLD + 20):
            deliver(receiver, f"{number}\r\nERROR forged \u202e" + "x" * 100)
    assert len(caplog.records) == MOST_TOLD
    for record in caplog.records:
        assert record.getMessage().isascii()
        assert "\n" not in record.getMessage()
        assert len(record.getMessage()) < 500
