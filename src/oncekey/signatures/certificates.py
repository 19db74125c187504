"""Certificates that a delivery points to: fetched seldom, kept, and bounded whoever asks."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from oncekey._core.forks import Forking, watch_forks

__all__ = ["Certificate", "CertificateCache", "Fetch", "fetch_certificate", "read_certificate"]

logger = logging.getLogger("oncekey")

_MAX_CERTIFICATE: Final = 65_536
_FETCH_SECONDS: Final = 5
_NO_SUCH: Final = (404, 410)

Fetch = Callable[[str], bytes]


def fetch_certificate(url: str) -> bytes:
    """Fetch a certificate: HTTPS, no redirects, 5 seconds, at most 64 KB."""
    from urllib.error import HTTPError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class NoRedirects(HTTPRedirectHandler):
        def redirect_request(self, *args: Any, **kwargs: Any) -> None:
            return None

    request = Request(url, headers={"Accept": "application/x-pem-file, */*"})  # noqa: S310 - pinned
    try:
        with build_opener(NoRedirects).open(request, timeout=_FETCH_SECONDS) as answer:
            found: bytes = answer.read(_MAX_CERTIFICATE + 1)
    except HTTPError as error:
        error.close()
        raise
    return found


class Certificate(NamedTuple):
    """An RSA public key, and from when to when it is valid, in seconds since 1970."""

    key: Any
    begins: float
    ends: float


def read_certificate(pem: bytes) -> Certificate:
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
    return Certificate(
        key,
        certificate.not_valid_before_utc.timestamp(),
        certificate.not_valid_after_utc.timestamp(),
    )


class _Entry(NamedTuple):
    until: float
    certificate: Certificate | None
    transient: bool  # without a certificate: it may be there the next time


_NOT_NOW: Final = _Entry(0, None, True)


class CertificateCache(Forking):
    """Public keys by the URL of their certificate; remembers failures too, and fetches seldom.

    Anyone can send a delivery that names a certificate, so what is fetched is bounded: at most
    ``per_minute`` fetches a minute, whatever comes in. Deliveries that need the same certificate
    at the same time wait for one fetch.
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
        self.after_fork_in_child()
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        """A fresh lock, and no fetch under way: the parent's threads are not here."""
        self._lock = threading.Lock()
        self._under_way: dict[str, threading.Event] = {}

    def knows(self, url: str) -> bool:
        """Whether ``find`` would answer at once, without a fetch."""
        with self._lock:
            return self._kept(url) is not None

    def find(self, url: str) -> _Entry:
        """The certificate; without one, whether it may be there the next time."""
        with self._lock:
            kept = self._kept(url)
            if kept is not None:
                return kept
            under_way = self._under_way.get(url)
            if under_way is None:
                if not self._may_fetch():
                    return _NOT_NOW
                self._under_way[url] = threading.Event()
        if under_way is None:
            return self._fetch_entry(url)
        under_way.wait(2 * _FETCH_SECONDS)
        with self._lock:
            return self._kept(url) or _NOT_NOW

    def _may_fetch(self) -> bool:
        moment = self._clock()
        self._fetched = [one for one in self._fetched if moment - one < 60]
        if len(self._fetched) >= self._per_minute:
            return False
        self._fetched.append(moment)
        return True

    def _fetch_entry(self, url: str) -> _Entry:
        found = _NOT_NOW
        try:
            found = self._load(url)
        finally:
            with self._lock:
                self._keep_entry(url, found)
                ready = self._under_way.pop(url, None)
            if ready is not None:
                ready.set()
        return found

    def _kept(self, url: str) -> _Entry | None:
        entry = self._entries.get(url)
        return entry if entry is not None and self._clock() < entry.until else None

    def _keep_entry(self, url: str, found: _Entry) -> None:
        keep = self._keep_failure if found.certificate is None else self._keep
        self._entries[url] = found._replace(until=self._clock() + keep)
        self._entries.move_to_end(url)
        while len(self._entries) > self._size:
            # A failure goes first: strangers can make any number of those.
            failed = (one for one, entry in self._entries.items() if entry.certificate is None)
            del self._entries[next(failed, next(iter(self._entries)))]

    def _load(self, url: str) -> _Entry:
        try:
            return _Entry(0, read_certificate(self._fetch(url)), False)
        except Exception as error:  # noqa: BLE001 - it may fail in any way; no reason to crash
            # Only the class: the text of another's error may hold anything.
            logger.warning("a certificate could not be had: %s", type(error).__name__)
            return _Entry(0, None, not _says_there_is_none(error))


def _says_there_is_none(error: Exception) -> bool:
    """Whether the server has answered that there is no such certificate, as urllib reports it."""
    return getattr(error, "code", None) in _NO_SUCH
