"""Strict readers of what a stranger sent: each gives a value, or a ``Rejection`` with its code.

Strict means one spelling for one value: no white space, no signs, no second form of the same
base64. Whatever a lenient parser would forgive, somebody could use to make one signature look
like two.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from datetime import UTC, datetime
from typing import Any, Final

from oncekey.canonical import parse_json
from oncekey.errors import CanonicalJSONError
from oncekey.signatures.delivery import Headers

__all__ = [
    "ENCODINGS",
    "MAX_HEADER",
    "MAX_URL",
    "Rejection",
    "check_clock",
    "decode",
    "encode",
    "json_body",
    "one_header",
    "seconds_since_1970",
    "written_time",
]

MAX_HEADER: Final = 8192
MAX_URL: Final = 8192
ENCODINGS: Final = ("hex", "hex-upper", "base64", "base64url")


class Rejection(Exception):
    """Carries the code of a rejected delivery to the verifier. Never leaves this package."""

    def __init__(self, code: str, message: str = "", *, transient: bool = False) -> None:
        super().__init__(code)
        self.code = code
        self.message = message
        self.transient = transient


def one_header(headers: Headers, *names: str, missing: str = "header_missing") -> str:
    """The value of the first of ``names`` that is there. It must have come exactly once.

    Raises:
        Rejection: ``header_missing`` (or ``missing``), or ``header_malformed``.
    """
    for name in names:
        found = headers.all(name)
        if len(found) > 1:
            raise Rejection("header_malformed", f"{name} came {len(found)} times; send it once")
        if found:
            if len(found[0]) > MAX_HEADER:
                raise Rejection("header_malformed", f"{name} has more than {MAX_HEADER} characters")
            return found[0]
    raise Rejection(missing, f"the header {names[0]} is not there; check that no proxy drops it")


# --- time --------------------------------------------------------------------------------------

_WHOLE = re.compile(r"0|[1-9][0-9]{0,14}")
_ISO = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})"
)
_NANOS = re.compile(r"(\.[0-9]{6})[0-9]+")
_FORMS = {
    "s": "whole seconds since 1970, digits only",
    "ms": "whole milliseconds since 1970, digits only",
    "iso": "a date such as 2026-11-16T03:10:00Z",
}


def seconds_since_1970(text: object, unit: str) -> float:
    """A timestamp in seconds. ``unit`` is ``s``, ``ms`` or ``iso``.

    Raises:
        Rejection: ``timestamp_malformed``, for anything but the one spelling.
    """
    if unit == "iso":
        if isinstance(text, str) and _ISO.fullmatch(text):
            try:
                # Nanoseconds, as Go writes them: no clock here needs more than the microseconds.
                return datetime.fromisoformat(_NANOS.sub(r"\1", text)).timestamp()
            except (ValueError, OverflowError):  # the 31st of February, or the year 0
                pass
    elif isinstance(text, str) and _WHOLE.fullmatch(text):
        return int(text) / (1000 if unit == "ms" else 1)
    raise Rejection("timestamp_malformed", f"the timestamp must be {_FORMS[unit]}")


def written_time(moment: float, unit: str) -> str:
    """A moment as ``seconds_since_1970`` reads it."""
    if unit == "iso":
        return datetime.fromtimestamp(int(moment), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return str(int(moment * 1000) if unit == "ms" else int(moment))


def check_clock(timestamp: float, now: float, past: float, future: float) -> None:
    """Refuse what is older than ``past`` seconds or more than ``future`` seconds ahead.

    Raises:
        Rejection: ``timestamp_too_old`` or ``timestamp_in_future``.
    """
    age = now - timestamp
    if age > past:
        raise Rejection(
            "timestamp_too_old",
            f"signed {age:.0f} s ago, at most {past:g} s are allowed: check the clocks on both "
            "sides; a captured delivery can't be sent again",
        )
    if not age >= -future:  # also when the clock that was passed in is no number
        ahead = f"{-age:.0f} s" if math.isfinite(age) else "too far"
        raise Rejection(
            "timestamp_in_future",
            f"signed {ahead} ahead of this clock, at most {future:g} s are allowed: check the "
            "clocks on both sides",
        )


# --- signatures as text ------------------------------------------------------------------------

_HEX = re.compile(r"(?:[0-9a-f]{2})*")


def decode(text: object, encoding: str) -> bytes | None:
    """The bytes that ``text`` spells, or ``None`` if it is not the one spelling of some bytes."""
    if not isinstance(text, str):
        return None
    if encoding == "hex-upper":
        # Letters of the other case, and those that fold to ASCII, must not slip through lower().
        text = text.swapcase() if text.isascii() else ""
    if encoding.startswith("hex"):
        return bytes.fromhex(text) if text and _HEX.fullmatch(text) else None
    padded = text + "=" * (-len(text) % 4) if encoding == "base64url" else text
    try:
        raw = base64.b64decode(padded, b"-_" if encoding == "base64url" else b"+/", validate=True)
    except (ValueError, binascii.Error):
        return None
    return raw if raw and encode(raw, encoding) == text else None


def encode(raw: bytes, encoding: str) -> str:
    """The one spelling of ``raw``."""
    if encoding == "hex":
        return raw.hex()
    if encoding == "hex-upper":
        return raw.hex().upper()
    if encoding == "base64url":
        return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")
    return base64.b64encode(raw).decode("ascii")


# --- the body ----------------------------------------------------------------------------------


def json_body(body: bytes) -> Any:
    """The body as a JSON value, with no name twice in an object.

    Raises:
        Rejection: ``body_malformed``.
    """
    try:
        return parse_json(body)
    except CanonicalJSONError:
        # Its own message can name keys of the body, which may be anything.
        raise Rejection(
            "body_malformed",
            "the body is not JSON that every parser reads alike: no name twice in an object, "
            "valid UTF-8, no NaN",
        ) from None
