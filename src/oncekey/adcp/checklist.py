"""The profile of RFC 9421 that AdCP has, once for its webhooks and its requests: ordered checks.

``oncekey.adcp.signatures`` is for webhooks, ``oncekey.adcp.requests`` for requests. They differ in
the tag, the names of the codes, how bytes are written, and what a body must be.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, Final, NoReturn, cast

from oncekey.adcp.signing_profiles import COVERED, Profile, strict_payload
from oncekey.errors import PolicyError
from oncekey.signatures.algorithms import SignatureKey, signature_is_right
from oncekey.signatures.asking import AskingProvider, Checks
from oncekey.signatures.base import Facts, SignedRequest, put_header
from oncekey.signatures.delivery import Delivery, Headers
from oncekey.signatures.jwks import Revocations
from oncekey.signatures.parsing import Rejection, decode, encode
from oncekey.signatures.rfc9421 import (
    digest_is_right,
    field_value,
    is_integer,
    is_text,
    lasting_ms,
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
from oncekey.signatures.target_uri import (
    Target,
    canonical_authority,
    canonical_target,
    with_ascii_host,
)
from oncekey.signatures.urls import Hosts, SignedUrl
from oncekey.signatures.verdict import OK, Nonce, Verdict, VerifiedWebhookSender

__all__ = ["ALLOWED", "Publisher", "SignedByAdcp"]

logger = logging.getLogger("oncekey")

LABEL: Final = "sig1"
PARAMS: Final = ("created", "expires", "nonce", "keyid", "alg", "tag")
ALLOWED: Final = ("ed25519", "ecdsa-p256-sha256")
SKEW_SECONDS: Final = 60
WINDOW_SECONDS: Final = 300

_ONCE_ONLY: Final = (
    *("signature-input", "signature", "content-type", "content-digest", "host", ":authority"),
)
_QUOTED: Final = re.compile(r'"[^"]*"')

Publisher = str | Mapping[str, str] | Callable[[str], str | None] | None


class SignedByAdcp(AskingProvider):
    """What webhooks and requests have in common: the checks of the profile, and a signer."""

    profile: Profile
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
        profile, reject = self.profile, self.profile.reject
        self._check_mode(delivery.headers)
        covered, signature = _read_headers(profile, delivery.headers)  # 1
        params = covered.params
        _check_params(profile, params)  # 2
        if params["tag"] != profile.tag:  # 3
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
        self._check_components(covered, delivery.body)  # 6
        key, is_certain = yield from self._keys.find(key_id)  # 7
        if key is None:
            reject("key_unknown", transient=not is_certain)
        if key.algorithm != params["alg"] or not _is_for(profile.purposes, key.jwk):  # 8
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
        return self._accepted(delivery, covered, sender, nonce, signature, base)  # 14

    def _check_mode(self, headers: Headers) -> None:
        """What must be so before anything of the signature is looked at."""

    def _check_components(self, covered: SignatureInput, body: bytes) -> None:
        if not {Component(name) for name in COVERED} <= set(covered.components):
            self.profile.reject("components_incomplete")

    def _accepted(
        self,
        delivery: Delivery,
        covered: SignatureInput,
        sender: VerifiedWebhookSender,
        nonce: Nonce,
        signature: bytes,
        base: bytes,
    ) -> Verdict:
        """The verdict; the body is looked at here, when the nonce is used up."""
        payload = strict_payload(self.profile, delivery, nonce.key_id, nonce.value)
        return Verdict(
            True,
            OK,
            sender,
            event_id=self._event_id(payload),
            id_is_signed=True,
            timestamp=float(cast("int", covered.params["created"])),
            signature=encode(signature, self.profile.encoding),
            nonce=nonce if self._nonces is None else None,
            payload=payload,
            signed_message=base,
        )

    def _event_id(self, payload: Any) -> str | None:
        return None

    def _check_signature(
        self, delivery: Delivery, covered: SignatureInput, key: SignatureKey, signature: bytes
    ) -> bytes:
        target, profile = self._target(delivery), self.profile
        try:
            base = signature_base(covered, lambda part: _value_of(delivery, target, part))
            if not signature_is_right(key, base, signature):
                profile.reject("invalid")
            if Component("content-digest") in covered.components:
                digest = field_value("content-digest", delivery.headers)
                if not digest_is_right(digest, delivery.body, encodings=profile.digests):
                    profile.reject("digest_mismatch")
        except HeaderError:
            profile.reject("header_malformed")
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
                    self.profile.reject("target_uri_malformed")
        except (ValueError, Rejection):
            self.profile.reject("target_uri_malformed")
        return target

    def _refuse_abuse(self, key_id: str) -> NoReturn:
        logger.warning("%s: key id %s has as many live nonces as it may have", self.title, key_id)
        self.profile.reject("rate_abuse")

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
            logger.exception("%s: nobody can tell whose the key id %s is now", self.title, key_id)
            self.profile.reject("key_unknown", transient=True)
        return VerifiedWebhookSender(
            self.name, account=self.sender.account, key_id=key_id, publisher=publisher or ""
        )

    def _covers(self, body: bytes) -> tuple[str, ...]:
        """The parts that a signature of ours covers."""
        return COVERED

    def _sign(self, request: SignedRequest, now: float) -> SignedRequest:
        fields = dict(request.headers)
        covers = self._covers(request.body)
        if "content-type" in covers and "content-type" not in Headers(fields):
            put_header(fields, "Content-Type", "application/json")
        params: dict[str, Value] = {
            "created": int(now),
            "expires": int(now) + WINDOW_SECONDS,
            "nonce": encode(os.urandom(16), "base64url"),
            "keyid": self.key_id,
            "alg": self.signing_key.algorithm if self.signing_key else "",
            "tag": self.profile.tag,
        }
        covered = SignatureInput(tuple(map(Component, covers)), params)
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
            self.profile.encoding,
        )


def _read_headers(profile: Profile, headers: Headers) -> tuple[SignatureInput, bytes]:
    if any(len(headers.all(name)) > 1 for name in _ONCE_ONLY):
        profile.reject("header_malformed")
    if "," in _QUOTED.sub("", headers.one("content-type") or ""):  # two, folded into one
        profile.reject("header_malformed")
    try:
        labels = parse_signature_input(field_value("signature-input", headers))
        signatures = parse_bytes(field_value("signature", headers))
        if "content-digest" in headers:
            parse_bytes(field_value("content-digest", headers))
    except HeaderError:
        profile.reject("header_malformed")
    signature = decode(signatures.get(LABEL), profile.encoding)
    if signature is None or LABEL not in labels:
        profile.reject("header_malformed")
    return labels[LABEL], signature


def _check_params(profile: Profile, params: Mapping[str, Value]) -> None:
    if not all(name in params for name in PARAMS):
        profile.reject("params_incomplete")
    if not all(is_integer(params[name]) for name in ("created", "expires")):
        profile.reject("header_malformed")
    if not all(is_text(params[name]) for name in ("nonce", "keyid", "alg", "tag")):
        profile.reject("header_malformed")
    nonce = decode(params["nonce"], "base64url")
    if nonce is None or not 16 <= len(nonce) <= 128:
        profile.reject("header_malformed")


def _is_for(purposes: Sequence[str], jwk: Mapping[str, Any]) -> bool:
    """Whether a published key may sign this. One that was pinned by hand says nothing."""
    if not jwk:
        return True
    operations = jwk.get("key_ops")
    return (
        jwk.get("use") == "sig"
        and isinstance(operations, (list, tuple))
        and "verify" in operations
        and jwk.get("adcp_use") in purposes
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
