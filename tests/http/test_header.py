"""The value of the Idempotency-Key header."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncekey.http.header import MAX_KEY, read_key
from oncekey.http.problems import Refusal

UUID = "8e03978e-40d5-43dd-bc93-6894a57f9324"


@pytest.mark.parametrize(
    "value, key",
    [
        (f'"{UUID}"', UUID),
        (UUID, UUID),
        (f"  {UUID}\t", UUID),
        ('"with space"', "with space"),
        (r'"a\"b\\c"', 'a"b\\c'),
        (b"KG5LxwFBepaKHyUD", "KG5LxwFBepaKHyUD"),
        ("k" * MAX_KEY, "k" * MAX_KEY),
        ('"' + "k" * MAX_KEY + '"', "k" * MAX_KEY),
        ("order:17/refund@2", "order:17/refund@2"),
    ],
)
def test_quoted_and_bare_values_are_keys(value: str | bytes, key: str) -> None:
    """A structured-field string and the bare text name the same key."""
    assert read_key([value], "Idempotency-Key") == key


@pytest.mark.parametrize(
    "values",
    [
        [""],
        ["   "],
        ['""'],
        ['"  "'],
        ["a b"],
        ["a,b"],
        ["a, b"],
        ['"open'],
        ['"a" b'],
        ['"a";p=1'],
        ['a"b'],
        [r'"bad \x escape"'],
        ["k" * (MAX_KEY + 1)],
        ['"' + "k" * (MAX_KEY + 1) + '"'],
        ["k" * 100_000],
        ["a\x00b"],
        ["a\x7fb"],
        ["a\nb"],
        ["caf\xe9"],
        [b"caf\xc3\xa9"],
        [b"\xff\xfe"],
        ['"caf\xe9"'],
        [UUID, UUID],
        [UUID, "other"],
    ],
)
def test_what_can_not_be_a_key_is_refused(values: list[str | bytes]) -> None:
    """Two headers, empty, long, control characters, other alphabets: a 400 that says what to do."""
    with pytest.raises(Refusal) as refused:
        read_key(values, "Idempotency-Key")
    assert refused.value.name == "key-invalid"
    assert "Idempotency-Key" in refused.value.detail


def test_no_header_is_no_key() -> None:
    """Without the header there is nothing to refuse."""
    assert read_key([], "Idempotency-Key") is None


@given(st.binary(max_size=600))
def test_any_bytes_are_a_key_or_a_refusal(raw: bytes) -> None:
    """Nothing else can happen, and a key is always short visible text."""
    try:
        key = read_key([raw], "Idempotency-Key")
    except Refusal:
        return
    assert key is not None
    assert 0 < len(key) <= MAX_KEY
    assert key.isascii()
    assert key.isprintable()
