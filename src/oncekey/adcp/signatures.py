"""AdCP webhooks: the RFC 9421 profile with its ordered checks, and the legacy HMAC.

Which of the two a sender uses is agreed beforehand. It is a switch: a delivery signed the other
way is refused, never tried, as whoever could choose would choose the weaker.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import NoneType
from typing import Any, Final, NoReturn, cast

from oncekey.adcp.webhooks import (
    ADCP_CODES,
    COVERED,
    TAG,
    check_envelope,
    check_signable,
    event_id_in,
    reject,
    rejection_headers,
    strict_payload,
)
from oncekey.errors import PolicyError
from oncekey.signatures.algorithms import SignatureKey, signature_is_right
from oncekey.signatures.asking import AskingProvider, Checks
from oncekey.signatures.base import (
    Facts,
    Item,
    Proof,
    Provider,
    Secrets,
    SignedRequest,
    as_bytes,
    as_secrets,
    put_header,
)
from oncekey.signatures.delivery import Delivery, Headers
from oncekey.signatures.hmac_schemes import HmacProvider
from oncekey.signatures.jwks import FetchedKeys, Revocations, as_keys
from oncekey.signatures.keypairs import need_cryptography
from oncekey.signatures.nonces import Nonces
from oncekey.signatures.parsing import Rejection, decode, encode
from oncekey.signatures.rfc9421 import (
    digest_is_right,
    field_value,
    is_integer,
    is_text,
    lasting_ms,
    load_signing_key,
    sign_request,
    signature_base,
)
from oncekey.signatures.structured import (
    Component,
    HeaderError,
    SignatureInput,
    Value,
    parse_bytes,
    parse_signature_input,
)
from oncekey.signatures.table import providers
from oncekey.signatures.target_uri import (
    Target,
    canonical_authority,
    canonical_target,
    with_ascii_host,
)
from oncekey.signatures.urls import Hosts, SignedUrl
from oncekey.signatures.verdict import OK, Nonce, Verdict, VerifiedWebhookSender

__all__ = [
    "ADCP_CODES",
    "AdcpHmacProvider",
    "AdcpProvider",
    "adcp_hmac_provider",
    "adcp_provider",
    "rejection_headers",
]

logger = logging.getLogger("oncekey")

LABEL: Final = "sig1"
PARAMS: Final = ("created", "expires", "nonce", "keyid", "alg", "tag")
ALLOWED: Final = ("ed25519", "ecdsa-p256-sha256")
PURPOSES: Final = ("request-signing", "webhook-signing")
SKEW_SECONDS: Final = 60
WINDOW_SECONDS: Final = 300

_SIGNATURE_HEADERS: Final = ("signature-input", "signature")
_HMAC_HEADERS: Final = ("x-adcp-signature", "x-adcp-timestamp")
_ONCE_ONLY: Final = (*_SIGNATURE_HEADERS, "content-type", "content-digest", "host", ":authority")
_QUOTED: Final = re.compile(r'"[^"]*"')


# --- RFC 9421 --------------------------------------------------------------------------------

Publisher = str | Mapping[str, str] | Callable[[str], str | None] | None


class _Envelopes(Provider):
    """What AdCP asks of a delivery's body, however it is signed."""

    on_changed = "reject"
    rejection_headers = staticmethod(rejection_headers)

    def _item(self, headers: Headers, payload: Any, event_id: str | None) -> Item:
        check_envelope(payload)
        return super()._item(headers, payload, event_id_in(payload))

    def _check_signable(self, body: bytes) -> None:
        check_signable(self.name, body)


class AdcpProvider(_Envelopes, AskingProvider):
    """AdCP webhooks signed by RFC 9421. Made by ``adcp_provider``."""

    needs_nonces = True

    def __init__(
        self,
        facts: Facts,
        *,
        publisher: Publisher,
        revocations: Revocations | None,
        public_url: str,
        allowed_hosts: Hosts,
        **common: Any,
    ) -> None:
        super().__init__(facts, **common)
        self._publisher = publisher
        self._revocations = revocations
        self._url = SignedUrl(facts.title, public_url, allowed_hosts)

    @property
    def is_async(self) -> bool:
        """Whether something must be awaited, so that only ``averify`` works."""
        revocations = self._revocations
        return super().is_async or (revocations is not None and revocations.is_async)

    def _checks(self, delivery: Delivery, now: float) -> Checks[Verdict]:
        """The checks of the profile. Their order is part of it: the first failure is the answer.

        Whatever is cheap comes before cryptography, and the nonce is used up only by a signature
        that is right, so that nobody without a key can fill the store. It is used up before the
        body is looked at, so that a signed but malformed body can't be sent again and again.
        """
        # Long: the profile's list, in the profile's order, is best read in one piece.
        _refuse_mode(delivery.headers, _HMAC_HEADERS)
        covered, signature = _read_headers(delivery.headers)  # 1
        params = covered.params
        _check_params(params)  # 2
        if params["tag"] != TAG:  # 3
            reject("tag_invalid")
        if params["alg"] not in ALLOWED:  # 4
            reject("alg_not_allowed")
        key_id = str(params["keyid"])
        created, expires = int(params["created"]), int(params["expires"])
        if not (  # 5, written so that a clock that is no number fails it
            created < expires <= created + WINDOW_SECONDS
            and created <= now + SKEW_SECONDS
            and expires >= now - SKEW_SECONDS
        ):
            reject("window_invalid")
        if not {Component(name) for name in COVERED} <= set(covered.components):  # 6
            reject("components_incomplete")
        key, is_certain = yield from self._keys.find(key_id)  # 7
        if key is None:
            reject("key_unknown", transient=not is_certain)
        if key.algorithm != params["alg"] or not _is_for_webhooks(key.jwk):  # 8
            reject("key_purpose_invalid")
        if self._revocations is not None:  # 9
            standing: str | None = yield from self._revocations.check(key_id, now)
            if standing == "revoked":
                reject("key_revoked")
            if standing is not None:
                # A list that is out of date is a rejection of the profile; one that can't be
                # fetched says nothing about the delivery.
                reject("revocation_stale", transient=self._revocations.is_down)
        if self._nonces is not None and self._nonces.is_full(key_id):  # 9a
            self._refuse_abuse(key_id)
        base = self._check_signature(delivery, covered, key, signature)  # 10, 11
        sender = self._sender(key_id)  # may fail, and must not cost the nonce then
        nonce = Nonce(key_id, str(params["nonce"]), lasting_ms(expires + SKEW_SECONDS - now))
        if self._nonces is not None:  # 12, 13
            outcome = yield from self._use(self._nonces, nonce)
            if outcome == "full":
                self._refuse_abuse(key_id)
            if outcome == "replayed":
                reject("replayed")
        payload = strict_payload(delivery, key_id, nonce.value)  # 14
        return Verdict(
            True,
            OK,
            sender,
            event_id=event_id_in(payload),
            id_is_signed=True,
            timestamp=float(created),
            signature=encode(signature, "base64url"),
            nonce=nonce if self._nonces is None else None,
            payload=payload,
            signed_message=base,
        )

    def _check_signature(
        self, delivery: Delivery, covered: SignatureInput, key: SignatureKey, signature: bytes
    ) -> bytes:
        target = self._target(delivery)
        try:
            base = signature_base(covered, lambda part: _value_of(delivery, target, part))
            if not signature_is_right(key, base, signature):
                reject("invalid")
            if not digest_is_right(field_value("content-digest", delivery.headers), delivery.body):
                reject("digest_mismatch")
        except HeaderError:
            reject("header_malformed")
        return base

    def _target(self, delivery: Delivery) -> Target:
        """The signed URL. ``Host`` must name the same host, unless the URL was pinned by hand.

        Else a delivery to one of your hosts could be sent again to another one.
        """
        try:
            self._url.check(delivery.url)
            target = canonical_target(self._url.form(delivery.url))
            for name in () if self._url.public_url else (":authority", "host"):
                host = delivery.headers.one(name)
                if host is None:
                    continue
                if canonical_authority(host, target.scheme) != target.authority:
                    reject("target_uri_malformed")
        except (ValueError, Rejection):
            reject("target_uri_malformed")
        return target

    def _refuse_abuse(self, key_id: str) -> NoReturn:
        logger.warning("AdCP webhooks: key id %s has as many live nonces as it may have", key_id)
        reject("rate_abuse")

    def _sender(self, key_id: str) -> VerifiedWebhookSender:
        publisher: Any = self._publisher
        try:
            if isinstance(publisher, Mapping):
                publisher = cast("Mapping[str, str]", publisher).get(key_id)
            elif callable(publisher):
                publisher = publisher(key_id)
            if not isinstance(publisher, (str, NoneType)):
                raise TypeError(f"a publisher is a name, got {type(publisher).__name__}")
        except Exception:
            logger.exception("AdCP webhooks: nobody can tell whose the key id %s is now", key_id)
            reject("key_unknown", transient=True)
        return VerifiedWebhookSender(
            self.name, account=self.sender.account, key_id=key_id, publisher=publisher or ""
        )

    def _sign(self, request: SignedRequest, now: float) -> SignedRequest:
        fields = dict(request.headers)
        if "content-type" not in Headers(fields):
            put_header(fields, "Content-Type", "application/json")
        params: dict[str, Value] = {
            "created": int(now),
            "expires": int(now) + WINDOW_SECONDS,
            "nonce": encode(os.urandom(16), "base64url"),
            "keyid": self.key_id,
            "alg": self.signing_key.algorithm if self.signing_key else "",
            "tag": TAG,
        }
        covered = SignatureInput(tuple(map(Component, COVERED)), params)
        try:
            request = request._replace(url=with_ascii_host(request.url))
            target = canonical_target(request.url)
        except ValueError as error:
            raise PolicyError(f"{self.name}: the URL can't be signed: {error}") from None
        return sign_request(
            self,
            request._replace(headers=fields),
            LABEL,
            covered,
            lambda delivery, part: _value_of(delivery, target, part),
            "base64url",
        )


def _refuse_mode(headers: Headers, other: tuple[str, ...]) -> None:
    if any(name in headers for name in other):
        reject("mode_mismatch")


def _read_headers(headers: Headers) -> tuple[SignatureInput, bytes]:
    if any(len(headers.all(name)) > 1 for name in _ONCE_ONLY):
        reject("header_malformed")
    if "," in _QUOTED.sub("", headers.one("content-type") or ""):  # two, folded into one
        reject("header_malformed")
    try:
        labels = parse_signature_input(field_value("signature-input", headers))
        signature = decode(parse_bytes(field_value("signature", headers)).get(LABEL), "base64url")
    except HeaderError:
        reject("header_malformed")
    if signature is None or LABEL not in labels:
        reject("header_malformed")
    return labels[LABEL], signature


def _check_params(params: Mapping[str, Value]) -> None:
    if not all(name in params for name in PARAMS):
        reject("params_incomplete")
    if not all(is_integer(params[name]) for name in ("created", "expires")):
        reject("header_malformed")
    if not all(is_text(params[name]) for name in ("nonce", "keyid", "alg", "tag")):
        reject("header_malformed")
    nonce = decode(params["nonce"], "base64url")
    if nonce is None or not 16 <= len(nonce) <= 128:
        reject("header_malformed")


def _is_for_webhooks(jwk: Mapping[str, Any]) -> bool:
    """Whether a published key may sign webhooks. One that was pinned by hand says nothing."""
    if not jwk:
        return True
    operations = jwk.get("key_ops")
    return (
        jwk.get("use") == "sig"
        and isinstance(operations, (list, tuple))
        and "verify" in operations
        and jwk.get("adcp_use") in PURPOSES
    )


def _value_of(delivery: Delivery, target: Target, component: Component) -> str:
    name = component.name
    if component.params:
        raise HeaderError("components with parameters are not part of the profile")
    if name == "@target-uri":
        return target.uri
    if name == "@authority":
        return target.authority
    if name == "@method":
        if not re.fullmatch(r"[A-Za-z-]{1,32}", delivery.method):
            raise HeaderError("the method is none of HTTP")
        return delivery.method.upper()
    if name.startswith("@"):
        raise HeaderError("the component is not part of the profile")
    return field_value(name, delivery.headers)


def adcp_provider(
    *,
    keys: Mapping[str, Any] | None = None,
    secret: Mapping[str, Any] | None = None,
    jwks: FetchedKeys | Callable[[], Any] | None = None,
    publisher: Publisher = None,
    nonces: Nonces | None = None,
    revocations: Revocations | Mapping[str, Any] | Callable[[], Any] | None = None,
    signing_key: object = None,
    key_id: str = "",
    account: str = "",
    public_url: str = "",
    allowed_hosts: Hosts = "",
) -> AdcpProvider:
    """AdCP webhooks, signed by RFC 9421 with the profile ``adcp/webhook-signing/v1``.

    Args:
        keys: The sender's JSON Web Key Set, or keys by key id.
        secret: Another name of ``keys``, for ``provider("adcp", ...)``.
        jwks: Instead: a function that fetches the set, or ``FetchedKeys`` of one.
        publisher: The stable name of the sender, for deduplication: it must outlive a change of
            keys. A name for all keys, a mapping from key id, or a function of the key id.
        nonces: Where used nonces are kept. ``None``: a receiver keeps them in its own store;
            without one the verdict carries the nonce, and whoever
            accepts the delivery must see to it that it is used once.
        revocations: The sender's list of revoked keys, or a function that fetches it.
        signing_key: A private key, or a JSON Web Key with ``d``, for ``sign``.
        key_id: Its id.
        account: Which of your endpoints or accounts this is.
        public_url: The URL that the sender knows, where a proxy changes it. ``Host`` is then not
            compared.
        allowed_hosts: Your hosts, in its place: a delivery to another one is refused.

    Raises:
        PolicyError: An option can't work, or ``cryptography`` is not installed.
    """
    # Long: most of it says what the options do.
    need_cryptography()
    signer = load_signing_key(signing_key, key_id)
    if signer is not None and signer.algorithm not in ALLOWED:
        raise PolicyError("signing_key= must be of Ed25519 or P-256")
    given: list[object] = [one for one in (keys, secret, jwks) if one is not None]
    if not given and signer is not None:
        given = [{key_id: signer._replace(jwk={})}]
    if len(given) != 1:
        raise PolicyError("pass keys= or jwks= to verify with, one of them")
    if nonces is not None and not isinstance(nonces, Nonces):
        raise PolicyError("nonces= must be Nonces(store)")
    if revocations is not None and not isinstance(revocations, Revocations):
        revocations = Revocations(revocations)
    return AdcpProvider(
        providers()["adcp"],
        keys=as_keys(given[0]),
        nonces=nonces,
        signing_key=signer,
        key_id=key_id,
        publisher=publisher,
        revocations=revocations,
        public_url=public_url,
        allowed_hosts=allowed_hosts,
        account=account,
    )


# --- legacy HMAC -----------------------------------------------------------------------------


class AdcpHmacProvider(_Envelopes, HmacProvider):
    """AdCP webhooks signed by the legacy HMAC. Made by ``adcp_hmac_provider``."""

    def __init__(self, facts: Facts, *, publisher: str, **options: Any) -> None:
        super().__init__(facts, **options)
        self.sender = VerifiedWebhookSender(
            self.name, account=self.sender.account, publisher=publisher
        )

    def _prove(self, delivery: Delivery, now: float) -> Proof:
        _refuse_mode(delivery.headers, _SIGNATURE_HEADERS)
        return super()._prove(delivery, now)

    def _genuine(self, delivery: Delivery, proof: Proof) -> Verdict:
        payload = strict_payload(delivery, "-", "-")
        return Verdict(
            True,
            OK,
            self.sender,
            event_id=event_id_in(payload),
            id_is_signed=True,
            timestamp=proof.timestamp,
            signature=proof.signature,
            payload=payload,
            signed_message=proof.message,
        )


def adcp_hmac_provider(
    *,
    secret: Secrets,
    previous: Secrets | None = None,
    publisher: str = "",
    account: str = "",
    tolerance: float | None = None,
) -> AdcpHmacProvider:
    """AdCP webhooks, signed by the legacy HMAC-SHA256 that AdCP 4 removes.

    Args:
        secret: The shared secret, at least 32 bytes.
        previous: The one before it, while it is being changed.
        publisher: The stable name of the sender, for deduplication.
        account: Which of your endpoints or accounts this is.
        tolerance: How far the clocks may differ, in seconds; 300 if not given.

    Raises:
        PolicyError: A secret is missing, too short or of one repeated byte.
    """
    dress = {
        "header": "X-ADCP-Signature",
        "prefix": "sha256=",
        "signed": "{timestamp}.{body}",
        "timestamp_header": "X-ADCP-Timestamp",
    }
    facts = replace(providers()["adcp-hmac"], settings=dress)
    for one in as_secrets(facts, secret, previous):
        raw = as_bytes(facts, one)
        if len(raw) < 32 or len(set(raw)) == 1:
            raise PolicyError(
                "a secret of AdCP must have at least 32 random bytes: make one with "
                "secrets.token_hex(32)"
            )
    return AdcpHmacProvider(
        facts,
        secret=secret,
        previous=previous,
        publisher=publisher,
        account=account,
        tolerance=tolerance,
    )
