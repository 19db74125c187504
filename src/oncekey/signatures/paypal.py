"""PayPal: RSA over ids and a CRC32 of the body, with a certificate that the delivery points to.

Two things to know. The URL of the certificate comes from the delivery, so it is fetched only from
PayPal's own hosts. And a CRC32 can be forged: whoever captures one delivery can change its body
and keep the signature right. Treat the body as a hint, and ask PayPal's API for what matters.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar, Final, NamedTuple

from oncekey.errors import PolicyError
from oncekey.signatures.base import Facts, Proof, Provider, SignedRequest, put_header
from oncekey.signatures.delivery import Delivery
from oncekey.signatures.keypairs import load_key, need_cryptography
from oncekey.signatures.strict import (
    Rejection,
    decode,
    encode,
    one_header,
    seconds_since_1970,
    written_time,
)

__all__ = ["CertificateCache", "PayPalProvider", "fetch_certificate"]

_CERT_URL = re.compile(
    r"https://(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+paypal\.com"
    r"/v1/notifications/certs/[A-Za-z0-9_-]{1,128}"
)
_TRANSMISSION = re.compile(r"[\x21-\x7b\x7d\x7e]{1,255}")  # visible, without the separator |
_ALGORITHM: Final = "SHA256withRSA"
_MAX_CERTIFICATE: Final = 65_536
_FETCH_SECONDS: Final = 5

Fetch = Callable[[str], bytes]


def fetch_certificate(url: str) -> bytes:
    """Fetch a certificate: HTTPS, no redirects, 5 seconds, at most 64 KB."""
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class NoRedirects(HTTPRedirectHandler):
        def redirect_request(self, *args: Any, **kwargs: Any) -> None:
            return None

    request = Request(url, headers={"Accept": "application/x-pem-file, */*"})  # noqa: S310 - pinned
    with build_opener(NoRedirects).open(request, timeout=_FETCH_SECONDS) as answer:
        found: bytes = answer.read(_MAX_CERTIFICATE + 1)
    return found


class _Entry(NamedTuple):
    until: float
    key: Any  # None: could not be had


class CertificateCache:
    """Public keys by the URL of their certificate; remembers failures too, and fetches seldom.

    Anyone can send a delivery that names a certificate, so what is fetched is bounded: at most
    ``per_minute`` fetches a minute, whatever comes in.
    """

    def __init__(
        self,
        fetch: Fetch = fetch_certificate,
        *,
        size: int = 32,
        keep_seconds: float = 86_400,
        keep_failure_seconds: float = 60,
        per_minute: int = 10,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetch = fetch
        self._size = size
        self._keep = keep_seconds
        self._keep_failure = keep_failure_seconds
        self._per_minute = per_minute
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._fetched: list[float] = []
        self._lock = threading.Lock()

    def key(self, url: str) -> Any:
        """The RSA public key and its validity, or ``None`` if it can't be had now."""
        with self._lock:
            moment = self._clock()
            entry = self._entries.get(url)
            if entry is not None and moment < entry.until:
                return entry.key
            self._fetched = [one for one in self._fetched if moment - one < 60]
            if len(self._fetched) >= self._per_minute:
                return None
            self._fetched.append(moment)
        key = self._load(url)
        with self._lock:
            keep = self._keep_failure if key is None else self._keep
            self._entries[url] = _Entry(moment + keep, key)
            self._entries.move_to_end(url)
            while len(self._entries) > self._size:
                # A failure goes first: strangers can make any number of those.
                failed = next((one for one in self._entries if self._entries[one].key is None), "")
                del self._entries[failed or next(iter(self._entries))]
        return key

    def _load(self, url: str) -> Any:
        try:
            return read_certificate(self._fetch(url))
        except Exception:  # noqa: BLE001 - a fetch may fail in any way, and it is no reason to crash
            return None


class _Certificate(NamedTuple):
    key: Any
    begins: float
    ends: float


def read_certificate(pem: bytes) -> _Certificate:
    """The key of a certificate and the time it is valid.

    Raises:
        ValueError: It is no certificate with an RSA key.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

    if len(pem) > _MAX_CERTIFICATE:
        raise ValueError("too large for a certificate")
    certificate = x509.load_pem_x509_certificate(pem)
    key = certificate.public_key()
    if not isinstance(key, RSAPublicKey) or key.key_size < 2048:
        raise ValueError("no RSA key of 2048 bits or more")
    return _Certificate(
        key,
        certificate.not_valid_before_utc.timestamp(),
        certificate.not_valid_after_utc.timestamp(),
    )


class PayPalProvider(Provider):
    """Needs no secret but ``webhook_id``: the id of your webhook at PayPal, which is signed too.

    A certificate is fetched when its URL is first seen: ``verify`` may block for a few seconds
    then. Pass ``fetch`` to fetch in your own way, or a ``CertificateCache`` to share.
    """

    body_is_signed: ClassVar[bool] = False

    def __init__(
        self,
        facts: Facts,
        *,
        webhook_id: str = "",
        secret: None = None,
        previous: None = None,
        fetch: Fetch | CertificateCache | None = None,
        signing_key: str | bytes = "",
        cert_url: str = "",
        **common: Any,
    ) -> None:
        super().__init__(facts, **common)
        if secret is not None or previous is not None:
            raise PolicyError("PayPal has no shared secret: pass webhook_id= and no secret=")
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", webhook_id):
            raise PolicyError("pass webhook_id=, the id that PayPal's dashboard shows for the hook")
        self._webhook_id = webhook_id
        self._cache = (
            fetch
            if isinstance(fetch, CertificateCache)
            else CertificateCache(fetch or fetch_certificate)
        )
        self._private = load_key(signing_key, "signing_key", private=True) if signing_key else None
        self._cert_url = cert_url
        need_cryptography()

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
        certificate = self._cache.key(cert_url)
        if certificate is None or not certificate.begins <= now <= certificate.ends:
            raise Rejection("key_unknown", "PayPal's certificate can't be had now, or is not valid")
        message = self._message(transmission, stamp, delivery.body)
        if not _signed_by(certificate.key, signature, message):
            raise Rejection(
                "signature_mismatch", "check webhook_id, and that the body is untouched"
            )
        return Proof(encode(signature, "base64"), timestamp)

    def _message(self, transmission: str, stamp: str, body: bytes) -> bytes:
        return f"{transmission}|{stamp}|{self._webhook_id}|{zlib.crc32(body)}".encode()

    def _sign(self, request: SignedRequest, now: float) -> SignedRequest:
        if self._private is None or not self._cert_url:
            raise PolicyError(
                "PayPal signs with a private key: pass signing_key= with an RSA key of your own, "
                "and cert_url= with the URL that your fetch= knows, for tests"
            )
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import padding

        transmission, stamp = str(uuid.uuid4()), written_time(now, "iso")
        message = self._message(transmission, stamp, request.body)
        signature = self._private.sign(message, padding.PKCS1v15(), hashes.SHA256())
        for name, value in (
            ("PAYPAL-TRANSMISSION-ID", transmission),
            ("PAYPAL-TRANSMISSION-TIME", stamp),
            ("PAYPAL-TRANSMISSION-SIG", encode(signature, "base64")),
            ("PAYPAL-CERT-URL", self._cert_url),
            ("PAYPAL-AUTH-ALGO", _ALGORITHM),
        ):
            put_header(request.headers, name, value)
        return request


def _signed_by(key: Any, signature: bytes, message: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    try:
        key.verify(signature, message, padding.PKCS1v15(), hashes.SHA256())
    except InvalidSignature:
        return False
    return True
