"""What an event is known by, where its provider's id is not all of it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from typing import Any

from oncekey.canonical import canonicalize_json
from oncekey.errors import CanonicalJSONError, InvalidKeyError, OncekeyError
from oncekey.models import Key, check_text
from oncekey.signatures.verdict import CODES, Item, Verdict

__all__ = ["fingerprint", "key_of", "signed_name", "veiled"]

logger = logging.getLogger("oncekey")


def signed_name(verdict: Verdict) -> str:
    """The name of the message that was signed."""
    if not verdict.message_digest:  # no verifier of ours says ok without one
        raise OncekeyError("the provider gave a verdict without the message that was signed")
    return f"signed:{verdict.message_digest}"


def veiled(name: bytes, guard: Key) -> bytes:
    """An id as it is kept beside a signed message, and back: unreadable without the message."""
    pad = hashlib.shake_256(b"oncekey id\0" + guard.name.encode()).digest(len(name))
    return bytes(one ^ other for one, other in zip(name, pad, strict=True))


def key_of(find: Callable[[Any], str], payload: Any) -> str:
    """What the user's own function gives. What it does not find, a sender did not send."""
    try:
        return check_text(find(payload), "the key of a webhook")
    except Exception as error:
        # The sender is told what it can do; why is for whoever wrote the function.
        logger.warning("key= found no key in a webhook", exc_info=error)
        raise InvalidKeyError(CODES["id_missing"]) from None


def fingerprint(item: Item, body: bytes) -> bytes:
    """What must not change under one key: the payload, however it is written."""
    if item.payload is None:
        return hashlib.sha256(body).hexdigest().encode()
    text = json.dumps(item.payload, sort_keys=True)
    try:
        canonical = canonicalize_json(text)
    except CanonicalJSONError:  # an integer that a double can't hold: its digits stand for it
        canonical = text.encode()
    return hashlib.sha256(canonical).hexdigest().encode()
