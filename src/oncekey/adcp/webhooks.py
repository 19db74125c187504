"""What both forms of AdCP webhooks share: the codes of rejections, and the rules for bodies."""

from __future__ import annotations

import re
from typing import Any, Final

from oncekey.adcp.signing_profiles import WEBHOOKS
from oncekey.canonical import parse_json
from oncekey.errors import CanonicalJSONError, PolicyError
from oncekey.signatures.parsing import Rejection

__all__ = ["ADCP_CODES", "check_envelope", "check_signable", "event_id_in", "rejection_headers"]


_EVENT_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{16,255}")

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
ADCP_CODES: Final[dict[str, str]] = WEBHOOKS.told()
"""The codes of AdCP's webhook profile, with what a person can do about each."""

rejection_headers = WEBHOOKS.headers
"""The headers of the 401 that answers a rejected delivery; none if it was accepted.

A code that is none of AdCP's, as the HMAC form gives, is sent as an invalid signature.
"""


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
