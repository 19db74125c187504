"""AdCP webhooks signed by the legacy HMAC."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import pytest

from oncekey.adcp.signatures import adcp_hmac_provider, rejection_headers
from oncekey.errors import PolicyError
from oncekey.signatures import VerifiedWebhookSender, provider
from oncekey.signatures.base import UnreadableError

NOW = 1_790_000_000
URL = "https://buyer.example.com/hooks/adcp"
EVENT = "whk_01HW9D3H8FZP2N6R8T0V4X6Z9B"
BODY = json.dumps({"idempotency_key": EVENT}).encode()
SECRET = "a secret of the seller, 32 bytes or more"
OLD = "the secret before that one, also long enough"


def headers(
    body: bytes = BODY, stamp: str = str(NOW), secret: str = SECRET, **other: str
) -> dict[str, str]:
    digest = hmac.new(secret.encode(), f"{stamp}.".encode() + body, hashlib.sha256).hexdigest()
    return {"X-AdCP-Signature": f"sha256={digest}", "X-AdCP-Timestamp": stamp, **other}


def code(fields: Any, body: bytes = BODY, now: float = NOW, **options: Any) -> str:
    found = adcp_hmac_provider(secret=SECRET, **options).verify("POST", URL, fields, body, now=now)
    assert found.ok == (found.code == "ok") == (found.sender is not None)
    assert found.ok or found.message
    return found.code


def test_a_right_delivery_says_who_sent_what() -> None:
    """The verdict carries the sender that was configured, and the event's id."""
    found = adcp_hmac_provider(secret=SECRET, account="eu", publisher="seller.example")
    verdict = found.verify("POST", URL, headers(), BODY, now=NOW)
    assert verdict.ok
    assert (verdict.event_id, verdict.timestamp, verdict.nonce) == (EVENT, NOW, None)
    assert verdict.sender == VerifiedWebhookSender(
        "adcp-hmac", account="eu", publisher="seller.example"
    )
    assert verdict.signature == headers()["X-AdCP-Signature"].removeprefix("sha256=")
    assert found.id_is_signed
    assert found.retention_seconds == 604_800


def test_it_is_in_the_table() -> None:
    """provider("adcp-hmac", ...) makes the same provider."""
    found = provider("adcp-hmac", SECRET, previous=OLD, account="eu", tolerance=10)
    assert found.verify("POST", URL, headers(secret=OLD), BODY, now=NOW).ok
    assert found.verify("POST", URL, headers(), BODY, now=NOW + 11).code == "timestamp_too_old"


@pytest.mark.parametrize("name", ["Signature", "signature-input"])
def test_headers_of_the_other_mode_are_a_mismatch(name: str) -> None:
    """Any header of RFC 9421 is refused as such, with or without the HMAC beside it."""
    assert code(headers(**{name: "sig1=()"})) == "webhook_mode_mismatch"
    assert code({name: "sig1=()"}) == "webhook_mode_mismatch"


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"X-AdCP-Signature": None}, "header_missing"),
        ({"X-AdCP-Timestamp": None}, "timestamp_missing"),
        ({"X-AdCP-Signature": ""}, "header_malformed"),
        ({"X-AdCP-Signature": "sha256="}, "header_malformed"),
        ({"X-AdCP-Signature": "sha256=c4faf8"}, "header_malformed"),
        ({"X-AdCP-Signature": "sha512=" + "0" * 64}, "header_malformed"),
        ({"X-AdCP-Signature": "sha256=sha256=" + "0" * 64}, "header_malformed"),
        ({"X-AdCP-Signature": "sha256=" + "A" * 64}, "header_malformed"),
        ({"X-AdCP-Signature": "sha256=" + "0" * 64}, "signature_mismatch"),
        ({"X-AdCP-Timestamp": "not-a-number"}, "timestamp_malformed"),
        ({"X-AdCP-Timestamp": f" +{NOW}"}, "timestamp_malformed"),
        ({"X-AdCP-Timestamp": f"{NOW}.0"}, "timestamp_malformed"),
        ({"X-AdCP-Timestamp": str(NOW + 1)}, "signature_mismatch"),
    ],
)
def test_a_header_that_is_wrong_gets_its_code(change: dict[str, Any], expected: str) -> None:
    """Every fault of the two headers has a code of its own."""
    fields = {name: value for name, value in {**headers(), **change}.items() if value is not None}
    assert code(fields) == expected


@pytest.mark.parametrize(
    "stamp, expected",
    [
        (NOW - 300, "ok"),
        (NOW - 301, "timestamp_too_old"),
        (NOW + 300, "ok"),
        (NOW + 301, "timestamp_in_future"),
        (0, "timestamp_too_old"),
    ],
)
def test_the_clocks_may_differ_by_five_minutes(stamp: int, expected: str) -> None:
    """300 s either way, to the second."""
    assert code(headers(stamp=str(stamp))) == expected


def test_the_body_is_signed_as_it_came() -> None:
    """The same JSON in other bytes is another body."""
    assert code(headers(), BODY + b"\n") == "signature_mismatch"


def test_the_previous_secret_still_counts() -> None:
    """While a secret is changed, both are accepted, and no other."""
    assert code(headers(secret=OLD)) == "signature_mismatch"
    assert code(headers(secret=OLD), previous=OLD) == "ok"
    assert code(headers(secret="x" * 32), previous=OLD) == "signature_mismatch"


def test_names_sent_twice_are_malformed_not_mismatched() -> None:
    """The signature is right, and the body is what is wrong."""
    body = b'{"status":"approved","status":"rejected"}'
    assert code(headers(body), body) == "webhook_body_malformed"


@pytest.mark.parametrize("body", [b"", b"{}", b'{"idempotency_key":"short"}'])
def test_without_an_id_the_signature_is_still_right(body: bytes) -> None:
    """What to do without an id is the receiver's to say."""
    found = adcp_hmac_provider(secret=SECRET)
    verdict = found.verify("POST", URL, headers(body), body, now=NOW)
    assert verdict.ok
    assert verdict.event_id is None
    with pytest.raises(UnreadableError, match="no envelope"):
        found.items({}, body)


@pytest.mark.parametrize(
    "options",
    [
        {"secret": ""},
        {"secret": "x" * 31},
        {"secret": "x" * 32},
        {"secret": bytes(32)},
        {"secret": SECRET, "previous": "short"},
        {"secret": None},
    ],
)
def test_a_weak_secret_is_refused_at_once(options: dict[str, Any]) -> None:
    """Secrets that are short, empty or of one repeated byte never sign anything."""
    with pytest.raises(PolicyError) as caught:
        adcp_hmac_provider(**options)
    assert SECRET not in str(caught.value)


def test_signing_gives_what_verifies() -> None:
    """What sign makes is accepted, and is the HMAC over timestamp and body."""
    found = adcp_hmac_provider(secret=SECRET)
    request = found.sign("POST", URL, {}, BODY, now=NOW)
    assert found.verify(*request, now=NOW).ok
    lower = {name.lower(): value for name, value in request.headers.items()}
    expected = {name.lower(): value for name, value in headers().items()}
    assert {name: lower[name] for name in expected} == expected


def test_a_rejection_is_answered_as_an_invalid_signature() -> None:
    """AdCP knows no codes for the HMAC's faults, so one that it knows is sent."""
    verdict = adcp_hmac_provider(secret=SECRET).verify("POST", URL, {}, BODY, now=NOW)
    assert rejection_headers(verdict) == {
        "WWW-Authenticate": 'Signature error="webhook_signature_invalid"'
    }
