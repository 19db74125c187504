"""The ``adcp`` package as a real peer: its signatures verify here, and ours verify there."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncekey import MemoryStore
from oncekey.adcp.signatures import adcp_hmac_provider, adcp_provider
from oncekey.signatures.nonces import Nonces
from oncekey.signatures.target_uri import canonical_target

if find_spec("adcp") is None:
    if os.environ.get("CI"):
        raise RuntimeError("the adcp package is the peer of this test: install adcp==9.2.0")
    pytest.skip("adcp is not installed: pip install adcp==9.2.0", allow_module_level=True)

NOW = 1_790_000_000
URL = "https://Buyer.example.com:443/hooks/%7eadcp/./op%2fx?b=2&a=1"
BODY = json.dumps({"idempotency_key": "whk_01HW9D3H8FZP2N6R8T0V4X6Z9B", "status": "done"}).encode()
SECRET = "cc237f7fe354609bb41360c6530a2deb7926f3cc55e91df3ff90e37202950b6c"
ALGORITHMS = {"ed25519": "generate_ed25519", "ecdsa-p256-sha256": "generate_es256"}


class Peer:
    """The modules of the package, imported at first use as that takes seconds."""

    MODULES = frozenset(
        {"canonical", "crypto", "errors", "keygen", "webhook_hmac", "webhook_signer"}
        | {"webhook_verifier"}
    )

    def __getattr__(self, name: str) -> Any:
        if name not in self.MODULES:  # pytest asks for a lot of names while it collects
            raise AttributeError(name)
        module = import_module(f"adcp.signing.{name}")
        setattr(self, name, module)
        return module

    def key(self, algorithm: str) -> tuple[Any, dict[str, Any]]:
        pem, jwk = getattr(self.keygen, ALGORITHMS[algorithm])(f"peer-{algorithm}")
        return self.crypto.load_private_key_pem(pem), jwk

    def verify(self, jwk: dict[str, Any], request: Any, now: float = NOW) -> Any:
        """The sender that the peer finds, or the code of its rejection."""
        options = self.webhook_verifier.WebhookVerifyOptions(
            jwks_resolver={jwk["kid"]: jwk}.get, clock=lambda: now
        )
        try:
            found = self.webhook_verifier.verify_webhook_signature(
                method=request.method,
                url=request.url,
                headers=request.headers,
                body=request.body,
                options=options,
            )
        except self.errors.SignatureVerificationError as error:
            return error.code
        return found.key_id


peer = Peer()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_the_peer_signs_verifies_here(algorithm: str) -> None:
    """A delivery that the peer's signer signed is accepted once, then a replay."""
    private, jwk = peer.key(algorithm)
    signed = peer.webhook_signer.sign_webhook(
        method="POST",
        url=URL,
        headers={"Content-Type": "application/json"},
        body=BODY,
        private_key=private,
        key_id=jwk["kid"],
        alg=algorithm,
        created=NOW,
    ).as_dict()
    headers = {"Content-Type": "application/json", "Host": "buyer.example.com", **signed}
    provider = adcp_provider(allowed_hosts="*", keys={"keys": [jwk]}, nonces=Nonces(MemoryStore()))
    verdict = provider.verify("POST", URL, headers, BODY, now=NOW)
    assert verdict.ok, verdict
    assert verdict.event_id == "whk_01HW9D3H8FZP2N6R8T0V4X6Z9B"
    assert verdict.sender is not None
    assert verdict.sender.key_id == jwk["kid"]
    again = provider.verify("POST", URL, headers, BODY, now=NOW)
    assert again.code == "webhook_signature_replayed"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_signed_here_verifies_there(algorithm: str) -> None:
    """The peer's verifier accepts our signature, and gives the code that we give for a fault."""
    private, jwk = peer.key(algorithm)
    provider = adcp_provider(
        allowed_hosts="*", keys={"keys": [jwk]}, signing_key=private, key_id=jwk["kid"]
    )
    request = provider.sign("POST", URL, {"Content-Type": "application/json"}, BODY, now=NOW)
    assert provider.verify(*request, now=NOW).ok
    assert peer.verify(jwk, request) == jwk["kid"]

    late = provider.verify(*request, now=NOW + 361)
    assert peer.verify(jwk, request, NOW + 361) == late.code == "webhook_signature_window_invalid"
    changed = [
        ("webhook_signature_digest_mismatch", request._replace(body=BODY + b" ")),
        ("webhook_signature_invalid", request._replace(url=URL + "&c=3")),
        ("webhook_signature_invalid", request._replace(method="PUT")),
        ("webhook_signature_header_malformed", request._replace(headers={})),
    ]
    for code, other in changed:
        assert peer.verify(jwk, other) == provider.verify(*other, now=NOW).code == code


@pytest.mark.parametrize(
    "old, new",
    [
        (";tag=", ";other="),
        (";created=", ";created=x"),
        ('"@authority" ', ""),
        ('"@method"', '"@method" "@method"'),
        ('"@method"', '"@method" "x-absent"'),
        ('alg="ed25519"', 'alg="hmac-sha256"'),
        ("webhook-signing/v1", "webhook-signing/v2"),
        ('keyid="', 'keyid="x'),
        ("sig1=(", "sig2=("),
        ("sig1=(", "sig1=(("),
        (";expires=179", ";expires=199"),
        ("(", "( "),
    ],
)
def test_both_name_the_same_fault(old: str, new: str) -> None:
    """For the same change of Signature-Input, the peer gives the code that we give."""
    private, jwk = peer.key("ed25519")
    provider = adcp_provider(
        allowed_hosts="*", keys={"keys": [jwk]}, signing_key=private, key_id=jwk["kid"]
    )
    request = provider.sign("POST", URL, {}, BODY, now=NOW)
    assert old in request.headers["Signature-Input"]
    header = request.headers["Signature-Input"].replace(old, new)
    other = request._replace(headers={**request.headers, "Signature-Input": header})
    ours = provider.verify(*other, now=NOW)
    theirs = peer.verify(jwk, other)
    # Spaces that are not in the canonical form: we sign the form, the peer what was written.
    expected = "webhook_signature_invalid" if (old, new) == ("(", "( ") else ours.code
    assert theirs == expected
    assert ours.ok == ((old, new) == ("(", "( "))


hosts = st.sampled_from(["h.example", "H.Example.", "h..example", "[::1]", "[::1", "fe80::1", ""])
ports = st.sampled_from(["", ":", ":443", ":80", ":8443", ":x", ":00443"])
parts = st.lists(
    st.sampled_from(["/", ".", "..", "a", "%41", "%2f", "%zz", "%", "~", ";", "b"]), max_size=12
)
queries = st.sampled_from(["", "?", "?b=2&a=1", "?%7e", "?a?b", "#f", "?x#y"])


@settings(max_examples=300)
@given(st.sampled_from(["http", "HTTPS"]), hosts, ports, parts, queries)
def test_urls_get_the_peers_form(
    scheme: str, host: str, port: str, path: list[str], query: str
) -> None:
    """Whatever we bring into canonical form, the peer brings into the same."""
    url = f"{scheme}://{host}{port}" + (f"/{''.join(path)}" if path else "") + query
    try:
        ours = canonical_target(url).uri
    except ValueError:
        with pytest.raises(ValueError):
            peer.canonical.canonicalize_target_uri(url)
        return
    assert ours == peer.canonical.canonicalize_target_uri(url)


def peers_hmac(headers: dict[str, str], body: bytes) -> bool:
    options = peer.webhook_hmac.LegacyWebhookHmacOptions(
        secret=SECRET.encode(), sender_identity="seller", now=NOW
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            peer.webhook_hmac.verify_webhook_hmac(headers=headers, body=body, options=options)
        except peer.webhook_hmac.LegacyWebhookHmacError:
            return False
    return True


def test_the_legacy_hmac_is_the_peers() -> None:
    """The peer accepts our HMAC, and refuses the changes that we refuse."""
    provider = adcp_hmac_provider(secret=SECRET)
    request = provider.sign("POST", URL, {}, BODY, now=NOW)
    assert provider.verify(*request, now=NOW).ok
    assert peers_hmac(request.headers, request.body)
    for other in (
        request._replace(body=BODY + b" "),
        request._replace(headers={**request.headers, "X-ADCP-Timestamp": str(NOW - 301)}),
        request._replace(headers={**request.headers, "X-ADCP-Signature": "sha256="}),
    ):
        assert not provider.verify(*other, now=NOW).ok
        assert not peers_hmac(other.headers, other.body)


def test_a_timestamp_that_the_peer_forgives_is_refused() -> None:
    """A timestamp with a sign or a space is refused here, though the peer takes it."""
    stamp = f" +{NOW}"
    digest = hmac.new(SECRET.encode(), f"{stamp}.".encode() + BODY, hashlib.sha256).hexdigest()
    headers = {"X-ADCP-Signature": f"sha256={digest}", "X-ADCP-Timestamp": stamp}
    assert peers_hmac(headers, BODY)
    verdict = adcp_hmac_provider(secret=SECRET).verify("POST", URL, headers, BODY, now=NOW)
    assert verdict.code == "timestamp_malformed"
