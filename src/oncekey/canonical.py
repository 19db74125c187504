"""RFC 8785 (JCS) canonical JSON, and the request fingerprints made from it.

Two texts of the same JSON value, whatever their spacing, key order or number spelling, have
one canonical form and so one hash. The pure Python writer below defines that form; with
orjson installed (``pip install oncekey[fast]``) its output is used wherever it can be *proved*
to be the same bytes, and the pure writer does the rest. ``FAST`` tells which of the two runs.

Integers past ``2**53 - 1`` either way are refused, although JSON can spell them: RFC 8785
numbers are IEEE doubles, so 2**53 and 2**53 + 1 would get the same canonical form, and two
different requests one fingerprint. A *float* of that size is already a double, loses nothing,
and is written as ECMAScript writes it (``float(2**53)`` gives ``9007199254740992``).
"""

from __future__ import annotations

import collections
import copy
import enum
import hashlib
import importlib
import json
import marshal
import re
from collections.abc import Callable, Mapping
from json.encoder import encode_basestring as _quote
from math import isfinite
from typing import Any, Final, TypeAlias, cast

from oncekey.errors import CanonicalJSONError

__all__ = [
    "EXCLUDED_FIELDS",
    "EXCLUDED_PATHS",
    "FAST",
    "MAX_DEPTH",
    "canonical_json_sha256",
    "canonicalize",
    "canonicalize_json",
    "parse_json",
    "sha256_hex",
    "strip_excluded_fields",
]

EXCLUDED_FIELDS: Final[frozenset[str]] = frozenset(
    {"idempotency_key", "context", "governance_context"}
)
"""Top-level request fields that are no part of a fingerprint. The list is closed."""

EXCLUDED_PATHS: Final[tuple[tuple[str, ...], ...]] = (
    ("push_notification_config", "authentication", "credentials"),
)
"""Nested request fields that are no part of a fingerprint. The list is closed."""

MAX_DEPTH: Final = 500
"""How many arrays and objects may stand inside one another."""

_MAX_INT = 2**53 - 1
_MAX_DIGITS = 4300
_ONLY_STR = {str}
_type_of: Callable[[object], object] = type  # for type checkers: no type[Unknown]


def canonicalize(value: object) -> bytes:
    """Return the RFC 8785 canonical form of a Python JSON value, as UTF-8.

    Takes ``None``, ``bool``, ``int``, ``float``, ``str``, ``list``, ``tuple`` and ``dict`` with
    string keys, and their subclasses (an ``IntEnum`` member is its integer).

    Example:
        >>> canonicalize({"b": 1.0, "a": [1e21, -0.0]})
        b'{"a":[1e+21,0],"b":1}'

    Raises:
        CanonicalJSONError: For what has no canonical form: NaN and infinities, integers past
            2**53 - 1, keys that are not strings, lone surrogates, other types, and values that
            are cyclic or nested deeper than ``MAX_DEPTH``. ``path`` says where.
    """
    proved = _attempt(value) if FAST else None
    return _canonicalize_pure(value) if proved is None else proved


def canonicalize_json(raw: bytes | str) -> bytes:
    """Parse JSON text strictly and return its canonical form.

    Raises:
        CanonicalJSONError: For text that ``parse_json`` refuses, or a value that
            ``canonicalize`` refuses.
    """
    proved = _attempt_json(raw) if FAST else None
    return canonicalize(_parse_pure(raw)) if proved is None else proved


def parse_json(raw: bytes | str) -> Any:
    """Parse JSON text, refusing what two parsers could read as two different values.

    That is: duplicate keys in an object, ``NaN`` and ``Infinity``, numbers too large for a
    double, integers of more than 4300 digits, lone surrogates, a byte order mark, invalid
    UTF-8, and nesting deeper than ``MAX_DEPTH``. Integers keep all their digits.

    Raises:
        CanonicalJSONError: With the ``path`` of the fault, or ``$`` and a line and column where
            the text is no JSON at all.
    """
    if FAST:
        proved, value = _attempt_parse(raw)
        if proved:
            return value
    return _parse_pure(raw)


def sha256_hex(value: object) -> str:
    """Return the SHA-256 of a value's canonical form, as 64 hex digits.

    Raises:
        CanonicalJSONError: As ``canonicalize`` does.
    """
    proved = _attempt(value) if FAST else None  # canonicalize, without the cost of one more call
    text = _canonicalize_pure(value) if proved is None else proved
    return hashlib.sha256(text).hexdigest()


def canonical_json_sha256(payload: Mapping[str, Any]) -> str:
    """Return a request's fingerprint: the hash of its payload without the excluded fields.

    A field that is missing and one that is null give different fingerprints.

    Raises:
        CanonicalJSONError: If ``payload`` is no mapping, or as ``canonicalize`` does.
    """
    return sha256_hex(_stripped(payload))


def strip_excluded_fields(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of ``payload`` without the excluded fields; the input stays as it is.

    Raises:
        CanonicalJSONError: If ``payload`` is no mapping, or holds what can't be copied.
    """
    stripped = _stripped(payload)
    try:
        return copy.deepcopy(stripped)
    except (RecursionError, TypeError):
        raise _explain(stripped) from None


def _stripped(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Strip by copying only the dicts on the way, which costs a tenth of a deep copy."""
    if not isinstance(cast("object", payload), Mapping):
        name = type(payload).__name__
        raise CanonicalJSONError(f"a request payload must be an object, not {name}")
    kept = dict(payload)
    for field in EXCLUDED_FIELDS:
        kept.pop(field, None)
    for path in EXCLUDED_PATHS:
        kept = _without(kept, path)
    return kept


def _without(holder: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    name, rest = path[0], path[1:]
    if name not in holder:
        return holder
    if not rest:
        return {key: value for key, value in holder.items() if key != name}
    child = holder[name]
    if not isinstance(child, dict):
        return holder
    pruned = _without(cast("dict[str, Any]", child), rest)
    return holder if pruned is child else {**holder, name: pruned}


# --- The pure writer: it defines the result. -------------------------------------------------


class _UnfitError(Exception):
    """Some value has no canonical form; ``_explain`` then finds which, off the hot path."""


def _canonicalize_pure(value: object) -> bytes:
    try:
        text = _join(value, None)
        # Code point order, which Python sorts by, is UTF-16 order for nearly every document.
        return _join(value, _utf16) if _order_is_doubtful(text) else text
    except (_UnfitError, RecursionError, UnicodeEncodeError):
        raise _explain(value) from None


def _join(value: object, order: Callable[[str], bytes] | None) -> bytes:
    parts: list[str] = []
    _write(value, parts.append, order, MAX_DEPTH)
    return "".join(parts).encode()


def _utf16(key: str) -> bytes:
    return key.encode("utf-16-be", "surrogatepass")


def _write(
    value: Any, emit: Callable[[str], None], order: Callable[[str], bytes] | None, room: int
) -> None:
    kind = _type_of(value)
    if kind is str:
        emit(_quote(value))
    elif kind is dict:
        if not room:
            raise _UnfitError
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
            raise _UnfitError
        lead = "["
        for item in value:
            emit(lead)
            lead = ","
            _write(item, emit, order, room - 1)
        emit("]" if value else "[]")
    elif kind is int:
        if not -_MAX_INT <= value <= _MAX_INT:
            raise _UnfitError
        emit(int.__repr__(value))
    elif kind is float:
        emit(_es6_number(value))
    elif value is None:
        emit("null")
    elif kind is bool:
        emit("true" if value else "false")
    else:
        _write(_plain(value), emit, order, room)


def _es6_number(number: float) -> str:
    """Spell a double as ECMAScript's Number::toString does; repr finds the same digits."""
    if number == 0:
        return "0"  # also -0.0
    if not isfinite(number):
        raise _UnfitError
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


def _plain(value: Any) -> Any:
    """Turn an instance of a subclass into the builtin that it extends."""
    for base, convert in _CONVERSIONS:
        if isinstance(value, base):
            try:
                return convert(value)
            except Exception:  # noqa: BLE001 - a subclass may raise anything at all here
                raise _UnfitError from None
    raise _UnfitError


def _with_plain_keys(holder: dict[Any, Any]) -> dict[str, Any]:
    """Replace keys of str subclasses, whose own ``__lt__`` must not decide the order."""
    plain = {str.__str__(key): holder[key] for key in holder if isinstance(key, str)}
    if len(plain) != len(holder):
        raise _UnfitError
    return plain


# --- Faults: found by a second walk, so that a good value never pays for its path. -----------

# The link of the value's holder, its place there, and the holder itself.
_Link: TypeAlias = tuple["_Link | None", "str | int", object]
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*").fullmatch
_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels (flatten the value)"
_CYCLE = "the value holds itself (break the cycle)"
_LONE_SURROGATE = "holds a lone surrogate, which UTF-8 can't express (repair the text)"


class _Refused:
    """Stands in a parsed tree for a literal that must not be accepted."""

    def __init__(self, fault: str) -> None:
        self.fault = fault


_CONTAINERS: tuple[object, ...] = (dict, list, tuple)
_BUILTINS = (*_CONTAINERS, str, int, float, bool, type(None), _Refused)


def _explain(root: object) -> CanonicalJSONError:
    found = _first_fault(root)
    # Nothing wrong with the value itself: this thread's stack was almost used up already.
    return found or CanonicalJSONError("too deep for the stack that is left (flatten the value)")


def _first_fault(root: object, *, any_int: bool = False) -> CanonicalJSONError | None:
    """Find the first fault in document order, without recursion."""
    todo: list[tuple[Any, _Link | None, int]] = [(root, None, MAX_DEPTH)]
    while todo:
        value, link, room = todo.pop()
        children: list[tuple[str | int, Any]] = []
        try:
            value = value if type(value) in _BUILTINS else _plain(value)
            fault = _fault_of(value, any_int=any_int)
            if fault is None and type(value) in _CONTAINERS:
                if not room:
                    fault = _CYCLE if _is_cyclic(link) else _TOO_DEEP
                children = _children(value)
        except _UnfitError:
            fault = _foreign_type(value)
        if fault is not None:
            return CanonicalJSONError(fault, _render(link))
        for place, child in reversed(children):
            todo.append((child, (link, place, value), room - 1))
    return None


def _children(holder: Any) -> list[tuple[str | int, Any]]:
    if type(holder) is dict:
        return list(cast("dict[str, Any]", holder).items())
    return list(enumerate(cast("list[Any]", holder)))


def _fault_of(value: Any, *, any_int: bool) -> str | None:
    kind = _type_of(value)
    if kind is _Refused:
        return cast("_Refused", value).fault
    if kind is str and not _is_unicode(value):
        return f"the string {_LONE_SURROGATE}"
    if kind is int and not any_int and not -_MAX_INT <= value <= _MAX_INT:
        return "an integer past 2**53-1 would lose digits as a JSON number (send it as a string)"
    if kind is float and not isfinite(value):
        return f"{value!r} is no JSON number (send null or a string, or leave it out)"
    if kind is dict:
        for key in cast("dict[Any, Any]", value):
            if not isinstance(key, str):
                return f"an object key is of type {type(key).__name__} (make it a string)"
            if not _is_unicode(key):
                return f"an object key {_LONE_SURROGATE}"
    return None


def _foreign_type(value: object) -> str:
    hint = "convert it to a dict, list, string or number first"
    if type(value).__name__ in {"Decimal", "UUID", "date", "datetime", "time", "bytes"}:
        hint = "send it as a string"
    return f"{type(value).__name__} is no JSON type ({hint})"


def _is_unicode(text: str) -> bool:
    try:
        str.encode(text)
    except UnicodeEncodeError:
        return False
    return True


def _is_cyclic(link: _Link | None) -> bool:
    seen: set[int] = set()
    while link is not None:
        link, _, holder = link
        if id(holder) in seen:
            return True
        seen.add(id(holder))
    return False


def _render(link: _Link | None) -> str:
    places: list[str] = []
    while link is not None:
        link, place, _ = link
        if isinstance(place, int):
            places.append(f"[{place}]")
        else:
            short = place if len(place) <= 64 else place[:63] + "\u2026"
            places.append(f".{short}" if _NAME(short) else f"[{json.dumps(short)}]")
    if len(places) > 40:
        places[20:-20] = ["\u2026"]
    return "$" + "".join(reversed(places))


# --- The pure parser: it defines what is accepted. -------------------------------------------

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]").search


def _parse_pure(raw: bytes | str) -> Any:
    refused: list[_Refused] = []

    def refuse(fault: str) -> _Refused:
        refused.append(_Refused(fault))
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
        raise CanonicalJSONError(_TOO_DEEP) from None
    if refused or _SURROGATE_ESCAPE(text) or _is_too_deep(value):
        fault = _first_fault(value, any_int=True)
        if fault is not None:
            raise fault
    return value


def _is_too_deep(value: Any) -> bool:
    level: list[Any] = [value] if _type_of(value) in _CONTAINERS else []
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        level = [
            child
            for holder in level
            for child in (holder.values() if _type_of(holder) is dict else holder)
            if _type_of(child) in _CONTAINERS
        ]
    return bool(level)


def _encode(raw: bytes | str) -> bytes:
    if isinstance(raw, str):
        return str.encode(raw)
    if isinstance(cast("object", raw), (bytes, bytearray, memoryview)):
        return bytes(raw)
    raise TypeError


def _decode(raw: bytes | str) -> str:
    try:
        text = _encode(raw).decode()
    except TypeError:
        name = type(raw).__name__
        raise CanonicalJSONError(f"JSON text must be bytes or str, not {name}") from None
    except UnicodeError:
        raise CanonicalJSONError("the text is not valid UTF-8 (send JSON as UTF-8)") from None
    if text.startswith("\ufeff"):
        raise CanonicalJSONError("the text starts with a byte order mark (send it without)")
    return text


# --- The fast path: orjson's bytes, where they are proved to be the canonical ones. ----------
#
# orjson sorts keys by code point and differs from RFC 8785 in a few known ways: ".0" on
# integral floats, exponents from 1e16 to 1e21 and from 1e-6 to 1e-5, NaN as null. It also takes
# UUID, Enum and Fragment objects, and reads integers past 64 bits as floats. Each function
# returns None where it can't prove the result; the pure code then decides.
#
# For speed, patterns start with the rarest literal byte, which the regex engine can skip to, and
# `_PLUS in text` (an int: one memchr, ten times faster than b"+" in text) asks first.

_PLUS, _MINUS, _BACKSLASH = b"+-\\"

_dumps: Any = None
_loads: Any = None
_options = 0

_INTEGRAL = re.compile(rb"\.0(?=[,\]}])").split
# A quote that follows none of \ : , [ { closes a string; with ":" after it, that was a key.
_IS_MEMBER = re.compile(rb'[^\\:,\[{]":-?\d+\Z').search
_PLUS_EXPONENT = re.compile(rb"\+(?<=e\+)(?:1[6-9]|20)[,\]}]").search
_MINUS_EXPONENT = re.compile(rb"-(?<=e-)6[,\]}]").search
_ANY_PLUS_EXPONENT = re.compile(rb"\+(?<=e\+)\d+[,\]}]").search
_LONG_DIGITS = re.compile(rb"\d{19}").search
_ESCAPED_COLON = re.compile(rb"\\(?=u003[aA])").search
_WIDE_STRINGS = re.compile(rb'[\xee-\xf4][^"\\]*(?:\\.[^"\\]*)*"(:?)').findall
# A marshalled double whose exponent bits are all ones, or bytes that look like one.
_NOT_FINITE_7F = re.compile(rb"\x7f(?<=[g\xe7].{6}[\xf0-\xff].)", re.DOTALL).search
_NOT_FINITE_FF = re.compile(rb"\xff(?<=[g\xe7].{6}[\xf0-\xff].)", re.DOTALL).search


def _attempt(value: object) -> bytes | None:
    kind = type(value)
    if kind is not dict and kind is not list:
        return None
    try:
        text: bytes = _dumps(value, None, _options)
        # marshal takes exact builtin types only, so no UUID, Enum or Fragment got through.
        image = marshal.dumps(cast("Any", value))
    except (TypeError, ValueError):
        return None
    if text.find(b"null") >= 0 and (
        (0x7F in image and _NOT_FINITE_7F(image)) or (0xFF in image and _NOT_FINITE_FF(image))
    ):
        return None
    return _repair(text)


def _attempt_json(raw: bytes | str) -> bytes | None:
    try:
        source = raw if type(raw) is bytes else _encode(raw)
        value: object = _loads(source)
        kind = type(value)
        if kind is not dict and kind is not list:
            return None
        text: bytes = _dumps(value, None, _options)
    except (TypeError, ValueError):
        return None
    return _repair(text) if _nothing_lost(source, text) else None


def _attempt_parse(raw: bytes | str) -> tuple[bool, Any]:
    try:
        source = raw if type(raw) is bytes else _encode(raw)
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
    if not text.isascii() and _order_is_doubtful(text):
        return None
    parts = _INTEGRAL(text)
    if len(parts) == 1:
        return text
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


def _order_is_doubtful(text: bytes) -> bool:
    """Tell whether UTF-16 and code point order may differ for the keys of this JSON.

    They differ only between characters past U+FFFF and those from U+E000 to U+FFFF.
    """
    if 0xEE not in text and 0xEF not in text:
        return False
    return any(lead in text for lead in range(0xF0, 0xF5)) and b":" in _WIDE_STRINGS(text)


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
    values += [[_MAX_INT, -_MAX_INT, None, True, False, (), {}], {"b": 1.0, "a": ["1.0]", 2.0]}]
    nan = float("nan")
    refused: list[object] = [[nan], [float("nan")], [float("inf")], [float("-inf")], [nan, None]]
    refused += [[_MAX_INT + 1], [-_MAX_INT - 1], [2**64], ["\ud800"], {"\udc00": 1}, [b""]]
    refused += [[Text("a")], [Member.ONE], {Text("a"): 1}, {Member.ONE: 1}, {1: 1}, {None: 1}]
    unread = [b'{"a":1,"a":1}', b'{"a":":","\\u0061":1}', b"[NaN]", b"[1e400]", b'["\\ud800"]']
    unread += [b"[18446744073709551616]", b"[-9223372036854775809]", b"\xef\xbb\xbf[]", b'["\xff"]']
    return (
        all(_attempt(value) in (None, _canonicalize_pure(value)) for value in values)
        and all(_attempt(value) is None for value in refused)
        and all(_attempt_json(raw) is None and not _attempt_parse(raw)[0] for raw in unread)
        and _attempt({"b": [1.5, "\u00e9"], "a": -2.0}) == '{"a":-2,"b":[1.5,"\u00e9"]}'.encode()
    )


def _enable_fast_path() -> bool:
    global _dumps, _loads, _options
    try:
        orjson: Any = importlib.import_module("orjson")
        _dumps, _loads = orjson.dumps, orjson.loads
        _options = (
            orjson.OPT_SORT_KEYS
            | orjson.OPT_STRICT_INTEGER
            | orjson.OPT_PASSTHROUGH_SUBCLASS
            | orjson.OPT_PASSTHROUGH_DATETIME
            | orjson.OPT_PASSTHROUGH_DATACLASS
        )
        return _self_test()
    except (ImportError, AttributeError):
        return False


FAST: Final[bool] = _enable_fast_path()
"""Whether orjson is installed and passed the self-test, so that the fast path is in use."""
