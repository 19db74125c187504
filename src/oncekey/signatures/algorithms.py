"""Keys and the algorithms of RFC 9421: load them, verify and sign with them.

``cryptography`` does the work for public keys and is imported when the first one is used.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, cast

from oncekey.signatures.keypairs import load_key as load_pem
from oncekey.signatures.keypairs import need_cryptography
from oncekey.signatures.parsing import decode

__all__ = ["ALGORITHMS", "SignatureKey", "load_key", "sign_bytes", "signature_is_right"]

ALGORITHMS: Final = ("ed25519", "ecdsa-p256-sha256", "rsa-pss-sha512", "hmac-sha256")
"""The algorithms of RFC 9421 that are supported."""


class SignatureKey(NamedTuple):
    """A key and the one algorithm that it is for, so that no sender can choose another.

    Attributes:
        algorithm: The name that RFC 9421 has for it.
        material: A key object of ``cryptography``, or the bytes of a shared secret.
        jwk: The members of the JSON Web Key, without the material. Empty: it was pinned by hand.
    """

    algorithm: str
    material: Any
    jwk: Mapping[str, Any]

    def __repr__(self) -> str:
        """Without the material: it may be a secret."""
        return f"SignatureKey({self.algorithm!r})"


_SECRET_MEMBERS: Final = frozenset({"k", "d", "p", "q", "dp", "dq", "qi", "oth"})
_JWK_ALGORITHMS: Final = {  # kty, crv -> RFC 9421's name, JOSE's name
    ("OKP", "Ed25519"): ("ed25519", "EdDSA"),
    ("EC", "P-256"): ("ecdsa-p256-sha256", "ES256"),
    ("RSA", None): ("rsa-pss-sha512", "PS512"),
    ("oct", None): ("hmac-sha256", "HS256"),
}


def load_key(value: object, *, private: bool = False) -> SignatureKey:
    """Make a key of a JSON Web Key, PEM, a key object of ``cryptography``, or a secret's bytes.

    Args:
        value: The key.
        private: The private half of a JSON Web Key (its ``d``) is wanted, to sign with.

    Raises:
        ValueError: It is none of those, or of no supported kind.
        PolicyError: It is an asymmetric key, and ``cryptography`` is not installed.
    """
    if isinstance(value, SignatureKey):
        return value
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    if isinstance(text, str) and "-----BEGIN " in text:
        # Never a shared secret: whoever has the public key could sign with it.
        value = load_pem(text, "the key", private=private)
    if isinstance(value, (bytes, bytearray)):
        if len(value) < 16:
            raise ValueError("a shared secret must have at least 16 bytes")
        return SignatureKey("hmac-sha256", bytes(value), {})
    if isinstance(value, Mapping):
        return _load_jwk(cast("Mapping[str, Any]", value), private=private)
    return SignatureKey(_algorithm_of(value), value, {})


def _load_jwk(jwk: Mapping[str, Any], *, private: bool) -> SignatureKey:
    kind = jwk.get("kty"), jwk.get("crv")
    # Values of any type may stand there, and a list has no hash.
    names = next((names for known, names in _JWK_ALGORITHMS.items() if known == kind), None)
    if names is None:
        raise ValueError("a JSON Web Key of no supported kind; use Ed25519 or P-256")
    algorithm, jose = names
    given = jwk.get("alg")
    if given is not None and given != jose and given != algorithm:
        raise ValueError(f"a JSON Web Key whose alg does not fit its kind, which is {jose}")
    shown = {name: member for name, member in jwk.items() if name not in _SECRET_MEMBERS}
    return SignatureKey(algorithm, _material(algorithm, jwk, private=private), shown)


def _material(algorithm: str, jwk: Mapping[str, Any], *, private: bool) -> Any:
    def octets(name: str, size: int | None = None) -> bytes:
        text = jwk.get(name)
        raw = decode(text, "base64url") if isinstance(text, str) and len(text) <= 2048 else None
        if raw is None:
            raise ValueError(f"the JSON Web Key needs {name} as base64url")
        if size is not None and len(raw) != size:
            raise ValueError(f"{name} of the JSON Web Key must have {size} bytes")
        return raw

    def number(name: str, size: int | None = None) -> int:
        return int.from_bytes(octets(name, size), "big")

    if algorithm == "hmac-sha256":
        secret = octets("k")
        if len(secret) < 16:
            raise ValueError("a shared secret must have at least 16 bytes")
        return secret
    need_cryptography()
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

    if algorithm == "ed25519":
        if private:
            return ed25519.Ed25519PrivateKey.from_private_bytes(octets("d", 32))
        return ed25519.Ed25519PublicKey.from_public_bytes(octets("x", 32))
    if algorithm == "ecdsa-p256-sha256":
        if private:
            return ec.derive_private_key(number("d", 32), ec.SECP256R1())
        numbers = ec.EllipticCurvePublicNumbers(number("x", 32), number("y", 32), ec.SECP256R1())
        return numbers.public_key()
    if private:
        raise ValueError("pass an RSA key to sign with as a key object of cryptography")
    return _fit_rsa(rsa.RSAPublicNumbers(number("e"), number("n")).public_key())


def _algorithm_of(material: object) -> str:
    try:
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
    except ImportError:
        raise ValueError("a key is a JSON Web Key, a key object or a secret's bytes") from None
    if isinstance(material, (ed25519.Ed25519PublicKey, ed25519.Ed25519PrivateKey)):
        return "ed25519"
    if isinstance(material, (ec.EllipticCurvePublicKey, ec.EllipticCurvePrivateKey)):
        if isinstance(material.curve, ec.SECP256R1):
            return "ecdsa-p256-sha256"
        raise ValueError("an elliptic curve key must be of P-256")
    if isinstance(material, (rsa.RSAPublicKey, rsa.RSAPrivateKey)):
        _fit_rsa(material)
        return "rsa-pss-sha512"
    raise ValueError(
        f"{type(material).__name__} is no key: pass a JSON Web Key, a key object of cryptography "
        "or the bytes of a shared secret"
    )


def _fit_rsa(key: Any) -> Any:
    if not 2048 <= key.key_size <= 8192:
        raise ValueError("an RSA key must have 2048 to 8192 bits")
    return key


def signature_is_right(key: SignatureKey, message: bytes, signature: bytes) -> bool:
    """Whether ``signature`` is the key's over ``message``. Any bytes give an answer."""
    if key.algorithm == "hmac-sha256":
        return hmac.compare_digest(hmac.digest(key.material, message, "sha256"), signature)
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, utils

    public = key.material.public_key() if hasattr(key.material, "public_key") else key.material
    try:
        if key.algorithm == "ed25519":
            public.verify(signature, message)
        elif key.algorithm == "ecdsa-p256-sha256":
            if len(signature) != 64:  # r and s, 32 bytes each; not DER
                return False
            r, s = int.from_bytes(signature[:32], "big"), int.from_bytes(signature[32:], "big")
            public.verify(utils.encode_dss_signature(r, s), message, ec.ECDSA(hashes.SHA256()))
        else:
            public.verify(signature, message, _pss(), hashes.SHA512())
    except (InvalidSignature, ValueError):
        return False
    return True


def sign_bytes(key: SignatureKey, message: bytes) -> bytes:
    """Sign ``message``.

    Raises:
        ValueError: The key is the public half.
    """
    if key.algorithm == "hmac-sha256":
        return hmac.digest(key.material, message, "sha256")
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, utils

    if not hasattr(key.material, "sign"):
        raise ValueError("a public key can't sign: pass the private one")
    if key.algorithm == "ed25519":
        return cast("bytes", key.material.sign(message))
    if key.algorithm == "ecdsa-p256-sha256":
        der = key.material.sign(message, ec.ECDSA(hashes.SHA256()))
        r, s = utils.decode_dss_signature(der)
        return int(r).to_bytes(32, "big") + int(s).to_bytes(32, "big")
    return cast("bytes", key.material.sign(message, _pss(), hashes.SHA512()))


def _pss() -> Any:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    return padding.PSS(padding.MGF1(hashes.SHA512()), 64)
