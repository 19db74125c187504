"""Who is calling: what a scope is made of, and scopes that are ready to be used.

What names a caller is often a credential, so that only a keyed digest of it gets into the store.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from oncekey._core.drive import Flow
from oncekey._core.secret import StoreSecret
from oncekey.errors import InvalidKeyError, PolicyError
from oncekey.http.facts import Facts
from oncekey.http.problems import Refusal
from oncekey.http.settings import Settings
from oncekey.models import Scope, identity_text

__all__ = ["Callers", "by_client_certificate", "by_header", "header_of", "of_kind"]

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
        self._scopes: dict[str, Scope] = {}

    def at_hand(self, facts: Facts) -> Scope | None:
        """The scope of a caller that was here before, if nobody has to be asked for it."""
        settings = self._settings
        secret = self._secret or self._kept.at_hand()
        if not secret or not facts.authorization or settings.scope is not None:
            return None
        who = hmac.digest(secret, facts.authorization, "sha256").hex()
        return self._scopes.get(f"{who} {facts.host}" if settings.per_host else who)

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
            name, host = f"{who} {facts.host}", ("host", facts.host[:MAX_HOST] or "-")
        scope = self._scopes.get(name)
        if scope is None:
            scope = Scope("http", settings.namespace, kind, who, *host)
            if len(self._scopes) >= MAX_SCOPES:
                self._scopes.clear()
            if len(facts.host) <= MAX_HOST:
                self._scopes[name] = scope
        return scope

    def _digest(self, who: bytes) -> Flow[str]:
        secret = self._secret or (yield from self._kept.get())
        return hmac.digest(secret, who, "sha256").hex()


def _is_bare(authorization: bytes) -> bool:
    """Whether it is a scheme without credentials, as clients send that were given no token."""
    return authorization.strip().lower() in _SCHEMES


def _identity(named: Any) -> str:
    try:
        return identity_text(named, "what scope= gave")
    except InvalidKeyError as error:
        # The owner's mistake. Guessing could put two callers into one space.
        logger.error("a keyed request was refused, since its caller has no name: %s", error)
        raise Refusal(
            "scope-invalid", "Nothing was done. The server's log says what is wrong."
        ) from None


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
