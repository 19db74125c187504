"""The fast path: orjson's bytes, where they are proved to be the canonical ones.

orjson sorts keys by code point and differs from RFC 8785 in a few known ways: ".0" on
integral floats, exponents from 1e16 to 1e21 and from 1e-6 to 1e-5, NaN as null. It also takes
UUID, Enum and Fragment objects, and reads integers past 64 bits as floats. Where a function
can't prove its result it says so, and the pure code decides.
"""

from __future__ import annotations

import enum
import importlib
import json
import marshal
import re
from typing import Any, Final

from oncekey._jcs.parser import encode
from oncekey._jcs.writer import MAX_INT, order_is_doubtful, write_json

_PLUS, _MINUS, _BACKSLASH = b"+-\\"

_dumps: Any = None
_loads: Any = None
_options = 0
_exact = 0

# For speed, patterns start with the rarest literal byte, which the regex engine can skip to, and
# `_PLUS in text` (an int: one memchr, ten times faster than b"+" in text) asks first.
_INTEGRAL = re.compile(rb"\.0(?=[,\]}])").split
# A quote that follows none of \ : , [ { closes a string; with ":" after it, that was a key.
_IS_MEMBER = re.compile(rb'[^\\:,\[{]":-?\d+\Z').search
_PLUS_EXPONENT = re.compile(rb"\+(?<=e\+)(?:1[6-9]|20)[,\]}]").search
_MINUS_EXPONENT = re.compile(rb"-(?<=e-)6[,\]}]").search
_ANY_PLUS_EXPONENT = re.compile(rb"\+(?<=e\+)\d+[,\]}]").search
_LONG_DIGITS = re.compile(rb"\d{19}").search
_ESCAPED_COLON = re.compile(rb"\\(?=u003[aA])").search
# A marshalled double whose exponent bits are all ones, or bytes that look like one.
_TUPLE = re.compile(rb"[()\xa8\xa9]").search  # how marshal begins one, with or without its flag
_NOT_FINITE_7F = re.compile(rb"\x7f(?<=[g\xe7].{6}[\xf0-\xff].)", re.DOTALL).search
_NOT_FINITE_FF = re.compile(rb"\xff(?<=[g\xe7].{6}[\xf0-\xff].)", re.DOTALL).search


def attempt(value: object) -> bytes | None:
    """Write a value, or return None where the result can't be proved canonical."""
    kind = type(value)
    if kind is not dict and kind is not list:
        return None
    try:
        text: bytes = _dumps(value, None, _options)
        # marshal takes exact builtin types only, so no UUID, Enum or Fragment got through.
        image = marshal.dumps(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    if text.find(b"null") >= 0 and _may_hold_nan(image):
        return None
    return _repair(text)


def attempt_exact(value: object) -> bytes | None:
    """Write a value in its own order, or return None unless reading gives the very same back.

    That is: the same types all through, no NaN that would be null, no tuple that would be a list.
    """
    try:
        text: bytes = _dumps(value, None, _exact)
        image = marshal.dumps(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    # Whatever looks like a tuple's mark need not be one, but then it is somebody else's to see.
    if _TUPLE(image) or (text.find(b"null") >= 0 and _may_hold_nan(image)):
        return None
    return text


def _may_hold_nan(image: bytes) -> bool:
    return bool(
        (0x7F in image and _NOT_FINITE_7F(image)) or (0xFF in image and _NOT_FINITE_FF(image))
    )


def attempt_json(raw: bytes | str) -> bytes | None:
    """Read and rewrite text, or return None where the result can't be proved canonical."""
    try:
        source = raw if type(raw) is bytes else encode(raw)
        value: object = _loads(source)
        kind = type(value)
        if kind is not dict and kind is not list:
            return None
        text: bytes = _dumps(value, None, _options)
    except (TypeError, ValueError):
        return None
    if (
        _PLUS not in text
        and _BACKSLASH not in source
        and text.isascii()
        and source.count(b":") == text.count(b":")
        and text.find(b".0") < 0
        and (_MINUS not in text or not _MINUS_EXPONENT(text))
    ):
        return text  # as most are, by what the two below ask
    return _repair(text) if _nothing_lost(source, text) else None


def attempt_parse(raw: bytes | str) -> tuple[bool, Any]:
    """Read text; the first item tells whether the value is proved to be what it says."""
    try:
        source = raw if type(raw) is bytes else encode(raw)
        value = _loads(source)
        text = b"%b," % _dumps(value)  # so that a number at the very end has an end as well
    except (TypeError, ValueError):
        return False, None
    return _nothing_lost(source, text), value


def _nothing_lost(source: bytes, text: bytes) -> bool:
    """Prove that ``text``, written from what was read, has every key and digit of ``source``.

    A duplicate key that the reader dropped took at least its own colon along, and nothing but
    an escaped colon can bring one back. Integers past 64 bits come out as floats of at least
    1e18, so with an exponent; their source has 19 digits or more.
    """
    if source.count(b":") != text.count(b":"):
        return False
    if _BACKSLASH in source and _ESCAPED_COLON(source):
        return False
    return not (_PLUS in text and _ANY_PLUS_EXPONENT(text) and _LONG_DIGITS(source))


def _repair(text: bytes) -> bytes | None:
    """Make orjson's sorted output canonical, or return None where that needs the pure writer."""
    if _PLUS in text and _PLUS_EXPONENT(text):
        return None
    if _MINUS in text and _MINUS_EXPONENT(text):
        return None
    if not text.isascii() and order_is_doubtful(text):
        return None
    if text.find(b".0") < 0:
        return text
    parts = _INTEGRAL(text)
    last = parts.pop()
    in_string = False
    for i, part in enumerate(parts):
        if _IS_MEMBER(part, len(part) - 20):
            in_string = False
        else:
            quotes = part.count(b'"')
            if _BACKSLASH in part:
                quotes -= part.replace(b"\\\\", b"").count(b'\\"')
            in_string ^= quotes & 1 == 1
        if in_string:
            parts[i] = part + b".0"
        elif part[-2:] == b"-0":
            parts[i] = part[:-2] + b"0"
    parts.append(last)
    return b"".join(parts)


def _self_test() -> bool:
    """Try the fast path on everything known to differ between versions of orjson."""

    class Text(str):
        __slots__ = ()

    class Member(enum.Enum):
        ONE = 1

    powers = (-8, -7, -6, -5, -4, 0, 15, 16, 17, 18, 19, 20, 21, 22)
    numbers = [mantissa * 10.0**power for mantissa in (1, -1.25) for power in powers]
    numbers += [-0.0, 5e-324, 1.7976931348623157e308, 2.0**53, 0.1, 123456789012345680.0]
    texts = ["\x00\x1f\x7f\u2028\ud7ff\u20ac\U0001f600", '\\"/\b\f\n\r\t', "1.0,", '":-0.0,\\']
    values: list[object] = [[number] for number in numbers]
    values += [texts, {text: text for text in texts}, {"\ue000": 1, "\U0001f600": 2}]
    values += [[MAX_INT, -MAX_INT, None, True, False, (), {}], {"b": 1.0, "a": ["1.0]", 2.0]}]
    nan = float("nan")
    refused: list[object] = [[nan], [float("nan")], [float("inf")], [float("-inf")], [nan, None]]
    refused += [[MAX_INT + 1], [-MAX_INT - 1], [2**64], ["\ud800"], {"\udc00": 1}, [b""]]
    refused += [[Text("a")], [Member.ONE], {Text("a"): 1}, {Member.ONE: 1}, {1: 1}, {None: 1}]
    unread = [b'{"a":1,"a":1}', b'{"a":":","\\u0061":1}', b"[NaN]", b"[1e400]", b'["\\ud800"]']
    unread += [b"[18446744073709551616]", b"[-9223372036854775809]", b"\xef\xbb\xbf[]", b'["\xff"]']
    return (
        all(attempt(value) in (None, write_json(value)) for value in values)
        and all(attempt(value) is None for value in refused)
        and all(attempt_json(raw) is None and not attempt_parse(raw)[0] for raw in unread)
        and all(_comes_back(value) for value in values)
        and all(attempt_exact(value) is None for value in [*refused[:5], *refused[7:], [()], ()])
        and attempt({"b": [1.5, "\u00e9"], "a": -2.0}) == '{"a":-2,"b":[1.5,"\u00e9"]}'.encode()
    )


def _comes_back(value: object) -> bool:
    text = attempt_exact(value)
    return text is None or repr(json.loads(text)) == repr(value)


def _enable() -> bool:
    global _dumps, _loads, _options, _exact
    try:
        orjson: Any = importlib.import_module("orjson")
        _dumps, _loads = orjson.dumps, orjson.loads
        _exact = (
            orjson.OPT_PASSTHROUGH_SUBCLASS
            | orjson.OPT_PASSTHROUGH_DATETIME
            | orjson.OPT_PASSTHROUGH_DATACLASS
        )
        _options = _exact | orjson.OPT_SORT_KEYS | orjson.OPT_STRICT_INTEGER
        return _self_test()
    except (ImportError, AttributeError):
        return False


FAST: Final[bool] = _enable()
