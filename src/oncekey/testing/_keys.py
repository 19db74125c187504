"""Secrets and keys of the kit's own: known to everybody, so of no use to anybody."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from typing import Any, Final

__all__ = ["keys_of", "words_of"]

_SHARED: Final = "a-secret-of-no-worth-for-tests-only-0123456789"
_WHSEC: Final = "whsec_YS1zZWNyZXQtb2Ytbm8td29ydGgtZm9yLXRlc3Rz"
_HEX: Final = "44782def547aaa06c910c43932b1eb0c71fc68d9d0c057550c48ec2acf6ba056"
_SEED: Final = bytes(range(32))


def keys_of(name: str) -> dict[str, Any]:
    """What to make the provider ``name`` with, so that it can verify and sign."""
    if name in ("standard-webhooks", "svix"):
        return {"secret": _WHSEC}
    if name.startswith("adyen"):
        return {"secret": _HEX}
    if name == "discord":
        return {
            "secret": _ed25519().public_key().public_bytes_raw().hex(),
            "signing_key": _SEED.hex(),
        }
    if name == "adcp":
        return {"signing_key": _ed25519(), "key_id": "oncekey-testing"}
    if name == "sendgrid":
        return dict(_curve_keys())
    if name == "paypal":
        return dict(_paypal_keys())
    return {"secret": _SHARED}


def words_of(name: str) -> dict[str, Any]:
    """What else the provider asks for. Tests run on any host, and everybody has these secrets."""
    return {"allowed_hosts": "*"} if name in ("twilio", "square", "hubspot", "adcp") else {}


def _crypto(module: str) -> Any:
    """A module of ``cryptography``, which only providers with key pairs need."""
    from oncekey.signatures.keypairs import need_cryptography

    need_cryptography()
    return import_module(f"cryptography.{module}")


def _ed25519() -> Any:
    kind = _crypto("hazmat.primitives.asymmetric.ed25519").Ed25519PrivateKey
    return kind.from_private_bytes(_SEED)


def _pem(key: Any) -> bytes:
    of = _crypto("hazmat.primitives.serialization")
    pem: bytes = key.private_bytes(of.Encoding.PEM, of.PrivateFormat.PKCS8, of.NoEncryption())
    return pem


@cache
def _curve_keys() -> Mapping[str, Any]:
    ec = _crypto("hazmat.primitives.asymmetric.ec")
    of = _crypto("hazmat.primitives.serialization")
    key = ec.derive_private_key(0xC0FFEE, ec.SECP256R1())
    public = key.public_key().public_bytes(of.Encoding.PEM, of.PublicFormat.SubjectPublicKeyInfo)
    return {"secret": public, "signing_key": _pem(key)}


@cache
def _paypal_keys() -> Mapping[str, Any]:
    x509 = _crypto("x509")
    hashes, of = _crypto("hazmat.primitives.hashes"), _crypto("hazmat.primitives.serialization")
    key = _crypto("hazmat.primitives.asymmetric.rsa").generate_private_key(65537, 2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "oncekey testing")])
    begins, ends = datetime(2000, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, begins, ends)
    certificate = made.sign(key, hashes.SHA256()).public_bytes(of.Encoding.PEM)
    return {
        "webhook_id": "1JE4291016473214C",
        "fetch": lambda url: certificate,
        "signing_key": _pem(key),
        "cert_url": "https://api.paypal.com/v1/notifications/certs/CERT-oncekey-testing",
    }
