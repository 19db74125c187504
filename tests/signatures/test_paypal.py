"""PayPal: the certificate is fetched from PayPal alone, seldom, and believed only while valid."""

from __future__ import annotations

import threading
import zlib
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import HTTPError

import pytest
from tests.signatures.cases import CERT_URL, NOW, URL, WEBHOOK_ID, keys, make, signed

from oncekey import MemoryStore
from oncekey.errors import OncekeyError
from oncekey.receiver import WebhookReceiver
from oncekey.signatures import CertificateCache, Provider, provider
from oncekey.signatures.certificates import fetch_certificate
from oncekey.testing import ManualClock
from oncekey.testing._keys import issued

pytest.importorskip("cryptography")

JSON = {"Content-Type": "application/json"}


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


def receiver(fetch: object) -> Provider:
    """One that trusts the tests' own root, by itself or through its cache."""
    trust = {} if isinstance(fetch, CertificateCache) else {"trust": keys().root}
    return provider("paypal", webhook_id=WEBHOOK_ID, fetch=fetch, accept_unsigned="body", **trust)


def verify(fetch: object, **headers: str) -> str:
    request = signed("paypal")
    fields = {**request.headers, **{name.replace("_", "-"): one for name, one in headers.items()}}
    return receiver(fetch).verify("POST", URL, fields, request.body, now=NOW).code


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


@pytest.mark.parametrize("host", ["api", "api-m", "api.sandbox", "api-m.sandbox"])
def test_paypals_hosts_are_fetched(host: str) -> None:
    """Live and sandbox, whose certificate has another name."""
    fetch = Fetches()
    url = f"https://{host}.paypal.com/v1/notifications/certs/CERT-1"

    assert verify(fetch, PAYPAL_CERT_URL=url) == ("key_unknown" if "sandbox" in host else "ok")
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
    cache = CertificateCache(fetch, clock=clock, trust=keys().root)
    for _ in range(3):
        assert verify(cache) == "ok"
    assert len(fetch.urls) == 1
    clock.advance(86_400)
    assert verify(cache) == "ok"
    assert len(fetch.urls) == 2

    failing = Fetches(OSError("down"))
    cache = CertificateCache(failing, clock=clock, trust=keys().root)
    for _ in range(3):
        assert verify(cache) == "key_unknown"
    assert len(failing.urls) == 1
    clock.advance(60)
    failing.answer = keys().certificate
    assert verify(cache) == "ok"


def test_strangers_can_not_make_us_fetch_without_end() -> None:
    """So many fetches a minute, whatever is named; the known certificate still works."""
    clock, fetch = ManualClock(), Fetches()
    cache = CertificateCache(fetch, clock=clock, trust=keys().root, per_minute=10)
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


class Site:
    """PayPal's: one certificate, and nothing at other URLs."""

    def __init__(self) -> None:
        self.urls: list[str] = []

    def __call__(self, url: str) -> bytes:
        self.urls.append(url)
        if url != CERT_URL:
            raise OSError("404")
        return keys().certificate


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("host", ["api.paypal.com", "api.sandbox.paypal.com", "x.paypal.com"])
def test_forged_urls_do_not_starve_the_true_one(host: str, copies: int) -> None:
    """Of another host they cost it nothing; of its own, it is soon the one named most often."""
    site = Site()
    cache = CertificateCache(site, clock=ManualClock(), trust=keys().root)
    for number in range(300):
        forged = f"https://{host}/v1/notifications/certs/CERT-{number}"
        for _ in range(copies):
            assert verify(cache, PAYPAL_CERT_URL=forged) == "key_unknown"
    assert len(site.urls) <= 60
    codes = [verify(cache) for _ in range(3)]
    assert codes[-1] == "ok"
    assert host == "api.paypal.com" or codes[0] == "ok"


def test_a_known_certificate_is_fetched_again_whatever_strangers_do() -> None:
    """And holds while it can't be: only PayPal's word that it is gone ends it."""
    clock, fetch = ManualClock(), Fetches()
    cache = CertificateCache(fetch, clock=clock, trust=keys().root)
    assert verify(cache) == "ok"
    clock.advance(86_400)
    fetch.answer = OSError("down")
    for number in range(50):
        verify(cache, PAYPAL_CERT_URL=f"{CERT_URL}{number}")
    assert verify(cache) == "ok"
    assert fetch.urls[-1] == CERT_URL
    clock.advance(60)
    fetch.answer = HTTPError(CERT_URL, 410, "gone", None, None)  # type: ignore[arg-type]
    assert verify(cache) == "key_unknown"


# --- chains --------------------------------------------------------------------------------------


def test_a_certificate_without_a_trusted_chain_is_not_believed() -> None:
    """Signed by a key whose certificate somebody made himself: the system's roots, or yours."""
    cache = CertificateCache(Fetches())
    verdict = receiver(cache).verify(*signed("paypal"), now=NOW)
    assert (verdict.code, verdict.transient) == ("key_unknown", False)
    years = [datetime(year, 1, 1, tzinfo=UTC) for year in (2000, 2100)]
    stranger, certificate, root = issued("messageverificationcerts.paypal.com", *years)
    forger = make("paypal", signing_key=stranger, fetch=Fetches(certificate), trust=root)
    request = forger.sign("POST", URL, JSON, b'{"id": "WH-1"}', now=NOW)
    assert forger.verify(*request, now=NOW).ok
    for sent in (certificate, certificate + root):  # nor does a root that comes along help
        assert receiver(Fetches(sent)).verify(*request, now=NOW).code == "key_unknown"


@pytest.mark.parametrize(
    "name, host, ok",
    [
        ("messageverificationcerts.paypal.com", "api.paypal.com", True),
        ("messageverificationcerts.sandbox.paypal.com", "api-m.sandbox.paypal.com", True),
        ("messageverificationcerts.sandbox.paypal.com", "api.paypal.com", False),
        ("messageverificationcerts.paypal.com", "api.sandbox.paypal.com", False),
        ("www.paypal.com", "api.paypal.com", False),
        ("messageverificationcerts.paypal.com.evil.example", "api.paypal.com", False),
        ("evil.example", "api.paypal.com", False),
    ],
)
def test_a_trusted_certificate_must_be_made_out_to_paypal(name: str, host: str, ok: bool) -> None:
    """Any site has a certificate of a trusted root: the name in it decides."""
    years = [datetime(year, 1, 1, tzinfo=UTC) for year in (2000, 2100)]
    private, certificate, root = issued(name, *years)
    url = f"https://{host}/v1/notifications/certs/CERT-1"
    options = {"signing_key": private, "cert_url": url, "fetch": Fetches(certificate)}
    maker = make("paypal", trust=root, **options)
    request = maker.sign("POST", URL, JSON, b'{"id": "WH-1"}', now=NOW)
    assert maker.verify(*request, now=NOW).ok == ok


@pytest.mark.parametrize(
    "issuer_at, code",
    [
        ("http://cacerts.digicert.com/Issuer.crt", "ok"),
        ("http://evil.example/Issuer.crt", "key_unknown"),
        ("http://cacerts.digicert.com.evil.example/Issuer.crt", "key_unknown"),
    ],
)
def test_a_certificate_that_comes_alone_has_its_issuers_fetched(issuer_at: str, code: str) -> None:
    """PayPal's may: where it says, if that is its authority's own place, and as part of a chain."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    years = [datetime(year, 1, 1, tzinfo=UTC) for year in (2000, 2100)]
    private, leaf, issuer = issued("messageverificationcerts.paypal.com", *years, issuer_at)
    between = x509.load_pem_x509_certificate(issuer)
    key = rsa.generate_private_key(65537, 2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a root")])

    def certified(subject: x509.Name, public: Any) -> x509.Certificate:
        made = x509.CertificateBuilder(name, subject, public, 3, *years)
        for extension in between.extensions:
            if not isinstance(extension.value, x509.SubjectKeyIdentifier):
                made = made.add_extension(extension.value, extension.critical)
        own = x509.SubjectKeyIdentifier.from_public_key(public)
        by = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
        made = made.add_extension(own, critical=False).add_extension(by, critical=False)
        return made.sign(key, hashes.SHA256())

    root = certified(name, key.public_key())
    cross = certified(between.subject, between.public_key())
    there = {CERT_URL: leaf, issuer_at: cross.public_bytes(serialization.Encoding.DER)}
    fetched: list[str] = []

    def fetch(url: str) -> bytes:
        fetched.append(url)
        return there[url]

    trust = root.public_bytes(serialization.Encoding.PEM)
    maker = make("paypal", signing_key=private, fetch=fetch, trust=trust)
    request = maker.sign("POST", URL, JSON, b'{"id": "WH-1"}', now=NOW)
    assert maker.verify(*request, now=NOW).code == code
    assert fetched == ([CERT_URL, issuer_at] if code == "ok" else [CERT_URL])


class Drips(BaseHTTPRequestHandler):
    """Answers a byte at a time, and never ends."""

    def do_GET(self) -> None:
        self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
        while not self.server.stopped.wait(0.01):  # type: ignore[attr-defined]
            self.wfile.write(b"-")

    def log_message(self, *args: object) -> None: ...


def test_a_fetch_that_never_ends_is_given_up() -> None:
    """Each of its steps is quick, all of them together are not: the delivery is told to come again.

    Without a deadline for the whole, this test would hang.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), Drips)
    server.stopped = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        slow = f"http://127.0.0.1:{server.server_port}/"
        cache = CertificateCache(
            lambda _url: fetch_certificate(slow), deadline=0.2, trust=keys().root
        )
        verdict = receiver(cache).verify(*signed("paypal"), now=NOW)
        assert (verdict.code, verdict.transient) == ("key_unknown", True)
    finally:
        server.stopped.set()  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()
        server.server_close()


# --- what is not signed --------------------------------------------------------------------------


@pytest.mark.parametrize("name, why", [("paypal", "CRC32"), ("mailgun", "nothing of the event")])
def test_what_is_not_signed_must_be_said(name: str, why: str) -> None:
    """The body can be forged outright, so its user says that he knows."""
    given = {"webhook_id": WEBHOOK_ID} if name == "paypal" else {"secret": "s"}
    with pytest.raises(ValueError, match=rf"{why}.*accept_unsigned='body'"):
        provider(name, **given)
    with pytest.raises(ValueError, match="accept_unsigned='body'"):
        provider(name, **given, accept_unsigned="id")
    assert not provider(name, **given, accept_unsigned="body").body_is_signed
    with pytest.raises(ValueError, match="leave accept_unsigned= out"):
        provider("stripe", secret="s", accept_unsigned="body")


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


def test_a_forged_body_is_not_another_event() -> None:
    """One signature, one event: a body that was made to fit it is a replay, and is not handled."""
    request, handled = signed("paypal"), []
    receives = WebhookReceiver(make("paypal"), MemoryStore())
    receives.on()(handled.append)
    headers = {**JSON, **request.headers}
    assert receives.receive("POST", URL, headers, request.body, now=NOW).outcome == "handled"
    wanted, bodies = zlib.crc32(request.body), []
    for number in range(100_000):  # until the four bytes are text that JSON takes
        forged = b'{"id": "WH-FORGED-%d", "pad": "' % number
        body = _with_crc(forged, b'"}', wanted)
        four = body[len(forged) : len(forged) + 4]
        if all(byte < 128 and chr(byte).isalnum() for byte in four):
            bodies.append(body)
            break
    answer = receives.receive("POST", URL, headers, bodies[0], now=NOW)
    assert (answer.outcome, answer.code, len(handled)) == ("duplicate", "replayed", 1)


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
    known = {"accept_unsigned": "body"}
    with pytest.raises(ValueError, match="webhook_id"):
        provider("paypal", **known)
    with pytest.raises(ValueError, match="no shared secret"):
        provider("paypal", secret="x", webhook_id=WEBHOOK_ID, **known)
    with pytest.raises(OncekeyError, match="signing_key"):
        provider("paypal", webhook_id=WEBHOOK_ID, **known).sign("POST", URL, {}, b"{}")
    with pytest.raises(ValueError, match="root certificates"):
        provider("paypal", webhook_id=WEBHOOK_ID, trust="none", **known)
    cache = CertificateCache(lambda _url: b"", trust=keys().root)
    with pytest.raises(ValueError, match="to the CertificateCache"):
        provider("paypal", webhook_id=WEBHOOK_ID, fetch=cache, trust=keys().root, **known)
