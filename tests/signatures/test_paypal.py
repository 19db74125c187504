"""PayPal: the certificate is fetched from PayPal alone, seldom, and believed only while valid."""

from __future__ import annotations

import zlib

import pytest
from tests.signatures.cases import CERT_URL, NOW, URL, WEBHOOK_ID, keys, make, signed

from oncekey.errors import OncekeyError
from oncekey.signatures import CertificateCache, provider
from oncekey.testing import ManualClock

pytest.importorskip("cryptography")


class Fetches:
    """Remembers what was asked for."""

    def __init__(self, answer: bytes | Exception | None = None) -> None:
        self.urls: list[str] = []
        self.answer = keys().certificate if answer is None else answer

    def __call__(self, url: str) -> bytes:
        self.urls.append(url)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def verify(fetch: object, **headers: str) -> str:
    request = signed("paypal")
    fields = {**request.headers, **{name.replace("_", "-"): one for name, one in headers.items()}}
    receiver = provider("paypal", webhook_id=WEBHOOK_ID, fetch=fetch)
    return receiver.verify("POST", URL, fields, request.body, now=NOW).code


@pytest.mark.parametrize(
    "url",
    [
        "http://api.paypal.com/v1/notifications/certs/CERT-1",
        "https://api.paypal.com.evil.example/v1/notifications/certs/CERT-1",
        "https://evil.example/v1/notifications/certs/CERT-1",
        "https://evil.example/?https://api.paypal.com/v1/notifications/certs/CERT-1",
        "https://evilpaypal.com/v1/notifications/certs/CERT-1",
        "https://paypal.com@evil.example/v1/notifications/certs/CERT-1",
        "https://api.paypal.com:444/v1/notifications/certs/CERT-1",
        "https://u@api.paypal.com/v1/notifications/certs/CERT-1",
        "https://api.paypal.com/v1/notifications/certs/../../upload",
        "https://api.paypal.com/v1/notifications/certs/CERT-1?x=1",
        "https://api.paypal.com/v1/notifications/certs/CERT-1#x",
        "https://api.paypal.com/uploads/cert.pem",
        "https://api.paypal.com\\@evil.example/v1/notifications/certs/CERT-1",
        "https://api.paypal.com/v1/notifications/certs/CERT-1\n",
        "https://API.PAYPAL.COM\u2025evil.example/v1/notifications/certs/CERT-1",
        "file:///etc/passwd",
        "",
        "\ud800",
    ],
)
def test_only_paypals_own_certificates_are_fetched(url: str) -> None:
    """The URL comes from the delivery, so anything else would be a request forged by a stranger."""
    fetch = Fetches()

    assert verify(fetch, PAYPAL_CERT_URL=url) == "key_unknown"
    assert fetch.urls == []


@pytest.mark.parametrize("host", ["api.paypal.com", "api.sandbox.paypal.com", "api-m.paypal.com"])
def test_paypals_hosts_are_fetched(host: str) -> None:
    """Live and sandbox."""
    fetch = Fetches()
    url = f"https://{host}/v1/notifications/certs/CERT-1"

    assert verify(fetch, PAYPAL_CERT_URL=url) == "ok"
    assert fetch.urls == [url]


@pytest.mark.parametrize(
    "answer",
    [OSError("no route"), RuntimeError("odd"), b"", b"no certificate", b"x" * 100_000],
)
def test_a_certificate_that_can_not_be_had_is_a_verdict(answer: bytes | Exception) -> None:
    """Whatever the fetch does, verify says ``key_unknown``, and the sender will try again."""
    assert verify(Fetches(answer)) == "key_unknown"


def test_an_expired_certificate_is_not_believed() -> None:
    """Its dates are held against the clock."""
    assert verify(Fetches(keys().expired)) == "key_unknown"


def test_a_certificate_is_fetched_once() -> None:
    """And again only when it was kept for a day; a failure is kept for a minute."""
    clock, fetch = ManualClock(), Fetches()
    cache = CertificateCache(fetch, clock=clock)
    for _ in range(3):
        assert verify(cache) == "ok"
    assert len(fetch.urls) == 1
    clock.advance(86_400)
    assert verify(cache) == "ok"
    assert len(fetch.urls) == 2

    failing = Fetches(OSError("down"))
    cache = CertificateCache(failing, clock=clock)
    for _ in range(3):
        assert verify(cache) == "key_unknown"
    assert len(failing.urls) == 1
    clock.advance(60)
    failing.answer = keys().certificate
    assert verify(cache) == "ok"


def test_strangers_can_not_make_us_fetch_without_end() -> None:
    """Ten fetches a minute, however many certificates are named; the known one still works."""
    clock, fetch = ManualClock(), Fetches()
    cache = CertificateCache(fetch, clock=clock)
    assert verify(cache) == "ok"
    fetch.answer = OSError("404")
    for number in range(500):
        assert verify(cache, PAYPAL_CERT_URL=f"{CERT_URL}{number}") == "key_unknown"
    assert len(fetch.urls) == 10
    for minute in range(10):
        clock.advance(60)
        for number in range(20):
            verify(cache, PAYPAL_CERT_URL=f"{CERT_URL}-{minute}-{number}")
    assert len(cache._entries) <= 32
    assert verify(cache) == "ok"
    assert len(fetch.urls) == 110


def test_a_forged_crc32_is_why_the_body_counts_as_unsigned() -> None:
    """Four chosen bytes give any checksum: the verdict is ok, and says the id is not signed."""
    request = signed("paypal")
    forged = b'{"id": "WH-FORGED", "pad": "'
    body = _with_crc(forged, b'"}', zlib.crc32(request.body))
    verdict = make("paypal", event_id=None).verify("POST", URL, request.headers, body, now=NOW)

    assert verdict.ok
    assert b"WH-FORGED" in body
    assert not make("paypal").id_is_signed
    assert not make("paypal").verify(*request, now=NOW).id_is_signed


def _with_crc(before: bytes, after: bytes, wanted: int) -> bytes:
    """Put four bytes between so that the CRC32 is ``wanted``: it is linear, so solve for bits."""
    base = zlib.crc32(before + bytes(4) + after)
    rows = []
    for bit in range(32):
        four = (1 << bit).to_bytes(4, "little")
        rows.append((zlib.crc32(before + four + after) ^ base, 1 << bit))
    target, chosen = base ^ wanted, 0
    for column in range(32):
        pivot = next(i for i, (row, _) in enumerate(rows) if row >> column & 1)
        row, mask = rows.pop(pivot)
        rows = [(r ^ row, m ^ mask) if r >> column & 1 else (r, m) for r, m in rows]
        if target >> column & 1:
            target, chosen = target ^ row, chosen ^ mask
    body = before + chosen.to_bytes(4, "little") + after
    assert zlib.crc32(body) == wanted
    return body


@pytest.mark.parametrize(
    "name, value, code",
    [
        ("PAYPAL_AUTH_ALGO", "SHA1withRSA", "header_malformed"),
        ("PAYPAL_AUTH_ALGO", "none", "header_malformed"),
        ("PAYPAL_TRANSMISSION_ID", "a|b", "header_malformed"),
        ("PAYPAL_TRANSMISSION_ID", "", "header_malformed"),
        ("PAYPAL_TRANSMISSION_ID", "other", "signature_mismatch"),
    ],
)
def test_other_headers(name: str, value: str, code: str) -> None:
    """One algorithm; no separator in the id; and the id is signed."""
    assert verify(Fetches(), **{name: value}) == code


def test_what_it_needs_is_said() -> None:
    """No shared secret, but the webhook's id; and a private key of one's own to sign."""
    with pytest.raises(ValueError, match="webhook_id"):
        provider("paypal")
    with pytest.raises(ValueError, match="no shared secret"):
        provider("paypal", secret="x", webhook_id=WEBHOOK_ID)
    with pytest.raises(OncekeyError, match="signing_key"):
        provider("paypal", webhook_id=WEBHOOK_ID).sign("POST", URL, {}, b"{}")
