"""Which event a delivery is: who sent it is part of that, and no unsigned byte is."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")


from oncekey import MemoryStore, PolicyError, aconnect, connect, signature_bound
from oncekey.instrument import Event, EventKind, subscribe
from oncekey.receiver import AsyncWebhookReceiver, AuditEntry, WebhookEvent, WebhookReceiver
from oncekey.signatures import Provider, provider
from oncekey.signatures.base import put_header
from oncekey.signatures.event_fields import event_field
from oncekey.testing import SignedDelivery, sample, sample_provider

JSON = {"Content-Type": "application/json"}


@pytest.fixture(params=["memory", "sqlite", "postgresql", "redis"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty store."""
    if request.param in ("memory", "sqlite"):
        path = f"memory://{tmp_path.name}"
        return path if request.param == "memory" else f"sqlite:///{tmp_path}/w.db"
    fixture = {"postgresql": "pg_url", "redis": "redis_url"}[request.param]
    return str(request.getfixturevalue(fixture))


def test_one_tenants_event_is_not_anothers_duplicate() -> None:
    """Two accounts that map their key to one publisher share a store, and no events."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from oncekey.adcp.signatures import adcp_provider

    key, store, handled = Ed25519PrivateKey.generate(), MemoryStore(), []
    outcomes = []
    for account in ("tenant-a", "tenant-b", "tenant-a"):
        tenant = adcp_provider(
            allowed_hosts="*",
            signing_key=key,
            key_id="k1",
            account=account,
            publisher="seller.example",
        )
        receiver = WebhookReceiver(tenant, store)
        receiver.on()(lambda event: handled.append(event.sender.account))
        delivery = sample(tenant, id="whk_01HW9D3H8FZP2N6R8T0V4X6Z9B")
        outcomes.append(receiver.receive(*delivery).outcome)

    assert outcomes == ["handled", "handled", "duplicate"]
    assert handled == ["tenant-a", "tenant-b"]


# --- ids that nobody signed ----------------------------------------------------------------------

UNSIGNED = ["github", "shopify", "linear", "zendesk", "twilio"]


def fresh_id(delivery: SignedDelivery, name: str) -> SignedDelivery:
    """What an attacker sends: the captured delivery, with other bytes where the id is read."""
    where = event_field(delivery.provider.event_id).parts[0].names[0]  # type: ignore[union-attr,arg-type]
    return with_header(delivery, where, name)


def with_header(delivery: SignedDelivery, name: str, value: str) -> SignedDelivery:
    fields = dict(delivery.headers)
    put_header(fields, name, value)
    return replace(delivery, headers=fields)


def counting(provider: Provider, store: Any, **options: Any) -> tuple[WebhookReceiver, list[str]]:
    receiver, handled = WebhookReceiver(provider, store, **options), list[str]()
    receiver.on()(lambda event: handled.append(event.id))
    return receiver, handled


@pytest.mark.parametrize("name", UNSIGNED)
def test_a_captured_delivery_runs_once_under_any_id(
    name: str, store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By default, on every store: a fresh id is a duplicate that the answer and the log name."""
    delivery = sample(name)
    with connect(store_url) as store:
        receiver, handled = counting(delivery.provider, store)
        first = receiver.receive(*delivery)
        again = receiver.receive(*delivery)
        with caplog.at_level(logging.WARNING):
            attacks = [receiver.receive(*fresh_id(delivery, f"fresh-{n}")) for n in range(3)]
        other = receiver.receive(*delivery.another())

    assert (first.outcome, again.outcome, again.code) == ("handled", "duplicate", "")
    assert {(one.status, one.outcome, one.code) for one in attacks} == {
        (first.status, "duplicate", "replayed")
    }
    assert "came again under another id" in caplog.text
    assert (other.outcome, len(handled)) == ("handled", 2)


@pytest.mark.parametrize("name", ["github", "shopify"])
def test_an_empty_body_that_is_signed_is_a_message_too(name: str) -> None:
    """It is handled once, also under a fresh id, and no fault of the receiver."""
    provider = sample(name).provider
    receiver = WebhookReceiver(provider, MemoryStore())
    handled: list[str] = []
    receiver.on()(lambda event: handled.append(event.id))
    headers = {"Content-Type": "application/json"}
    signed = [
        provider.sign("POST", "https://x.example/h", headers, b"", event_id=f"id-{number}")
        for number in range(2)
    ]
    first, again, fresh = [receiver.receive(*one) for one in (signed[0], *signed)]
    assert (first.outcome, again.outcome) == ("handled", "duplicate")
    assert (fresh.code, len(handled)) == ("replayed", 1)


async def test_a_captured_delivery_runs_once_in_a_loop(store_url: str) -> None:
    """Copies under fresh ids at the same time, on an async receiver: one is handled."""
    delivery, handled = sample("github"), list[str]()
    async with aconnect(store_url) as store:
        receiver = AsyncWebhookReceiver(delivery.provider, store)
        receiver.on()(lambda event: handled.append(event.id))
        copies = [fresh_id(delivery, f"fresh-{n}") for n in range(8)]
        answers = await asyncio.gather(*(receiver.receive(*one) for one in copies))

    # Who runs it under the first id may be another copy than who brought that id.
    assert sorted(one.outcome for one in answers) == [*["duplicate"] * 7, "handled"]
    assert sum(one.code == "replayed" for one in answers) >= 6
    assert len(handled) == 1


@pytest.mark.parametrize("name", UNSIGNED)
def test_a_failed_event_is_not_a_replay_when_it_is_sent_again(name: str) -> None:
    """What was signed stays with its id: the sender's own retry runs, before and after."""
    delivery, fails = sample(name), [True, True, False]
    receiver = WebhookReceiver(delivery.provider, MemoryStore())

    @receiver.on()
    def handle(event: WebhookEvent) -> None:
        if fails.pop(0):
            raise RuntimeError("not yet")

    assert receiver.receive(*delivery).outcome == "failed"
    assert receiver.receive(*delivery).outcome == "failed"
    assert receiver.receive(*delivery.again()).outcome == "handled"
    assert receiver.receive(*fresh_id(delivery, "fresh")).code == "replayed"
    assert receiver.receive(*delivery.again()).outcome == "duplicate"


@pytest.mark.parametrize("name", UNSIGNED)
def test_who_comes_first_under_another_id_can_not_have_the_event_dropped(
    name: str, store_url: str
) -> None:
    """A captured copy came first and its handler failed: the sender's own delivery is handled."""
    delivery, fails, ran = sample(name), [True, True, False], list[str]()
    with connect(store_url) as store:
        receiver = WebhookReceiver(delivery.provider, store)

        @receiver.on()
        def handle(event: WebhookEvent) -> None:
            ran.append(event.id)
            if fails.pop(0):
                raise RuntimeError("not yet")

        early = fresh_id(delivery, "captured-first")
        outcomes = [receiver.receive(*one).outcome for one in (early, delivery, delivery)]
        copies = [receiver.receive(*one) for one in (delivery, early, fresh_id(delivery, "third"))]

    assert outcomes == ["failed", "failed", "handled"]
    assert [(one.outcome, one.code) for one in copies] == [
        ("duplicate", "replayed"),
        ("duplicate", ""),
        ("duplicate", "replayed"),
    ]
    assert len(ran) == 3
    assert len(set(ran)) == 1


async def test_a_message_in_hand_under_another_id_is_not_taken_for_handled(store_url: str) -> None:
    """While the copy that came first is being handled, the sender's own is told to retry."""
    delivery, begun, ends = sample("github"), asyncio.Event(), asyncio.Event()
    async with aconnect(store_url) as store:
        receiver = AsyncWebhookReceiver(delivery.provider, store, wait=0)

        @receiver.on()
        async def handle(event: WebhookEvent) -> None:
            begun.set()
            await ends.wait()

        first = asyncio.create_task(receiver.receive(*fresh_id(delivery, "captured-first")))
        await begun.wait()
        meanwhile = await receiver.receive(*delivery)
        ends.set()
        answers = [await first, await receiver.receive(*delivery)]

    assert (meanwhile.status, meanwhile.outcome) == (503, "in_flight")
    assert [(one.outcome, one.code) for one in answers] == [
        ("handled", ""),
        ("duplicate", "replayed"),
    ]


def test_a_captured_message_is_no_late_event_under_a_fresh_id() -> None:
    """After its window, and while it is still remembered: not handled under another id."""
    clock = [1_794_800_000.0]
    delivery = sample("github")
    receiver, handled = counting(delivery.provider, MemoryStore(clock=lambda: clock[0]))
    assert receiver.receive(*delivery).outcome == "handled"
    clock[0] += delivery.provider.retention_seconds + 60  # type: ignore[union-attr]
    assert receiver.receive(*fresh_id(delivery, "fresh")).code == "replayed"
    assert len(handled) == 1


def test_the_id_beside_a_signed_message_is_not_stored_in_the_clear(tmp_path: Path) -> None:
    """Stores keep no names of keys, and the guard's record of an id is none either."""
    delivery = sample("github")
    with connect(f"sqlite:///{tmp_path}/w.db") as store:
        receiver, _ = counting(delivery.provider, store)
        receiver.receive(*fresh_id(delivery, "a-name-to-look-for"))
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"oncekey" in kept
    assert b"a-name-to-look-for" not in kept
    assert b"a-name-to-look-for".hex().encode() not in kept


@pytest.mark.parametrize("name", ["zendesk", "linear", "mailgun", "paypal"])
def test_a_retry_that_is_signed_anew_is_a_duplicate(name: str) -> None:
    """Another signed message under the same id: the id still counts."""
    delivery = sample(name, now=1_794_800_000.0)
    receiver, handled = counting(delivery.provider, MemoryStore())
    later = replace(delivery, now=1_794_800_030.0).again()
    assert (later.headers, later.body) != (delivery.headers, delivery.body)

    assert receiver.receive(*delivery, now=delivery.now).outcome == "handled"
    assert receiver.receive(*later, now=later.now).outcome == "duplicate"
    assert len(handled) == 1


def test_the_guard_can_be_switched_off() -> None:
    """An explicit word, for senders that repeat a body as another event."""
    delivery = sample("github")
    receiver, handled = counting(delivery.provider, MemoryStore(), replay_guard=False)
    for n in range(3):
        assert receiver.receive(*fresh_id(delivery, f"fresh-{n}")).outcome == "handled"
    assert len(handled) == 3
    with pytest.raises(PolicyError, match="per-type"):
        WebhookReceiver(delivery.provider, MemoryStore(), replay_guard="sometimes")


def test_one_body_as_several_types_is_handled_once_each_where_that_is_asked_for() -> None:
    """Shopify names the topic in a header: strict by default, bounded by one's handlers if not."""
    delivery = sample("shopify", type="orders/create")
    topics = ["orders/create", "orders/paid", "invented/1", "invented/2", "orders/paid"]
    handled: dict[str, list[str]] = {}
    for mode in (None, "per-type"):
        receiver = WebhookReceiver(delivery.provider, MemoryStore(), replay_guard=mode)
        ran = handled.setdefault(str(mode), [])
        for types in (("orders/create",), ("orders/paid",), ()):
            receiver.on(*types)(lambda event, ran=ran: ran.append(event.type))
        for number, topic in enumerate(topics):
            copy = with_header(delivery, "X-Shopify-Topic", topic)
            receiver.receive(*fresh_id(copy, f"fresh-{number}"))
    assert handled["None"] == ["orders/create"]
    assert handled["per-type"] == ["orders/create", "orders/paid", "invented/1"]


def test_replays_under_fresh_ids_are_limited_as_one_key() -> None:
    """The limit counts what was signed, so that a flood of ids is told to slow down."""
    delivery = sample("github")
    receiver, _ = counting(delivery.provider, MemoryStore(), per_key=(2, 60))
    statuses = [receiver.receive(*fresh_id(delivery, f"fresh-{n}")).status for n in range(4)]
    assert statuses == [200, 200, 429, 429]


def test_a_replay_is_an_event_and_in_the_audit() -> None:
    """Who listens hears of it, and the audit has the reason."""
    delivery, entries, events = sample("github"), list[AuditEntry](), list[Event]()
    receiver, _ = counting(delivery.provider, MemoryStore(), audit=entries.append)
    with subscribe(events.append):
        for n in range(2):
            receiver.receive(*fresh_id(delivery, f"fresh-{n}"))
    assert [(one.outcome, one.code) for one in entries] == [
        ("first", ""),
        ("duplicate", "replayed"),
    ]
    assert [one.error for one in events if one.kind is EventKind.CONFLICT] == ["replayed"]


def test_a_key_of_the_payload_needs_the_guard_only_where_the_body_is_unsigned() -> None:
    """``key=`` is made of the body: GitHub signs that, Mailgun does not."""
    github = sample("github")
    receiver, handled = counting(github.provider, MemoryStore(), key=lambda body: body["id"])
    assert receiver.receive(*github).outcome == "handled"
    again = receiver.receive(*fresh_id(github, "fresh"))
    assert (again.outcome, again.code) == ("duplicate", "")

    mailgun = sample("mailgun")
    key = lambda body: body["event-data"]["id"]  # noqa: E731
    receiver, handled = counting(mailgun.provider, MemoryStore(), key=key)
    assert receiver.receive(*mailgun).outcome == "handled"
    forged = mailgun.body.replace(key(json.loads(mailgun.body)).encode(), b"forged")
    assert receiver.receive(*replace(mailgun, body=forged)).code == "replayed"
    assert len(handled) == 1


# --- more than one right signature ---------------------------------------------------------------


def test_the_second_form_of_an_ecdsa_signature_is_the_same_message() -> None:
    """``(r, n - s)`` is right wherever ``(r, s)`` is, and names no other event."""
    from cryptography.hazmat.primitives.asymmetric import utils

    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    header = "X-Twilio-Email-Event-Webhook-Signature"
    # No id, as for senders that have none: what was signed is the key.
    delivery = sample("sendgrid", event_id=None, batch=None)
    r, s = utils.decode_dss_signature(base64.b64decode(delivery.headers[header]))
    second = base64.b64encode(utils.encode_dss_signature(r, order - s)).decode()
    copy = replace(delivery, headers={**delivery.headers, header: second})
    receiver, _ = counting(delivery.provider, MemoryStore())

    assert [receiver.receive(*one).outcome for one in (delivery, copy)] == ["handled", "duplicate"]
    verdicts = [delivery.provider.verify(*one) for one in (delivery, copy)]
    assert verdicts[0].signature != verdicts[1].signature
    assert len({one.message_digest for one in verdicts}) == 1
    assert (
        len({signature_bound(one.body, delivery.provider.verify(*one)) for one in (delivery, copy)})
        == 1
    )


def test_one_of_two_signatures_left_out_is_the_same_message() -> None:
    """While a secret is rolled the header carries a signature for each; either alone is right."""
    stripe = provider("stripe", secret="new", previous="old", event_id=None)
    body, now = b'{"type": "paid"}', 1_794_800_000.0
    both = [provider("stripe", secret=one, event_id=None) for one in ("new", "old")]
    signed = [one.sign("POST", "https://x.example/", {}, body, now=now) for one in both]
    values = [one.headers["Stripe-Signature"] for one in signed]
    stamp = values[0].partition(",")[0]
    forms = [*values, ",".join([stamp, *(one.partition(",")[2] for one in values)])]
    receiver, handled = counting(stripe, MemoryStore())
    outcomes = [
        receiver.receive(
            "POST", "https://x.example/", {**JSON, "Stripe-Signature": one}, body, now=now
        ).outcome
        for one in forms
    ]
    assert outcomes == ["handled", "duplicate", "duplicate"]
    assert len(handled) == 1


def test_a_colon_moved_between_fields_of_adyen_makes_no_other_event() -> None:
    """Fields are joined with colons: only the merchant's own reference may hold one."""
    delivery = sample("adyen")
    payload = json.loads(delivery.body)
    item = payload["notificationItems"][0]["NotificationRequestItem"]
    item["merchantReference"] = "order:1"
    captured = delivery.provider.sign("POST", delivery.url, JSON, json.dumps(payload).encode())
    assert delivery.provider.verify(*captured).ok
    moved = json.loads(captured.body)
    item = moved["notificationItems"][0]["NotificationRequestItem"]
    item["pspReference"] += ":" + item["originalReference"]
    item.update(
        originalReference="TestMerchant", merchantAccountCode="order", merchantReference="1"
    )
    verdict = delivery.provider.verify("POST", delivery.url, JSON, json.dumps(moved).encode())
    assert verdict.code == "body_malformed"
    with pytest.raises(PolicyError, match="signs pspReference"):
        sample_provider("adyen", event_id="NotificationRequestItem.additionalData.id")
