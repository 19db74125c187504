"""RFC 9421, HTTP Message Signatures: build what is signed, verify it and sign it.

``rfc9421_provider`` is for senders who follow the RFC and publish keys; ``oncekey.adcp.signatures``
is the stricter profile of AdCP on the same ground.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final, NoReturn
from urllib.parse import parse_qsl, quote, unquote

from oncekey.errors import PolicyError
from oncekey.signatures.algorithms import (
    ALGORITHMS,
    SignatureKey,
    load_key,
    sign_bytes,
    signature_is_right,
)
from oncekey.signatures.asking import AskingProvider, Checks
from oncekey.signatures.base import Facts, Proof, SignedRequest, put_header
from oncekey.signatures.delivery import Delivery, Headers
from oncekey.signatures.jwks import as_keys
from oncekey.signatures.nonces import Nonces
from oncekey.signatures.parsing import MAX_HEADER, MAX_URL, Rejection, check_clock, decode, encode
from oncekey.signatures.structured import (
    Component,
    HeaderError,
    Raw,
    SignatureInput,
    Value,
    parse_bytes,
    parse_signature_input,
)
from oncekey.signatures.urls import Hosts, SignedUrl
from oncekey.signatures.verdict import Nonce, Verdict, VerifiedWebhookSender

__all__ = [
    "RFC9421Provider",
    "content_digest",
    "digest_is_right",
    "rfc9421_provider",
    "sign_request",
    "signature_base",
]

# --- what is signed --------------------------------------------------------------------------


def signature_base(covered: SignatureInput, value_of: Callable[[Component], str]) -> bytes:
    """The bytes that are signed.

    Args:
        covered: What ``Signature-Input`` says.
        value_of: The value of each covered part; raises ``HeaderError`` if it has none.

    Raises:
        HeaderError: A part has no value.
    """
    lines = [f"{component}: {value_of(component)}" for component in covered.components]
    lines.append(f'"@signature-params": {covered}')
    return "\n".join(lines).encode("ascii")


def field_value(name: str, headers: Headers) -> str:
    """The value of a header field, as it is signed.

    Raises:
        HeaderError: It is missing, too long, or holds what no header may.
    """
    values = headers.all(name)
    if not values:
        raise HeaderError("a header that is needed is missing")
    value = ", ".join(value.strip(" \t") for value in values)
    # A line break in here could forge further lines of the base.
    if len(value) > MAX_HEADER or not value.isascii() or not value.replace("\t", " ").isprintable():
        raise HeaderError("a header is too long, or holds what no header may")
    return value


_URL: Final = re.compile(r"(https?)://([^/?#]+)([^?#]*)(\?[^#]*)?(?:#.*)?", re.IGNORECASE)
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}


def component_value(delivery: Delivery, component: Component) -> str:
    """The value of a covered part of a request, as the RFC defines it.

    Raises:
        HeaderError: It has none, or is not supported.
    """
    name, url = component.name, delivery.url
    if name == "@query-param":
        return _query_param(url, component.params)
    if component.params:
        raise HeaderError("components with parameters are not supported")
    if not name.startswith("@"):
        return field_value(name, delivery.headers)
    if name == "@method":
        if not re.fullmatch(r"[A-Za-z-]{1,32}", delivery.method):
            raise HeaderError("the method is none of HTTP")
        return delivery.method
    parts = _URL.fullmatch(url) if len(url) <= MAX_URL else None
    if parts is None or not re.fullmatch(r"[!-~]*", url):
        raise HeaderError("the URL is not an absolute one of HTTP")
    scheme = parts[1].lower()
    values = {
        "@target-uri": url.partition("#")[0],
        "@authority": parts[2].rpartition("@")[2].lower().removesuffix(_DEFAULT_PORTS[scheme]),
        "@scheme": scheme,
        "@path": parts[3] or "/",
        "@query": parts[4] or "?",
        "@request-target": (parts[3] or "/") + (parts[4] or ""),
    }
    if name not in values:
        raise HeaderError("a covered component is not supported")
    return values[name]


def _query_param(url: str, params: tuple[tuple[str, Value], ...]) -> str:
    """The value of one parameter of the query, encoded anew so that all write it alike."""
    given = dict(params)
    name = given.pop("name", None)
    if given or not isinstance(name, str) or len(url) > MAX_URL:
        raise HeaderError("@query-param has one parameter, name")
    query = url.partition("#")[0].partition("?")[2]
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=1000)
    except ValueError:
        raise HeaderError("the query is not UTF-8, or has too many parameters") from None
    found = [value for key, value in pairs if key == unquote(name)]
    if len(found) != 1:  # more than one may not be covered, as nobody can tell which is
        raise HeaderError("a parameter of the query is missing, or there twice")
    return quote(found[0], safe="*-._").replace("~", "%7E")


def component_of(text: str) -> Component:
    """A covered part as ``covers`` names it: ``@method``, or ``@query-param;name=id``."""
    name, parameter, value = text.partition(";name=")
    params = (("name", value.strip('"')),) if parameter else ()
    return Component(name.lower(), params)


def _lowered(part: str) -> str:
    name, parameter, value = part.partition(";name=")
    return name.lower() + parameter + value  # of the query's own names, the letter case counts


def content_digest(body: bytes) -> str:
    """The ``Content-Digest`` header (RFC 9530) of a body."""
    return f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"


def digest_is_right(
    text: str,
    body: bytes,
    *,
    algorithms: Iterable[str] = ("sha-256",),
    encodings: Iterable[str] = ("base64", "base64url"),
) -> bool:
    """Whether a ``Content-Digest`` header has the body's digest, in each of the algorithms it has.

    Standard base64 with padding and URL-safe base64 without are both accepted, unless ``encodings``
    says otherwise.

    Raises:
        HeaderError: The header can't be read, or mixes the two.
    """
    digests = parse_bytes(text)
    checked = [name for name in algorithms if name in digests]
    for name in checked:
        read = (decode(digests[name], encoding) for encoding in encodings)
        given = next((one for one in read if one), None)
        if given is None:
            raise HeaderError("neither standard nor URL-safe base64")
        if not hmac.compare_digest(given, hashlib.new(name.replace("-", ""), body).digest()):
            return False
    return bool(checked)


def sign_request(
    provider: AskingProvider,
    request: SignedRequest,
    label: str,
    covered: SignatureInput,
    value_of: Callable[[Delivery, Component], str],
    encoding: str,
) -> SignedRequest:
    """The request with a signature, and with the digest of its body if that is covered.

    Raises:
        PolicyError: There is no key to sign with, or a covered part is missing.
    """
    if provider.signing_key is None:
        raise PolicyError(f"{provider.name}: pass signing_key= and key_id= to sign")
    fields = dict(request.headers)
    if Component("content-digest") in covered.components:
        put_header(fields, "Content-Digest", content_digest(request.body))
    delivery = Delivery(request.method, request.url, Headers(fields), request.body)
    try:
        base = signature_base(covered, lambda component: value_of(delivery, component))
        signature = encode(sign_bytes(provider.signing_key, base), encoding)
    except ValueError as error:
        raise PolicyError(f"{provider.name}: can't be signed: {error}") from None
    put_header(fields, "Signature-Input", f"{label}={covered}")
    put_header(fields, "Signature", f"{label}=:{signature}:")
    return request._replace(headers=fields)


def is_integer(value: object) -> bool:
    """Whether a parameter is an integer, which true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_text(value: object, limit: int = 256) -> bool:
    """Whether a parameter is a string of 1 to ``limit`` characters."""
    return isinstance(value, str) and not isinstance(value, Raw) and 0 < len(value) <= limit


def lasting_ms(seconds: float) -> int:
    """How long a nonce is kept: a second longer than its signature is accepted."""
    return int(seconds * 1000) + 1000


def load_signing_key(signing_key: object, key_id: str) -> SignatureKey | None:
    """The key to sign with, if one was given.

    Raises:
        PolicyError: It can't be used, or has no id.
    """
    if signing_key is None:
        return None
    if not is_text(key_id):
        raise PolicyError("pass key_id= with signing_key=: receivers look the key up by it")
    try:
        return load_key(signing_key, private=True)
    except ValueError as error:
        raise PolicyError(f"signing_key: {error}") from None


# --- the generic provider --------------------------------------------------------------------

_MESSAGES: Final = {
    "header_missing": "send Signature and Signature-Input, as RFC 9421 has them",
    "header_malformed": "send Signature and Signature-Input once each, as RFC 9421 has them",
    "components_incomplete": "the signature must cover the parts of the message that are required",
    "algorithm_not_allowed": "sign with an algorithm that is allowed here",
    "tag_mismatch": "the signature was made for another purpose: its tag is another one",
    "digest_mismatch": "Content-Digest is not the digest of the body that arrived",
    "rate_abuse": "too many signatures of this key are alive: slow down",
}


def _reject(code: str, *, transient: bool = False) -> NoReturn:
    raise Rejection(code, _MESSAGES.get(code, ""), transient=transient)


class RFC9421Provider(AskingProvider):
    """Deliveries signed as RFC 9421 says. Made by ``rfc9421_provider``."""

    def __init__(
        self,
        facts: Facts,
        *,
        covers: tuple[str, ...],
        label: str | None,
        algorithms: tuple[str, ...],
        tag: str | None,
        max_age: float,
        skew: float,
        public_url: str,
        allowed_hosts: Hosts,
        **common: Any,
    ) -> None:
        super().__init__(facts, **common)
        self._covers, self._label, self._tag = covers, label, tag
        self._algorithms, self._max_age, self._skew = algorithms, max_age, skew
        signed = not {"@target-uri", "@authority"}.isdisjoint(covers)
        self._url = SignedUrl(facts.title, public_url, allowed_hosts, signed=signed)
        self.body_is_signed = "content-digest" in covers

    @functools.cached_property
    def id_is_signed(self) -> bool:
        """Whether every signature must cover the event id."""
        if self._id_field is None:
            return True
        needed = {*self._id_field.headers, *(["content-digest"] if self._id_field.in_body else [])}
        return needed <= set(self._covers)

    def _sign(self, request: SignedRequest, now: float) -> SignedRequest:
        params: dict[str, Value] = {"created": int(now), "keyid": self.key_id}
        if self.signing_key is not None:
            params["alg"] = self.signing_key.algorithm
        if self._tag is not None:
            params["tag"] = self._tag
        covered = SignatureInput(tuple(map(component_of, self._covers)), params)
        return sign_request(self, request, self._label or "sig1", covered, self._value_of, "base64")

    def _value_of(self, delivery: Delivery, component: Component) -> str:
        return component_value(delivery._replace(url=self._url.form(delivery.url)), component)

    def _checks(self, delivery: Delivery, now: float) -> Checks[Verdict]:
        self._url.check(delivery.url)
        try:
            covered, signature = self._read(delivery.headers)
        except HeaderError:
            _reject("header_malformed")
        key_id, created = self._check_params(covered, now)
        key, is_certain = yield from self._keys.find(key_id)
        if key is None:
            _reject("key_unknown", transient=not is_certain)
        named = covered.params.get("alg", key.algorithm)
        if key.algorithm not in self._algorithms or named != key.algorithm:
            _reject("algorithm_not_allowed")
        try:
            base = signature_base(covered, lambda part: self._value_of(delivery, part))
            if not signature_is_right(key, base, signature):
                _reject("signature_mismatch")
            if Component("content-digest") in covered.components:
                digest = field_value("content-digest", delivery.headers)
                if not digest_is_right(digest, delivery.body, algorithms=("sha-256", "sha-512")):
                    _reject("digest_mismatch")
        except HeaderError:
            _reject("header_malformed")
        nonce = self._nonce_of(covered, key_id, created, now)
        if nonce is not None and self._nonces is not None:
            outcome = yield from self._use(self._nonces, nonce)
            if outcome != "fresh":
                _reject("replayed" if outcome == "replayed" else "rate_abuse")
            nonce = None
        verdict = self._genuine(delivery, Proof(encode(signature, "base64"), base, created))
        sender = VerifiedWebhookSender(self.name, account=self.sender.account, key_id=key_id)
        return replace(verdict, sender=sender, nonce=nonce)

    def _read(self, headers: Headers) -> tuple[SignatureInput, bytes]:
        if "signature" not in headers and "signature-input" not in headers:
            _reject("header_missing")
        labels = parse_signature_input(field_value("signature-input", headers))
        signatures = parse_bytes(field_value("signature", headers))
        label = self._label or (next(iter(labels)) if len(labels) == 1 else "")
        signature = decode(signatures.get(label), "base64")
        if label not in labels or signature is None:
            _reject("header_malformed")
        return labels[label], signature

    def _check_params(self, covered: SignatureInput, now: float) -> tuple[str, float]:
        params = covered.params
        created, expires, key_id = params.get("created"), params.get("expires"), params.get("keyid")
        if created is None:
            _reject("timestamp_missing")
        if not is_integer(created) or not (expires is None or is_integer(expires)):
            _reject("timestamp_malformed")
        check_clock(float(created), now, self._max_age + self._skew, self._skew)
        if expires is not None and not now <= float(expires) + self._skew:
            _reject("timestamp_too_old")
        if key_id is None:
            _reject("key_unknown")
        if not is_text(key_id) or not is_text(params.get("nonce", "none")):
            _reject("header_malformed")
        if self._tag is not None and params.get("tag") != self._tag:
            _reject("tag_mismatch")
        if not {component_of(name) for name in self._covers} <= set(covered.components):
            _reject("components_incomplete")
        return str(key_id), float(created)

    def _nonce_of(
        self, covered: SignatureInput, key_id: str, created: float, now: float
    ) -> Nonce | None:
        if "nonce" not in covered.params:
            return None
        until = created + self._max_age
        if "expires" in covered.params:
            until = min(until, float(covered.params["expires"]))
        return Nonce(key_id, str(covered.params["nonce"]), lasting_ms(until + self._skew - now))


def rfc9421_provider(
    *,
    keys: object = None,
    signing_key: object = None,
    key_id: str = "",
    covers: Iterable[str] = ("@method", "@target-uri", "content-digest"),
    label: str | None = None,
    algorithms: Iterable[str] = ALGORITHMS,
    tag: str | None = None,
    max_age: float = 300,
    skew: float = 60,
    nonces: Nonces | None = None,
    name: str = "rfc9421",
    account: str = "",
    event_id: str | None = None,
    event_type: str | None = None,
    retention_seconds: int = 604_800,
    public_url: str = "",
    allowed_hosts: Hosts = "",
) -> RFC9421Provider:
    """A provider for deliveries that are signed as RFC 9421 says.

    Args:
        keys: Keys by key id, a JSON Web Key Set, or what fetches one: see
            ``oncekey.signatures.jwks``.
        signing_key: The key that ``sign`` signs with.
        key_id: Its id.
        covers: What a signature must cover; one parameter of the query is written
            ``@query-param;name=id``. Without ``content-digest`` the body is not protected.
        label: Which signature counts. ``None``: there must be exactly one.
        algorithms: Which algorithms are allowed.
        tag: What a signature must be tagged with, if anything.
        max_age: How old a signature may be, in seconds.
        skew: How far the clocks may differ, in seconds.
        nonces: Where used nonces are kept. ``None``: the verdict carries the nonce.
        name: The provider's name.
        account: Which of your endpoints or accounts the keys belong to.
        event_id: Where the event's id is, such as ``id`` or ``header:X-Event-Id``.
        event_type: Where its type is.
        retention_seconds: How long an event must be remembered.
        public_url: The URL that the sender knows, where a proxy changes it.
        allowed_hosts: Your hosts: a delivery to another one is refused.

    Raises:
        PolicyError: An option can't work.

    Example:
        >>> secret = b"0123456789abcdef0123456789abcdef"
        >>> provider = rfc9421_provider(
        ...     signing_key=secret, key_id="k1", allowed_hosts="example.com")
        >>> request = provider.sign("POST", "https://example.com/hooks", {}, b"{}")
        >>> provider.verify(*request).ok
        True
    """
    # Long: one argument for each choice that the RFC leaves to a profile, and what each means.
    signer = load_signing_key(signing_key, key_id)
    if keys is None and signer is None:
        raise PolicyError("pass keys= to verify with, or signing_key= to sign with")
    chosen, required = tuple(algorithms), tuple(_lowered(part) for part in covers)
    if not chosen or not set(chosen) <= set(ALGORITHMS):
        raise PolicyError(f"algorithms must be some of {', '.join(ALGORITHMS)}")
    if not max_age > 0 or not skew >= 0:
        raise PolicyError("max_age must be positive, and skew not negative")
    return RFC9421Provider(
        Facts(
            name=name,
            title="HTTP Message Signatures",
            scheme="rfc9421",
            event_id=event_id,
            event_type=event_type,
            retention_seconds=retention_seconds,
            source="https://www.rfc-editor.org/rfc/rfc9421",
            checked="2026-11-16",
        ),
        keys=as_keys({key_id: signer} if keys is None else keys),
        nonces=nonces,
        signing_key=signer,
        key_id=key_id,
        covers=required,
        label=label,
        algorithms=chosen,
        tag=tag,
        max_age=max_age,
        skew=skew,
        public_url=public_url,
        allowed_hosts=allowed_hosts,
        account=account,
    )
