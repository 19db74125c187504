"""A signed JSON Web Token with each delivery: Google Pub/Sub, Plaid.

The keys are a published set, or what a function of yours fetches. The token says for whom it is,
who signed it and when; all of that is checked. It covers the body only where it has its hash.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any, Final, cast

from oncekey.errors import PolicyError
from oncekey.signatures.algorithms import JOSE_NAMES, load_key, sign_bytes, signature_is_right
from oncekey.signatures.asking import AskingProvider, Checks
from oncekey.signatures.base import Facts, Proof, SignedRequest, put_header
from oncekey.signatures.certificates import fetch_certificate
from oncekey.signatures.delivery import Delivery
from oncekey.signatures.jwks import Found, as_keys
from oncekey.signatures.parsing import (
    MAX_URL,
    Rejection,
    check_clock,
    decode,
    encode,
    json_body,
    one_header,
)
from oncekey.signatures.verdict import Verdict

__all__ = ["JwtProvider"]

_MOST_SECONDS: Final = 2**40


class JwtProvider(AskingProvider):
    """``facts.settings`` describes the token.

    ==============  ============================================================================
    ``header``      the header that it is in
    ``prefix``      what stands before it, such as ``Bearer``
    ``algorithms``  those that are accepted, by their JOSE names; never what the token wishes
    ``issuers``     who may have signed it (``iss``)
    ``audience``    ``true``: it is for one receiver (``aud``), whom ``audience=`` names
    ``email``       ``true``: it is of one account, which ``email=`` names
    ``body_claim``  the claim with the SHA-256 of the body, in hex
    ``keys_url``    where the key set is published, if it is
    ==============  ============================================================================
    """

    def __init__(
        self,
        facts: Facts,
        *,
        secret: None = None,
        previous: None = None,
        keys: Any = None,
        audience: str = "",
        email: str = "",
        signing_key: Any = None,
        key_id: str = "",
        **common: Any,
    ) -> None:
        rules = facts.settings
        if secret is not None or previous is not None:
            raise PolicyError(
                f"{facts.title} has no shared secret: leave secret= and previous= out"
            )
        for name, given in (("audience", audience), ("email", email)):
            if bool(rules.get(name)) != bool(given):
                raise PolicyError(
                    f"pass {name}=, {_MEANT[name]}; there is no secret"
                    if rules.get(name)
                    else f"the tokens of {facts.title} name no {name}: leave {name}= out"
                )
        private = load_key(signing_key, private=True) if signing_key is not None else None
        url: str = rules.get("keys_url", "")
        self._fetches = keys is None and private is None and bool(url)
        if keys is None and private is not None:
            keys = {key_id: private._replace(material=private.material.public_key())}
        if keys is None and url:
            keys = functools.partial(fetch_certificate, url)
        if keys is None:
            raise PolicyError(f"pass keys=, {facts.secret}; there is no secret")
        super().__init__(
            facts,
            keys=as_keys(keys),
            nonces=None,
            signing_key=private,
            key_id=key_id,
            **common,
        )
        self._rules = rules
        self._audience, self._email = audience, email
        self.body_is_signed = "body_claim" in rules

    async def ajudge(self, delivery: Delivery, now: float | None = None) -> Verdict:
        """``judge``; in a thread where that may fetch the published keys."""
        if self._fetches:
            return await asyncio.to_thread(self.judge, delivery, now)
        return await super().ajudge(delivery, now)

    # --- verify ----------------------------------------------------------------------------

    def _checks(self, delivery: Delivery, now: float) -> Checks[Verdict]:
        if len(delivery.url) > MAX_URL:
            raise Rejection("url_malformed", f"the URL has more than {MAX_URL} characters")
        head, claims, message, signature = self._parts(delivery)
        key_id, algorithm = head.get("kid"), head.get("alg")
        if algorithm not in self._rules["algorithms"] or not isinstance(key_id, str):
            several = " or ".join(self._rules["algorithms"])
            raise Rejection("header_malformed", f"the token must name its key, and {several}")
        found: Found = yield from self._keys.find(key_id)
        key = found.key
        if key is None:
            raise Rejection("key_unknown", transient=not found.is_certain)
        # The key says which algorithm it is for: a token can't choose a weaker one.
        if JOSE_NAMES.get(key.algorithm) != algorithm or not signature_is_right(
            key, message, signature
        ):
            raise Rejection("signature_mismatch")
        self._check_claims(claims)
        signed_at = self._check_times(claims, now)
        self._check_body(claims, delivery.body)
        proof = Proof(encode(signature, "base64url"), delivery.body, signed_at)
        return self._genuine(delivery, proof)

    def _parts(self, delivery: Delivery) -> tuple[dict[str, Any], dict[str, Any], bytes, bytes]:
        name, prefix = self._rules["header"], self._rules.get("prefix", "")
        value = one_header(delivery.headers, name)
        parts = value[len(prefix) :].split(".")
        raw = [decode(one, "base64url") for one in parts] if len(parts) == 3 else [None]
        if not value.startswith(prefix) or not value.isascii() or None in raw:
            raise Rejection("header_malformed", f"{name} must hold {prefix}and a JSON Web Token")
        head, claims = (_object(one, name) for one in raw[:2])
        return head, claims, ".".join(parts[:2]).encode(), cast("bytes", raw[2])

    def _check_claims(self, claims: Mapping[str, Any]) -> None:
        issuers = self._rules.get("issuers")
        if issuers and claims.get("iss") not in issuers:
            raise Rejection("claim_mismatch", "the token is of another issuer")
        audience = claims.get("aud")
        if self._audience and audience != self._audience and audience != [self._audience]:
            raise Rejection("claim_mismatch", "the token is for another receiver: check audience=")
        if self._email and not (
            claims.get("email") == self._email and claims.get("email_verified") is True
        ):
            raise Rejection("claim_mismatch", "the token is of another account: check email=")

    def _check_times(self, claims: Mapping[str, Any], now: float) -> float:
        signed_at = _moment(claims.get("iat"))
        if signed_at is None:
            raise Rejection("timestamp_missing", "the token does not say when it was signed (iat)")
        self._check_clock(signed_at, now)
        for name in ("exp", "nbf"):
            moment = _moment(claims.get(name))
            if moment is None and name in claims:
                raise Rejection("timestamp_malformed", f"{name} must be seconds since 1970")
            if moment is not None and name == "exp":
                check_clock(moment, now, self._future, float("inf"))
            elif moment is not None:
                check_clock(moment, now, float("inf"), self._future)
        return signed_at

    def _check_body(self, claims: Mapping[str, Any], body: bytes) -> None:
        name = self._rules.get("body_claim")
        if name is None:
            return
        said, real = claims.get(name), hashlib.sha256(body).hexdigest()
        if not isinstance(said, str) or not hmac.compare_digest(said.encode(), real.encode()):
            raise Rejection("signature_mismatch", "the token is for another body")

    # --- sign ------------------------------------------------------------------------------

    def _sign(self, request: SignedRequest, now: float) -> SignedRequest:
        if self.signing_key is None:
            raise PolicyError(
                f"{self.facts.title} signs with a private key: pass signing_key= with one of your "
                "own and its key_id=, for tests"
            )
        rules, moment = self._rules, int(now)
        claims: dict[str, Any] = {"iat": moment, "exp": moment + int(self._past)}
        if rules.get("issuers"):
            claims["iss"] = rules["issuers"][0]
        if self._audience:
            claims["aud"] = self._audience
        if self._email:
            claims |= {"email": self._email, "email_verified": True}
        if "body_claim" in rules:
            claims[rules["body_claim"]] = hashlib.sha256(request.body).hexdigest()
        head = {"alg": JOSE_NAMES[self.signing_key.algorithm], "kid": self.key_id, "typ": "JWT"}
        text = ".".join(encode(json.dumps(one).encode(), "base64url") for one in (head, claims))
        signature = encode(sign_bytes(self.signing_key, text.encode()), "base64url")
        put_header(request.headers, rules["header"], f"{rules.get('prefix', '')}{text}.{signature}")
        return request


_MEANT: Final = {
    "audience": "what the sender puts into its tokens for you: the URL of the endpoint, mostly",
    "email": "the account that the tokens are of",
}


def _object(raw: bytes | None, header: str) -> dict[str, Any]:
    try:
        found = json_body(raw or b"")
    except Rejection:
        found = None
    if not isinstance(found, dict):
        raise Rejection("header_malformed", f"{header} holds a token whose parts are no objects")
    return cast("dict[str, Any]", found)


def _moment(value: object) -> float | None:
    if (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and 0 <= value < _MOST_SECONDS
    ):
        return float(value)
    return None
