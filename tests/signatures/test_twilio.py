"""Twilio: forms of the URL, fields of the form, hashes of the body."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest
from tests.signatures.cases import SECRET, make, signed

from oncekey.signatures import provider

FORM = {"Content-Type": "application/x-www-form-urlencoded; charset=UTF-8"}
TOKEN = {"I-Twilio-Idempotency-Token": "t-1"}


def mac(text: str, algorithm: str = "sha1") -> str:
    digest = hmac.new(SECRET.encode(), text.encode(), algorithm).digest()
    return base64.b64encode(digest).decode()


def code(url: str, text: str, body: bytes = b"", *, algorithm: str = "sha1", **headers: str) -> str:
    fields = {**TOKEN, "X-Twilio-Signature": mac(text, algorithm)}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    if body and "Content-Type" not in fields:
        fields |= FORM
    return make("twilio").verify("POST", url, fields, body).code


def test_the_documented_example() -> None:
    """The numbers of Twilio's own page on security."""
    twilio = provider("twilio", secret="12345", event_id=None, allowed_hosts="*")
    body = b"CallSid=CA1234567890ABCDE&Caller=%2B14158675310&Digits=1234&From=%2B14158675310"
    body += b"&To=%2B18005551212"
    headers = {**FORM, "X-Twilio-Signature": "GvWf1cFY/Q7PnoempGyD5oXAezc="}

    url = "https://mycompany.com/myapp.php?foo=1&bar=2"
    assert twilio.verify("POST", url, headers, body).ok
    assert twilio.verify("POST", url + "3", headers, body).code == "signature_mismatch"


@pytest.mark.parametrize(
    "called, as_signed",
    [
        ("https://a.example/x", "https://a.example/x"),
        ("https://a.example/x", "https://a.example:443/x"),
        ("https://a.example:443/x", "https://a.example/x"),
        ("https://a.example:8443/x", "https://a.example/x"),
        ("http://a.example/x?q=1", "http://a.example:80/x?q=1"),
        ("https://u:p@a.example:8443/x", "https://u:p@a.example/x"),
        ("https://[::1]:8443/x", "https://[::1]/x"),
        ("https://[::1]/x", "https://[::1]:443/x"),
        ("https://a.example/x?", "https://a.example/x?"),
    ],
)
def test_the_port_may_be_there_or_not(called: str, as_signed: str) -> None:
    """Twilio signs the URL in either form."""
    assert code(called, as_signed) == "ok"


def test_another_port_or_scheme_is_another_url() -> None:
    """Only the default port may be added."""
    assert code("https://a.example/x", "https://a.example:8443/x") == "signature_mismatch"
    assert code("https://a.example/x", "https://a.example:80/x") == "signature_mismatch"
    assert code("http://a.example/x", "https://a.example/x") == "signature_mismatch"


def test_fields_are_sorted_and_each_pair_counts_once() -> None:
    """Blank values stay; repeated pairs are signed once; several values are sorted."""
    url = "https://a.example/x"

    assert code(url, url + "a1a2bZ", b"b=Z&a=2&a=1&a=2") == "ok"
    assert code(url, url + "ab", b"a=&b=") == "ok"
    assert code(url, url + "n\u00e9 x", b"n=%C3%A9+x") == "ok"
    assert code(url, url + "a1", b"a=%FF") == "body_malformed"
    assert code(url, url + "a1", b"\xff=1") == "body_malformed"
    assert code(url, url, b"&".join([b"a=1"] * 1001)) == "body_malformed"


def test_json_is_covered_by_its_hash_in_the_url() -> None:
    """Without the hash nothing covers the body, and it is refused."""
    body = b'{"id": 1}'
    url = f"https://a.example/x?y=1&bodySHA256={hashlib.sha256(body).hexdigest()}"
    json = {"Content-Type": "application/json"}

    assert code(url, url, body, **json) == "ok"
    assert code(url, url, body + b" ", **json) == "signature_mismatch"
    bare = "https://a.example/x"
    assert code(bare, bare, body, **json) == "signature_mismatch"
    assert code(bare, bare, body, Content_Type="text/plain") == "signature_mismatch"
    twice = url + "&bodySHA256=0"
    assert code(twice, twice, body, **json) == "signature_mismatch"


def test_a_captured_json_request_does_not_pass_as_an_empty_form() -> None:
    """The hash is held against the body whatever the content type claims."""
    url = f"https://a.example/x?bodySHA256={hashlib.sha256(b'{}').hexdigest()}"

    assert code(url, url, b"", **FORM) == "signature_mismatch"
    assert code(url, url, b"a=1", **FORM) == "signature_mismatch"


@pytest.mark.parametrize(
    "settings, algorithm, expected",
    [
        ("key=webhooks_sharedkey_1,algorithm=HMAC_SHA256", "sha256", "ok"),
        ("key=k, algorithm=HMAC_SHA256", "sha256", "ok"),
        ("key=k", "sha1", "ok"),
        ("", "sha1", "ok"),
        ("algorithm=HMAC_SHA256", "sha1", "header_malformed"),
        ("algorithm=HMAC_MD5", "sha1", "header_malformed"),
        ("algorithm=", "sha1", "header_malformed"),
        ("algorithm=\xff", "sha1", "header_malformed"),
    ],
)
def test_the_settings_header_names_the_algorithm(
    settings: str, algorithm: str, expected: str
) -> None:
    """SHA-1 unless it says SHA-256; anything else is refused."""
    url = "https://a.example/x"
    header = {"X_Twilio_Webhooks_Signature_Settings": settings}

    assert code(url, url, algorithm=algorithm, **header) == expected


def test_the_algorithm_can_be_pinned() -> None:
    """Whoever has moved to SHA-256 can refuse SHA-1."""
    pinned = make("twilio", algorithm="HMAC_SHA256")
    request = pinned.sign("POST", "https://a.example/x", FORM, b"a=1")

    assert pinned.verify(*request).ok
    assert make("twilio").verify(*request).ok
    assert pinned.verify(*signed("twilio")).code == "header_malformed"
    with pytest.raises(ValueError, match="algorithm"):
        make("twilio", algorithm="MD5")


@pytest.mark.parametrize(
    "url", ["https://[::1/x", "", "x", "//", "https://", "https://a:b:c/", "?"]
)
def test_any_url_gives_a_verdict(url: str) -> None:
    """Also one that the standard library refuses to read."""
    assert code(url, "https://a.example/") in ("url_malformed", "signature_mismatch")


def test_a_lone_surrogate_in_the_url_is_a_verdict() -> None:
    """It can't be encoded, so nobody signed it."""
    assert code("https://a.example/\ud800", "https://a.example/") == "url_malformed"


def test_signing_json_adds_the_hash_to_the_url() -> None:
    """The request that comes out is the one to send; Event Streams are batches of it."""
    streams = make("twilio", event_id="id", event_type="type", batch="$")
    request = streams.sign("POST", "https://a.example/x", {}, b'[{"id": "E1", "type": "a.b"}]')

    assert "?bodySHA256=" in request.url
    assert streams.verify(*request).ok
    assert streams.id_is_signed
    assert not make("twilio").id_is_signed
    assert [one.event_id for one in streams.items({}, request.body)] == ["E1"]
