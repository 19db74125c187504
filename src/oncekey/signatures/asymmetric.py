"""Providers that sign ``{timestamp}{body}`` with a key pair: Discord (ed25519), SendGrid (ECDSA).

``secret`` is the provider's *public* key here. To sign, for tests, pass ``signing_key`` too.
"""

from __future__ import annotations

from typing import Any

from oncekey.errors import PolicyError
from oncekey.signatures.base import (
    Facts,
    Proof,
    Provider,
    Secrets,
    SignedRequest,
    as_secrets,
    put_header,
)
from oncekey.signatures.delivery import Delivery
from oncekey.signatures.keypairs import ed25519_private, ed25519_public, load_key, signed_by
from oncekey.signatures.parsing import (
    Rejection,
    decode,
    encode,
    one_header,
    seconds_since_1970,
    written_time,
)

__all__ = ["KeyPairProvider"]


class KeyPairProvider(Provider):
    """``facts.settings`` names the two headers and the ``kind``: ``ed25519`` or ``ecdsa``."""

    def __init__(
        self,
        facts: Facts,
        *,
        secret: Secrets | None = None,
        previous: Secrets | None = None,
        signing_key: str | bytes = "",
        **common: Any,
    ) -> None:
        super().__init__(facts, **common)
        self._header: str = facts.settings["header"]
        self._stamp_header: str = facts.settings["timestamp_header"]
        self._is_ecdsa = facts.settings["kind"] == "ecdsa"
        self._encoding = "base64" if self._is_ecdsa else "hex"
        self._private = self._private_key(signing_key) if signing_key else None
        if self._private is not None and secret is None:
            self._public = [self._private.public_key()]
        else:
            self._public = [self._public_key(one) for one in as_secrets(facts, secret, previous)]

    def signed_headers(self) -> frozenset[str]:
        """The timestamp."""
        return frozenset({self._stamp_header.lower()})

    def _public_key(self, secret: str | bytes) -> Any:
        what = f"the public key of {self.facts.title}"
        if not self._is_ecdsa:
            return ed25519_public(_from_hex(secret, what), what)
        key = load_key(secret, what)
        if not hasattr(key, "curve"):
            raise PolicyError(f"{what} must be one of an elliptic curve")
        return key

    def _private_key(self, secret: str | bytes) -> Any:
        if self._is_ecdsa:
            key = load_key(secret, "signing_key", private=True)
            if not hasattr(key, "curve"):
                raise PolicyError("signing_key must be one of an elliptic curve")
            return key
        return ed25519_private(_from_hex(secret, "signing_key"), "signing_key")

    def _prove(self, delivery: Delivery, now: float) -> Proof:
        signature = decode(one_header(delivery.headers, self._header), self._encoding)
        if signature is None or (not self._is_ecdsa and len(signature) != 64):
            raise Rejection(
                "header_malformed", f"{self._header} holds no {self._encoding} of a signature"
            )
        stamp = one_header(delivery.headers, self._stamp_header, missing="timestamp_missing")
        timestamp = seconds_since_1970(stamp, "s")
        self._check_clock(timestamp, now)
        message = stamp.encode() + delivery.body
        how = self._hashing()
        if not any(signed_by(key, signature, message, *how) for key in self._public):
            raise Rejection("signature_mismatch")
        return Proof(encode(signature, self._encoding), message, timestamp)

    def _hashing(self) -> tuple[Any, ...]:
        if not self._is_ecdsa:
            return ()
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        return (ec.ECDSA(hashes.SHA256()),)

    def _sign(self, request: SignedRequest, now: float) -> SignedRequest:
        if self._private is None:
            raise PolicyError(
                f"{self.facts.title} signs with a private key, and the public one can't sign: pass "
                "signing_key= with one of your own, for tests"
            )
        stamp = written_time(now, "s")
        signature = self._private.sign(stamp.encode() + request.body, *self._hashing())
        put_header(request.headers, self._stamp_header, stamp)
        put_header(request.headers, self._header, encode(signature, self._encoding))
        return request


def _from_hex(secret: str | bytes, what: str) -> bytes:
    if isinstance(secret, bytes):
        return secret
    try:
        return bytes.fromhex(secret)
    except ValueError:
        raise PolicyError(f"{what} must be hex digits") from None
