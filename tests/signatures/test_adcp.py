"""AdCP webhooks signed by RFC 9421: the checks, their order and what they give."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import sys
from typing import Any

import pytest
from tests.signatures.schemes import ENVELOPE

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from oncekey import MemoryBackend, MemoryStore
from oncekey.adcp.signatures import ADCP_CODES, AdcpProvider, adcp_provider, rejection_headers
from oncekey.errors import BackendMismatchError, PolicyError
from oncekey.signatures import Verdict, VerifiedWebhookSender, provider
from oncekey.signatures.algorithms import load_key
from oncekey.signatures.base import SignedRequest, UnreadableError
from oncekey.signatures.jwks import FetchedKeys
from oncekey.signatures.nonces import Nonces
from oncekey.signatures.rfc9421 import sign_request
from oncekey.signatures.structured import Component, SignatureInput
from oncekey.signatures.target_uri import canonical_target

NOW = 1_790_000_000
URL = "https://buyer.example.com/hooks/adcp"
EVENT = "whk_01HW9D3H8FZP2N6R8T0V4X6Z9B"
BODY = json.dumps({"idempotency_key": EVENT, **ENVELOPE}).encode()
PRIVATE = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
X = base64.urlsafe_b64encode(PRIVATE.public_key().public_bytes_raw()).rstrip(b"=").decode()
JWK = {
    "kid": "seller-1",
    "kty": "OKP",
    "crv": "Ed25519",
    "alg": "EdDSA",
    "use": "sig",
    "key_ops": ["verify"],
    "adcp_use": "request-signing",
    "x": X,
}
SIGNER = adcp_provider(allowed_hosts="*", signing_key=PRIVATE, key_id="seller-1")
SIGNER._check_signable = lambda body: None  # type: ignore[method-assign] # signs what none may send


def made(**options: Any) -> AdcpProvider:
    options.setdefault("keys", {"keys": [JWK]})
    return adcp_provider(allowed_hosts="*", **options)


def signed(body: bytes = BODY, url: str = URL, **headers: str) -> SignedRequest:
    return SIGNER.sign("POST", url, headers, body, now=NOW)


def with_header(request: SignedRequest, name: str, value: str | None) -> SignedRequest:
    fields = {key: text for key, text in request.headers.items() if key.lower() != name.lower()}
    return request._replace(headers=fields if value is None else {**fields, name: value})


def resigned(
    body: bytes = BODY,
    covers: tuple[str, ...] = (
        "@method",
        "@target-uri",
        "@authority",
        "content-type",
        "content-digest",
    ),
    digest: str | None = None,
    **params: Any,
) -> SignedRequest:
    """A request with a right signature over whatever parameters, so that only those are wrong."""
    target = canonical_target(URL)
    fields = {"Content-Type": "application/json"}
    sha = base64.b64encode(hashlib.sha256(body).digest()).decode()
    values = {
        "@method": "POST",
        "@target-uri": target.uri,
        "@authority": target.authority,
        "content-type": "application/json",
        "content-digest": digest or f"sha-256=:{sha}:",
        "date": "today",
    }
    all_params: dict[str, Any] = {
        "created": NOW,
        "expires": NOW + 300,
        "nonce": "KXYnfEfJ0PBRZXQyVXfVQA",
        "keyid": "seller-1",
        "alg": "ed25519",
        "tag": "adcp/webhook-signing/v1",
        **params,
    }
    kept = {name: value for name, value in all_params.items() if value is not None}
    covered = SignatureInput(tuple(map(Component, covers)), kept)
    request = sign_request(
        SIGNER,
        SignedRequest("POST", URL, fields, body),
        "sig1",
        covered,
        lambda _, part: values[part.name],
        "base64url",
    )
    return with_header(request, "Content-Digest", values["content-digest"])


def code(request: SignedRequest, now: float = NOW, **options: Any) -> str:
    verdict = made(**options).verify(*request, now=now)
    assert verdict.ok == (verdict.code == "ok")
    assert verdict.ok == (verdict.sender is not None)
    assert verdict.ok or verdict.message == ADCP_CODES[verdict.code]
    return verdict.code.removeprefix("webhook_signature_")


def test_a_right_delivery_says_who_sent_what() -> None:
    """The verdict carries the key, the event's id and the nonce that nobody checked yet."""
    request = signed()
    verdict = made(account="eu", publisher={"seller-1": "seller.example"}).verify(*request, now=NOW)
    assert verdict.ok
    assert verdict.event_id == EVENT
    assert verdict.id_is_signed
    assert verdict.timestamp == NOW
    assert verdict.sender == VerifiedWebhookSender(
        "adcp", account="eu", key_id="seller-1", publisher="seller.example"
    )
    assert verdict.signature == request.headers["Signature"].removeprefix("sig1=").strip(":")
    assert verdict.nonce is not None
    assert f'nonce="{verdict.nonce.value}"' in request.headers["Signature-Input"]
    assert verdict.nonce.key_id == "seller-1"
    assert verdict.nonce.lasts_ms == 361_000


def test_the_provider_says_what_it_is() -> None:
    """The attributes that a receiver reads are there."""
    found = made()
    assert (found.name, found.batch, found.id_is_signed) == ("adcp", None, True)
    assert found.retention_seconds == 604_800
    assert found.ack.status == 200
    assert found.source
    assert found.checked
    assert not found.is_async
    assert "seller-1" not in repr(found)


def test_it_is_in_the_table() -> None:
    """provider("adcp", ...) makes the same provider, with keys= or secret=."""
    for options in ({"keys": {"keys": [JWK]}}, {"secret": {"keys": [JWK]}}):
        found = provider("adcp", allowed_hosts="*", **options)  # type: ignore[arg-type]
        assert found.verify(*signed(), now=NOW).ok


@pytest.mark.parametrize("name", ["adcp", "adcp-hmac"])
def test_unknown_options_are_named(name: str) -> None:
    """A typing error is an error of ours, and says what there is."""
    with pytest.raises(
        PolicyError, match=f"{name} has no option bogus; it takes account,.* secret"
    ):
        provider(name, "x" * 32, bogus=1)
    with pytest.raises(PolicyError, match="adcp has no option previous, tolerance; it takes"):
        provider("adcp", {"keys": [JWK]}, previous="x", tolerance=5)  # type: ignore[arg-type]


# --- one mode or the other ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["X-ADCP-Signature", "x-adcp-timestamp"])
@pytest.mark.parametrize("drop", [(), ("Signature",), ("Signature", "Signature-Input")])
def test_headers_of_the_other_mode_are_a_mismatch(name: str, drop: tuple[str, ...]) -> None:
    """Any header of the HMAC form is refused as such, whatever else is there."""
    request = with_header(signed(), name, "1790000000")
    for gone in drop:
        request = with_header(request, gone, None)
    assert code(request) == "webhook_mode_mismatch"


@pytest.mark.parametrize("gone", ["Signature", "Signature-Input"])
def test_one_header_alone_is_malformed(gone: str) -> None:
    """One of the two headers without the other is malformed, never another mode."""
    assert code(with_header(signed(), gone, None)) == "header_malformed"


def test_no_signature_at_all_is_malformed() -> None:
    """The profile has no code of its own for a delivery that is not signed."""
    assert code(signed()._replace(headers={})) == "header_malformed"


# --- the headers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["Signature", "Signature-Input", "Content-Type", "Content-Digest", "Host", ":authority"]
)
def test_a_header_that_comes_twice_is_refused(name: str) -> None:
    """A repeated header is ambiguous, so it is malformed even if both say the same."""
    request = with_header(signed(), "Host", "buyer.example.com")
    value = request.headers.get(name, "buyer.example.com")
    pairs = [*request.headers.items(), (name.lower(), value)]
    if name == ":authority":
        pairs.append((name, value))
    verdict = made().verify("POST", URL, pairs, BODY, now=NOW)
    assert verdict.code == "webhook_signature_header_malformed"


@pytest.mark.parametrize(
    "signature",
    [
        "",
        "sig1",
        "sig1=abc",
        "sig1=::",
        "sig1=:A:",
        "sig1=:{}==:",
        "sig1=:{}:, sig1=:{}:",
        "sig1=:{}:,",
        "SIG1=:{}:",
        "sig2=:{}:",
        "sig1 =:{}:",
        "sig1=:{}: x",
        "sig1=:{}:\n",
        "sig1=:{}:é",
        "sig1=:" + "A" * 9000 + ":",
    ],
)
def test_a_signature_header_of_another_form_is_malformed(signature: str) -> None:
    """Only the label sig1 with base64url without padding is taken."""
    request = signed()
    token = request.headers["Signature"].removeprefix("sig1=").strip(":")
    assert code(with_header(request, "Signature", signature.format(token, token))) == (
        "header_malformed"
    )


def test_a_signature_in_standard_base64_is_malformed() -> None:
    """The profile has one alphabet for signatures, and the standard one is not it."""
    request = signed()
    raw = base64.urlsafe_b64decode(request.headers["Signature"][6:-1] + "==")
    standard = f"sig1=:{base64.b64encode(raw).decode()}:"
    assert code(with_header(request, "Signature", standard)) == "header_malformed"


@pytest.mark.parametrize(
    "value", ["application/json, text/plain", "application/json\n", "é", "x" * 9000, None]
)
def test_a_content_type_that_is_not_one_value_is_malformed(value: str | None) -> None:
    """Two content types folded into one line, or none, can't have been signed."""
    assert code(with_header(signed(), "Content-Type", value)) == "header_malformed"


def test_a_comma_in_quotes_is_part_of_the_value() -> None:
    """A content type may have a quoted parameter with a comma in it."""
    assert code(signed(**{"Content-Type": 'application/json; x="a,b"'})) == "ok"
    assert code(with_header(signed(), "Content-Type", "")) == "invalid"


def test_other_labels_are_ignored() -> None:
    """Labels besides sig1 may be there, before or after it."""
    request = signed()
    for name, extra in (("Signature-Input", "a=();x=?1"), ("Signature", "a=:AA==:")):
        request = with_header(request, name, f"{extra}, {request.headers[name]}")
    assert code(request) == "ok"


# --- the parameters ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["created", "expires", "nonce", "keyid", "alg", "tag"])
def test_every_parameter_is_required(name: str) -> None:
    """A parameter that is missing is params_incomplete, whichever it is."""
    assert code(resigned(**{name: None})) == "params_incomplete"


@pytest.mark.parametrize(
    "params",
    [
        {"created": "1790000000"},
        {"expires": True},
        {"keyid": 7},
        {"keyid": ""},
        {"keyid": "k" * 257},
        {"nonce": 1},
        {"nonce": "KXYnfEfJ0PBRZXQyVXfVQA=="},
        {"nonce": "KXYnfEfJ0PBRZXQyVXfV"},
        {"nonce": "KXYnfEfJ0PBRZXQyVXfVQB"},
        {"nonce": "KXYnfEfJ0PBRZXQyVXfV+A"},
        {"nonce": "A" * 172},
    ],
)
def test_a_parameter_of_another_form_is_malformed(params: dict[str, Any]) -> None:
    """Types are checked, and a nonce has 16 to 128 bytes in its one spelling."""
    assert code(resigned(**params)) == "header_malformed"


@pytest.mark.parametrize("size", [16, 128])
def test_a_nonce_has_16_to_128_bytes(size: int) -> None:
    """The shortest and the longest nonce are accepted."""
    nonce = base64.urlsafe_b64encode(bytes(size)).rstrip(b"=").decode()
    assert code(resigned(nonce=nonce)) == "ok"


@pytest.mark.parametrize("tag", ["adcp/request-signing/v1", "ADCP/webhook-signing/v1", "x"])
def test_another_tag_is_invalid(tag: str) -> None:
    """A signature made for another purpose is refused."""
    assert code(resigned(tag=tag)) == "tag_invalid"


@pytest.mark.parametrize("alg", ["hmac-sha256", "rsa-pss-sha512", "Ed25519", "none"])
def test_other_algorithms_are_not_allowed(alg: str) -> None:
    """Only the two algorithms of the profile are taken, and the key does not decide that."""
    assert code(resigned(alg=alg)) == "alg_not_allowed"


@pytest.mark.parametrize(
    "created, expires, now, fits",
    [
        (NOW, NOW + 300, NOW, True),
        (NOW, NOW + 301, NOW, False),
        (NOW, NOW, NOW, False),
        (NOW, NOW - 1, NOW, False),
        (NOW + 60, NOW + 61, NOW, True),
        (NOW + 61, NOW + 62, NOW, False),
        (NOW - 300, NOW - 60, NOW, True),
        (NOW - 300, NOW - 61, NOW, False),
        (NOW - 300, NOW - 60, NOW + 0.5, False),
        (NOW, NOW + 300, float("nan"), False),
    ],
)
def test_the_window_has_exact_edges(created: int, expires: int, now: float, fits: bool) -> None:
    """300 s of life and 60 s of difference between the clocks, to the second."""
    found = code(resigned(created=created, expires=expires), now=now)
    assert found == ("ok" if fits else "window_invalid")


@pytest.mark.parametrize(
    "missing", ["@method", "@target-uri", "@authority", "content-type", "content-digest"]
)
def test_all_five_parts_must_be_covered(missing: str) -> None:
    """A right signature over less than the profile asks for is incomplete."""
    parts = ("@method", "@target-uri", "@authority", "content-type", "content-digest")
    assert code(resigned(covers=tuple(p for p in parts if p != missing))) == "components_incomplete"


@pytest.mark.parametrize("extra", ['"@path"', '"@query"', '"x-absent"', '"content-type";sf'])
def test_a_part_that_is_not_of_the_profile_is_malformed(extra: str) -> None:
    """What else is covered must be a header that is there."""
    header = signed().headers["Signature-Input"].replace('"@method"', f'"@method" {extra}')
    assert code(with_header(signed(), "Signature-Input", header)) == "header_malformed"


def test_another_header_may_be_covered() -> None:
    """More than the profile asks for is fine, as long as it is there."""
    covers = ("@method", "@target-uri", "@authority", "content-type", "content-digest", "date")
    request = with_header(resigned(covers=covers), "Date", "today")
    assert code(request) == "ok"
    assert code(with_header(request, "Date", "tomorrow")) == "invalid"


def test_a_part_with_a_parameter_is_another_part() -> None:
    """content-digest;sf covers something else than content-digest."""
    header = signed().headers["Signature-Input"].replace('"content-digest"', '"content-digest";sf')
    assert code(with_header(signed(), "Signature-Input", header)) == "components_incomplete"


# --- the key -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "member, value",
    [
        ("use", "enc"),
        ("use", None),
        ("key_ops", ["sign"]),
        ("key_ops", "verify"),
        ("key_ops", None),
        ("adcp_use", "response-signing"),
        ("adcp_use", ["request-signing"]),
        ("adcp_use", None),
        ("alg", "ES256"),
        ("x", "AAAA"),
        ("crv", "Ed448"),
    ],
)
def test_a_key_for_another_purpose_is_refused(member: str, value: Any) -> None:
    """Every member of the key that the profile names is checked."""
    jwk = {**JWK, member: value}
    other = {**JWK, "kid": "another"}
    assert code(signed(), keys={"keys": [jwk, other]}) == "key_purpose_invalid"


def test_the_key_decides_the_algorithm() -> None:
    """An algorithm that is allowed but not the key's is refused before any cryptography."""
    assert code(resigned(alg="ecdsa-p256-sha256")) == "key_purpose_invalid"


def test_both_purposes_are_accepted() -> None:
    """A key for requests may sign webhooks, and so may one of the deprecated kind."""
    assert code(signed(), keys={"keys": [{**JWK, "adcp_use": "webhook-signing"}]}) == "ok"


def test_a_key_that_was_pinned_by_hand_needs_no_purpose() -> None:
    """A bare public key is trusted for what it was configured for."""
    assert code(signed(), keys={"seller-1": PRIVATE.public_key()}) == "ok"


def test_a_key_id_that_is_there_twice_is_unknown() -> None:
    """Two keys of one id: nobody knows which is meant, so neither counts."""
    other = {**JWK, "kid": "another"}
    assert code(signed(), keys={"keys": [JWK, JWK, other]}) == "key_unknown"


def test_revocation_comes_before_the_caps_and_the_signature() -> None:
    """A revoked key is refused even if the list is stale; a stale list refuses all keys."""
    revoked = {"revoked_kids": ["seller-1"], "next_update": NOW - 10_000}
    assert code(signed(), revocations=revoked) == "key_revoked"
    assert code(signed(), revocations={"next_update": NOW - 900}) == "ok"
    assert code(signed(), revocations={"next_update": NOW - 901}) == "revocation_stale"
    assert code(signed(), revocations={"revoked_kids": ["another"]}) == "ok"


# --- the URL -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host, expected",
    [
        ("buyer.example.com", "ok"),
        ("BUYER.example.com.", "ok"),
        ("buyer.example.com:443", "ok"),
        ("buyer.example.com:8443", "webhook_target_uri_malformed"),
        ("other.example.com", "webhook_target_uri_malformed"),
        ("", "webhook_target_uri_malformed"),
        ("buyer.example.com, other", "webhook_target_uri_malformed"),
        ("bücher.example", "webhook_target_uri_malformed"),
    ],
)
@pytest.mark.parametrize("name", ["Host", ":authority"])
def test_the_host_must_be_the_signed_one(host: str, expected: str, name: str) -> None:
    """A delivery for one host can't be sent again to another one on the same servers."""
    assert code(with_header(signed(), name, host)) == expected


def test_host_and_authority_must_agree() -> None:
    """With both there, both must name the signed host."""
    request = with_header(signed(), "Host", "buyer.example.com")
    assert code(with_header(request, ":authority", "buyer.example.com")) == "ok"
    assert code(with_header(request, ":authority", "x.example")) == "webhook_target_uri_malformed"


def test_a_pinned_url_stands_for_the_one_that_arrived() -> None:
    """Behind a proxy the public URL is what was signed, and Host is the proxy's."""
    request = with_header(signed(url=f"{URL}?a=1"), "Host", "internal:8080")
    inside = request._replace(url="http://internal:8080/hooks/adcp?a=1")
    assert code(inside, public_url="https://buyer.example.com") == "ok"
    assert code(inside, public_url=URL) == "ok"
    assert code(inside, public_url="https://other.example.com") == "invalid"
    assert code(inside) == "invalid"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/hooks/adcp",
        "ftp://x/",
        "https://x:65536/",
        "https://",
        "https://a b/",
        "https://ü.example/",
        "\x00",
    ],
)
def test_a_url_that_is_none_is_malformed(url: str) -> None:
    """Whatever stands for the URL, the answer is a verdict."""
    assert code(signed()._replace(url=url)) == "webhook_target_uri_malformed"
    assert code(signed()._replace(url=URL + "a" * 9000)) == "webhook_target_uri_malformed"


# --- signature and digest ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, expected",
    [
        ("PUT", "invalid"),
        ("post", "ok"),
        ("", "header_malformed"),
        ("PO\nST", "header_malformed"),
        ("POST ", "header_malformed"),
    ],
)
def test_the_method_is_signed(method: str, expected: str) -> None:
    """Another method, or what is none, is refused; the case of letters does not matter."""
    assert code(signed()._replace(method=method)) == expected


def test_a_line_break_can_not_forge_a_line_of_the_base() -> None:
    """A covered header with a line break in it is refused, not signed as two lines."""
    evil = 'application/json\n"content-digest": x'
    assert code(with_header(signed(), "Content-Type", evil)) == "header_malformed"


def test_a_body_that_was_written_anew_does_not_match() -> None:
    """The same JSON in other bytes has another digest."""
    again = json.dumps(json.loads(BODY), separators=(",", ":")).encode()
    assert code(signed()._replace(body=again)) == "digest_mismatch"


def sha(body: bytes = BODY, algorithm: str = "sha256") -> bytes:
    return hashlib.new(algorithm, body).digest()


STANDARD = base64.b64encode(sha()).decode()
URL_SAFE = base64.urlsafe_b64encode(sha()).rstrip(b"=").decode()


@pytest.mark.parametrize(
    "digest, expected",
    [
        (f"sha-256=:{STANDARD}:", "ok"),
        (f"sha-256=:{URL_SAFE}:", "ok"),
        (f"sha-512=:{base64.b64encode(sha(algorithm='sha512')).decode()}:", "digest_mismatch"),
        (f"sha-512=:AAAA:, sha-256=:{STANDARD}:", "ok"),
        (f"sha-256=:{base64.b64encode(sha(b'')).decode()}:", "digest_mismatch"),
        (f"sha-256=:{STANDARD[:-1]}:", "header_malformed"),
        (f"sha-256=:{STANDARD}:, sha-256=:{STANDARD}:", "header_malformed"),
        (f"sha-256={STANDARD}", "header_malformed"),
        ("sha-256=:+-+-:", "header_malformed"),
    ],
)
def test_the_digest_has_two_spellings(digest: str, expected: str) -> None:
    """Standard base64 with padding and URL-safe without are taken; nothing in between."""
    assert code(resigned(digest=digest)) == expected


def test_a_digest_that_needs_its_special_characters_verifies() -> None:
    """Digests with + and / (or - and _) in them are read right in both spellings."""
    body = next(b for n in range(999) if {43, 47} <= {*base64.b64encode(sha(b := b"%d" % n))})
    for text in (base64.b64encode(sha(body)), base64.urlsafe_b64encode(sha(body)).rstrip(b"=")):
        assert code(resigned(body, digest=f"sha-256=:{text.decode()}:")) == "ok"


@pytest.mark.parametrize("flip", [0, 31, 32, 63])
def test_a_changed_bit_of_the_signature_is_invalid(flip: int) -> None:
    """One bit anywhere in the signature makes it wrong, and so does another length."""
    request = signed()
    raw = bytearray(base64.urlsafe_b64decode(request.headers["Signature"][6:-1] + "=="))
    raw[flip] ^= 1
    for wrong in (bytes(raw), bytes(raw[:-1]), bytes(raw) + b"\0"):
        text = base64.urlsafe_b64encode(wrong).rstrip(b"=").decode()
        assert code(with_header(request, "Signature", f"sig1=:{text}:")) == "invalid"


# --- nonces ------------------------------------------------------------------------------------


class Counting(MemoryStore):
    """Counts the calls that reach it."""

    calls = 0

    def first_seen(self, key: Any, terms: Any) -> bool:
        self.calls += 1
        return super().first_seen(key, terms)


def test_a_nonce_is_used_once() -> None:
    """The second copy is a replay, also at another endpoint on the same store."""
    store = MemoryStore()
    request = signed()
    assert code(request, nonces=Nonces(store)) == "ok"
    assert code(request, nonces=Nonces(store)) == "replayed"
    assert made(nonces=Nonces(MemoryStore())).verify(*request, now=NOW).nonce is None


def test_what_is_not_signed_right_costs_no_call_to_the_store() -> None:
    """Wrong signatures, digests and URLs never touch the store."""
    store = Counting()
    nonces = Nonces(store)
    request = signed()
    for wrong in (
        request._replace(body=b"{}"),
        request._replace(url=URL + "x"),
        with_header(request, "Host", "x.example"),
        with_header(request, "Signature", "sig1=:AAAA:"),
        resigned(tag="x"),
    ):
        assert code(wrong, nonces=nonces) != "ok"
    assert store.calls == 0
    assert code(request, nonces=nonces) == "ok"
    assert store.calls == 1


def test_over_its_cap_a_key_is_refused_before_cryptography() -> None:
    """A key at its cap gets rate_abuse even for a wrong signature; other keys go on."""
    nonces = Nonces(Counting(), per_key=2)
    assert [code(signed(), nonces=nonces) for _ in range(3)] == ["ok", "ok", "rate_abuse"]
    wrong = with_header(signed(), "Signature", "sig1=:AAAA:")
    assert code(wrong, nonces=nonces) == "rate_abuse"
    other = ed25519.Ed25519PrivateKey.generate()
    second = adcp_provider(allowed_hosts="*", signing_key=other, key_id="seller-2", nonces=nonces)
    assert second.verify(*second.sign("POST", URL, {}, BODY, now=NOW), now=NOW).ok


def test_a_full_store_is_rate_abuse() -> None:
    """Where the store has no room left, the delivery is refused, and nothing is forgotten."""
    nonces = Nonces(MemoryStore(max_entries=1))
    first = signed()
    assert code(first, nonces=nonces) == "ok"
    found = {code(signed(), nonces=nonces) for _ in range(3)}
    assert found == {"rate_abuse"}
    assert code(first, nonces=nonces) == "replayed"


def test_an_async_store_needs_averify() -> None:
    """A provider on an async store says so instead of handing out a coroutine."""
    found = made(nonces=Nonces(MemoryBackend()))
    assert found.is_async
    with pytest.raises(BackendMismatchError, match="averify"):
        found.verify(*signed(), now=NOW)


async def test_one_of_many_concurrent_copies_is_accepted() -> None:
    """Of 20 copies at the same time, one is accepted and 19 are replays."""
    found = made(nonces=Nonces(MemoryBackend()))
    request = signed()
    verdicts = await asyncio.gather(*[found.averify(*request, now=NOW) for _ in range(20)])
    codes = sorted(verdict.code for verdict in verdicts)
    assert codes == ["ok", *["webhook_signature_replayed"] * 19]


async def test_averify_takes_sync_parts() -> None:
    """The asynchronous form works with a sync store and static keys too."""
    found = made(nonces=Nonces(MemoryStore()))
    assert (await found.averify(*signed(), now=NOW)).ok


# --- the body ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b'{"status":"approved","status":"rejected"}',
        b'{"a":[{"b":1,"b":1}]}',
        b"{",
        b"NaN",
        b"\xff",
        b'{"a":1e999}',
        b'"\\ud800"',
        b"[" * 5000,
    ],
)
def test_a_body_that_parsers_read_differently_is_malformed(body: bytes) -> None:
    """Names twice in an object and what is no strict JSON are refused, though signed right."""
    assert code(signed(body)) == "webhook_body_malformed"


def test_a_malformed_body_uses_its_nonce_up() -> None:
    """A signed but malformed delivery can't be sent again to cost the same work."""
    nonces = Nonces(MemoryStore())
    request = signed(b'{"a":1,"a":2}')
    assert code(request, nonces=nonces) == "webhook_body_malformed"
    assert code(request, nonces=nonces) == "replayed"


def test_names_in_the_log_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    """Names that a stranger chose are cut: no control characters, 32 bytes, four of them."""
    names = ["y" * 40, "a\u202eb", "ab" + "é" * 40, "status", "x\n", "sixth"]
    members = ",".join(f"{json.dumps(name)}:{n}" for n in (1, 2) for name in names)
    with caplog.at_level(logging.WARNING, "oncekey"):
        verdict = made().verify(*signed(f"{{{members}}}".encode()), now=NOW)
    [record] = caplog.records
    text = record.getMessage()
    assert text.endswith(
        f"names sent twice: {'y' * 32}, <sanitized:1>, ab{'é' * 15}, status, <...2 more>"
    )
    assert "key id seller-1" in text
    assert "sixth" not in text
    assert "status" not in verdict.message


@pytest.mark.parametrize(
    "body, expected",
    [
        (b"", None),
        (b" \n", None),
        (b"[]", None),
        (b"{}", None),
        (b'{"idempotency_key": 7}', None),
        (b'{"idempotency_key": "short"}', None),
        (b'{"idempotency_key": "0123456789abcde"}', None),
        (b'{"idempotency_key": "0123456789abcde\\n"}', None),
        (b'{"idempotency_key": "0123456789abcdef"}', "0123456789abcdef"),
        (b'{"idempotency_key": "' + b"k" * 255 + b'"}', "k" * 255),
        (b'{"idempotency_key": "' + b"k" * 256 + b'"}', None),
    ],
)
def test_an_id_of_another_form_is_no_id(body: bytes, expected: str | None) -> None:
    """The signature is right all the same; what to do without an id is the receiver's to say."""
    found = made()
    verdict = found.verify(*signed(body), now=NOW)
    assert verdict.ok
    assert verdict.event_id == expected
    if expected is None:
        with pytest.raises(UnreadableError, match="no idempotency_key"):
            found.items({}, body)
    else:
        assert found.items({}, body)[0].event_id == expected


def test_items_have_the_type_of_the_task() -> None:
    """A receiver routes by the task's type."""
    [item] = made().items({}, BODY)
    assert (item.event_id, item.event_type) == (EVENT, "create_media_buy")
    kind = b'"notification_type": "creative.status_changed"'
    other = b'{"idempotency_key": "0123456789abcdef", ' + kind + b"}"
    assert made().items({}, other)[0].event_type == "creative.status_changed"


# --- senders -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "publisher",
    [
        "seller.example",
        {"seller-1": "seller.example", "seller-2": "seller.example"},
        {"seller-1": "seller.example", "seller-2": "seller.example"}.get,
    ],
)
def test_a_publisher_outlives_its_keys(publisher: Any) -> None:
    """Two keys of one publisher are one sender, so that a change of keys splits no dedup."""
    second = ed25519.Ed25519PrivateKey.generate()
    keys = {"seller-1": PRIVATE.public_key(), "seller-2": second.public_key()}
    rotated = adcp_provider(allowed_hosts="*", signing_key=second, key_id="seller-2")
    found = made(keys=keys, publisher=publisher)
    for request in (signed(), rotated.sign("POST", URL, {}, BODY, now=NOW)):
        sender = found.verify(*request, now=NOW).sender
        assert sender is not None
        assert sender.as_sender_identity() == "adcp::publisher:seller.example"


@pytest.mark.parametrize("publisher", [None, {}, lambda _: None])
def test_without_a_publisher_the_key_is_the_sender(publisher: Any) -> None:
    """A key that nobody mapped is a sender of its own."""
    sender = made(publisher=publisher).verify(*signed(), now=NOW).sender
    assert sender is not None
    assert sender.as_sender_identity() == "adcp:key:seller-1"


# --- order -------------------------------------------------------------------------------------


def test_the_first_failure_is_the_answer() -> None:
    """With everything wrong at once, faults come to light in the order of the checks."""
    keys = {"keys": [{**JWK, "adcp_use": "x"}]}
    late = {"revoked_kids": ["seller-1"]}
    full = Nonces(MemoryStore(), per_key=1)
    assert code(signed(), nonces=full) == "ok"
    wrong: dict[str, Any] = {"tag": "x", "alg": "x", "expires": NOW - 100, "keyid": "nobody"}
    few = ("@method",)

    def found(request: SignedRequest, **options: Any) -> str:
        bad = request._replace(url="https://x.example/", body=b'{"a":1,"a":2}')
        return code(bad, **{"keys": keys, "revocations": late, "nonces": full, **options})

    order = [found(with_header(resigned(covers=few, **wrong), "Signature", "x"))]
    order.append(found(resigned(covers=few, **{**wrong, "nonce": None})))
    for name in ("tag", "alg", "expires"):
        order.append(found(resigned(covers=few, **wrong)))
        del wrong[name]
    order.append(found(resigned(covers=few, **wrong)))
    order.append(found(resigned(**wrong)))
    order.append(found(resigned()))
    right = {"keys": {"keys": [JWK]}}
    order.append(found(resigned(), **right))
    order.append(found(resigned(), **right, revocations=None))
    order.append(found(resigned(), **right, revocations=None, nonces=None))
    assert order == [
        "header_malformed",
        "params_incomplete",
        "tag_invalid",
        "alg_not_allowed",
        "window_invalid",
        "components_incomplete",
        "key_unknown",
        "key_purpose_invalid",
        "key_revoked",
        "rate_abuse",
        "invalid",
    ]


# --- answers and options -----------------------------------------------------------------------


def test_a_rejection_is_answered_with_its_code() -> None:
    """The 401 carries the code, one that AdCP knows, and nothing a stranger wrote."""
    assert rejection_headers(Verdict(True, "ok")) == {}
    for known in ADCP_CODES:
        assert rejection_headers(Verdict.rejected(known)) == {
            "WWW-Authenticate": f'Signature error="{known}"'
        }
    for other in ("timestamp_too_old", 'x"\r\nSet-Cookie: a'):
        assert rejection_headers(Verdict.rejected(other)) == {
            "WWW-Authenticate": 'Signature error="webhook_signature_invalid"'
        }
    assert made().rejection_headers(Verdict(True, "ok")) == {}


def test_the_codes_are_those_of_adcp() -> None:
    """The seventeen codes of the profile, each with what to do about it."""
    assert len(ADCP_CODES) == 17
    assert all(ADCP_CODES.values())


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "keys="),
        ({"keys": {}}, "1 to"),
        ({"keys": {"keys": []}, "jwks": dict}, "one of them"),
        ({"keys": {"k": {"kty": "OKP"}}}, "supported kind"),
        ({"keys": {"k": "text"}}, "is no key"),
        ({"keys": [JWK]}, "mapping or a function"),
        ({"signing_key": PRIVATE}, "key_id="),
        ({"signing_key": PRIVATE, "key_id": "k" * 300}, "key_id="),
        ({"signing_key": b"0123456789abcdef", "key_id": "k"}, "Ed25519 or P-256"),
        ({"signing_key": {**JWK, "d": 5}, "key_id": "k"}, "base64url"),
        ({"keys": {"keys": [JWK]}, "nonces": MemoryStore()}, "Nonces"),
        ({"keys": {"keys": [JWK]}, "revocations": 5}, "revocations"),
        ({"keys": {"keys": [JWK]}, "public_url": "nope"}, "public_url"),
    ],
)
def test_an_option_that_can_not_work_is_refused_at_once(
    options: dict[str, Any], message: str
) -> None:
    """Wrong options raise when the provider is made, and say what to pass."""
    with pytest.raises(PolicyError, match=message):
        adcp_provider(allowed_hosts="*", **options)


def test_without_cryptography_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package is told when the provider is made, not as an unknown key later."""
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    with pytest.raises(PolicyError, match=r"oncekey\[crypto\]"):
        adcp_provider(allowed_hosts="*", jwks=lambda: {"keys": [JWK]})
    with pytest.raises(PolicyError, match=r"oncekey\[crypto\]"):
        FetchedKeys(lambda: {"keys": [JWK]})


def test_a_body_that_is_not_bytes_is_refused() -> None:
    """A parsed body can't be verified."""
    with pytest.raises(TypeError, match="raw bytes"):
        made().verify("POST", URL, {}, "{}", now=NOW)  # type: ignore[arg-type]


# --- signing -----------------------------------------------------------------------------------


def test_every_signature_has_a_fresh_nonce() -> None:
    """A retry is signed anew, so it is no replay."""
    nonces = Nonces(MemoryStore())
    assert [code(signed(), nonces=nonces) for _ in range(3)] == ["ok"] * 3


def test_a_json_web_key_signs() -> None:
    """The private half of a JSON Web Key is taken as it is, for both algorithms."""
    d = base64.urlsafe_b64encode(bytes(range(32))).rstrip(b"=").decode()
    one = adcp_provider(
        allowed_hosts="*", keys={"keys": [JWK]}, signing_key={**JWK, "d": d}, key_id="seller-1"
    )
    assert one.verify(*one.sign("POST", URL, {}, BODY, now=NOW), now=NOW).ok
    curve = ec.generate_private_key(ec.SECP256R1())
    two = adcp_provider(allowed_hosts="*", signing_key=curve, key_id="k2")
    request = two.sign("POST", URL, {}, BODY, now=NOW)
    assert 'alg="ecdsa-p256-sha256"' in request.headers["Signature-Input"]
    assert two.verify(*request, now=NOW).ok


def test_what_can_not_be_signed_says_why() -> None:
    """No key, a public key, a URL that is none, or a header of two lines."""
    with pytest.raises(PolicyError, match="signing_key="):
        made().sign("POST", URL, {}, BODY)
    public = adcp_provider(allowed_hosts="*", signing_key=PRIVATE.public_key(), key_id="k")
    with pytest.raises(PolicyError, match="private"):
        public.sign("POST", URL, {}, BODY)
    with pytest.raises(PolicyError, match="ASCII"):
        SIGNER.sign("POST", "https://example.com/b\u00fccher", {}, BODY)
    with pytest.raises(PolicyError, match="header"):
        SIGNER.sign("POST", URL, {"content-type": "a\nb"}, BODY)


def test_keys_keep_their_secrets() -> None:
    """Neither a key nor a provider shows key material."""
    key = load_key(b"sixteen bytes or more")
    assert "sixteen" not in repr(key)
    d = base64.urlsafe_b64encode(bytes(range(32))).rstrip(b"=").decode()
    private = load_key({**JWK, "d": d}, private=True)
    assert d not in repr(private)
    assert "d" not in private.jwk
    assert load_key(rsa.generate_private_key(65537, 2048)).algorithm == "rsa-pss-sha512"
