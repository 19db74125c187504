"""RFC 8785 canonical JSON, the strict parser, and request fingerprints."""

from __future__ import annotations

import copy
import decimal
import enum
import hashlib
import importlib.util
import json
import struct
import sys
import types
import uuid
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest

from oncekey import canonical
from oncekey._jcs import fast
from oncekey.canonical import (
    EXCLUDED_FIELDS,
    EXCLUDED_PATHS,
    MAX_DEPTH,
    canonical_json_sha256,
    canonicalize,
    canonicalize_json,
    parse_json,
    sha256_hex,
    strip_excluded_fields,
)
from oncekey.errors import CanonicalJSONError, OncekeyError


@pytest.fixture(params=["pure", "fast"], autouse=True)
def path_in_use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run every test once on the pure path and once on the orjson path."""
    if request.param == "fast" and not canonical.FAST:
        pytest.skip("orjson is not installed")
    monkeypatch.setattr(canonical, "FAST", request.param == "fast")
    return str(request.param)


def nested(depth: int, innermost: object = 0) -> Any:
    value = innermost
    for _ in range(depth):
        value = [value]
    return value


# RFC 8785, appendix B: the bits of a double, and its canonical spelling.
APPENDIX_B = [
    ("0000000000000000", "0"),
    ("8000000000000000", "0"),
    ("0000000000000001", "5e-324"),
    ("8000000000000001", "-5e-324"),
    ("7fefffffffffffff", "1.7976931348623157e+308"),
    ("ffefffffffffffff", "-1.7976931348623157e+308"),
    ("4340000000000000", "9007199254740992"),
    ("c340000000000000", "-9007199254740992"),
    ("4430000000000000", "295147905179352830000"),
    ("44b52d02c7e14af5", "9.999999999999997e+22"),
    ("44b52d02c7e14af6", "1e+23"),
    ("44b52d02c7e14af7", "1.0000000000000001e+23"),
    ("444b1ae4d6e2ef4e", "999999999999999700000"),
    ("444b1ae4d6e2ef4f", "999999999999999900000"),
    ("444b1ae4d6e2ef50", "1e+21"),
    ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
    ("3eb0c6f7a0b5ed8d", "0.000001"),
    ("41b3de4355555553", "333333333.3333332"),
    ("41b3de4355555554", "333333333.33333325"),
    ("41b3de4355555555", "333333333.3333333"),
    ("41b3de4355555556", "333333333.3333334"),
    ("41b3de4355555557", "333333333.33333343"),
    ("becbf647612f3696", "-0.0000033333333333333333"),
    ("43143ff3c1cb0959", "1424953923781206.2"),
]


@pytest.mark.parametrize("bits, spelling", APPENDIX_B)
def test_number_vectors_of_the_rfc(bits: str, spelling: str) -> None:
    """Every double of RFC 8785 appendix B is spelled as there."""
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    assert canonicalize([number]) == f"[{spelling}]".encode()
    assert canonicalize(number) == spelling.encode()
    assert canonicalize({"a": 1.0, "b": number}) == f'{{"a":1,"b":{spelling}}}'.encode()


@pytest.mark.parametrize("bits", ["7fffffffffffffff", "7ff0000000000000", "fff0000000000000"])
def test_doubles_that_the_rfc_refuses(bits: str) -> None:
    """NaN and the infinities are refused, also beside a real null."""
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    for value in ([number], [None, number], {"a": None, "b": {"c": number}}):
        with pytest.raises(CanonicalJSONError, match="no JSON number"):
            canonicalize(value)


def test_a_nan_that_nothing_else_refers_to_is_refused() -> None:
    """A NaN is found whether its object is shared or not, whatever its payload bits."""
    for text in ("nan", "-nan", "inf", "-inf"):
        with pytest.raises(CanonicalJSONError):
            canonicalize([None, float(text)])
    (odd,) = struct.unpack("<d", b"\x01\x02\x03\x04\x05\x06\xf7\xff")
    with pytest.raises(CanonicalJSONError):
        canonicalize([None, odd])


def test_example_of_the_rfc() -> None:
    """The sample of RFC 8785 section 3.2 comes out byte for byte."""
    raw = rb"""{
      "numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
      "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
      "literals": [null, true, false]
    }"""
    assert canonicalize_json(raw) == (
        rb'{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        b'"string":"\xe2\x82\xac$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
    )


def test_keys_sort_by_utf16_code_units() -> None:
    """The sorting sample of RFC 8785: an astral key comes before U+FB33."""
    keys = ["\u20ac", "\r", "\ufb33", "1", "\U0001f600", "\u0080", "\u00f6"]
    ordered = ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]
    assert list(json.loads(canonicalize(dict.fromkeys(keys, 0)))) == ordered
    assert list(json.loads(canonicalize([{"k": dict.fromkeys(keys, 0)}]))[0]["k"]) == ordered


def test_astral_values_do_not_need_the_pure_writer(path_in_use: str) -> None:
    """Emoji in values, not keys, leave the order alone."""
    value = {"b": "\ufe0f\U0001f600", "a": '\U0001f600":'}
    assert canonicalize(value) == '{"a":"\U0001f600\\":","b":"\ufe0f\U0001f600"}'.encode()
    if path_in_use == "fast":
        assert fast.attempt(value) is not None


def test_the_fast_path_is_taken(path_in_use: str) -> None:
    """An ordinary payload does not fall back to the pure writer or parser."""
    if path_in_use == "pure":
        pytest.skip("about the fast path")
    value = {"id": "evt_1", "n": 24.0, "f": -0.5, "none": None, "list": [1.0, -0.0, "x\\", 2.0]}
    assert fast.attempt(value) == canonical._canonicalize_pure(value)
    raw = json.dumps(value).encode()
    assert fast.attempt_json(raw) == canonical._canonicalize_pure(value)
    assert fast.attempt_parse(raw) == (True, value)


@pytest.mark.parametrize(
    "text",
    [
        "1.0,",
        "2.0}",
        "3.0]",
        '":1.0,',
        ':"a":1.0,',
        "\\",
        '\\":5.0,',
        '"',
        "-0.0,",
        "e+16,",
        "e-6]",
    ],
)
def test_strings_that_look_like_numbers_stay_as_they_are(text: str) -> None:
    """Number repairs never reach into strings, keys included."""
    value = [text, 1.0, {text: 2.0, "k" + text: -0.0}, text + text, 3.5, [text, 4.0], text]
    assert json.loads(canonicalize(value)) == value
    assert b".0," not in canonicalize([1.0, 2.0, {"a": 3.0}])


def test_integers_end_at_the_safe_range() -> None:
    """2**53 - 1 passes, 2**53 as an integer does not, and as a float it does."""
    edge = 2**53 - 1
    assert canonicalize([edge, -edge]) == b"[9007199254740991,-9007199254740991]"
    assert canonicalize([2.0**53]) == b"[9007199254740992]"
    for number in (edge + 1, -edge - 1, 2**63, 2**64, 10**30, 10**5000, -(10**5000)):
        for value in (number, [number], {"a": [number]}):
            with pytest.raises(CanonicalJSONError, match="send it as a string"):
                canonicalize(value)


class Level(enum.IntEnum):
    LOW = 1


class Colour(enum.StrEnum):
    RED = "red"


class OldColour(str, enum.Enum):  # noqa: UP042 - its str() is the name, unlike a StrEnum's
    RED = "red"


class Plain(enum.Enum):
    ONE = 1


class BackwardStr(str):
    """Sorts the wrong way round, to show that its own order does not count."""

    __slots__ = ()

    def __lt__(self, other: str) -> bool:
        return str.__gt__(self, other)


class MyInt(int):
    pass


class MyFloat(float):
    def __repr__(self) -> str:
        return "MyFloat"


class MyDict(dict[str, Any]):
    pass


class MyList(list[Any]):
    pass


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value, expected",
    [
        (Level.LOW, b"1"),
        (Colour.RED, b'"red"'),
        (OldColour.RED, b'"red"'),
        (True, b"true"),
        (BackwardStr("a"), b'"a"'),
        (MyInt(5), b"5"),
        (MyFloat(1.0), b"1"),
        (MyDict(b=1, a=2), b'{"a":2,"b":1}'),
        (MyList([1.0]), b"[1]"),
        (Point(1, 2), b"[1,2]"),
        (OrderedDict(b=1, a=2), b'{"a":2,"b":1}'),
        ({Colour.RED: 1, "a": 2}, b'{"a":2,"red":1}'),
        ({BackwardStr("b"): 1, BackwardStr("a"): 2}, b'{"a":2,"b":1}'),
        ((), b"[]"),
        ({}, b"{}"),
        (None, b"null"),
    ],
)
def test_subclasses_are_their_builtin(value: object, expected: bytes) -> None:
    """A subclass is written as the builtin it extends, at the top and inside."""
    assert canonicalize(value) == expected
    assert canonicalize([value]) == b"[" + expected + b"]"
    assert canonicalize({"k": value}) == b'{"k":' + expected + b"}"


@pytest.mark.parametrize(
    "value",
    [
        Plain.ONE,
        uuid.UUID(int=1),
        decimal.Decimal(1),
        b"x",
        bytearray(b"x"),
        {1},
        1j,
        ...,
        object(),
        types.MappingProxyType({}),
        range(3),
    ],
)
def test_other_types_are_refused(value: object) -> None:
    """What is no JSON type is refused, even where orjson would write it."""
    for holder in (value, [value], {"k": value}, [None, {"k": [value]}]):
        with pytest.raises(CanonicalJSONError, match="no JSON type"):
            canonicalize(holder)


def test_fragments_of_orjson_are_refused() -> None:
    """Raw JSON can't be smuggled in past the checks."""
    orjson = pytest.importorskip("orjson")
    with pytest.raises(CanonicalJSONError, match="Fragment"):
        canonicalize([orjson.Fragment(b'{"b":1,"a":2}')])


def test_a_subclass_that_fails_to_convert_is_refused() -> None:
    """What a subclass's own conversion raises does not get out."""

    class Broken(int):
        def __int__(self) -> int:
            raise KeyError("broken")

    with pytest.raises(CanonicalJSONError, match=r"Broken is no JSON type .* at \$\[0\]"):
        canonicalize([Broken(1)])


NAN = float("nan")


@pytest.mark.parametrize(
    "value, path",
    [
        (NAN, "$"),
        ({"items": [0, 1, 2, {"price": NAN}]}, "$.items[3].price"),
        ({"items": [0, 1, 2, {"price": 2**60}]}, "$.items[3].price"),
        ({"weird key": {"b": b""}}, '$["weird key"].b'),
        ({"": [NAN]}, '$[""][0]'),
        ({"1a": NAN}, '$["1a"]'),
        ({'q"': NAN}, '$["q\\""]'),
        ({"\u00e9": NAN}, '$["\\u00e9"]'),
        ({"a": {"b": {1: 2}}}, "$.a.b"),
        ({"a": {"b": {"\ud800": 2}}}, "$.a.b"),
        ({"a": ["ok", "\udfff"]}, "$.a[1]"),
        ((1, (2, NAN)), "$[1][1]"),
        ({"z": NAN, "a": NAN}, "$.z"),
        ({"k" * 100: NAN}, '$["' + "k" * 63 + '\\u2026"]'),
    ],
)
def test_errors_name_the_path(value: object, path: str) -> None:
    """The error says where the first fault of the document stands."""
    with pytest.raises(CanonicalJSONError) as caught:
        canonicalize(value)
    assert caught.value.path == path
    assert str(caught.value).endswith(f"at {path}")


def test_depth_is_bounded_exactly() -> None:
    """The deepest allowed value passes, one level more is refused, a hundred thousand too."""
    assert canonicalize(nested(MAX_DEPTH)) == b"[" * MAX_DEPTH + b"0" + b"]" * MAX_DEPTH
    for value in (nested(MAX_DEPTH + 1), nested(MAX_DEPTH, []), nested(100_000)):
        with pytest.raises(CanonicalJSONError, match="nested deeper") as caught:
            canonicalize(value)
        assert len(str(caught.value)) < 300


def test_a_stack_that_is_nearly_used_up_gives_the_same_kind_of_error() -> None:
    """No RecursionError gets out, however little stack the caller has left."""

    def deeper(levels: int) -> bytes:
        return deeper(levels - 1) if levels else canonicalize(nested(400))

    with pytest.raises(CanonicalJSONError):
        deeper(sys.getrecursionlimit() - 300)


def test_cycles_are_refused() -> None:
    """A value that holds itself is named as such."""
    loop: list[Any] = []
    loop.append({"again": loop})
    with pytest.raises(CanonicalJSONError, match="holds itself"):
        canonicalize(loop)
    members: dict[str, Any] = {}
    members["me"] = (members,)
    with pytest.raises(CanonicalJSONError, match="holds itself"):
        canonicalize(members)


def test_an_object_used_twice_is_no_cycle() -> None:
    """Sharing is not a cycle."""
    shared = {"a": [1.0]}
    assert canonicalize([shared, shared]) == b'[{"a":[1]},{"a":[1]}]'


# --- Parsing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw, path",
    [
        (b'{"a":1,"a":1}', "$"),
        (b'{"a":1,"\\u0061":2}', "$"),
        (b'{"a":1,"b":2,"a":3}', "$"),
        (b'[0,{"k":[{"x":1,"y":{"p":1,"q":2,"p":1}}]}]', "$[1].k[0].y"),
        (b'{"a":{"b":1,"\\u0062":":"}}', "$.a"),
        (b'{"a":":","b":"\\u003a","b":1}', "$"),
        (b'{"a\\u003a":1,"a:":"\\u003A"}', "$"),
        (b'{"\xf0\x9f\x98\x80":1,"\\ud83d\\ude00":2}', "$"),
        (b'{"":1,"":2}', "$"),
        (b'{"a":{"x":1,"x":2},"a":3}', "$"),
    ],
)
def test_duplicate_keys_are_found_at_any_depth(raw: bytes, path: str) -> None:
    """A key that comes twice, also when equal only after unescaping, is an error."""
    for parse in (parse_json, canonicalize_json):
        for text in (raw, raw.decode(), b" " + raw.replace(b",", b" ,\n")):
            with pytest.raises(CanonicalJSONError, match="more than once") as caught:
                parse(text)
            assert caught.value.path == path


def test_the_duplicate_key_is_named() -> None:
    """The message says which key to look for, cut short where it is long."""
    with pytest.raises(CanonicalJSONError, match='has the key "b" more than once'):
        parse_json(b'{"a":1,"b":2,"c":3,"b":4}')
    with pytest.raises(CanonicalJSONError) as caught:
        parse_json(json.dumps({"k" * 10_000: 1})[:-1] + "," + json.dumps({"k" * 10_000: 1})[1:])
    assert len(str(caught.value)) < 200


def test_colons_in_strings_are_not_duplicates() -> None:
    """Colons, escaped or not, confuse nothing."""
    raw = b'{"a:b":"::","c":"\\u003a","d":{"\\u003A":":"}}'
    assert parse_json(raw) == {"a:b": "::", "c": ":", "d": {":": ":"}}
    assert canonicalize_json(raw) == b'{"a:b":"::","c":":","d":{":":":"}}'


@pytest.mark.parametrize(
    "raw, path, reason",
    [
        (b"[NaN]", "$[0]", "NaN is no JSON number"),
        (b'{"a":[1,-Infinity]}', "$.a[1]", "-Infinity is no JSON number"),
        (b"[0,1e400]", "$[1]", "too large"),
        (b"-1e400", "$", "too large"),
        (b"[" + b"1" * 4301 + b"]", "$[0]", "4301 digits is too long"),
        (b'{"a":"\\ud800"}', "$.a", "lone surrogate"),
        (b'["\\ud83dx"]', "$[0]", "lone surrogate"),
        (b'["\\uDE00"]', "$[0]", "lone surrogate"),
        (b'{"\\udfff":1}', "$", "lone surrogate"),
        ('["\ud800"]', "$", "not valid UTF-8"),
        (b'["\xff"]', "$", "not valid UTF-8"),
        (b'["\xed\xa0\x80"]', "$", "not valid UTF-8"),
        ("[1]".encode("utf-16"), "$", "not valid UTF-8"),
        (b"[\x001\x00]\x00", "$", "line 1 column 2"),
        (b"\xef\xbb\xbf[1]", "$", "byte order mark"),
        ("\ufeff[1]", "$", "byte order mark"),
        (b"", "$", "line 1 column 1"),
        (b"[1]\n[", "$", "line 2 column 1"),
        (b'["\n"]', "$", "control character"),
        (b"[01]", "$", "line 1"),
        (b"[1.]", "$", "line 1"),
        (b"[1,]", "$", "line 1"),
        (b"[1]" * MAX_DEPTH, "$", "line 1"),
        (b"[" * 1_000_000, "$", "nested deeper"),
        (5, "$", "bytes or str, not int"),
        (None, "$", "bytes or str, not NoneType"),
    ],
)
def test_text_that_is_refused(raw: Any, path: str, reason: str) -> None:
    """Text that parsers may read differently is refused, with the reason and the place."""
    for parse in (parse_json, canonicalize_json):
        with pytest.raises(CanonicalJSONError, match=reason) as caught:
            parse(raw)
        assert caught.value.path == path
        assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "raw",
    ["1", "-0", "-0.0", "1E+2", " [1 ,\t2\r\n] ", '"\\/\\u0000"', "null", "[1e-400]", "[1.0e300]"],
)
def test_text_is_read_as_the_standard_parser_reads_it(raw: str) -> None:
    """Sound text gives what json.loads gives, from bytes, str and bytearray."""
    for text in (raw, raw.encode(), bytearray(raw.encode())):
        assert repr(parse_json(text)) == repr(json.loads(raw))


def test_integers_keep_their_digits() -> None:
    """Parsing loses no digit; only the canonical form refuses large integers."""
    for number in (2**53, 2**63, 2**64, -(2**63) - 1, 10**400):
        assert parse_json(b"[%d]" % number) == [number]
        assert parse_json(b"%d" % number) == number
        with pytest.raises(CanonicalJSONError, match=r"send it as a string.* at \$\.a\[0\]"):
            canonicalize_json(b'{"a":[%d]}' % number)


def test_a_lower_limit_on_digits_gives_our_error() -> None:
    """A process may allow fewer digits than we do; that is no reason for a bare ValueError."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        with pytest.raises(CanonicalJSONError, match="700 digits is too long") as caught:
            parse_json(b'{"a":[' + b"1" * 700 + b"]}")
    finally:
        sys.set_int_max_str_digits(before)
    assert caught.value.path == "$.a[0]"


def test_parsed_depth_is_bounded_exactly() -> None:
    """The deepest allowed text is read, also with many brackets beside; one more is refused."""
    for depth in (1, 254, 255, MAX_DEPTH):
        assert parse_json(b"[" * depth + b"]" * depth) == nested(depth - 1, [])
    with pytest.raises(CanonicalJSONError, match="nested deeper"):
        parse_json(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))
    assert parse_json(b"[" + b"{}," * 2000 + b"{}]") == [{}] * 2001


# --- Fingerprints ------------------------------------------------------------------------------


def test_the_exclusion_list_is_closed() -> None:
    """Whoever changes the list changes every fingerprint, and this test."""
    assert {"idempotency_key", "context", "governance_context"} == EXCLUDED_FIELDS
    assert EXCLUDED_PATHS == (("push_notification_config", "authentication", "credentials"),)
    assert isinstance(EXCLUDED_FIELDS, frozenset)


REQUEST: dict[str, Any] = {
    "idempotency_key": "k-1",
    "context": {"trace": 1},
    "governance_context": "g",
    "budget": 100.0,
    "ext": {"x": None, "context": "kept, as it is not at the top"},
    "push_notification_config": {
        "url": "https://example.com/hook",
        "authentication": {"schemes": ["Bearer"], "credentials": "secret"},
    },
}
STRIPPED: dict[str, Any] = {
    "budget": 100.0,
    "ext": {"x": None, "context": "kept, as it is not at the top"},
    "push_notification_config": {
        "url": "https://example.com/hook",
        "authentication": {"schemes": ["Bearer"]},
    },
}


def test_excluded_fields_do_not_count() -> None:
    """The fingerprint is that of the payload without the excluded fields, and no others."""
    expected = hashlib.sha256(canonicalize(STRIPPED)).hexdigest()
    assert canonical_json_sha256(REQUEST) == sha256_hex(STRIPPED) == expected
    assert canonical_json_sha256(STRIPPED) == expected
    assert canonical_json_sha256(types.MappingProxyType(REQUEST)) == expected
    # What another implementation of the same rules gives for this request.
    assert expected == "b68d4b47c68532446c30bed86ce1450ae107b05374a444e52ddc2271507e6b48"


def test_every_other_field_counts() -> None:
    """``ext`` and the rest of the notification config are part of the fingerprint."""
    base = canonical_json_sha256(REQUEST)
    for change in (
        {"ext": {}},
        {"budget": 100.5},
        {"credentials": 1},
        {"push_notification_config": {"authentication": {"credentials": "secret"}}},
    ):
        assert canonical_json_sha256({**REQUEST, **change}) != base


def test_missing_is_not_null() -> None:
    """A field that is absent and one that is null differ."""
    assert canonical_json_sha256({"a": 1}) != canonical_json_sha256({"a": 1, "b": None})


@pytest.mark.parametrize("strip", [strip_excluded_fields, canonical_json_sha256])
def test_the_input_is_never_mutated(strip: Callable[[dict[str, Any]], object]) -> None:
    """Stripping leaves the payload as it was."""
    payload = copy.deepcopy(REQUEST)
    strip(payload)
    assert payload == REQUEST


def test_the_stripped_copy_shares_nothing() -> None:
    """The caller may change the result anywhere without touching the input."""
    payload = copy.deepcopy(REQUEST)
    stripped = strip_excluded_fields(payload)
    assert stripped == STRIPPED
    stripped["ext"]["x"] = "changed"
    stripped["push_notification_config"]["authentication"]["schemes"].append("changed")
    assert payload == REQUEST


@pytest.mark.parametrize(
    "config",
    [None, "text", [], {}, {"authentication": None}, {"authentication": {"schemes": []}}],
)
def test_a_notification_config_of_another_shape_stays(config: object) -> None:
    """Where the nested path leads nowhere, nothing is removed."""
    payload = {"push_notification_config": config}
    assert strip_excluded_fields(payload) == payload


@pytest.mark.parametrize("payload", [None, [], "text", 5])
def test_a_payload_must_be_an_object(payload: Any) -> None:
    """Only mappings have fields to strip."""
    for function in (strip_excluded_fields, canonical_json_sha256):
        with pytest.raises(CanonicalJSONError, match="must be an object"):
            function(payload)


def test_what_can_not_be_copied_is_refused() -> None:
    """Deep-copying gives our error and its path, not TypeError or RecursionError."""
    with pytest.raises(CanonicalJSONError, match=r"module is no JSON type .* at \$\.a"):
        strip_excluded_fields({"a": sys})
    with pytest.raises(CanonicalJSONError, match="nested deeper"):
        strip_excluded_fields({"a": nested(100_000)})


def test_errors_are_of_the_one_base_class() -> None:
    """The error is an OncekeyError and a ValueError, with a stable code."""
    with pytest.raises(OncekeyError) as caught:
        canonicalize(NAN)
    assert isinstance(caught.value, ValueError)
    assert caught.value.code == "INVALID_REQUEST"


# --- Choosing the path -------------------------------------------------------------------------


def load_with(orjson: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load a second copy of the public module, on a fast path that sees another orjson, or none."""
    monkeypatch.setitem(sys.modules, "orjson", orjson)
    monkeypatch.setitem(sys.modules, "oncekey._jcs.fast", copy_of(fast))
    return copy_of(canonical)


def copy_of(module: types.ModuleType) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("a_copy", str(module.__file__))
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_without_orjson_the_pure_path_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but speed needs orjson."""
    module = load_with(None, monkeypatch)
    assert module.FAST is False
    assert module.canonicalize({"b": 1.0, "a": 2}) == b'{"a":2,"b":1}'
    assert module.parse_json(b'{"a":[1]}') == {"a": [1]}


def fake_orjson(dumps: Callable[..., bytes], loads: Callable[[bytes], Any]) -> Any:
    real = pytest.importorskip("orjson")
    fake = types.SimpleNamespace(dumps=dumps, loads=loads)
    for name in dir(real):
        if name.startswith("OPT_"):
            setattr(fake, name, getattr(real, name))
    return fake


def test_the_real_orjson_passes_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake below differs in its fault only: unaltered, it is accepted."""
    real = pytest.importorskip("orjson")
    assert load_with(fake_orjson(real.dumps, real.loads), monkeypatch).FAST is True


@pytest.mark.parametrize(
    "written, instead",
    [
        (b"e+2", b"e2"),
        (b"e-7", b"e-07"),
        (b"0.1", b"0.10"),
        (b"e-8", b"E-8"),
        (b"\x7f", b"\\u007f"),
    ],
)
def test_an_orjson_that_writes_otherwise_is_not_used(
    monkeypatch: pytest.MonkeyPatch, written: bytes, instead: bytes
) -> None:
    """A version with other number or string formats fails the self-test; results stay right."""
    real = pytest.importorskip("orjson")

    def dumps(*args: Any) -> bytes:
        return bytes(real.dumps(*args).replace(written, instead))

    module = load_with(fake_orjson(dumps, real.loads), monkeypatch)
    assert module.FAST is False
    assert module.canonicalize([1e22, 1e-7, 0.1, "\x7f"]) == b'[1e+22,1e-7,0.1,"\x7f"]'


def test_an_orjson_that_reads_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that reads NaN, overflow or lone surrogates fails the self-test."""
    real = pytest.importorskip("orjson")
    assert load_with(fake_orjson(real.dumps, json.loads), monkeypatch).FAST is False
    old = types.SimpleNamespace(dumps=real.dumps, loads=real.loads)  # without the options
    assert load_with(old, monkeypatch).FAST is False
