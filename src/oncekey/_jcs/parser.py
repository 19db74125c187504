"""The pure parser: it defines what is accepted."""

from __future__ import annotations

import collections
import json
import re
from math import isfinite
from typing import Any, cast

from oncekey._jcs.faults import CONTAINERS, TOO_DEEP, Refused, first_fault
from oncekey._jcs.writer import MAX_DEPTH, type_of
from oncekey.errors import CanonicalJSONError

_MAX_DIGITS = 4300
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]").search


def parse_pure(raw: bytes | str) -> Any:
    """Parse JSON text as ``oncekey.canonical.parse_json`` promises."""
    refused: list[Refused] = []

    def refuse(fault: str) -> Refused:
        refused.append(Refused(fault))
        return refused[-1]

    def parse_object(pairs: list[tuple[str, Any]]) -> Any:
        members = dict(pairs)
        if len(members) == len(pairs):
            return members
        times = collections.Counter(key for key, _ in pairs)
        name = json.dumps(times.most_common(1)[0][0][:64])
        return refuse(f"the object has the key {name} more than once (send each key once)")

    def parse_int(digits: str) -> Any:
        try:
            if len(digits) <= _MAX_DIGITS:
                return int(digits)
        except ValueError:
            pass  # sys.set_int_max_str_digits() allows fewer
        return refuse(f"a number of {len(digits)} digits is too long (send it as a string)")

    def parse_float(digits: str) -> Any:
        number = float(digits)
        if isfinite(number):
            return number
        return refuse("a number too large for a double (send it as a string)")

    def parse_constant(name: str) -> Any:
        return refuse(f"{name} is no JSON number (send null or a string, or leave it out)")

    text = _decode(raw)
    try:
        # A decoder of its own, and str, as json.loads would guess UTF-16 and UTF-32.
        value = json.JSONDecoder(
            object_pairs_hook=parse_object,
            parse_int=parse_int,
            parse_float=parse_float,
            parse_constant=parse_constant,
        ).decode(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise CanonicalJSONError(f"not valid JSON: {error.msg}, {where} (fix the text)") from None
    except RecursionError:
        raise CanonicalJSONError(TOO_DEEP) from None
    if refused or _SURROGATE_ESCAPE(text) or _is_too_deep(value):
        fault = first_fault(value, any_int=True)
        if fault is not None:
            raise fault
    return value


def _is_too_deep(value: Any) -> bool:
    level: list[Any] = [value] if type_of(value) in CONTAINERS else []
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        level = [
            child
            for holder in level
            for child in (holder.values() if type_of(holder) is dict else holder)
            if type_of(child) in CONTAINERS
        ]
    return bool(level)


def encode(raw: bytes | str) -> bytes:
    """Return JSON text as bytes; raise TypeError for what is no text, UnicodeError if unfit."""
    if isinstance(raw, str):
        return str.encode(raw)
    if isinstance(cast("object", raw), (bytes, bytearray, memoryview)):
        return bytes(raw)
    raise TypeError


def _decode(raw: bytes | str) -> str:
    try:
        text = encode(raw).decode()
    except TypeError:
        name = type(raw).__name__
        raise CanonicalJSONError(f"JSON text must be bytes or str, not {name}") from None
    except UnicodeError:
        raise CanonicalJSONError("the text is not valid UTF-8 (send JSON as UTF-8)") from None
    if text.startswith("\ufeff"):
        raise CanonicalJSONError("the text starts with a byte order mark (send it without)")
    return text
