"""Certificates that a delivery points to: fetched seldom, believed only with their whole chain."""

from __future__ import annotations

import functools
import logging
import re
import ssl
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from oncekey._core.forks import Forking, watch_forks
from oncekey.errors import PolicyError
from oncekey.signatures.parsing import Rejection

__all__ = ["Certificate", "CertificateCache", "Fetch", "fetch_certificate", "read_certificate"]

logger = logging.getLogger("oncekey")

_MAX_CERTIFICATE: Final = 65_536
_MAX_CHAIN: Final = 10
_FETCH_SECONDS: Final = 5
_HUNG_SECONDS: Final = 60  # a fetch that takes longer is given up, and may be made again
_OFTEN: Final = 3
_NAMES_COUNTED: Final = 256
_NO_SUCH: Final = (404, 410)
# Who issues PayPal's and SNS's certificates, for one that comes without its issuer's. What lies
# there is believed only as part of a chain.
_ISSUERS: Final = re.compile(
    r"http://(?:cacerts\.digicert\.com|crt\.[a-z0-9]{1,16}\.amazontrust\.com)/[\w.-]{1,128}"
)

Fetch = Callable[[str], bytes]


def fetch_certificate(url: str) -> bytes:
    """Fetch a certificate: HTTPS, no redirects, 5 seconds for each step, at most 64 KB."""
    from urllib.error import HTTPError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class NoRedirects(HTTPRedirectHandler):
        def redirect_request(self, *args: Any, **kwargs: Any) -> None:
            return None

    request = Request(url, headers={"Accept": "application/x-pem-file, */*"})  # noqa: S310 - pinned
    ends, found = time.monotonic() + 2 * _FETCH_SECONDS, b""
    try:
        with build_opener(NoRedirects).open(request, timeout=_FETCH_SECONDS) as answer:
            while len(found) <= _MAX_CERTIFICATE and (part := answer.read1(_MAX_CERTIFICATE)):
                found += part
                if time.monotonic() > ends:
                    raise TimeoutError("the certificate comes too slowly")
    except HTTPError as error:
        error.close()
        raise
    return found


# --- chains --------------------------------------------------------------------------------------


class Certificate(NamedTuple):
    """An RSA public key, and from when to when it is valid, in seconds since 1970."""

    key: Any
    begins: float
    ends: float


class UntrustedError(ValueError):
    """A certificate that is none of the sender's: fetching it again would change nothing."""


def read_certificate(pem: bytes, name: str, trusted: Any, fetch: Fetch) -> Certificate:
    """The key of a certificate and the time it is valid.

    Args:
        pem: The certificate, and those between it and a trusted one.
        name: The host that it must be for.
        trusted: A store of ``cryptography``: where its chain must end.
        fetch: Gives the certificate of the issuer, if it is not in ``pem``.

    Raises:
        ValueError: It is no certificate with an RSA key.
        UntrustedError: It is for another name, out of its time, or has no chain to a trusted one.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from cryptography.x509.verification import PolicyBuilder, VerificationError

    if len(pem) > _MAX_CERTIFICATE:
        raise ValueError("too large for a certificate")
    certificate, *between = x509.load_pem_x509_certificates(pem)
    key = certificate.public_key()
    if not isinstance(key, RSAPublicKey) or key.key_size < 2048 or len(between) > _MAX_CHAIN:
        raise ValueError("no RSA key of 2048 bits or more, or too long a chain")
    rules = PolicyBuilder().store(trusted).time(datetime.now(UTC))
    verifier = rules.build_server_verifier(x509.DNSName(name))
    try:
        try:
            verifier.verify(certificate, between)
        except VerificationError:
            url = "" if between else _issuer_url(certificate)
            if not url:
                raise
            verifier.verify(certificate, [_any_form(fetch(url))])
    except VerificationError as error:
        raise UntrustedError(f"no chain from {name} to a trusted root: {error}") from None
    return Certificate(
        key,
        certificate.not_valid_before_utc.timestamp(),
        certificate.not_valid_after_utc.timestamp(),
    )


def _issuer_url(certificate: Any) -> str:
    """Where the issuer's certificate is, as a certificate says; empty if that is elsewhere."""
    from cryptography import x509
    from cryptography.x509.oid import AuthorityInformationAccessOID

    try:
        found = certificate.extensions.get_extension_for_class(x509.AuthorityInformationAccess)
    except x509.ExtensionNotFound:
        return ""
    places = [
        str(one.access_location.value)
        for one in found.value
        if one.access_method == AuthorityInformationAccessOID.CA_ISSUERS
    ]
    return next((one for one in places if _ISSUERS.fullmatch(one)), "")


def _any_form(raw: bytes) -> Any:
    from cryptography import x509

    if len(raw) > _MAX_CERTIFICATE:
        raise ValueError("too large for a certificate")
    if raw.startswith(b"-----"):
        return x509.load_pem_x509_certificate(raw)
    return x509.load_der_x509_certificate(raw)


def signer_of(url: str) -> str:
    """The host that a certificate is made out to which lies at ``url``: PayPal's, or SNS's."""
    host = urlsplit(url).hostname or ""
    if host.startswith("sns."):
        return host if host.endswith(".cn") else "sns.amazonaws.com"
    middle = "sandbox." if host.endswith(".sandbox.paypal.com") else ""
    return f"messageverificationcerts.{middle}paypal.com"


def trust_in(pem: bytes) -> Any:
    """A store of ``cryptography`` with these roots.

    Raises:
        PolicyError: They can't be read.
    """
    from cryptography import x509
    from cryptography.x509.verification import Store

    try:
        return Store(x509.load_pem_x509_certificates(pem))
    except ValueError:
        raise PolicyError("trust= must be the PEM of one or more root certificates") from None


@functools.cache
def system_trust() -> Any:
    """A store of ``cryptography`` with the roots that the system trusts, else those of certifi.

    Raises:
        PolicyError: There are none.
    """
    from cryptography import x509
    from cryptography.x509.verification import Store

    ders = ssl.create_default_context().get_ca_certs(binary_form=True)
    folder = ssl.get_default_verify_paths().capath
    if not ders and folder:  # OpenSSL looks into a folder only while it verifies
        ders = [one for file in Path(folder).glob("*.pem") for one in _ders_of(file)]
    if not ders:
        try:
            import certifi  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            pass
        else:
            ders = _ders_of(Path(certifi.where()))
    roots: list[Any] = []
    for der in ders:
        try:
            roots.append(x509.load_der_x509_certificate(der))
        except Exception:  # noqa: BLE001, S112 - an odd root of the system's is one less
            continue
    if not roots:
        raise PolicyError("no trusted root certificates were found here: pass trust=, or certifi")
    return Store(roots)


def _ders_of(file: Path) -> list[bytes]:
    end = "-----END CERTIFICATE-----"
    texts = file.read_text("ascii", "replace").split(end)[:-1]
    begin = "-----BEGIN CERTIFICATE-----"
    return [ssl.PEM_cert_to_DER_cert(begin + one.partition(begin)[2] + end) for one in texts]


# --- the cache -----------------------------------------------------------------------------------


class _Entry(NamedTuple):
    until: float
    certificate: Certificate | None
    transient: bool  # without a certificate: it may be there the next time


_NOT_NOW: Final = _Entry(0, None, True)


class CertificateCache(Forking):
    """Public keys by the URL of their certificate; remembers failures too, and fetches seldom.

    Anyone can send a delivery that names a certificate, so what is fetched is bounded, for each
    host: ``per_minute`` fetches of URLs as they come, and as many for the one that is named most
    often, which strangers who make up URLs can't take from the true one. A URL that had a good
    certificate is always fetched again, and the old one holds while that fails. Deliveries that
    need the same certificate at the same time wait for one fetch.

    Args:
        fetch: Gives what lies at a URL: the PEM of a certificate, and of those between it and a
            root; for one that comes alone it is asked for the issuer's too, at DigiCert.
        trust: The PEM of the roots to trust. ``None``: those of the system.
        deadline: How long a delivery waits for a fetch, in all, in seconds.
        size: How many URLs are remembered.
        keep_seconds: How long a certificate is used before it is fetched again.
        keep_failure_seconds: How long a failure is remembered.
        per_minute: How many URLs of a host are fetched in a minute.
        clock: Seconds, any origin.

    Raises:
        PolicyError: ``trust`` can't be read, or the deadline is not positive.
    """

    def __init__(
        self,
        fetch: Fetch = fetch_certificate,
        *,
        trust: bytes | str | None = None,
        deadline: float = 10,
        size: int = 32,
        keep_seconds: float = 86_400,
        keep_failure_seconds: float = 60,
        per_minute: int = 60,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not deadline > 0:
            raise PolicyError(f"deadline must be positive, got {deadline!r}")
        self._fetch = fetch
        self._trust = None if trust is None else trust_in(_as_bytes(trust))
        self._deadline = deadline
        self._size = size
        self._keep = keep_seconds
        self._keep_failure = keep_failure_seconds
        self._per_minute = per_minute
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._fetched: dict[tuple[str, bool], list[float]] = {}  # by host and lane
        self._named: Counter[str] = Counter()
        self.after_fork_in_child()
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        """A fresh lock, and no fetch under way: the parent's threads are not here."""
        self._lock = threading.Lock()
        self._under_way: dict[str, tuple[threading.Event, float]] = {}

    def knows(self, url: str) -> bool:
        """Whether ``find`` would answer at once, without a fetch."""
        with self._lock:
            return self._kept(url) is not None

    def find(self, url: str) -> _Entry:
        """The certificate; without one, whether it may be there the next time.

        Waits for a fetch at most as long as the deadline says. The fetch goes on, for the next
        delivery.
        """
        with self._lock:
            kept = self._kept(url)
            if kept is not None:
                return kept
            ready, begun = self._under_way.get(url, (None, 0.0))
            if ready is None or self._clock() - begun > _HUNG_SECONDS:
                if not self._may_fetch(url):
                    return _NOT_NOW
                ready = threading.Event()
                self._under_way[url] = (ready, self._clock())
                # A thread, as nothing else ends a fetch that hangs in each of its steps.
                work = (url, ready)
                threading.Thread(target=self._fetch_entry, args=work, daemon=True).start()
        ready.wait(self._deadline)
        with self._lock:
            # What was found by this fetch, also if it is not kept for any time.
            return self._kept(url) or self._entries.get(url, _NOT_NOW)

    def valid(self, url: str, whose: str, now: float) -> Certificate:
        """The certificate of a sender, for a signature of now.

        Raises:
            Rejection: There is none, not at present, or not any more.
        """
        certificate, transient = self.find(url)[1:]
        if certificate is None:
            raise Rejection(
                "key_unknown",
                f"{whose}'s certificate can't be fetched right now: send the delivery again"
                if transient
                else f"{whose} has no such certificate, or it is not {whose}'s",
                transient=transient,
            )
        if not certificate.begins <= now <= certificate.ends:
            raise Rejection("key_unknown", f"{whose}'s certificate is not valid at this time")
        return certificate

    def _may_fetch(self, url: str) -> bool:
        known = self._entries.get(url)
        if known is not None and known.certificate is not None:
            return True
        self._named[url] += 1
        if len(self._named) > _NAMES_COUNTED:  # those that came once are made up
            often = {one: count for one, count in self._named.items() if count > 1}
            self._named = Counter(often if len(often) < _NAMES_COUNTED else {})
        count = self._named[url]
        often_named = count >= _OFTEN and count == max(self._named.values())
        moment, host = self._clock(), urlsplit(url).netloc
        for lane in (False, True) if often_named else (False,):
            fetched = [one for one in self._fetched.get((host, lane), ()) if moment - one < 60]
            self._fetched[host, lane] = fetched
            if len(fetched) < self._per_minute:
                fetched.append(moment)
                return True
        return False

    def _fetch_entry(self, url: str, ready: threading.Event) -> None:
        found = _NOT_NOW
        try:
            found = self._load(url)
        finally:
            with self._lock:
                self._keep_entry(url, found)
                if self._under_way.get(url, (None,))[0] is ready:
                    del self._under_way[url]
            ready.set()

    def _kept(self, url: str) -> _Entry | None:
        entry = self._entries.get(url)
        return entry if entry is not None and self._clock() < entry.until else None

    def _keep_entry(self, url: str, found: _Entry) -> None:
        self._named.pop(url, None)
        keep = self._keep_failure if found.certificate is None else self._keep
        old = self._entries.get(url)
        if found.transient and old is not None and old.certificate is not None:
            found = old  # its own dates say how long it may be used
        self._entries[url] = found._replace(until=self._clock() + keep)
        self._entries.move_to_end(url)
        while len(self._entries) > self._size:
            # A failure goes first: strangers can make any number of those.
            failed = (one for one, entry in self._entries.items() if entry.certificate is None)
            del self._entries[next(failed, next(iter(self._entries)))]

    def _load(self, url: str) -> _Entry:
        try:
            pem = self._fetch(url)
            trusted = system_trust() if self._trust is None else self._trust
            return _Entry(0, read_certificate(pem, signer_of(url), trusted, self._fetch), False)
        except UntrustedError as error:
            logger.warning("a certificate is not to be trusted: %s", error)
            return _Entry(0, None, False)
        except PolicyError as error:  # what is missing here, and how to give it
            logger.error("no certificate can be trusted: %s", error)
            return _NOT_NOW
        except Exception as error:  # noqa: BLE001 - it may fail in any way; no reason to crash
            # Only the class: the text of another's error may hold anything.
            logger.warning("a certificate could not be had: %s", type(error).__name__)
            return _Entry(0, None, not _says_there_is_none(error))


def _as_bytes(pem: bytes | str) -> bytes:
    return pem.encode() if isinstance(pem, str) else pem


def _says_there_is_none(error: Exception) -> bool:
    """Whether the server has answered that there is no such certificate, as urllib reports it."""
    return getattr(error, "code", None) in _NO_SUCH
