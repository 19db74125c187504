"""What both forms of AdCP webhooks share: the codes of rejections, and the rules for bodies."""

from __future__ import annotations

import json
import logging
import re
from typing import Any, Final, NoReturn

from oncekey.canonical import parse_json
from oncekey.errors import CanonicalJSONError, PolicyError
from oncekey.signatures.delivery import Delivery
from oncekey.signatures.parsing import Rejection
from oncekey.signatures.verdict import Verdict

__all__ = [
    "ADCP_CODES",
    "check_envelope",
    "check_signable",
    "event_id_in",
    "reject",
    "rejection_headers",
    "strict_payload",
]

logger = logging.getLogger("oncekey")

TAG: Final = "adcp/webhook-signing/v1"
COVERED: Final = ("@method", "@target-uri", "@authority", "content-type", "content-digest")

_EVENT_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{16,255}")

_CODES: Final = {  # in the order of the checks; each with what a person can do about it
    "mode_mismatch": "the delivery is signed the other way than agreed: RFC 9421 and HMAC are a "
    "switch, set both sides to the same",
    "header_malformed": "send Signature and Signature-Input once each, with the label sig1 and the "
    "signature as base64url without padding",
    "params_incomplete": "Signature-Input needs created, expires, nonce, keyid, alg and tag",
    "tag_invalid": f"the tag must be {TAG}",
    "alg_not_allowed": "sign with ed25519 or ecdsa-p256-sha256",
    "window_invalid": "expires must be at most 300 s after created; check the clocks on both sides",
    "components_incomplete": f"the signature must cover {', '.join(COVERED)}",
    "key_unknown": "the key id is not in the sender's key set, or the set can't be fetched",
    "key_purpose_invalid": 'the key needs use "sig", key_ops with "verify", an alg that fits, and '
    'adcp_use "request-signing"',
    "key_revoked": "the key was revoked: sign with another",
    "revocation_stale": "the list of revoked keys is out of date and can't be fetched",
    "rate_abuse": "too many signatures of this key are alive: slow down, or check for a stolen key",
    "target_uri_malformed": "the URL or Host is malformed, or they name two different hosts",
    "invalid": "the signature is wrong: check the key, the URL as the sender saw it, and the "
    "headers it covers",
    "digest_mismatch": "Content-Digest is not the digest of the body that arrived",
    "replayed": "this nonce was used before: a retry must be signed anew",
    "body_malformed": "send JSON with no name twice in an object",
}
_TASK_FIELDS: Final = ("operation_id", "task_id", "task_type", "status", "timestamp")
_TASK_STATUS: Final = (
    *("submitted", "working", "input-required", "completed", "canceled", "failed", "rejected"),
    *("auth-required", "unknown"),
)
_ENVELOPE: Final = {
    "id_missing": "the body is no envelope of a webhook: it has no idempotency_key of 16 to 255 "
    "letters, digits and _.:-",
    "missing_envelope_fields": "the envelope lacks fields, which must be text",
    "invalid_envelope_status": f"the status of a task must be one of {', '.join(_TASK_STATUS)}",
}
_WHOLE: Final = ("mode_mismatch", "target_uri_malformed", "body_malformed")

_WHOLE_CODES: Final = {
    code: f"webhook_{code}" if code in _WHOLE else f"webhook_signature_{code}" for code in _CODES
}
ADCP_CODES: Final[dict[str, str]] = {_WHOLE_CODES[code]: text for code, text in _CODES.items()}
"""The codes of AdCP's webhook profile, with what a person can do about each."""


def reject(code: str, *, transient: bool = False) -> NoReturn:
    """Raise the rejection with a code of the profile, given without its prefix."""
    raise Rejection(_WHOLE_CODES[code], _CODES[code], transient=transient)


def rejection_headers(verdict: Verdict) -> dict[str, str]:
    """The headers of the 401 that answers a rejected delivery; none if it was accepted.

    A code that is none of AdCP's, as the HMAC form gives, is sent as an invalid signature.
    """
    if verdict.ok:
        return {}
    code = verdict.code if verdict.code in ADCP_CODES else "webhook_signature_invalid"
    return {"WWW-Authenticate": f'Signature error="{code}"'}


def strict_payload(delivery: Delivery, key_id: str, nonce: str) -> Any:
    """The body, parsed so that every parser would read it alike; ``None`` if it is empty."""
    if not delivery.body.strip(b" \t\r\n"):
        return None
    try:
        return parse_json(delivery.body)
    except CanonicalJSONError:
        logger.warning(
            "AdCP webhook with a malformed body: key id %s, nonce %s, %d bytes, names sent twice: "
            "%s",
            key_id,
            nonce,
            len(delivery.body),
            ", ".join(_shown(_names_sent_twice(delivery.body))) or "none",
        )
        reject("body_malformed")


def _names_sent_twice(body: bytes) -> list[str]:
    twice: dict[str, None] = {}

    def look(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                twice[name] = None
            seen.add(name)

    try:
        json.JSONDecoder(object_pairs_hook=look, parse_int=float).decode(body.decode())
    except (ValueError, RecursionError):
        pass
    return list(twice)


def _shown(names: list[str]) -> list[str]:
    """Names that strangers chose, cut so that a log can't be written through them."""
    shown: list[str] = []
    for name in names[:4]:
        bad = next((at for at, char in enumerate(name) if not char.isprintable()), None)
        if bad is not None:
            shown.append(f"<sanitized:{len(name[:bad].encode())}>")
        else:
            shown.append(name.encode()[:32].decode(errors="ignore"))
    if len(names) > 4:
        shown.append(f"<...{len(names) - 4} more>")
    return shown


def check_signable(name: str, body: bytes) -> None:
    """Refuse to sign a body that receivers must refuse.

    Raises:
        PolicyError: It is no JSON, or has a name twice in an object.
    """
    if body.strip(b" \t\r\n"):
        try:
            parse_json(body)
        except CanonicalJSONError as error:
            raise PolicyError(f"{name}: this body can't be sent: {error}") from None


def check_envelope(payload: Any) -> None:
    """Refuse a body that is no envelope of AdCP, which must not get to a handler.

    Webhooks of tasks have all the fields of one; every other kind has a key at least.

    Raises:
        Rejection: ``id_missing``, ``missing_envelope_fields`` or ``invalid_envelope_status``.
    """
    fields = payload if isinstance(payload, dict) else {}
    if event_id_in(fields) is None:
        raise Rejection("id_missing", _ENVELOPE["id_missing"])
    if "task_id" not in fields and "task_type" not in fields:
        return
    missing = [one for one in _TASK_FIELDS if not _is_filled(fields.get(one))]
    if missing:
        told = _ENVELOPE["missing_envelope_fields"]
        raise Rejection("missing_envelope_fields", f"{told}: {', '.join(missing)}")
    if fields["status"] not in _TASK_STATUS:
        raise Rejection("invalid_envelope_status", _ENVELOPE["invalid_envelope_status"])


def _is_filled(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def event_id_in(payload: Any) -> str | None:
    """The idempotency key, if it has the form that AdCP asks for."""
    key = payload.get("idempotency_key") if isinstance(payload, dict) else None
    return key if isinstance(key, str) and _EVENT_ID.fullmatch(key) else None
