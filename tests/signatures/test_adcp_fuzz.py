"""Hostile headers, URLs and bodies: AdCP and RFC 9421 give verdicts, and nothing else.

The short run is part of every test run. ``ONCEKEY_FUZZ=200000`` sets how many hostile deliveries
each provider gets; Hypothesis draws up to 20,000 of them, and ``random`` the rest.
"""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric import ed25519

from oncekey import MemoryStore
from oncekey.adcp.signatures import ADCP_CODES, adcp_hmac_provider, adcp_provider
from oncekey.signatures.base import SignedRequest
from oncekey.signatures.delivery import Delivery
from oncekey.signatures.nonces import Nonces
from oncekey.signatures.rfc9421 import component_value, rfc9421_provider, sign_request
from oncekey.signatures.structured import (
    Component,
    HeaderError,
    SignatureInput,
    parse_bytes,
    parse_signature_input,
)
from oncekey.signatures.target_uri import canonical_target
from oncekey.signatures.verdict import CODES, Verdict

NOW = 1_790_000_000
URL = "https://buyer.example.com/hooks/adcp"
BODY = json.dumps({"idempotency_key": "whk_01HW9D3H8FZP2N6R8T0V4X6Z9B"}).encode()
PRIVATE = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
SECRET = "a secret of the seller, 32 bytes or more"
MANY = int(os.environ.get("ONCEKEY_FUZZ", "0"))
DRAWN = settings(
    max_examples=min(MANY, 20_000) or 200,
    derandomize=not MANY,
    suppress_health_check=list(HealthCheck),
)
SEEDED = MANY or 900

ADCP = adcp_provider(
    allowed_hosts="*", signing_key=PRIVATE, key_id="k1", nonces=Nonces(MemoryStore())
)
UNSTORED = adcp_provider(allowed_hosts="*", signing_key=PRIVATE, key_id="k1")
HMAC = adcp_hmac_provider(secret=SECRET)
GENERIC = rfc9421_provider(allowed_hosts="*", signing_key=PRIVATE, key_id="k1")
GENERIC_CODES = {
    *("components_incomplete", "algorithm_not_allowed", "tag_mismatch", "digest_mismatch"),
    *("rate_abuse", "url_malformed"),
}
KNOWN = {*CODES, *ADCP_CODES, *GENERIC_CODES}


def must_be_a_verdict(provider: Any, request: Any, now: float = NOW) -> Verdict:
    verdict = provider.verify(*request, now=now)
    assert isinstance(verdict, Verdict)
    assert verdict.code in KNOWN
    assert verdict.ok == (verdict.code == "ok") == (verdict.sender is not None)
    assert verdict.ok or verdict.message
    return verdict


names = st.sampled_from(
    [
        *("Signature", "signature-input", "Content-Digest", "content-type", "Host", ":authority"),
        *("X-ADCP-Signature", "x-adcp-timestamp", "date"),
    ]
)
pieces = st.sampled_from(
    [
        *("sig1", "sig2", "=", "(", ")", ";", ",", " ", "\t", '"', "\\", ":", "?1", "-", "1", "99"),
        *('"@method"', '"@target-uri"', '"@authority"', '"content-type"', '"content-digest"'),
        *(";created=1790000000", ";expires=1790000300", ';nonce="KXYnfEfJ0PBRZXQyVXfVQA"'),
        *(';keyid="k1"', ';alg="ed25519"', ';tag="adcp/webhook-signing/v1"', "sha-256=:", "AAAA"),
        *("\n", "\0", "é", "\ud800", "*", "A" * 300, "sha256=", "1790000000"),
    ]
)
grammar = st.lists(pieces, max_size=25).map("".join)
values = st.one_of(st.text(max_size=200), grammar)
headers = st.lists(st.tuples(names, values), max_size=8)
raw_headers = st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=100)), max_size=6)
urls = st.one_of(
    st.just(URL),
    st.text(max_size=100),
    st.text("htps:/[]?#%.@ü012\\\n", max_size=60).map("https://".__add__),
)
bodies = st.one_of(st.just(BODY), st.binary(max_size=200))


@DRAWN
@given(st.text(max_size=10), urls, st.one_of(headers, raw_headers), bodies, st.floats())
def test_any_bytes_give_a_verdict(
    method: str, url: str, fields: Any, body: bytes, now: float
) -> None:
    """Whatever comes, and whatever the clock says, every provider answers with a verdict."""
    for provider in (ADCP, HMAC, GENERIC):
        assert not must_be_a_verdict(provider, (method, url, fields, body), now).ok


@DRAWN
@given(grammar)
def test_parsers_read_or_refuse(text: str) -> None:
    """A header is read to a form that reads the same again, or is refused with one error."""
    try:
        parsed = parse_signature_input(text)
    except HeaderError:
        pass
    else:
        written = ", ".join(f"{label}={one}" for label, one in parsed.items())
        assert parse_signature_input(written) == parsed
    try:
        parse_bytes(text)
    except HeaderError:
        pass


@DRAWN
@given(urls)
def test_a_canonical_url_is_its_own_canonical_form(url: str) -> None:
    """What is canonical stays as it is, and is ASCII."""
    try:
        target = canonical_target(url)
    except ValueError:
        return
    assert target.uri.isascii()
    if "%" not in target.uri:  # an escaped dot is decoded after dots are resolved
        assert canonical_target(target.uri) == target


parameters = st.fixed_dictionaries(
    {},
    optional={
        "created": st.integers(NOW - 400, NOW + 100) | st.just("x"),
        "expires": st.integers(NOW - 100, NOW + 400) | st.booleans(),
        "nonce": st.text("AQgw-_=+", max_size=30),
        "keyid": st.sampled_from(["k1", "k2", "", "k" * 300]),
        "alg": st.sampled_from(["ed25519", "ecdsa-p256-sha256", "none"]),
        "tag": st.sampled_from(["adcp/webhook-signing/v1", "x"]),
        "extra": st.integers(-9, 9),
    },
)
covered = st.lists(
    st.sampled_from(
        [
            *("@method", "@target-uri", "@authority", "content-type", "content-digest"),
            *("@path", "date", "x-absent", "@status"),
        ]
    ),
    unique=True,
    max_size=8,
)


def value_of(delivery: Delivery, part: Component) -> str:
    try:
        return component_value(delivery, part)
    except HeaderError:
        return "whatever"


@DRAWN
@given(parameters, covered, bodies)
def test_a_key_holder_gets_a_verdict_too(
    params: dict[str, Any], parts: list[str], body: bytes
) -> None:
    """A right signature over any parameters and parts comes as far as the checks allow."""
    base: dict[str, Any] = {
        "created": NOW,
        "expires": NOW + 300,
        "nonce": "KXYnfEfJ0PBRZXQyVXfVQA",
        "keyid": "k1",
        "alg": "ed25519",
        "tag": "adcp/webhook-signing/v1",
    }
    for chosen in ({**base, **params}, params):
        wanted = SignatureInput(tuple(map(Component, parts)), chosen)
        fields = {"content-type": "application/json", "date": "x"}
        request = SignedRequest("POST", URL, fields, body)
        for provider, encoding in ((ADCP, "base64url"), (GENERIC, "base64")):
            signed = sign_request(provider, request, "sig1", wanted, value_of, encoding)
            must_be_a_verdict(provider, signed)


COVERED = {
    "adcp": ("body", "url", "Content-Type", "Content-Digest", "Signature-Input", "Signature"),
    "adcp-hmac": ("body", "X-ADCP-Timestamp", "X-ADCP-Signature"),
    "rfc9421": ("body", "url", "Content-Digest", "Signature-Input", "Signature"),
}


@pytest.mark.parametrize("provider", [UNSTORED, HMAC, GENERIC], ids=list(COVERED))
def test_no_change_of_a_signed_delivery_is_accepted(provider: Any) -> None:
    """One character changed, dropped or doubled anywhere in what was signed is never accepted."""
    seed = random.SystemRandom().randrange(2**32) if MANY else 9421
    chance = random.Random(seed)
    request = provider.sign("POST", URL, {"Content-Type": "application/json"}, BODY, now=NOW)
    headers = {name.title(): value for name, value in request.headers.items()}
    assert provider.verify(*request, now=NOW).ok
    codes: dict[str, int] = {}
    for _ in range(SEEDED):
        name = chance.choice(COVERED[provider.name])
        value = headers.get(name.title(), URL if name == "url" else BODY.decode())
        at = chance.randrange(len(value))
        put = chance.choice(["", value[at] * 2, chr(chance.randrange(128)), chr(233)])
        changed = value[:at] + put + value[at + 1 :]
        other = request._replace(headers={**headers, name.title(): changed})
        if name in {"body", "url"}:
            other = request._replace(**{name: changed.encode() if name == "body" else changed})
        verdict = must_be_a_verdict(provider, other)
        codes[verdict.code] = codes.get(verdict.code, 0) + 1
        assert not verdict.ok or means_the_same(provider, name, value, changed), (
            f"seed {seed}: {name} {value!r} -> {changed!r}"
        )
    # A fuzzer that only ever hits the first check would prove little.
    assert len(codes) >= 4, codes


def means_the_same(provider: Any, name: str, old: str, new: str) -> bool:
    """Whether two spellings are one value: spaces that the grammar ignores, a URL's other form."""
    if old == new:
        return True
    if name == "url":
        form = canonical_target if provider is UNSTORED else lambda url: url.partition("#")[0]
        return bool(form(old) == form(new))
    if name == "Signature-Input":
        return parse_signature_input(old) == parse_signature_input(new)
    if name == "Signature":
        return parse_bytes(old) == parse_bytes(new)
    return old.strip() == new.strip() and name != "body"
