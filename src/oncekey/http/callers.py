"""Who is calling, how much a caller may put into the store, and scopes that are ready to be used.

What names a caller is often a credential, so that only a keyed digest of it gets into the store.
What a caller stores is counted in this process, not in the store.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from time import monotonic
from typing import Any, Final

from oncekey._core.call import Job
from oncekey._core.drive import Flow, Op
from oncekey._core.flows import Claim
from oncekey._core.limiter import InsertLimiter, SharedLimit
from oncekey._core.secret import StoreSecret
from oncekey.errors import InvalidKeyError, PolicyError
from oncekey.http.facts import Facts
from oncekey.http.problems import Refusal
from oncekey.http.settings import Settings
from oncekey.instrument.events import EventKind, emit
from oncekey.models import Key, Scope, identity_text
from oncekey.policy import milliseconds

__all__ = [
    "Callers",
    "Limits",
    "by_client_certificate",
    "by_header",
    "header_of",
    "of_kind",
    "unnamed",
]

WARN_AGAIN: Final = 60.0  # seconds
MAX_SCOPES: Final = 10_000
MAX_HOST: Final = 262  # characters of a name and its port
_SCHEMES: Final = frozenset(
    {b"basic", b"bearer", b"digest", b"dpop", b"negotiate", b"ntlm", b"token"}
)

logger = logging.getLogger("oncekey")


class Callers:
    """Tells callers apart, and gives each a scope for its keys."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        secret = settings.secret
        self._secret = secret.encode() if isinstance(secret, str) else secret
        self._kept = StoreSecret()
        self._scopes: dict[str | bytes, Scope] = {}

    def at_hand(self, authorization: bytes | None) -> Scope | None:
        """The scope of a caller that was here before, if nobody has to be asked for it."""
        if not authorization or self._settings.scope is not None:
            return None
        secret = self._secret
        if secret is None:
            kept = self._kept
            if monotonic() >= kept.until:
                return None
            secret = kept.known
        return self._scopes.get(sha256(secret + authorization).digest())

    def scope(self, named: Any, facts: Facts) -> Flow[Scope]:
        """Whose keys these are: by the ``scope`` function's answer, or the credentials.

        Raises:
            Refusal: Nobody that is known, or the function's answer can't name anybody.
        """
        settings = self._settings
        host: tuple[str, ...] = ()
        kind, who = "anonymous", ""
        if settings.scope is not None:
            if named is not None:
                raw = _identity(named).encode("utf-8", "surrogateescape")
                kind, who = "caller", (yield from self._digest(raw))
        elif facts.authorization and not _is_bare(facts.authorization):
            kind, who = "credentials", (yield from self._digest(facts.authorization))
        if not who and settings.anonymous == "refuse":
            raise Refusal(
                "caller-unknown",
                f"Authenticate: {settings.header} is only taken from known callers, which the "
                "server's owner tells apart by scope=.",
            )
        name = who
        if settings.per_host:
            shown = facts.host[:MAX_HOST].decode("latin-1") or "-"
            name, host = f"{who} {shown}", ("host", shown)
        scope = self._scopes.get(name)
        if scope is None:
            scope = Scope("http", settings.namespace, kind, who, *host)
            if len(self._scopes) >= MAX_SCOPES:
                self._scopes.clear()
            self._scopes[name] = scope
        if kind == "credentials" and not host:  # to be found without a flow, and a quicker digest
            secret = self._secret or self._kept.known
            self._scopes[hashlib.sha256(secret + (facts.authorization or b"")).digest()] = scope
        return scope

    def _digest(self, who: bytes) -> Flow[str]:
        secret = self._secret or (yield from self._kept.get())
        return hmac.digest(secret, who, "sha256").hex()


class Limits:
    """New keys of a caller, and bytes that are stored, of a caller and of all.

    A caller is the same at whatever host: it may name any number of those.
    """

    def __init__(self, settings: Settings) -> None:
        keys = settings.max_new_keys
        self._keys: InsertLimiter | None = None
        self._shared: SharedLimit | None = None
        if keys is not None and settings.limits == "shared":
            self._shared = SharedLimit(f"http {settings.namespace}", keys)
        elif keys is not None:
            self._keys = InsertLimiter((keys,), time.monotonic)
        # What is stored longer ago than the time to live is gone.
        lasts = max(1, milliseconds(settings.ttl, "ttl") // 1000)
        self._bytes = _budget(settings.max_caller_bytes, lasts)
        self._total = _budget(settings.max_total_bytes, lasts)
        self._none = 0 in (settings.max_caller_bytes, settings.max_total_bytes)
        self._warn_at = 0.0

    def wait(self, key: Key) -> int | None:
        """Seconds until the caller may make a new key; ``None``: it may.

        Where the store counts for all, only ``check`` knows.
        """
        if self._shared is not None:
            return 1
        return None if self._keys is None else self._keys.retry_after(key.scope.parts[2])

    def check(self, job: Job) -> Flow[None]:
        """Let a request pass that may make a new key, or has an old one.

        Raises:
            Refusal: It is one too many.
        """
        wait = self.wait(job.key)
        if wait is None:
            return
        known = yield Op("read", (job.key,))
        if known is not None:
            return
        if self._shared is not None:
            wait = yield from self._shared.admit(job.key.scope.parts[2])
        if wait is not None:
            emit(EventKind.LIMITED, job.key, job.operation)
            raise Refusal(
                "rate-limited",
                "Too many new keys. Send the same request again later; retries of earlier "
                "requests are answered.",
                retry_after=wait,
            )

    def count(self, claim: Claim) -> None:
        """Take note of a key that was won, if it is a new one."""
        if self._keys is not None and claim.attempts == 1:
            self._keys.count(claim.key.scope.parts[2])

    def fits(self, job: Job, size: int) -> bool:
        """Whether a body of this size may be stored; it is then counted."""
        own, total = self._bytes, self._total
        who = job.key.scope.parts[2]
        if own is not None and total is not None:  # as by default: most calls only subtract
            left, of_all = own.left.get(who, 0) - size, total.left.get("", 0) - size
            if left >= 0 and of_all >= 0:
                own.left[who], total.left[""] = left, of_all
                return True
        if not self._none and (own is None or own.take(who, size)):
            if total is None or total.take("", size):
                return True
            if own is not None:
                own.take(who, -size)
        now = time.monotonic()
        if now >= self._warn_at:
            self._warn_at = now + WARN_AGAIN
            logger.warning(
                "answers are stored without their bodies: a caller (scope %s) or all of them "
                "have stored as much as max_caller_bytes and max_total_bytes allow",
                job.key.scope.hash,
            )
        return False


class _Budget:
    """Bytes in a window of time.

    Taken from it in pieces of a thousandth, so that most calls only subtract. What is left of a
    piece may be used after its window: a thousandth more for each.
    """

    def __init__(self, most: int, seconds: int) -> None:
        self._window = InsertLimiter(((most, seconds),), time.monotonic)
        self._piece = most // 1000
        self.left: dict[str, int] = {}

    def take(self, who: str, size: int) -> bool:
        left = self.left.get(who, 0) - size
        if left < 0:
            if self._window.admit(who, size + self._piece) is not None:
                return False
            left += size + self._piece
            if len(self.left) >= MAX_SCOPES:
                self.left.clear()
        self.left[who] = left
        return True


def _budget(most: int | None, seconds: int) -> _Budget | None:
    return None if most is None else _Budget(most, seconds)


def _is_bare(authorization: bytes) -> bool:
    """Whether it is a scheme without credentials, as clients send that were given no token."""
    return authorization.strip().lower() in _SCHEMES


def _identity(named: Any) -> str:
    try:
        return identity_text(named, "what scope= gave")
    except InvalidKeyError as error:
        # The owner's mistake. Guessing could put two callers into one space.
        logger.error("a keyed request was refused, since its caller has no name: %s", error)
        raise _scope_invalid() from None


def unnamed(error: Exception) -> Refusal:
    """The refusal of a request for which the ``scope`` function failed, which the log tells."""
    logger.error(
        "a keyed request was refused, since scope= failed on it: correct that function, or let it "
        "give None for a caller that it does not know",
        exc_info=error,
    )
    return _scope_invalid()


def _scope_invalid() -> Refusal:
    return Refusal("scope-invalid", "Nothing was done. The server's log says what is wrong.")


def of_kind(kind: str, identity: Any) -> Any:
    """An identity among those of its kind. What can't be one is left for the guard to refuse."""
    try:
        return f"{kind}/{identity_text(identity, 'identity')}"
    except InvalidKeyError:
        return identity


def header_of(source: Any, name: str) -> str:
    """A header of a request, whatever framework it is of; one that came twice is joined."""
    return ",".join(_values(source, name))


def _values(source: Any, name: str) -> list[str]:
    """Every value of a header, as far as the server tells; WSGI has joined them."""
    fields: Any = getattr(source, "headers", None)
    if fields is not None:  # of Flask, Django, aiohttp
        every = getattr(fields, "getall", None) or getattr(fields, "getlist", None)
        return [*every(name)] if every is not None and name in fields else [fields.get(name, "")]
    if "wsgi.input" in source:
        return [str(source.get("HTTP_" + name.upper().replace("-", "_"), ""))]
    fields = source.get("multiValueHeaders") or source.get("headers") or ()
    if isinstance(fields, Mapping):  # of AWS Lambda
        given = [value for key, value in fields.items() if key.lower() == name.lower()]
        return [one for some in given for one in ([some] if isinstance(some, str) else some)]
    wanted = name.lower().encode("latin-1")
    return [value.decode("latin-1") for key, value in fields if key.lower() == wanted]


def by_header(name: str) -> Callable[[Any], bytes | None]:
    """A scope: the caller is who sends this value of a header, such as ``X-API-Key``.

    The header must be one that your authentication checks: a client can send any value. Who sends
    it twice is nobody, as authentication may look at the other one.

    Args:
        name: The name of the header.

    Raises:
        PolicyError: There can't be such a header.

    Example:
        >>> from oncekey.http import Settings, by_header
        >>> settings = Settings(scope=by_header("X-API-Key"))
    """
    if not name or not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
        raise PolicyError(f"{name!r} can't be the name of a header")

    def scope(source: Any) -> bytes | None:
        values = _values(source, name)
        value = values[0].strip(" \t") if len(values) == 1 else ""
        # A digest, since a token may be longer than a scope.
        return hashlib.sha256(value.encode("utf-8", "surrogateescape")).digest() if value else None

    vars(scope)["header"] = name  # for a proxy, which must pass it on
    return scope


def by_client_certificate(source: Any) -> bytes | None:
    """A scope: the caller is whom the client's TLS certificate names.

    Takes what the server has verified: the subject of the TLS extension of ASGI, or of
    ``SSL_CLIENT_S_DN`` with ``SSL_CLIENT_VERIFY`` of WSGI; else the certificate itself
    (``SSL_CLIENT_CERT``, or aiohttp's), which a renewal changes. Where a proxy ends TLS, use
    ``by_header`` with the header that the proxy sets and takes from nobody else.

    Example:
        >>> from oncekey.http import Settings, by_client_certificate
        >>> settings = Settings(scope=by_client_certificate)
    """
    found = _certificate(source)
    if not found:
        return None
    return hashlib.sha256(found if isinstance(found, bytes) else found.encode()).digest()


def _certificate(source: Any) -> str | bytes | None:
    if isinstance(source, Mapping) and "extensions" in source:  # ASGI
        tls = (source["extensions"] or {}).get("tls") or {}
        chain = tls.get("client_cert_chain") or ()
        if tls.get("client_cert_error"):
            return None
        return tls.get("client_cert_name") or next(iter(chain), None)
    transport = getattr(source, "transport", None)  # aiohttp
    if transport is not None:
        tls_object = transport.get_extra_info("ssl_object")
        return None if tls_object is None else tls_object.getpeercert(binary_form=True)
    environ = getattr(source, "environ", None) or getattr(source, "META", None) or source
    if not isinstance(environ, Mapping) or environ.get("SSL_CLIENT_VERIFY", "SUCCESS") != "SUCCESS":
        return None
    name, issuer = environ.get("SSL_CLIENT_S_DN"), environ.get("SSL_CLIENT_I_DN")
    if name and "SSL_CLIENT_VERIFY" in environ:
        return f"{len(name)}:{name}{issuer or ''}"
    return environ.get("SSL_CLIENT_CERT") or None
