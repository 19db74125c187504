"""Keys of asymmetric schemes, loaded with ``cryptography`` only when one is used."""

from __future__ import annotations

from typing import Any

from oncekey.errors import PolicyError

__all__ = [
    "MissingCryptographyError",
    "ed25519_private",
    "ed25519_public",
    "load_key",
    "need_cryptography",
    "signed_by",
]


class MissingCryptographyError(PolicyError, ImportError):
    """A scheme with key pairs was asked for, and the package that does them is not installed."""


def need_cryptography() -> Any:
    """The module of ed25519, if it is installed.

    Raises:
        MissingCryptographyError: It is not.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise MissingCryptographyError(
            "this signature needs the package cryptography: run pip install 'oncekey[crypto]'"
        ) from None
    return ed25519


def ed25519_public(raw: bytes, what: str) -> Any:
    """A public key of 32 bytes.

    Raises:
        PolicyError: It is none.
    """
    ed25519 = need_cryptography()
    if len(raw) != 32:
        raise PolicyError(f"{what} must have 32 bytes, got {len(raw)}")
    return ed25519.Ed25519PublicKey.from_public_bytes(raw)


def ed25519_private(raw: bytes, what: str) -> Any:
    """A private key: the seed of 32 bytes, or the seed and its public key.

    Raises:
        PolicyError: It is none, or the two halves don't belong together.
    """
    ed25519 = need_cryptography()
    if len(raw) not in (32, 64):
        raise PolicyError(f"{what} must have 32 or 64 bytes, got {len(raw)}")
    private = ed25519.Ed25519PrivateKey.from_private_bytes(raw[:32])
    if len(raw) == 64 and private.public_key().public_bytes_raw() != raw[32:]:
        raise PolicyError(f"{what} has two halves that don't belong together")
    return private


def load_key(text: str | bytes, what: str, *, private: bool = False) -> Any:
    """A key in PEM, or the base64 of its DER, as dashboards show it.

    Raises:
        PolicyError: It can't be read.
    """
    need_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    raw = text.encode("ascii", "replace") if isinstance(text, str) else text
    raw = raw.strip()
    if not raw.startswith(b"-----BEGIN"):
        kind = b"PRIVATE KEY" if private else b"PUBLIC KEY"
        raw = b"-----BEGIN %b-----\n%b\n-----END %b-----\n" % (kind, raw, kind)
    try:
        if private:
            return serialization.load_pem_private_key(raw, None)
        return serialization.load_pem_public_key(raw)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise PolicyError(f"{what} can't be read: give PEM, or the base64 of its DER") from None


def signed_by(key: Any, signature: bytes, message: bytes, *how: Any) -> bool:
    """Whether ``signature`` is a public key's over ``message``, made as ``how`` says."""
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, message, *how)
    except InvalidSignature:
        return False
    return True
