"""Providers whose events have no id: none of theirs is lost, and no retry is lost either."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from oncekey import MemoryStore
from oncekey.receiver import WebhookReceiver
from oncekey.signatures import hmac_provider, provider, providers
from oncekey.testing import sample, sample_provider, signed

REPEATING = [name for name, facts in providers().items() if facts.repeats]
CHANGE = {"list_folder": {"accounts": ["dbid:1"]}}


def test_which_providers_have_events_that_are_alike() -> None:
    """Whoever has no id in the table either repeats, or signs something that differs."""
    assert REPEATING == ["dropbox", "plaid"]
    without = [name for name, facts in providers().items() if facts.event_id is None]
    assert {*without} - {*REPEATING} == {"adyen-platform"}  # each of its bodies has a timestamp


@pytest.mark.parametrize("name", REPEATING)
def test_two_events_that_are_alike_are_both_handled(name: str) -> None:
    """Byte for byte the same, which is how Dropbox tells of each change: a lost one is worse."""
    delivery, seen = sample(name), list[str]()
    receiver = WebhookReceiver(delivery.provider, MemoryStore())
    receiver.on()(lambda event: seen.append(event.id))
    outcomes = [receiver.receive(*one).outcome for one in (delivery, delivery, delivery.again())]
    assert outcomes == ["handled"] * 3
    assert len(set(seen)) == 3


@pytest.mark.parametrize("name", REPEATING)
def test_that_copies_are_not_told_apart_is_said(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, when the receiver is made; who says what an event is hears nothing."""
    WebhookReceiver(sample_provider(name), MemoryStore(), key=str)
    assert caplog.text == ""
    WebhookReceiver(sample_provider(name), MemoryStore())
    assert f"webhook {name}: its deliveries have no id" in caplog.text
    assert "pass key=" in caplog.text


def test_more_alike_than_one_key_may_have_in_a_minute_are_handled() -> None:
    """The limit of one key is not theirs: each is a key of its own."""
    delivery, seen = sample("dropbox", body=CHANGE), list[object]()
    receiver = WebhookReceiver(delivery.provider, MemoryStore(), per_key=(2, 60))
    receiver.on()(seen.append)
    assert {receiver.receive(*delivery).status for _ in range(5)} == {200}
    assert len(seen) == 5


@pytest.mark.parametrize("by", ["key", "event_id"])
def test_who_says_what_an_event_is_has_it_once(by: str) -> None:
    """A function of the payload, or a place in it."""
    seen = list[str]()
    options: dict[str, Any] = {"event_id": "n"} if by == "event_id" else {}
    delivery = signed(sample_provider("dropbox", **options), {**CHANGE, "n": "1"})
    key = {"key": lambda payload: payload["n"]} if by == "key" else {}
    receiver = WebhookReceiver(delivery.provider, MemoryStore(), **key)
    receiver.on()(lambda event: seen.append(event.id))
    assert [receiver.receive(*delivery).outcome for _ in range(2)] == ["handled", "duplicate"]
    assert seen == ["1"]


@pytest.mark.parametrize("repeats", [True, False])
def test_a_provider_of_ones_own_says_whether_its_events_repeat(repeats: bool) -> None:
    """Without an id and without a word, the signed bytes are the event."""
    acme = hmac_provider("acme", secret="s3cret", header="X-Acme", repeats=repeats)
    receiver = WebhookReceiver(acme, MemoryStore())
    receiver.on()(lambda event: None)
    outcomes = [receiver.receive(*signed(acme, {"a": 1})).outcome for _ in range(2)]
    assert outcomes == ["handled", "handled" if repeats else "duplicate"]


def test_sns_says_that_its_messages_are_text() -> None:
    """As Amazon sends them, with no option; a list of one's own still counts alone."""
    delivery = sample("aws-sns")
    assert dict(delivery.headers)["content-type"] == "text/plain; charset=UTF-8"
    for options, status in (({}, 200), ({"content_types": ["application/json"]}, 415)):
        receiver = WebhookReceiver(delivery.provider, MemoryStore(), **options)
        receiver.on()(lambda event: None)
        assert receiver.receive(*delivery).status == status
    stripe = WebhookReceiver(provider("stripe", secret="whsec_test"), MemoryStore())
    answer = stripe.receive("POST", "https://x/", {"Content-Type": "text/plain"}, b"{}")
    assert (answer.status, answer.code) == (415, "content_type")


def test_the_gateway_keeps_each_of_them() -> None:
    """Two that are alike are two events of the inbox."""
    pytest.importorskip("httpx")
    asyncio.run(_through_a_gateway())


async def _through_a_gateway() -> None:
    import tempfile

    import httpx

    from oncekey.server.app import make_app
    from oncekey.server.config import settings_from
    from oncekey.server.gateway import Gateway

    with tempfile.TemporaryDirectory() as folder:
        text = f"""
            store = "sqlite:///{folder}/inbox.db"
            sources.files = {{ provider = "dropbox", secret_env = "FILES", targets = ["app"] }}
            targets.app = {{ url = "http://127.0.0.1:9/", allow_private = true }}
        """
        gateway = await Gateway.open(settings_from(text, "oncekey.toml", {"FILES": "s3cret"}))
        maker = gateway.settings.sources["files"].provider
        delivery = sample(maker, url="https://hooks.example.com/hooks/files", body=CHANGE)
        transport = httpx.ASGITransport(app=make_app(gateway))
        async with httpx.AsyncClient(transport=transport, base_url="https://h.example") as http:
            answers = [
                await http.post("/hooks/files", headers=delivery.headers, content=delivery.body)
                for _ in range(2)
            ]
        await gateway.stop(1)
    assert [one.headers["oncekey-outcome"] for one in answers] == ["new", "new"]
    assert len({one.headers["oncekey-event"] for one in answers}) == 2
