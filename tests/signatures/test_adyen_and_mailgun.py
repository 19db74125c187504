"""Signatures inside the body: Adyen's items, Mailgun's token."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.signatures.cases import ADYEN_ITEM, HEX_KEY, NOW, URL, adyen_body, make, signed

from oncekey.signatures import provider

# The item and signature of the example in Adyen's documentation and its libraries' tests.
KNOWN = {
    "pspReference": "7914073381342284",
    "merchantReference": "TestPayment-1407325143704",
    "merchantAccountCode": "TestMerchant",
    "amount": {"currency": "EUR", "value": 1130},
    "eventCode": "AUTHORISATION",
    "success": "true",
    "additionalData": {"hmacSignature": "coqCmt/IZ4E3CzPvMY8zTjQVL5hYJUiBRg8UU+iCWo0="},
}


def batch(*items: Any) -> bytes:
    return json.dumps(
        {"notificationItems": [{"NotificationRequestItem": i} for i in items]}
    ).encode()


def code(body: bytes) -> str:
    return make("adyen").verify("POST", URL, {}, body).code


def test_adyens_own_example() -> None:
    """Signed by Adyen."""
    verdict = make("adyen").verify("POST", URL, {}, batch(KNOWN))

    assert verdict.ok
    assert verdict.id_is_signed


@pytest.mark.parametrize(
    "path, value",
    [
        ("pspReference", "x"),
        ("originalReference", "x"),
        ("merchantAccountCode", "x"),
        ("merchantReference", "x"),
        ("amount", {"currency": "EUR", "value": 1131}),
        ("amount", {"currency": "USD", "value": 1130}),
        ("eventCode", "REFUND"),
        ("success", "false"),
    ],
)
def test_every_signed_field_counts(path: str, value: Any) -> None:
    """Any of the eight changed is a mismatch."""
    assert code(batch({**KNOWN, path: value})) == "signature_mismatch"


def test_every_item_is_checked() -> None:
    """A genuine first item must not carry a forged second one in."""
    genuine = json.loads(signed("adyen").body)
    assert code(json.dumps(genuine).encode()) == "ok"
    for place in (0, 1):
        forged = json.loads(signed("adyen").body)
        forged["notificationItems"][place]["NotificationRequestItem"]["amount"]["value"] = 1
        assert code(json.dumps(forged).encode()) == "signature_mismatch"
    unsigned = json.loads(signed("adyen").body)
    del unsigned["notificationItems"][1]["NotificationRequestItem"]["additionalData"]
    assert code(json.dumps(unsigned).encode()) == "header_missing"


def test_each_item_has_its_own_id() -> None:
    """Success is part of it: a failed attempt and a later success are two events."""
    body = adyen_body("a", "b:c")
    items = make("adyen").items({}, body)

    assert [one.event_id for one in items] == [
        "a:AUTHORISATION:true",
        "b%3Ac:AUTHORISATION:true",
    ]
    assert items[0].event_type == "AUTHORISATION"
    assert make("adyen").ack == (200, b"[accepted]", "text/plain; charset=utf-8")
    assert make("adyen").retention_seconds == 31 * 86_400


def test_a_boolean_success_is_the_word() -> None:
    """``true`` and ``"true"`` are the same field."""
    assert code(batch({**KNOWN, "success": True})) == "ok"


@pytest.mark.parametrize(
    "body, expected",
    [
        (b"", "body_malformed"),
        (b"{}", "body_malformed"),
        (b"[]", "body_malformed"),
        (b'{"notificationItems": []}', "body_malformed"),
        (b'{"notificationItems": {}}', "body_malformed"),
        (b'{"notificationItems": [1]}', "body_malformed"),
        (b'{"notificationItems": [{"NotificationRequestItem": 1}]}', "body_malformed"),
        (batch({}), "header_missing"),
        (batch({"additionalData": 1}), "header_missing"),
        (batch({"additionalData": {"hmacSignature": 1}}), "header_malformed"),
        (batch({"additionalData": {"hmacSignature": ""}}), "header_malformed"),
        (batch({"additionalData": {"hmacSignature": "\u00e9"}}), "header_malformed"),
        (batch({**KNOWN, "amount": {"value": 1.5, "currency": "EUR"}}), "body_malformed"),
        (batch({**KNOWN, "eventCode": []}), "body_malformed"),
        (batch({**KNOWN, "amount": 7}), "signature_mismatch"),
    ],
)
def test_malformed_items(body: bytes, expected: str) -> None:
    """Anything in the place of anything is a verdict."""
    assert code(body) == expected


def test_keys_are_hex() -> None:
    """The dashboard shows hex digits; anything else is refused without being shown."""
    with pytest.raises(ValueError, match="hex digits") as caught:
        provider("adyen", secret="not-hex-at-all")
    assert "not-hex" not in str(caught.value)
    with pytest.raises(ValueError, match="hex digits"):
        provider("adyen-platform", secret="not-hex-at-all")
    assert provider("adyen", secret=bytes.fromhex(HEX_KEY)).verify("POST", URL, {}, batch(KNOWN)).ok


def test_signing_one_item_makes_a_batch_of_it() -> None:
    """For tests it is enough to write the notification itself."""
    request = make("adyen").sign("POST", URL, {}, json.dumps(ADYEN_ITEM).encode())

    assert make("adyen").verify(*request).ok
    assert (
        json.loads(request.body)["notificationItems"][0]["NotificationRequestItem"][
            "additionalData"
        ]["paymentMethod"]
        == "visa"
    )
    for bad in (b"[]", b"", b'{"notificationItems": 1}', b'{"notificationItems": [{}]}'):
        with pytest.raises(ValueError, match=r"JSON object|NotificationRequestItem"):
            make("adyen").sign("POST", URL, {}, bad)


def test_mailgun_does_not_sign_the_event() -> None:
    """One captured delivery vouches for any event: the verdict says that the id is not signed."""
    request = signed("mailgun")
    payload = json.loads(request.body)
    first = make("mailgun").verify(*request, now=NOW)
    payload["event-data"] = {"id": "forged", "event": "complained"}
    forged = make("mailgun").verify("POST", URL, {}, json.dumps(payload).encode(), now=NOW)

    assert forged.ok
    assert not forged.id_is_signed
    assert forged.event_id == "forged"
    assert forged.signature == first.signature, "which is how a replay guard knows it"


def test_mailgun_binds_timestamp_and_token() -> None:
    """Digits can't be moved from one into the other."""
    payload = json.loads(signed("mailgun").body)
    block = payload["signature"]
    moved = {**block, "timestamp": block["timestamp"] + "1", "token": block["token"][1:]}
    for changed in (moved, {**block, "token": "0" * 50}, {**block, "timestamp": "1794800001"}):
        body = json.dumps({**payload, "signature": changed}).encode()
        assert make("mailgun").verify("POST", URL, {}, body, now=NOW).code in (
            "signature_mismatch",
            "timestamp_malformed",
        )
    as_number = {**payload, "signature": {**block, "timestamp": int(block["timestamp"])}}
    assert make("mailgun").verify("POST", URL, {}, json.dumps(as_number).encode(), now=NOW).ok
    with pytest.raises(ValueError, match="JSON object"):
        make("mailgun").sign("POST", URL, {}, b"[]")
