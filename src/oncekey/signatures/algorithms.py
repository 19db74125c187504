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

__all__ = [
    "ALGORITHMS",
    "JOSE_NAMES",
    "SignatureKey",
    "load_key",
    "sign_bytes",
    "signature_is_right",
]

ALGORITHMS: Final = (
    "ed25519",
    "ecdsa-p256-sha256",
    "ecdsa-p384-sha384",
    "rsa-pss-sha512",
    "rsa-v1_5-sha256",
    "hmac-sha256",
)
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
_JWK_ALGORITHMS: Final = {  # kty, crv -> RFC 9421's names and JOSE's, the usual one first
    ("OKP", "Ed25519"): {"ed25519": "EdDSA"},
    ("EC", "P-256"): {"ecdsa-p256-sha256": "ES256"},
    ("EC", "P-384"): {"ecdsa-p384-sha384": "ES384"},
    ("RSA", None): {"rsa-pss-sha512": "PS512", "rsa-v1_5-sha256": "RS256"},
    ("oct", None): {"hmac-sha256": "HS256"},
}
JOSE_NAMES: Final = {
    name: jose for names in _JWK_ALGORITHMS.values() for name, jose in names.items()
}
"""What JSON Web Tokens call each algorithm."""
_CURVES: Final = {"ecdsa-p256-sha256": 32, "ecdsa-p384-sha384": 48}  # bytes of a coordinate


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
        raise ValueError("a JSON Web Key of no supported kind; use Ed25519, P-256, P-384 or RSA")
    given = jwk.get("alg")
    fitting = [name for name, jose in names.items() if given in (None, name, jose)]
    if not fitting:
        several = " or ".join(names.values())
        raise ValueError(f"a JSON Web Key whose alg does not fit its kind, which is {several}")
    algorithm = fitting[0]
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
    if size := _CURVES.get(algorithm):
        curve = ec.SECP256R1() if size == 32 else ec.SECP384R1()
        if private:
            return ec.derive_private_key(number("d", size), curve)
        numbers = ec.EllipticCurvePublicNumbers(number("x", size), number("y", size), curve)
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
        if isinstance(material.curve, ec.SECP384R1):
            return "ecdsa-p384-sha384"
        raise ValueError("an elliptic curve key must be of P-256 or P-384")
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
    from cryptography.hazmat.primitives.asymmetric import ec, utils

    public = key.material.public_key() if hasattr(key.material, "public_key") else key.material
    try:
        if key.algorithm == "ed25519":
            public.verify(signature, message)
        elif size := _CURVES.get(key.algorithm):
            if len(signature) != 2 * size:  # r and s, of one size; not DER
                return False
            r, s = (int.from_bytes(half, "big") for half in (signature[:size], signature[size:]))
            public.verify(utils.encode_dss_signature(r, s), message, ec.ECDSA(_hash(size)))
        else:
            public.verify(signature, message, *_rsa(key.algorithm))
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
    from cryptography.hazmat.primitives.asymmetric import ec, utils

    if not hasattr(key.material, "sign"):
        raise ValueError("a public key can't sign: pass the private one")
    if key.algorithm == "ed25519":
        return cast("bytes", key.material.sign(message))
    if size := _CURVES.get(key.algorithm):
        der = key.material.sign(message, ec.ECDSA(_hash(size)))
        r, s = utils.decode_dss_signature(der)
        return int(r).to_bytes(size, "big") + int(s).to_bytes(size, "big")
    return cast("bytes", key.material.sign(message, *_rsa(key.algorithm)))


def _hash(size: int) -> Any:
    from cryptography.hazmat.primitives import hashes

    return hashes.SHA256() if size == 32 else hashes.SHA384()


def _rsa(algorithm: str) -> tuple[Any, Any]:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    if algorithm == "rsa-v1_5-sha256":
        return padding.PKCS1v15(), hashes.SHA256()
    return padding.PSS(padding.MGF1(hashes.SHA512()), 64), hashes.SHA512()
