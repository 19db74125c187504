"""Canonical JSON against the ``rfc8785`` package and the standard parser, over nasty input.

Every example runs on the pure path and on the orjson path; both must give the same bytes as the
reference, or refuse where it refuses.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.scale import scaled

from oncekey import canonical
from oncekey._jcs.fast import attempt
from oncekey._jcs.parser import parse_pure
from oncekey.errors import CanonicalJSONError

rfc8785 = pytest.importorskip("rfc8785")

fuzzed = settings(
    max_examples=scaled(800),
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)

# Fragments that tempt a byte-level repair: numbers and quotes in strings, half escapes, and the
# characters around the two ranges where UTF-16 and code point order differ.
FRAGMENTS = [
    *("\U0001f600", "\uff01", "\ue000", "\ud7ff", "\U0010ffff", "\ufeff", "\u00e9", "\u20ac"),
    *("1.0,", "2.0}", "3.0]", '":1.0,', '\\":5.0,', "-0.0,", ":[1.0,", 'k":7.0,', ".0", "0,"),
    *("e+16,", "e-6,", "e+20]", "null", ":", "\\", '"', "\x00", "\x1f", "\x7f", "\r", "a", "/"),
]
EDGE_FLOATS = [
    *(0.0, -0.0, 5e-324, 1.7976931348623157e308, 100.0, -100.0, 0.1, 2.0**53, -(2.0**63)),
    *(1e15, 1e16, -1e16, 1e20, -1.5e20, 999999999999999900000.0, 1e21, 1e22, 1e23),
    *(1e-4, 1e-5, 9.5e-6, 1e-6, -1e-6, 9.999999999999997e-7, 9.5e-7, 1e-7, 1e-10),
    *(math.nan, math.inf, -math.inf),
]
EDGE_INTS = [0, -1, 2**53 - 1, 2**53, 1 - 2**53, -(2**53), 2**63, 2**64, -(2**63) - 1, 10**30]


def texts_of(fragments: list[str]) -> st.SearchStrategy[str]:
    return st.text(max_size=8) | st.lists(st.sampled_from(fragments), max_size=5).map("".join)


sound_texts = texts_of(FRAGMENTS)  # st.text() makes no surrogates either
texts = texts_of([*FRAGMENTS, "\ud800", "\udfff"])
floats = st.one_of(
    st.floats(),
    st.integers(-(10**6), 10**6).map(float),
    st.floats(1e-8, 1e-3),
    st.floats(1e14, 1e23),
    st.sampled_from(EDGE_FLOATS),
)
integers = st.one_of(
    st.integers(-(2**53) - 2, 2**53 + 2), st.integers(), st.sampled_from(EDGE_INTS)
)
sound_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(1 - 2**53, 2**53 - 1),
    floats.filter(math.isfinite),
    sound_texts,
)
any_leaves = st.one_of(sound_leaves, integers, floats, texts, st.binary(max_size=2))
any_keys = st.one_of(texts, texts, texts, integers, st.none())


def trees(leaves: st.SearchStrategy[Any], keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda child: st.one_of(
            st.lists(child, max_size=6),
            st.dictionaries(keys, child, max_size=6),
            st.tuples(child, child),
        ),
        max_leaves=25,
    )


REFUSED = "refused"


def outcome(function: Callable[[Any], Any], value: object) -> Any:
    """Return what the function gives; any error but our own gets out and fails the test."""
    try:
        return function(value)
    except CanonicalJSONError:
        return REFUSED


def reference(value: object) -> bytes | str:
    try:
        return bytes(rfc8785.dumps(value))
    except (ValueError, AttributeError, TypeError):
        return REFUSED


def check_value(value: object) -> bytes | str:
    expected = reference(value)
    assert outcome(canonical._canonicalize_pure, value) == expected
    assert outcome(canonical.canonicalize, value) == expected
    if canonical.FAST:
        assert attempt(value) in (None, expected)
    return expected


@fuzzed
@given(trees(sound_leaves, sound_texts))
@example({"\U0001f600": 1, "\uff01": 2, "\ue000": 3, "\ud7ff": 4})
@example([-0.0, 1e21, 5e-324, 2**53 - 1, {"a": -0.0}])
@example(["1.0,", 1.0, "\\", 2.0, '"', 3.0, '\\"', -0.5, {"k": 4.0}])
@example({'":1.0,': ':"k":1.0,', "k": 1.0, 'k"': -0.0})
@example((1.0, (2.0,)))
def test_sound_values_have_the_bytes_of_the_reference(value: object) -> None:
    """A JSON value has the same canonical form here and in ``rfc8785``."""
    assert check_value(value) != REFUSED


def test_doubles_of_every_magnitude_are_spelled_as_the_reference_does() -> None:
    """Each power of ten, and doubles of random bits, agree in an array and in an object."""
    rng = random.Random(8785)
    mantissas = (1.0, -1.25, 7.0, 9.999999999999998, -123.0)
    numbers = [float(f"{m}e{power}") for power in range(-326, 309) for m in mantissas]
    numbers += [struct.unpack("<d", rng.randbytes(8))[0] for _ in range(5000)]
    numbers += [rng.uniform(-1, 1) * 10.0 ** rng.randrange(-8, 24) for _ in range(5000)]
    numbers += [float(rng.randrange(10**20)) for _ in range(1000)]
    for number in numbers:
        check_value([number])
        check_value({"k": number, "l": "1.0,"})


@fuzzed
@given(trees(any_leaves, any_keys))
@example({"a": None, "b": math.nan})
@example([2**53])
@example({1: 2})
@example({"a": 1, None: 2})
@example([{"\ud800": 1}])
@example(["\udfff"])
def test_other_values_are_refused_where_the_reference_refuses(value: object) -> None:
    """Whatever the value, both give the same bytes, or both refuse it."""
    check_value(value)


@fuzzed
@given(trees(st.one_of(sound_leaves, integers), sound_texts), st.booleans(), st.booleans())
@example([1.8446744073709552e19, 2**64], True, False)
@example({"a": [1e300, 10**19]}, False, True)
def test_text_has_the_canonical_form_of_what_it_says(
    value: object, ascii_only: bool, spaced: bool
) -> None:
    """Parsing and canonicalising text equals the standard parser and the reference."""
    text = json.dumps(value, ensure_ascii=ascii_only, indent=1 if spaced else None)
    expected = reference(json.loads(text))
    assert outcome(canonical.canonicalize_json, text) == expected
    assert outcome(canonical.canonicalize_json, text.encode()) == expected
    parsed = parse_pure(text)
    assert outcome(canonical._canonicalize_pure, parsed) == expected
    assert repr(parsed) == repr(canonical.parse_json(text.encode())) == repr(json.loads(text))


# JSON texts by their grammar, mostly sound, with keys that collide before or after unescaping.
key_texts = st.sampled_from(
    [
        *('"a"', '"\\u0061"', '"b"', '"a:"', '"a\\u003a"', '":"', '"\\u003A"', '""'),
        *('"\U0001f600"', '"\\ud83d\\ude00"', '"\\ud83d"', '"\\\\u003a"', '"\\""'),
    ]
)
leaf_texts = st.sampled_from(
    [
        *("1", "-0", "0.0", "-0.0", "1e2", "1E400", "18446744073709551616", "-9223372036854775809"),
        *("9223372036854775808", "123456789012345678901234567890.0", "1e300", "1e-400", "12e+20"),
        *('":"', '"\\u003a"', '"a:1"', '"\\udc00"', '"\\/"', '"e+19,"', "null", "true", "{}", "[]"),
        *("NaN", "-Infinity", "01", "1.", '"\t"', "'a'", ""),
    ]
)
gaps = st.sampled_from(["", "", " ", "\n\t"])
sound_leaf_texts = leaf_texts.filter(lambda text: text not in {"", "01", "1.", '"\t"', "'a'"})


def joined(parts: list[str], gap: str, around: str) -> str:
    return around[0] + gap + f"{gap},{gap}".join(parts) + gap + around[1]


json_texts = st.recursive(
    st.one_of(*[sound_leaf_texts] * 8, leaf_texts),
    lambda child: st.one_of(
        st.builds(joined, st.lists(child, max_size=4), gaps, st.just("[]")),
        st.builds(
            joined,
            st.lists(st.builds("{}:{}".format, key_texts, child), max_size=4),
            gaps,
            st.just("{}"),
        ),
    ),
    max_leaves=12,
)


def strictly(text: str) -> Any:
    """Parse by the standard library alone, raising ValueError for what must be refused."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError
        return dict(pairs)

    def constant(name: str) -> float:
        raise ValueError(name)

    def finite(digits: str) -> float:
        if math.isinf(float(digits)):
            raise ValueError
        return float(digits)

    value = json.loads(text, object_pairs_hook=members, parse_constant=constant, parse_float=finite)
    json.dumps(value, ensure_ascii=False).encode()  # raises for a lone surrogate
    return value


@fuzzed
@given(json_texts)
@example('{"a":":","a":"\\u003a\\u003a"}')
@example('{"a":"\\u003a","a":1}')
def test_texts_are_refused_exactly_where_they_must_be(text: str) -> None:
    """Duplicates, overflow, NaN, lone surrogates and bad syntax are found on both paths."""
    try:
        expected = repr(strictly(text))
    except ValueError:
        expected = repr(REFUSED)
    for parse in (parse_pure, canonical.parse_json):
        for raw in (text, text.encode()):
            assert repr(outcome(parse, raw)) == expected
    pure = outcome(lambda raw: canonical._canonicalize_pure(parse_pure(raw)), text)
    assert outcome(canonical.canonicalize_json, text) == pure


@fuzzed
@given(st.binary(max_size=24) | st.text(max_size=12))
def test_any_bytes_give_a_value_or_our_error(raw: bytes | str) -> None:
    """No other exception gets out of the parser, and both paths agree."""
    assert repr(outcome(canonical.parse_json, raw)) == repr(outcome(parse_pure, raw))
    outcome(canonical.canonicalize_json, raw)
