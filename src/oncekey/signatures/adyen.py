"""Adyen's payment notifications: each item of the batch is signed by itself, over eight fields.

Nothing but those fields is signed: ``additionalData`` and ``reason`` are not. They are joined with
colons and not escaped, so only the merchant's own reference may hold one: else a part of it could
be moved into another field, and one signed item would have two ids.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any, Final, cast

from oncekey.errors import PolicyError
from oncekey.signatures.base import (
    Facts,
    Proof,
    Provider,
    Secrets,
    SignedRequest,
    as_secrets,
    check_batch,
    object_body,
)
from oncekey.signatures.delivery import Delivery
from oncekey.signatures.event_fields import value_at
from oncekey.signatures.parsing import Rejection, decode, encode, json_body

__all__ = ["AdyenProvider"]

_ITEMS: Final = "notificationItems"
_ITEM: Final = "NotificationRequestItem"
_FIELDS: Final = (
    "pspReference",
    "originalReference",
    "merchantAccountCode",
    "merchantReference",
    "amount.value",
    "amount.currency",
    "eventCode",
    "success",
)


_FREE: Final = "merchantReference"


class AdyenProvider(Provider):
    """Checks every item, not only the first."""

    def __init__(
        self,
        facts: Facts,
        *,
        secret: Secrets | None = None,
        previous: Secrets | None = None,
        **common: Any,
    ) -> None:
        super().__init__(facts, **common)
        place = self._id_field
        read = [path for part in place.parts for path in part.paths] if place else []
        if place and (place.headers or not {f"{_ITEM}.{one}" for one in _FIELDS} >= {*read}):
            raise PolicyError(
                f"Adyen signs {', '.join(_FIELDS)} of an item and nothing else: make event_id= of "
                f"these, such as {_ITEM}.pspReference, or pass event_id=None and a key= of yours"
            )
        self._keys: list[bytes] = []
        for one in as_secrets(facts, secret, previous):
            try:
                self._keys.append(one if isinstance(one, bytes) else bytes.fromhex(one))
            except ValueError:
                raise PolicyError(
                    "an HMAC key of Adyen is written in hex digits; copy it from the webhook's page"
                ) from None

    def _prove(self, delivery: Delivery, now: float) -> Proof:
        payload = json_body(delivery.body)
        found = value_at(payload, _ITEMS)
        if not isinstance(found, list) or not found:
            raise Rejection("body_malformed", f"the body has no {_ITEMS}")
        check_batch(found)
        proofs = [self._prove_item(one) for one in found]
        messages = b"".join(hashlib.sha256(message).digest() for _, message in proofs)
        return Proof(",".join(text for text, _ in proofs), messages, None, payload)

    def _prove_item(self, holder: Any) -> tuple[str, bytes]:
        item = value_at(holder, _ITEM)
        if not isinstance(item, dict):
            raise Rejection("body_malformed", f"an item has no {_ITEM}")
        text = value_at(item, "additionalData.hmacSignature")
        if text is None:
            raise Rejection(
                "header_missing", "an item has no additionalData.hmacSignature: switch HMAC on"
            )
        given = decode(text, "base64")
        if given is None or len(given) != 32:
            raise Rejection("header_malformed", "hmacSignature holds no base64 of HMAC-SHA256")
        message = _signed_fields(cast("dict[str, Any]", item))
        matching = False
        for key in self._keys:
            matching |= hmac.compare_digest(hmac.digest(key, message, "sha256"), given)
        if not matching:
            raise Rejection("signature_mismatch", "an item of the batch is not signed by this key")
        return encode(given, "base64"), message

    def _sign(self, request: SignedRequest, now: float) -> SignedRequest:
        payload = object_body(self.facts, request.body)
        if _ITEMS not in payload:
            # One notification by itself is dressed as the batch that Adyen would send.
            payload = {"live": "false", _ITEMS: [{_ITEM: payload}]}
        holders = payload[_ITEMS]
        for holder in holders if isinstance(holders, list) else [None]:
            item = value_at(holder, _ITEM)
            if not isinstance(item, dict):
                raise PolicyError(f"{_ITEMS} must be a list, and each of it hold a {_ITEM}")
            members = cast("dict[str, Any]", item)
            try:
                message = _signed_fields(members)
            except Rejection as found:
                raise PolicyError(found.message) from None
            digest = hmac.digest(self._keys[0], message, "sha256")
            extra = members.get("additionalData")
            kept = cast("dict[str, Any]", extra) if isinstance(extra, dict) else {}
            members["additionalData"] = {**kept, "hmacSignature": encode(digest, "base64")}
        body = json.dumps(payload, separators=(",", ":"), ensure_ascii=False).encode()
        return SignedRequest(request.method, request.url, request.headers, body)


def _signed_fields(item: dict[str, Any]) -> bytes:
    texts = [_text(value_at(item, path), path) for path in _FIELDS]
    if any(":" in text for text, path in zip(texts, _FIELDS, strict=True) if path != _FREE):
        raise Rejection("body_malformed", f"no field of an item but {_FREE} may hold a colon")
    return ":".join(texts).encode()


def _text(value: Any, path: str) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) or (isinstance(value, int) and abs(value) < 10**30):
        return str(value)
    raise Rejection("body_malformed", f"{path} of an item must be text or a whole number")
