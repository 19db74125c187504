"""What can't be looked up right now is no forgery: the verdict says so, and nothing is accepted."""

from __future__ import annotations

import asyncio
import http.server
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.error import HTTPError, URLError

import pytest

pytest.importorskip("cryptography")

from tests.servers.redis import eventually
from tests.signatures.cases import CERT_URL, NOW, WEBHOOK_ID, keys, signed
from tests.signatures.schemes import ENDPOINT, JSON, scheme

from oncekey import MemoryBackend, MemoryStore
from oncekey.adcp.signatures import adcp_provider
from oncekey.errors import StoreUnavailableError
from oncekey.signatures import CertificateCache, Provider, SignedRequest, Verdict, provider
from oncekey.signatures.certificates import fetch_certificate
from oncekey.signatures.jwks import FetchedKeys, Revocations
from oncekey.signatures.nonces import Nonces
from oncekey.signatures.rfc9421 import rfc9421_provider
from oncekey.testing import ManualClock


def jwk(key_id: str) -> dict[str, Any]:
    import base64

    public = scheme("adcp").provider.signing_key.material.public_key()  # type: ignore[attr-defined]
    return {
        "kid": key_id,
        "kty": "OKP",
        "crv": "Ed25519",
        "x": base64.urlsafe_b64encode(public.public_bytes_raw()).rstrip(b"=").decode(),
        "use": "sig",
        "key_ops": ["verify"],
        "adcp_use": "request-signing",
    }


class Source:
    """Publishes a document, or is down."""

    def __init__(self, document: Any) -> None:
        self.document = document
        self.error: Exception | None = None

    def __call__(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.document


MAKERS: dict[str, Callable[..., Provider]] = {
    "adcp": lambda **options: adcp_provider(allowed_hosts="*", **options),
    "rfc9421": lambda jwks, **more: rfc9421_provider(allowed_hosts="*", keys=jwks, **more),
}
UNKNOWN = {"adcp": "webhook_signature_key_unknown", "rfc9421": "key_unknown"}


@pytest.fixture(params=["adcp", "rfc9421"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def found(maker: Provider, request: SignedRequest) -> tuple[str, bool]:
    verdict = maker.verify(*request, now=NOW)
    return verdict.code, verdict.transient


# --- key sets ----------------------------------------------------------------------------------


def test_a_key_set_that_can_not_be_fetched_is_transient(name: str, clock: ManualClock) -> None:
    """From the failed fetch until the next one that succeeds, also while none may be tried."""
    source = Source({"keys": [jwk("k1")]})
    source.error = OSError("down")
    maker = MAKERS[name](jwks=FetchedKeys(source, clock=clock))
    request = scheme(name).sign()
    assert [found(maker, request) for _ in range(3)] == [(UNKNOWN[name], True)] * 3
    source.error = None
    assert found(maker, request) == (UNKNOWN[name], True)
    clock.advance(30)
    assert found(maker, request) == ("ok", False)


def test_a_set_that_is_back_and_lacks_the_key_is_no_longer_transient(
    name: str, clock: ManualClock
) -> None:
    """Once it was read again, a key that is not in it is an unknown one."""
    source = Source({"keys": [jwk("another")]})
    source.error = OSError("down")
    maker = MAKERS[name](jwks=FetchedKeys(source, clock=clock))
    assert found(maker, scheme(name).sign()) == (UNKNOWN[name], True)
    source.error = None
    clock.advance(30)
    assert found(maker, scheme(name).sign()) == (UNKNOWN[name], False)


@pytest.mark.parametrize("document", [b"<html>", {"keys": 5}, None, b"x" * 70_000])
def test_a_document_that_is_no_key_set_is_transient(name: str, document: Any) -> None:
    """An error page of the sender's server says nothing about the delivery."""
    maker = MAKERS[name](jwks=FetchedKeys(Source(document)))
    assert found(maker, scheme(name).sign()) == (UNKNOWN[name], True)


def test_a_key_that_is_not_in_the_set_is_refused_for_good(name: str, clock: ManualClock) -> None:
    """The set was read for it and the key is not in it: no sender gets a second try for that."""
    source = Source({"keys": [jwk("another")]})
    maker = MAKERS[name](jwks=FetchedKeys(source, clock=clock))
    request = scheme(name).sign()
    for _ in range(3):
        assert found(maker, request) == (UNKNOWN[name], False)
        clock.advance(30)
    pinned = MAKERS[name](jwks={"keys": [jwk("another")]})
    assert found(pinned, request) == (UNKNOWN[name], False)


def test_an_old_set_without_the_key_is_transient_while_no_new_one_comes(
    name: str, clock: ManualClock
) -> None:
    """The key may have been published since; keys that are known go on being used."""
    source = Source({"keys": [jwk("k1")]})
    maker = MAKERS[name](jwks=FetchedKeys(source, clock=clock))
    rotated = MAKERS[name](jwks=FetchedKeys(Source({"keys": [jwk("k0")]}), clock=clock))
    request = scheme(name).sign()
    assert found(maker, request) == ("ok", False)
    assert found(rotated, request) == (UNKNOWN[name], False)
    rotated._keys._fetch.error = OSError("down")  # type: ignore[attr-defined]
    source.error = OSError("down")
    clock.advance(30)
    assert found(rotated, request) == (UNKNOWN[name], True)
    assert found(maker, scheme(name).sign()) == ("ok", False)


async def test_an_async_fetch_that_fails_or_is_cut_off_is_transient(
    name: str, clock: ManualClock
) -> None:
    """A fetch that a client's hanging up cut short brought nothing, as one that failed."""
    hang = asyncio.Event()
    started = asyncio.Event()

    async def fetch() -> Any:
        if hang.is_set():
            started.set()
            await asyncio.Event().wait()
        return {"keys": [jwk("k0")]}

    maker: Any = MAKERS[name](jwks=FetchedKeys(fetch, clock=clock))
    request = scheme(name).sign()
    verdict = await maker.averify(*request, now=NOW)
    assert (verdict.code, verdict.transient) == (UNKNOWN[name], False)
    clock.advance(30)
    hang.set()
    task = asyncio.create_task(maker.averify(*request, now=NOW))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    verdict = await maker.averify(*request, now=NOW)
    assert (verdict.code, verdict.transient) == (UNKNOWN[name], True)


# --- revocation lists --------------------------------------------------------------------------

STALE = "webhook_signature_revocation_stale"


def with_list(revocations: Any) -> Provider:
    return adcp_provider(allowed_hosts="*", keys={"keys": [jwk("k1")]}, revocations=revocations)


def test_a_list_that_can_not_be_fetched_is_transient(clock: ManualClock) -> None:
    """Nobody can tell whether the key was revoked: not accepted, and not the sender's fault."""
    source = Source({"revoked_kids": [], "next_update": NOW + 100})
    source.error = OSError("down")
    maker = with_list(Revocations(source, clock=clock))
    assert found(maker, scheme("adcp").sign()) == (STALE, True)
    source.error = None
    clock.advance(60)
    assert found(maker, scheme("adcp").sign()) == ("ok", False)


def test_a_list_that_is_out_of_date_is_a_rejection() -> None:
    """It was fetched, and says itself that it is no longer good: AdCP's own code, for good."""
    old = {"revoked_kids": [], "next_update": NOW - 901}
    assert found(with_list(Revocations(Source(old))), scheme("adcp").sign()) == (STALE, False)
    assert found(with_list(old), scheme("adcp").sign()) == (STALE, False)


def test_a_revoked_key_is_refused_for_good_while_the_list_is_away(clock: ManualClock) -> None:
    """What an old list revoked stays revoked."""
    source = Source({"revoked_kids": ["k1"], "next_update": NOW - 10})
    maker = with_list(Revocations(source, clock=clock))
    code = "webhook_signature_key_revoked"
    assert found(maker, scheme("adcp").sign()) == (code, False)
    source.error = OSError("down")
    clock.advance(60)
    assert found(maker, scheme("adcp").sign()) == (code, False)


# --- nonces ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [StoreUnavailableError("down"), OSError("x"), ValueError("y")])
def test_nonces_that_can_not_be_looked_up_are_transient(
    name: str, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that fails is a verdict: not accepted, not an exception, and the room given back."""

    class Broken(MemoryStore):
        broken = True

        def first_seen(self, key: Any, terms: Any) -> bool:
            if self.broken:
                raise error
            return super().first_seen(key, terms)

    store = Broken()
    maker = nonced(name, Nonces(store, per_key=1))
    request = with_nonce(name)
    with caplog.at_level(logging.WARNING, "oncekey"):
        assert [found(maker, request) for _ in range(3)] == [("store_unavailable", True)] * 3
    assert "can't be looked up" in caplog.text
    store.broken = False
    assert found(maker, request) == ("ok", False)


async def test_nonces_that_can_not_be_looked_up_are_transient_async(name: str) -> None:
    """The asynchronous form says the same."""

    class Broken(MemoryBackend):
        async def first_seen(self, key: Any, terms: Any) -> bool:
            raise StoreUnavailableError("down")

    maker: Any = nonced(name, Nonces(Broken()))
    verdict: Verdict = await maker.averify(*with_nonce(name), now=NOW)
    assert (verdict.ok, verdict.code, verdict.transient) == (False, "store_unavailable", True)
    assert "send it again" in verdict.message


def nonced(name: str, nonces: Nonces) -> Provider:
    return MAKERS[name](jwks=lambda: {"keys": [jwk("k1")]}, nonces=nonces)


def with_nonce(name: str) -> SignedRequest:
    """A delivery with a nonce, which the generic signer does not send by itself."""
    from oncekey.signatures.rfc9421 import component_value, sign_request
    from oncekey.signatures.structured import Component, SignatureInput

    one = scheme(name)
    if name == "adcp":
        return one.sign()
    params: Any = {"created": int(NOW), "keyid": "k1", "nonce": "n-1"}
    covers = ("@method", "@target-uri", "content-digest")
    covered = SignatureInput(tuple(map(Component, covers)), params)
    request = SignedRequest("POST", ENDPOINT, dict(JSON), one.case.body)
    signer: Any = one.provider
    return sign_request(signer, request, "sig1", covered, component_value, "base64")


# --- publishers --------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [OSError("down"), 5, b"x"])
def test_a_publisher_that_can_not_be_told_is_transient(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the sender's name nothing can be deduplicated; the nonce stays for the retry."""
    answers = [answer]

    def publisher(key_id: str) -> Any:
        given = answers.pop() if answers else "seller.example"
        if isinstance(given, Exception):
            raise given
        return given

    nonces = Nonces(MemoryStore())
    maker = adcp_provider(
        allowed_hosts="*", keys={"keys": [jwk("k1")]}, publisher=publisher, nonces=nonces
    )
    request = scheme("adcp").sign()
    assert found(maker, request) == (UNKNOWN["adcp"], True)
    assert "nobody can tell whose" in caplog.text
    assert found(maker, request) == ("ok", False)


# --- certificates ------------------------------------------------------------------------------


def paypal(fetch: Any) -> Provider:
    trust = {} if isinstance(fetch, CertificateCache) else {"trust": keys().root}
    return provider("paypal", webhook_id=WEBHOOK_ID, fetch=fetch, accept_unsigned="body", **trust)


def gone(code: int) -> HTTPError:
    return HTTPError(CERT_URL, code, "no", None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error, transient",
    [
        (OSError("down"), True),
        (TimeoutError(), True),
        (URLError("no route"), True),
        (gone(500), True),
        (gone(429), True),
        (gone(302), True),
        (ValueError("no certificate"), True),
        (gone(404), False),
        (gone(410), False),
    ],
)
def test_a_certificate_that_can_not_be_fetched_is_transient(
    error: Exception, transient: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless the server has answered that there is none; remembered, either way, for a minute."""
    clock, fetched = ManualClock(), []

    def fetch(url: str) -> bytes:
        fetched.append(url)
        raise error

    maker = paypal(CertificateCache(fetch, trust=keys().root, clock=clock))
    for _ in range(3):
        assert found(maker, signed("paypal")) == ("key_unknown", transient)
    assert len(fetched) == 1
    assert str(error) not in caplog.text or not str(error)
    clock.advance(60)
    found(maker, signed("paypal"))
    assert len(fetched) == 2


def test_other_certificates_are_refused_for_good() -> None:
    """One that has expired was read; a URL that is not PayPal's is never asked."""
    assert found(paypal(lambda _url: keys().expired), signed("paypal")) == ("key_unknown", False)
    request = signed("paypal")
    request.headers["PAYPAL-CERT-URL"] = "https://evil.example/cert"
    assert found(paypal(lambda _url: keys().certificate), request) == ("key_unknown", False)


def test_a_genuine_delivery_past_the_limit_on_fetches_is_transient() -> None:
    """While strangers use up the fetches of a minute, the sender is told to try again."""
    clock = ManualClock()
    maker = paypal(
        CertificateCache(
            lambda _url: keys().certificate, trust=keys().root, clock=clock, per_minute=1
        )
    )
    stranger = signed("paypal")
    stranger.headers["PAYPAL-CERT-URL"] = CERT_URL + "-made-up"
    assert found(maker, stranger) == ("ok", False)
    assert found(maker, signed("paypal")) == ("key_unknown", True)
    clock.advance(60)
    assert found(maker, signed("paypal")) == ("ok", False)


def test_deliveries_at_the_same_time_wait_for_one_fetch() -> None:
    """Sixteen first deliveries cost one fetch, and all of them are accepted."""
    fetched: list[str] = []

    def fetch(url: str) -> bytes:
        fetched.append(url)
        waiters: Any = cache._under_way[url][0]._cond._waiters  # type: ignore[attr-defined]
        eventually(lambda: len(waiters) == 16, "all of them wait")
        return keys().certificate

    cache = CertificateCache(fetch, trust=keys().root, per_minute=1, deadline=60)
    maker = paypal(cache)
    codes: list[str] = []

    def deliver() -> None:
        codes.append(maker.verify(*signed("paypal"), now=NOW).code)

    threads = [threading.Thread(target=deliver) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == ["ok"] * 16
    assert fetched == [CERT_URL]


async def test_no_loop_waits_for_a_fetch() -> None:
    """``averify`` fetches in a thread; what is known is verified at once."""
    go_on = threading.Event()
    threads: list[str] = []

    def fetch(url: str) -> bytes:
        threads.append(threading.current_thread().name)
        assert go_on.wait(60)
        return keys().certificate

    maker: Any = paypal(fetch)
    task = asyncio.create_task(maker.averify(*signed("paypal"), now=NOW))
    while not threads:
        await asyncio.sleep(0.001)
    assert threads != [threading.current_thread().name]
    go_on.set()
    assert (await task).ok
    assert (await maker.averify(*signed("paypal"), now=NOW)).ok
    assert len(threads) == 1
    request = signed("paypal")
    request.headers["PAYPAL-CERT-URL"] = "nonsense"
    assert (await maker.averify(*request, now=NOW)).code == "key_unknown"


class Certificates(http.server.BaseHTTPRequestHandler):
    """A server with a certificate, and with everything that is none."""

    def do_GET(self) -> None:
        status = int(self.path[1:])
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/200")
        body = keys().certificate if status == 200 else b"x" * 200_000
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Certificates)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    thread.join()
    made.server_close()


def test_our_own_fetch_follows_no_redirect(server: str) -> None:
    """One request, one answer: a redirect, an error and a flood of bytes are no certificate."""
    assert fetch_certificate(f"{server}/200") == keys().certificate
    for status in (302, 404, 500):
        with pytest.raises(HTTPError) as caught:
            fetch_certificate(f"{server}/{status}")
        assert caught.value.code == status
        caught.value.close()
    cache = CertificateCache(lambda url: fetch_certificate(f"{server}/{url}"), trust=keys().root)
    answers = {status: cache.find(status)[1:] for status in ("200", "302", "404", "500", "201")}
    assert answers["200"][0] is not None
    assert [answers[status] for status in ("302", "404", "500", "201")] == [
        (None, True),
        (None, False),
        (None, True),
        (None, True),
    ]
