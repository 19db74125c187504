"""RFC 8785 (JCS) canonical JSON, and the request fingerprints made from it.

Two texts of the same JSON value, whatever their spacing, key order or number spelling, have
one canonical form and so one hash. The pure Python writer defines that form; with orjson
installed (``pip install oncekey[fast]``) its output is used wherever it can be *proved* to be
the same bytes, and the pure writer does the rest. ``FAST`` tells which of the two runs.

Integers past ``2**53 - 1`` either way are refused, although JSON can spell them: RFC 8785
numbers are IEEE doubles, so 2**53 and 2**53 + 1 would get the same canonical form, and two
different requests one fingerprint. A *float* of that size is already a double, loses nothing,
and is written as ECMAScript writes it (``float(2**53)`` gives ``9007199254740992``).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any, Final

from oncekey._jcs import writer
from oncekey._jcs.fast import FAST as _FAST
from oncekey._jcs.fast import attempt, attempt_json, attempt_parse
from oncekey._jcs.faults import explain
from oncekey._jcs.parser import parse_pure
from oncekey._jcs.writer import UnfitError, write_json
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

_NESTED: Final = frozenset(path[0] for path in EXCLUDED_PATHS)

MAX_DEPTH: Final = writer.MAX_DEPTH
"""How many arrays and objects may stand inside one another."""

FAST: Final[bool] = _FAST
"""Whether orjson is installed and passed the self-test, so that the fast path is in use."""


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
    proved = attempt(value) if FAST else None
    return _canonicalize_pure(value) if proved is None else proved


def canonicalize_json(raw: bytes | str) -> bytes:
    """Parse JSON text strictly and return its canonical form.

    Raises:
        CanonicalJSONError: For text that ``parse_json`` refuses, or a value that
            ``canonicalize`` refuses.
    """
    proved = attempt_json(raw) if FAST else None
    return canonicalize(parse_pure(raw)) if proved is None else proved


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
        proved, value = attempt_parse(raw)
        if proved:
            return value
    return parse_pure(raw)


def sha256_hex(value: object) -> str:
    """Return the SHA-256 of a value's canonical form, as 64 hex digits.

    Raises:
        CanonicalJSONError: As ``canonicalize`` does.
    """
    proved = attempt(value) if FAST else None  # canonicalize, without the cost of one more call
    text = _canonicalize_pure(value) if proved is None else proved
    return hashlib.sha256(text).hexdigest()


def canonical_json_sha256(payload: Mapping[str, Any]) -> str:
    """Return a request's fingerprint: the hash of its payload without the excluded fields.

    A field that is missing and one that is null give different fingerprints.

    Raises:
        CanonicalJSONError: If ``payload`` is no mapping, or as ``canonicalize`` does.
    """
    stripped = _stripped(payload)
    proved = attempt(stripped) if FAST else None  # sha256_hex, without the cost of one more call
    text = _canonicalize_pure(stripped) if proved is None else proved
    return hashlib.sha256(text).hexdigest()


def strip_excluded_fields(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of ``payload`` without the excluded fields; the input stays as it is.

    Raises:
        CanonicalJSONError: If ``payload`` is no mapping, or holds what can't be copied.
    """
    stripped = _stripped(payload)
    try:
        return copy.deepcopy(stripped)
    except (RecursionError, TypeError):
        raise explain(stripped) from None


def _canonicalize_pure(value: object) -> bytes:
    try:
        return write_json(value)
    except (UnfitError, RecursionError, UnicodeEncodeError):
        raise explain(value) from None


def _stripped(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Strip by copying only the dicts on the way, which costs a tenth of a deep copy."""
    if type(payload) is not dict and not isinstance(payload, Mapping):
        name = type(payload).__name__
        raise CanonicalJSONError(f"a request payload must be an object, not {name}")
    kept = dict(payload)
    for field in EXCLUDED_FIELDS.intersection(kept):
        del kept[field]
    if not _NESTED.isdisjoint(kept):
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
    pruned = _without(child, rest)
    return holder if pruned is child else {**holder, name: pruned}
