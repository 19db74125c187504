"""RFC 9421 beside http-message-signatures, another implementation: each verifies the other's."""

from __future__ import annotations

import datetime
import os
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from tests.signatures.rsa_for_tests import rsa_key

from oncekey.signatures.algorithms import SignatureKey
from oncekey.signatures.rfc9421 import rfc9421_provider

if find_spec("http_message_signatures") is None and os.environ.get("CI"):
    raise RuntimeError("install http-message-signatures, which this test compares with")
peer = pytest.importorskip("http_message_signatures")

URL = "https://example.com/path?a=b&empty=&q=with%20space%20%C3%A9~%2B+plus%21%27*-._"
ALGORITHMS = (
    *("rsa-v1_5-sha256", "rsa-pss-sha512", "ecdsa-p256-sha256", "ecdsa-p384-sha384"),
    *("ed25519", "hmac-sha256"),
)
SECRET = b"0123456789abcdef0123456789abcdef"


def _private(algorithm: str) -> Any:
    if algorithm.startswith("rsa"):
        return rsa_key()
    if algorithm == "ed25519":
        return ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    curve = ec.SECP384R1() if "p384" in algorithm else ec.SECP256R1()
    return ec.derive_private_key(0xC0FFEE, curve)


class _Keys(peer.HTTPSignatureKeyResolver):  # type: ignore[misc]
    """The key of an algorithm, as PEM or as the shared secret."""

    def __init__(self, algorithm: str) -> None:
        self._algorithm = algorithm

    def resolve_private_key(self, key_id: str) -> bytes:
        if self._algorithm == "hmac-sha256":
            return SECRET
        pem: bytes = _private(self._algorithm).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return pem

    def resolve_public_key(self, key_id: str) -> bytes:
        if self._algorithm == "hmac-sha256":
            return SECRET
        pem: bytes = (
            _private(self._algorithm)
            .public_key()
            .public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )
        return pem


def _ours(algorithm: str, covers: tuple[str, ...]) -> Any:
    key = SECRET if algorithm == "hmac-sha256" else _private(algorithm)
    if algorithm == "rsa-v1_5-sha256":
        key = SignatureKey(algorithm, key, {})
    return rfc9421_provider(signing_key=key, key_id="k", covers=covers, allowed_hosts="*")


def _theirs(kind: Any, algorithm: str) -> Any:
    name = algorithm.upper().replace("-", "_")
    return kind(signature_algorithm=getattr(peer.algorithms, name), key_resolver=_Keys(algorithm))


COVERS = (
    ("@method", "@target-uri", "@authority"),
    ("@method", "@query-param;name=q", "@query-param;name=a", "@query-param;name=empty"),
)


@pytest.mark.parametrize("covers", COVERS, ids=["whole", "query-param"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_verifies_what_the_other_signs(algorithm: str, covers: tuple[str, ...]) -> None:
    """Every algorithm of the RFC, and parameters of the query with what has to be written anew."""
    ours = _ours(algorithm, covers)
    quoted = [
        f'"{name}";name="{value}"' if value else name
        for name, _, value in (one.partition(";name=") for one in covers)
    ]
    message = SimpleNamespace(method="POST", url=URL, headers={}, body=b"")
    _theirs(peer.HTTPMessageSigner, algorithm).sign(
        message, key_id="k", covered_component_ids=quoted, label="sig1"
    )
    assert ours.verify("POST", URL, message.headers, b"").code == "ok"
    other = URL.replace("plus", "minus")
    assert ours.verify("POST", other, message.headers, b"").code == "signature_mismatch"

    request = ours.sign("POST", URL, {}, b"")
    message = SimpleNamespace(method="POST", url=request.url, headers=dict(request.headers))
    day = datetime.timedelta(days=1)
    found = _theirs(peer.HTTPMessageVerifier, algorithm).verify(message, max_age=day)
    assert len(found[0].covered_components) == len(covers) + 1
