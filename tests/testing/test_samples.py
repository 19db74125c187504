"""Samples: every provider's deliveries, signed, for receivers to take."""

from __future__ import annotations

import json
import sys

import pytest

from oncekey.errors import PolicyError
from oncekey.receiver import WebhookReceiver
from oncekey.signatures import hmac_provider, provider, providers
from oncekey.testing import SignedDelivery, deliver, sample, sample_provider, signed

pytest.importorskip("cryptography")

NAMES = list(providers())
WITHOUT_ID = {name for name in NAMES if not providers()[name].event_id}
HASHED_ID = {name for name in NAMES if (providers()[name].event_id or "").startswith("sha256:")}
WITHOUT_TYPE = {name for name in NAMES if not providers()[name].event_type}


@pytest.mark.parametrize("name", NAMES)
def test_every_provider_has_a_sample_that_a_receiver_handles_once(name: str) -> None:
    """A sample, a retry of it and another event: handled, duplicate, handled."""
    delivery = sample(name, id="evt_1234567890123456")
    assert delivery.provider is not None
    receiver = WebhookReceiver(delivery.provider, "memory://")
    seen: list[tuple[str, str]] = []
    receiver.on()(lambda event: seen.append((event.id, event.type)))

    outcomes = [
        receiver.receive(*one).outcome
        for one in (delivery, delivery.again(), delivery.another(), delivery)
    ]

    # By AdCP's rules the very same bytes are no retry: they are refused as replayed.
    same_bytes = "rejected" if name == "adcp" else "duplicate"
    if providers()[name].repeats:  # each delivery is handled
        assert outcomes == ["handled"] * 4
    else:
        assert outcomes == ["handled", "duplicate", "handled", same_bytes]
        assert len({found for found, _ in seen}) == 2
    assert bool(seen[0][1]) == (name not in WITHOUT_TYPE)
    if name not in WITHOUT_ID:
        assert seen[0][0] == delivery.event_id
    receiver.close()


@pytest.mark.parametrize("name", [n for n in NAMES if n not in WITHOUT_TYPE | {"aws-sns"}])
def test_a_sample_has_the_type_that_was_asked_for(name: str) -> None:
    """``type=`` stands where the provider reads it."""
    delivery = sample(name, type="thing.happened")
    assert delivery.provider is not None
    [item] = delivery.provider.items(delivery.headers, delivery.body)

    assert item.event_type == "thing.happened"


@pytest.mark.parametrize("name", [n for n in NAMES if n not in WITHOUT_ID | HASHED_ID])
def test_a_sample_has_the_id_that_was_asked_for(name: str) -> None:
    """``id=`` is the event's id, or the part of it that the sender chooses."""
    found = sample(name, id="evt_1234567890123456").event_id

    assert found is not None
    assert found.split(":")[0] == "evt_1234567890123456"


@pytest.mark.parametrize("name", NAMES)
def test_samples_differ_unless_their_id_is_given(name: str) -> None:
    """Without an id each sample is another event."""
    one, other = sample(name), sample(name)

    assert (one.headers, one.body) != (other.headers, other.body)
    if name not in WITHOUT_ID:
        assert one.event_id != other.event_id


@pytest.mark.parametrize("name", NAMES)
def test_a_retry_is_signed_for_its_own_time_and_place(name: str) -> None:
    """``again`` signs anew: where the URL or the time is signed, the copy still verifies."""
    delivery = sample(name).again("https://other.example/hooks?a=b")
    assert delivery.provider is not None
    verdict = delivery.provider.verify(*delivery)

    assert verdict.ok, verdict
    assert delivery.url.startswith("https://other.example/hooks?a=b")


def test_samples_are_signed_by_the_provider_that_is_passed() -> None:
    """An app has its own secret: the sample of its provider fits it, and no other."""
    mine = provider("stripe", secret="whsec_mine", account="shop")
    delivery = sample(mine, type="invoice.paid", id="evt_1", body={"amount": 12}, url="/hooks")

    assert delivery.provider is mine
    assert mine.verify(*delivery).event_id == "evt_1"
    assert json.loads(delivery.body) == {"amount": 12, "type": "invoice.paid", "id": "evt_1"}
    assert delivery.url == "https://testserver/hooks"
    assert sample("stripe", secret="whsec_mine").provider != mine
    assert mine.verify(*sample("stripe", secret="whsec_mine")).ok
    assert not sample_provider("stripe").verify(*delivery).ok


def test_a_provider_of_ones_own_is_as_easy() -> None:
    """``hmac_provider`` with a body of the kit's or of one's own; ids in bodies and in headers."""
    acme = hmac_provider(
        "acme",
        secret="s3cret",
        header="X-Acme-Signature",
        signed="{timestamp}.{body}",
        timestamp_header="X-Acme-Time",
        event_id="data.list[1].id",
        event_type="header:X-Acme-Event",
    )
    made = sample(acme, id="e-1", type="order.paid")
    assert acme.verify(*made).event_id == "e-1"
    assert acme.items(made.headers, made.body)[0].event_type == "order.paid"
    assert made.another("e-2").event_id == "e-2"

    own = signed(acme, {"data": {"list": [0, {"id": "e-3"}]}}, headers={"X-Acme-Event": "x"})
    assert own.event_id == "e-3"
    assert own.another("e-4").event_id == "e-4"
    assert acme.verify(*signed(acme, b'{"data":{"list":[0,{"id":"e-5"}]}}')).event_id == "e-5"

    plain = hmac_provider("plain", secret="s", header="X-Sig", event_id="header:X-Id", batch=None)
    text = signed(plain, "not json", event_id="e-6", headers={"Content-Type": "text/plain"})
    assert (text.event_id, text.another("e-7").event_id) == ("e-6", "e-7")


def test_batches_get_their_id_in_their_first_event() -> None:
    """A provider that sends lists is sampled with a list of one."""
    acme = hmac_provider(
        "acme", secret="s", header="X-Sig", event_id="id", event_type="kind", batch="events"
    )
    delivery = sample(acme, id="e-1")

    assert json.loads(delivery.body) == {"events": [{"kind": "sample.created", "id": "e-1"}]}


def test_samples_for_a_clock_of_ones_own() -> None:
    """``now=`` is when it is signed, and what a receiver is told by ``deliver``."""
    delivery = sample("stripe", now=1_700_000_000.0)
    receiver = WebhookReceiver(sample_provider("stripe"), "memory://")
    receiver.on()(lambda event: None)

    assert receiver.receive(*delivery).code == "timestamp_too_old"
    assert deliver(receiver, delivery).outcome == "handled"
    assert deliver(receiver, delivery.again()).outcome == "duplicate"
    receiver.close()


def test_who_can_not_sign_sends_the_same_bytes_again() -> None:
    """With a public key only, or without a provider, a copy is a copy."""
    made = sample("discord")
    public = sample_provider("discord", secret=_public(), event_type="event.type")
    theirs = SignedDelivery(*made, provider=public)

    assert theirs.again() == theirs
    assert SignedDelivery(*made).again().body == made.body
    assert SignedDelivery(*made).event_id is None
    with pytest.raises(PolicyError, match="no provider"):
        SignedDelivery(*made).another()


def _public() -> str:
    from oncekey.testing._keys import keys_of

    return str(keys_of("discord")["secret"])


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: sample("strype"), "no provider 'strype'"),
        (lambda: sample("stripe", tolerence=3), "no option tolerence"),
        (lambda: sample("adcp-hmac", id="short"), "takes no id such as 'short'"),
        (lambda: signed(sample_provider("mailgun"), b"[1]"), "signs inside the body"),
        (lambda: signed(sample_provider("stripe"), b"{}", event_id="x"), "from the body at id"),
        (lambda: signed(sample_provider("stripe"), b"<xml/>").another(), "no JSON"),
    ],
)
def test_wrong_samples_are_refused_with_what_to_do(call: object, says: str) -> None:
    """A sample that no receiver could take is not made."""
    with pytest.raises(PolicyError, match=says):
        call()  # type: ignore[operator]


def test_key_pairs_name_the_extra_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``cryptography`` shared secrets work, and the rest says what to install."""
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)

    assert sample("stripe").event_id
    for name in ("discord", "sendgrid", "paypal", "adcp"):
        with pytest.raises(ImportError, match=r"oncekey\[crypto\]"):
            sample(name)
