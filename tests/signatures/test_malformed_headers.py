"""Headers that official verifiers crash on, and every other malformed one, by its exact code."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.cells import every
from tests.signatures.cases import NOW, OURS, URL, make, signed

from oncekey.signatures import SignedRequest, providers

pytest.importorskip("cryptography")

# Where each provider has its signature and, in a header of its own, its timestamp.
SIGNATURE = {
    "stripe": "Stripe-Signature",
    "github": "X-Hub-Signature-256",
    "shopify": "X-Shopify-Hmac-Sha256",
    "slack": "X-Slack-Signature",
    "twilio": "X-Twilio-Signature",
    "paypal": "PAYPAL-TRANSMISSION-SIG",
    "square": "x-square-hmacsha256-signature",
    "standard-webhooks": "webhook-signature",
    "svix": "svix-signature",
    "zendesk": "X-Zendesk-Webhook-Signature",
    "discord": "X-Signature-Ed25519",
    "paddle": "Paddle-Signature",
    "hubspot": "X-HubSpot-Signature-v3",
    "intercom": "X-Hub-Signature",
    "linear": "Linear-Signature",
    "sendgrid": "X-Twilio-Email-Event-Webhook-Signature",
    "adyen-platform": "HmacSignature",
    "sports-stack": "X-SportsStack-Signature",
}
for _name in OURS:  # of what the table says, the header is in the table too
    _facts = providers()[_name]
    if _facts.scheme == "hmac":
        _header = _facts.settings["header"]
        SIGNATURE.setdefault(_name, _header if isinstance(_header, str) else _header[0])
    elif _facts.scheme == "standard-webhooks":
        SIGNATURE.setdefault(_name, f"{_facts.settings['families'][0]}-signature")
TIMESTAMP = {
    "slack": "X-Slack-Request-Timestamp",
    "paypal": "PAYPAL-TRANSMISSION-TIME",
    "standard-webhooks": "webhook-timestamp",
    "svix": "svix-timestamp",
    "zendesk": "X-Zendesk-Webhook-Signature-Timestamp",
    "discord": "X-Signature-Timestamp",
    "hubspot": "X-HubSpot-Request-Timestamp",
    "sendgrid": "X-Twilio-Email-Event-Webhook-Timestamp",
}
BASE64 = {"AA==", "////", "A" * 44, "0" * 128, "a" * 8192}


def test_the_tables_here_are_complete() -> None:
    """Every provider with a signature in a header is tried."""
    others = {name for name in OURS if providers()[name].scheme in ("token", "jwt", "sns")}
    assert set(SIGNATURE) == set(OURS) - {"mailgun", "adyen"} - others


def with_header(request: SignedRequest, name: str, value: str) -> SignedRequest:
    fields = {key: kept for key, kept in request.headers.items() if key.lower() != name.lower()}
    return request._replace(headers={**fields, name: value})


@pytest.mark.parametrize("name", SIGNATURE)
@every(
    "value",
    [
        *("", " ", "=", ",", ";", "v1", "v1,", "v1=", "t=", "t=,v1=", "\x00", "\r\n", "a" * 8192),
        *("\xe9\xff", "\u0661\u0662", "\ud800", "v1,\xff", "t=1,v1=\xff", "sha256=\u00e9"),
        *("v1,!!!!", "v1,AAA", "v1,AAAA AAAA", "v0=zz", "sha256=" + "g" * 64, "sha256=" + "a" * 63),
        *("ts=1;h1", "ts=1;h1=", "A" * 43, "A" * 44, "====", "AA==", "////", "0" * 128, "-1"),
    ],
)
def test_a_malformed_signature_has_its_code(name: str, value: str) -> None:
    """No exception, no sender, and never a mismatch that would send people to look for a key."""
    verdict = make(name).verify(*with_header(signed(name), SIGNATURE[name], value), now=NOW)

    if name in ("sendgrid", "paypal") and value in BASE64:
        assert verdict.code == "signature_mismatch"  # these two have no length that is always right
    elif name in ("discord", "paystack") and value == "0" * 128:
        assert verdict.code == "signature_mismatch"
    elif name in ("stripe", "paddle", "calendly") and verdict.code != "header_malformed":
        assert verdict.code == "timestamp_missing"
        assert "t=" not in value.split(",", maxsplit=1)[0] or name == "paddle"
    else:
        assert verdict.code == "header_malformed"
    assert verdict.sender is None


@pytest.mark.parametrize("name", [*TIMESTAMP, "stripe", "paddle"])
@every(
    "value",
    [
        *("", " ", "abc", " 1794800000", "1794800000 ", "+1794800000", "-1794800000", "1e9"),
        *("1794800000.0", "1_794_800_000", "0x6af", "01794800000", "NaN", "Infinity", "-0"),
        *("9" * 16, "9" * 4301, "9" * 8000, "\u0661\u0667\u0669\u0664", "\uff11", "1794800000\x00"),
        *("2026-11-16", "2026-13-16T03:10:00Z", "2026-11-16 03:10:00Z", "2026-11-16T03:10:00"),
        *("2026-11-16T03:10:00z", "2026-11-16T25:10:00Z", "0000-11-16T03:10:00Z"),
        *("9999-12-31T23:59:59+99:99", "2026-W47-1T03:10:00Z", "20261116T031000Z"),
    ],
)
def test_a_malformed_timestamp_has_its_code(name: str, value: str) -> None:
    """Digits only, of bounded length: what ``int()`` and ``float()`` forgive is refused."""
    request = signed(name)
    if name in TIMESTAMP:
        request = with_header(request, TIMESTAMP[name], value)
    else:
        header = request.headers[SIGNATURE[name]]
        key, separator = ("t", ",") if name == "stripe" else ("ts", ";")
        rest = header.partition(separator)[2]
        request = with_header(request, SIGNATURE[name], f"{key}={value}{separator}{rest}")
    verdict = make(name).verify(*request, now=NOW)

    assert verdict.code == "timestamp_malformed"


@every("value", [None, True, 1.5, "x", "", [], {}, -1, 10**400, "1" * 5000])
@pytest.mark.parametrize("path", ["timestamp", "token", "signature"])
def test_mailgun_takes_only_text_of_the_right_form(path: str, value: Any) -> None:
    """The block in the body is as hostile as a header."""
    request = signed("mailgun")
    payload = json.loads(request.body)
    payload["signature"][path] = value
    body = json.dumps(payload).encode()
    verdict = make("mailgun").verify("POST", URL, {}, body, now=NOW)

    codes = ["header_malformed"]
    if path == "timestamp":
        codes = ["timestamp_missing"] if value is None else ["timestamp_malformed"]
    if value == 10**400:
        codes = [*codes, "body_malformed"]
    assert verdict.code in codes


@every("block", [None, 1, "x", [], {}, [[]]])
def test_mailgun_without_a_block_is_told_apart(block: Any) -> None:
    """No signature at all, or an empty one."""
    body = json.dumps({"signature": block, "event-data": {"id": "1"}}).encode()

    assert make("mailgun").verify("POST", URL, {}, body, now=NOW).code in (
        "header_missing",
        "timestamp_missing",
    )
    assert make("mailgun").verify("POST", URL, {}, b"[]", now=NOW).code == "header_missing"
    assert make("mailgun").verify("POST", URL, {}, b"\xff", now=NOW).code == "body_malformed"


@every("value", [None, True, 1.5, "x", "", [], {}, -1, 10**400, "1" * 5000])
def test_linear_takes_only_milliseconds_in_the_body(value: Any) -> None:
    """The body is genuine, but its time is not one."""
    import hashlib
    import hmac

    from tests.signatures.cases import SECRET

    body = json.dumps({"webhookTimestamp": value}).encode()
    headers = {
        "Linear-Signature": hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest(),
        "Linear-Delivery": "d-1",
        "Linear-Timestamp": str(int(NOW * 1000)),  # not signed: counts where the body has none
    }
    verdict = make("linear").verify("POST", URL, headers, body, now=NOW)

    expected = "ok" if value is None else "timestamp_malformed"
    assert verdict.code in (expected, "body_malformed" if value == 10**400 else expected)


@every(
    "text",
    ["", "A", "QUJD\n", " QUJD", "QUJ=", "QUJE=", "QU JD", "QUJD====", "Q\xc3JD", "_-_-", "QR=="],
)
def test_only_one_spelling_of_base64_is_read(text: str) -> None:
    """Two spellings of one signature would look like two deliveries to a replay guard."""
    from oncekey.signatures.parsing import decode

    assert decode(text, "base64") is None
    assert decode("QUJD", "base64") == b"ABC"
    assert decode("QQ==", "base64") == decode("QQ", "base64url") == b"A"
    assert decode("QQ==", "base64url") is None


@every("text", ["", "a", "AB", "aB", "zz", "a b", "\uff41\uff42", "ab ", "\u017f0"])
def test_only_one_spelling_of_hex_is_read(text: str) -> None:
    """Lower case, in pairs, ASCII; or upper case where a provider writes it so."""
    from oncekey.signatures.parsing import decode

    assert decode(text, "hex") is None
    assert decode("ab", "hex") == decode("AB", "hex-upper") == b"\xab"
    assert decode("ab", "hex-upper") is None
    assert decode("\u017f0", "hex-upper") is None
