"""Secrets and keys of the kit's own: known to everybody, so of no use to anybody."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from typing import Any, Final

from oncekey.signatures.facts import Facts
from oncekey.signatures.table import providers

__all__ = ["keys_of", "words_of"]

_SHARED: Final = "a-secret-of-no-worth-for-tests-only-0123456789"
_WHSEC: Final = "whsec_YS1zZWNyZXQtb2Ytbm8td29ydGgtZm9yLXRlc3Rz"
_HEX: Final = "44782def547aaa06c910c43932b1eb0c71fc68d9d0c057550c48ec2acf6ba056"
_SEED: Final = bytes(range(32))


def keys_of(name: str) -> dict[str, Any]:
    """What to make the provider ``name`` with, so that it can verify and sign."""
    facts = providers().get(name)
    scheme = "" if facts is None else facts.scheme
    if (facts is not None and facts.settings.get("key") == "hex") or scheme == "adyen":
        return {"secret": _HEX}
    if scheme == "standard-webhooks":
        return {"secret": _WHSEC}
    if scheme == "key-pair" and facts is not None and facts.settings["kind"] == "ed25519":
        return {
            "secret": _ed25519().public_key().public_bytes_raw().hex(),
            "signing_key": _SEED.hex(),
        }
    if name == "adcp":
        return {"signing_key": _ed25519(), "key_id": "oncekey-testing"}
    if scheme == "key-pair":
        return dict(_curve_keys())
    if facts is not None and scheme == "jwt":
        return _token_keys(facts)
    if scheme == "paypal":
        return dict(_paypal_keys())
    if scheme == "sns":
        return dict(_sns_keys())
    return {"secret": _SHARED}


def words_of(name: str) -> dict[str, Any]:
    """What else the provider asks for. Tests run on any host, and everybody has these secrets."""
    facts = providers().get(name)
    if facts is None:
        return {}
    said: dict[str, Any] = {}
    if facts.unsigned:
        said["accept_unsigned"] = facts.unsigned["what"]
    if facts.scheme in ("twilio", "rfc9421") or "{url}" in facts.settings.get("signed", ""):
        said["allowed_hosts"] = "*"
    return said


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
    of = _crypto("hazmat.primitives.serialization")
    key = _curve_key()
    public = key.public_key().public_bytes(of.Encoding.PEM, of.PublicFormat.SubjectPublicKeyInfo)
    return {"secret": public, "signing_key": _pem(key)}


def _token_keys(facts: Facts) -> dict[str, Any]:
    """A private key for the first algorithm of a provider's tokens, and what they say."""
    private = _rsa_key() if facts.settings["algorithms"][0] == "RS256" else _curve_key()
    said = {"audience": "https://testserver/webhooks", "email": "push@testing.example"}
    named = {name: value for name, value in said.items() if facts.settings.get(name)}
    return {"signing_key": private, "key_id": "oncekey-testing", **named}


@cache
def _rsa_key() -> Any:
    """An RSA key that is for RS256, and not for the PSS that one is usually taken for."""
    rsa = _crypto("hazmat.primitives.asymmetric.rsa")
    material = rsa.generate_private_key(65537, 2048)
    return import_module("oncekey.signatures.algorithms").SignatureKey(
        "rsa-v1_5-sha256", material, {}
    )


@cache
def _curve_key() -> Any:
    ec = _crypto("hazmat.primitives.asymmetric.ec")
    return ec.derive_private_key(0xC0FFEE, ec.SECP256R1())


@cache
def _paypal_keys() -> Mapping[str, Any]:
    place = "https://api.paypal.com/v1/notifications/certs/CERT-oncekey-testing"
    made = _certified("messageverificationcerts.paypal.com", place)
    return {"webhook_id": "1JE4291016473214C", **made}


@cache
def _sns_keys() -> Mapping[str, Any]:
    place = "https://sns.eu-west-1.amazonaws.com/SimpleNotificationService-" + "0" * 32 + ".pem"
    made = _certified("sns.amazonaws.com", place)
    return {"topics": "arn:aws:sns:eu-west-1:123456789012:testing", **made}


def _certified(name: str, place: str) -> dict[str, Any]:
    """A key whose certificate for ``name`` lies at ``place``, and what says so."""
    years = (datetime(2000, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC))
    key, certificate, root = issued(name, *years)
    return {
        "fetch": lambda url: certificate,
        "trust": root,
        "signing_key": key,
        "cert_url": place,
    }


def issued(
    name: str, begins: datetime, ends: datetime, issuer_at: str = ""
) -> tuple[bytes, bytes, bytes]:
    """A private key, its certificate for the host ``name``, and the root that issued it, as PEM.

    ``issuer_at`` is where the certificate says that its issuer's can be had.
    """
    x509 = _crypto("x509")
    hashes, of = _crypto("hazmat.primitives.hashes"), _crypto("hazmat.primitives.serialization")
    rsa = _crypto("hazmat.primitives.asymmetric.rsa")
    keys = [rsa.generate_private_key(65537, 2048) for _ in range(2)]
    root, own = (key.public_key() for key in keys)
    names = [
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, one)])
        for one in ("oncekey testing", name)
    ]
    identifier = x509.SubjectKeyIdentifier.from_public_key(root)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(root)
    usage = dict.fromkeys(
        (
            *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
            *("key_agreement", "crl_sign", "encipher_only", "decipher_only"),
        ),
        False,
    )
    authority = (
        x509.CertificateBuilder(names[0], names[0], root, 1, begins, ends)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**usage, key_cert_sign=True), critical=True)
        .add_extension(identifier, critical=False)
    )
    leaf = (
        x509.CertificateBuilder(names[0], names[1], own, 2, begins, ends)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(
            x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        .add_extension(issuer, critical=False)
    )
    if issuer_at:
        place = x509.AccessDescription(
            x509.AuthorityInformationAccessOID.CA_ISSUERS,
            x509.UniformResourceIdentifier(issuer_at),
        )
        leaf = leaf.add_extension(x509.AuthorityInformationAccess([place]), critical=False)
    made = [one.sign(keys[0], hashes.SHA256()) for one in (leaf, authority)]
    certificate, trusted = (one.public_bytes(of.Encoding.PEM) for one in made)
    return _pem(keys[1]), certificate, trusted
