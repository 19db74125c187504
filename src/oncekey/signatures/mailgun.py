"""Mailgun: a signature inside the body that covers a timestamp and a token, **not the event**.

Whoever captures one delivery can send any event in its name while the timestamp is accepted. What
helps: HTTPS only, and to treat the same token under another event id as a replay.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
from typing import Any

from oncekey.signatures.base import (
    Facts,
    Proof,
    Provider,
    Secrets,
    SignedRequest,
    as_bytes,
    as_secrets,
    object_body,
)
from oncekey.signatures.delivery import Delivery
from oncekey.signatures.event_fields import value_at
from oncekey.signatures.parsing import Rejection, decode, encode, json_body, seconds_since_1970

__all__ = ["MailgunProvider"]

_TOKEN = re.compile(r"[0-9A-Za-z_-]{16,128}")
# Ten digits: with any other number, digits could be moved between timestamp and token.
_STAMP = re.compile(r"[1-9][0-9]{9}")


class MailgunProvider(Provider):
    """Reads ``signature.timestamp``, ``.token`` and ``.signature`` of the body."""

    body_is_signed = False

    def __init__(
        self,
        facts: Facts,
        *,
        secret: Secrets | None = None,
        previous: Secrets | None = None,
        **common: Any,
    ) -> None:
        super().__init__(facts, **common)
        self._keys = [as_bytes(facts, one) for one in as_secrets(facts, secret, previous)]

    def _prove(self, delivery: Delivery, now: float) -> Proof:
        payload = json_body(delivery.body)
        if not isinstance(value_at(payload, "signature"), dict):
            raise Rejection("header_missing", "the body has no object signature")
        token, stamp = (
            value_at(payload, "signature.token"),
            value_at(payload, "signature.timestamp"),
        )
        given = decode(value_at(payload, "signature.signature"), "hex")
        if stamp is None:
            raise Rejection("timestamp_missing", "the body has no signature.timestamp")
        if isinstance(stamp, int) and 10**9 <= stamp < 10**10:
            stamp = str(stamp)
        if not isinstance(stamp, str) or not _STAMP.fullmatch(stamp):
            raise Rejection("timestamp_malformed", "signature.timestamp must have ten digits")
        if given is None or len(given) != 32 or not _is_token(token):
            raise Rejection("header_malformed", "signature.token or .signature is not well-formed")
        timestamp = seconds_since_1970(stamp, "s")
        self._check_clock(timestamp, now)
        message = (stamp + token).encode()
        matching = False
        for key in self._keys:
            matching |= hmac.compare_digest(hmac.digest(key, message, "sha256"), given)
        if not matching:
            raise Rejection("signature_mismatch", "check the HTTP webhook signing key")
        return Proof(encode(given, "hex"), message, timestamp, payload)

    def _sign(self, request: SignedRequest, now: float) -> SignedRequest:
        payload = object_body(self.facts, request.body)
        stamp, token = str(int(now)), secrets.token_hex(25)
        digest = hmac.digest(self._keys[0], (stamp + token).encode(), "sha256")
        payload["signature"] = {"timestamp": stamp, "token": token, "signature": digest.hex()}
        body = json.dumps(payload, separators=(",", ":"), ensure_ascii=False).encode()
        return SignedRequest(request.method, request.url, request.headers, body)


def _is_token(value: Any) -> bool:
    return isinstance(value, str) and _TOKEN.fullmatch(value) is not None
