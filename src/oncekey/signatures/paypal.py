"""PayPal: RSA over ids and a CRC32 of the body, with a certificate that the delivery points to.

Two things to know. The URL of the certificate comes from the delivery, so it is fetched only from
PayPal's own hosts, and believed only if a trusted chain says that it is PayPal's. And a CRC32 can
be forged: whoever captures one delivery can change its body and keep the signature right. Treat
the body as a hint, and ask PayPal's API for what matters.
"""

from __future__ import annotations

import asyncio
import re
import uuid
import zlib
from typing import Any, Final

from oncekey.errors import PolicyError
from oncekey.signatures.base import Facts, Proof, Provider, SignedRequest, put_header
from oncekey.signatures.certificates import CertificateCache, Fetch, fetch_certificate
from oncekey.signatures.delivery import Delivery
from oncekey.signatures.keypairs import load_key, need_cryptography, signed_by
from oncekey.signatures.parsing import (
    Rejection,
    decode,
    encode,
    one_header,
    seconds_since_1970,
    written_time,
)
from oncekey.signatures.verdict import Verdict

__all__ = ["PayPalProvider"]

_CERT_URL = re.compile(
    r"https://api(?:-m)?(?:\.sandbox)?\.paypal\.com"
    r"/v1/notifications/certs/[A-Za-z0-9_-]{1,128}"
)
_TRANSMISSION = re.compile(r"[\x21-\x7b\x7d\x7e]{1,255}")  # visible, without the separator |
_ALGORITHM: Final = "SHA256withRSA"


class PayPalProvider(Provider):
    """Needs no secret but ``webhook_id``: the id of your webhook at PayPal, which is signed too.

    A certificate is fetched when its URL is first seen: ``verify`` may block for a few seconds
    then, and ``averify`` does that in a thread. Pass ``fetch`` to fetch in your own way, or a
    ``CertificateCache`` to share; ``trust`` is the PEM of the roots that its chain may end in, in
    place of those that the system trusts.
    """

    body_is_signed = False

    def __init__(
        self,
        facts: Facts,
        *,
        webhook_id: str = "",
        secret: None = None,
        previous: None = None,
        fetch: Fetch | CertificateCache | None = None,
        trust: bytes | str | None = None,
        signing_key: str | bytes = "",
        cert_url: str = "",
        **common: Any,
    ) -> None:
        super().__init__(facts, **common)
        if secret is not None or previous is not None:
            raise PolicyError("PayPal has no shared secret: pass webhook_id= and no secret=")
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", webhook_id):
            raise PolicyError("pass webhook_id=, the id that PayPal's dashboard shows for the hook")
        need_cryptography()
        self._webhook_id = webhook_id
        if isinstance(fetch, CertificateCache):
            if trust is not None:
                raise PolicyError("give trust= to the CertificateCache, which reads certificates")
            self._cache = fetch
        else:
            self._cache = CertificateCache(fetch or fetch_certificate, trust=trust)
        self._private = load_key(signing_key, "signing_key", private=True) if signing_key else None
        self._cert_url = cert_url

    def signed_headers(self) -> frozenset[str]:
        """The id of the transmission, and its time."""
        return frozenset({"paypal-transmission-id", "paypal-transmission-time"})

    def _prove(self, delivery: Delivery, now: float) -> Proof:
        headers = delivery.headers
        signature = decode(one_header(headers, "PAYPAL-TRANSMISSION-SIG"), "base64")
        transmission = one_header(headers, "PAYPAL-TRANSMISSION-ID")
        if signature is None or not _TRANSMISSION.fullmatch(transmission):
            raise Rejection("header_malformed", "PAYPAL-TRANSMISSION-SIG or -ID is not well-formed")
        if one_header(headers, "PAYPAL-AUTH-ALGO") != _ALGORITHM:
            raise Rejection("header_malformed", f"PAYPAL-AUTH-ALGO must be {_ALGORITHM}")
        stamp = one_header(headers, "PAYPAL-TRANSMISSION-TIME", missing="timestamp_missing")
        timestamp = seconds_since_1970(stamp, "iso")
        self._check_clock(timestamp, now)
        cert_url = one_header(headers, "PAYPAL-CERT-URL")
        if not _CERT_URL.fullmatch(cert_url):
            raise Rejection(
                "key_unknown", "PAYPAL-CERT-URL is not a certificate on paypal.com: never fetched"
            )
        certificate = self._cache.valid(cert_url, "PayPal", now)
        message = self._message(transmission, stamp, delivery.body)
        if not signed_by(certificate.key, signature, message, *_how()):
            raise Rejection(
                "signature_mismatch", "check webhook_id, and that the body is untouched"
            )
        return Proof(encode(signature, "base64"), message, timestamp)

    async def ajudge(self, delivery: Delivery, now: float | None = None) -> Verdict:
        """``judge``, with the fetch of a certificate in a thread, so that no loop waits for it."""
        cert_url = delivery.headers.one("PAYPAL-CERT-URL") or ""
        if not _CERT_URL.fullmatch(cert_url) or self._cache.knows(cert_url):
            return self.judge(delivery, now)
        return await asyncio.to_thread(self.judge, delivery, now)

    def _message(self, transmission: str, stamp: str, body: bytes) -> bytes:
        return f"{transmission}|{stamp}|{self._webhook_id}|{zlib.crc32(body)}".encode()

    def _sign(self, request: SignedRequest, now: float) -> SignedRequest:
        if self._private is None or not self._cert_url:
            raise PolicyError(
                "PayPal signs with a private key: pass signing_key= with an RSA key of your own, "
                "and cert_url= with the URL that your fetch= knows, for tests"
            )
        transmission, stamp = str(uuid.uuid4()), written_time(now, "iso")
        message = self._message(transmission, stamp, request.body)
        signature = self._private.sign(message, *_how())
        for name, value in (
            ("PAYPAL-TRANSMISSION-ID", transmission),
            ("PAYPAL-TRANSMISSION-TIME", stamp),
            ("PAYPAL-TRANSMISSION-SIG", encode(signature, "base64")),
            ("PAYPAL-CERT-URL", self._cert_url),
            ("PAYPAL-AUTH-ALGO", _ALGORITHM),
        ):
            put_header(request.headers, name, value)
        return request


def _how() -> tuple[Any, ...]:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    return padding.PKCS1v15(), hashes.SHA256()
