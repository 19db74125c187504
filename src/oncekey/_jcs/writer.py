"""The pure writer: it defines the canonical form."""

from __future__ import annotations

import re
from collections.abc import Callable
from json.encoder import encode_basestring as _quote
from math import isfinite
from typing import Any, Final

MAX_DEPTH: Final = 500
MAX_INT: Final = 2**53 - 1
_ONLY_STR = {str}
_WIDE_STRINGS = re.compile(rb'[\xee-\xf4][^"\\]*(?:\\.[^"\\]*)*"(:?)').findall
type_of: Callable[[object], object] = type  # for type checkers: no type[Unknown]


class UnfitError(Exception):
    """Some value has no canonical form; ``faults.explain`` then finds which, off the hot path."""


def write_json(value: object) -> bytes:
    """Return the canonical form.

    Raises:
        UnfitError, RecursionError, UnicodeEncodeError: For a value that has none.
    """
    parts: list[str] = []
    _write(value, parts.append, None, MAX_DEPTH)
    text = "".join(parts).encode()
    # Code point order, which Python sorts by, is UTF-16 order for nearly every document.
    if not order_is_doubtful(text):
        return text
    parts.clear()
    _write(value, parts.append, _utf16, MAX_DEPTH)
    return "".join(parts).encode()


def order_is_doubtful(text: bytes) -> bool:
    """Tell whether UTF-16 and code point order may differ for the keys of this JSON.

    They differ only between characters past U+FFFF and those from U+E000 to U+FFFF.
    """
    if 0xEE not in text and 0xEF not in text:
        return False
    return any(lead in text for lead in range(0xF0, 0xF5)) and b":" in _WIDE_STRINGS(text)


def _utf16(key: str) -> bytes:
    return key.encode("utf-16-be", "surrogatepass")


def _write(
    value: Any, emit: Callable[[str], None], order: Callable[[str], bytes] | None, room: int
) -> None:
    kind = type_of(value)
    if kind is str:
        emit(_quote(value))
    elif kind is dict:
        if not room:
            raise UnfitError
        keys = list(value)
        if keys and set(map(type, keys)) != _ONLY_STR:
            value = _with_plain_keys(value)
            keys = list(value)
        keys.sort(key=order)
        lead = "{"
        for key in keys:
            emit(lead)
            emit(_quote(key))
            lead = ","
            emit(":")
            _write(value[key], emit, order, room - 1)
        emit("}" if keys else "{}")
    elif kind is list or kind is tuple:
        if not room:
            raise UnfitError
        lead = "["
        for item in value:
            emit(lead)
            lead = ","
            _write(item, emit, order, room - 1)
        emit("]" if value else "[]")
    elif kind is int:
        if not -MAX_INT <= value <= MAX_INT:
            raise UnfitError
        emit(int.__repr__(value))
    elif kind is float:
        emit(_es6_number(value))
    elif value is None:
        emit("null")
    elif kind is bool:
        emit("true" if value else "false")
    else:
        _write(plain(value), emit, order, room)


def _es6_number(number: float) -> str:
    """Spell a double as ECMAScript's Number::toString does; repr finds the same digits."""
    if number == 0:
        return "0"  # also -0.0
    if not isfinite(number):
        raise UnfitError
    text = float.__repr__(number)
    mantissa, exponential, exponent = text.partition("e")
    if not exponential:
        return text.removesuffix(".0")
    power = int(exponent)
    if power >= 21:
        return text
    if power < -6:
        return f"{mantissa}e{power}"  # repr pads the power to two digits
    sign = "-" if mantissa[0] == "-" else ""
    digits = mantissa.lstrip("-").replace(".", "")
    if power > 0:
        return sign + digits.ljust(power + 1, "0")
    return f"{sign}0.{'0' * (-power - 1)}{digits}"


# str.__str__, as str() would give an Enum member's name.
_CONVERSIONS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int),
    (str, str.__str__),
    (float, float),
    (list, list),
    (tuple, list),
    (dict, dict),
)


def plain(value: Any) -> Any:
    """Turn an instance of a subclass into the builtin that it extends."""
    for base, convert in _CONVERSIONS:
        if isinstance(value, base):
            try:
                return convert(value)
            except Exception:  # noqa: BLE001 - a subclass may raise anything at all here
                raise UnfitError from None
    raise UnfitError


def _with_plain_keys(holder: dict[Any, Any]) -> dict[str, Any]:
    """Replace keys of str subclasses, whose own ``__lt__`` must not decide the order."""
    plain = {str.__str__(key): holder[key] for key in holder if isinstance(key, str)}
    if len(plain) != len(holder):
        raise UnfitError
    return plain
