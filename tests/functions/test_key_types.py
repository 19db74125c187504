"""When an id as text and the same as a number, a UUID or a date are one key, and when they are two.

Stored keys are made by these rules, so none of them may change.
"""

from __future__ import annotations

import datetime as dt
import uuid
from decimal import Decimal
from enum import Enum, StrEnum
from typing import Any

import pytest

from oncekey import IdempotencyConflictError, Once

ID = uuid.UUID("8e03978e-40d5-43dd-bc93-6894a57f9324")
PAIRS: list[tuple[Any, str]] = [
    (1, "1"),
    (ID, str(ID)),
    (Decimal("1.5"), "1.5"),
    (dt.date(2026, 11, 18), "2026-11-18"),
]


class Number(Enum):
    ONE = 1


class Word(StrEnum):
    ONE = "one"


def runs(key: Any, *values: Any) -> list[Any]:
    """What a function ran for."""
    ran: list[Any] = []

    @Once("memory://")(key=key, name="f")
    def f(a: Any) -> str:
        ran.append(a)
        return "done"

    for value in values:
        f(value)
    return ran


@pytest.mark.parametrize("value, text", PAIRS)
def test_one_name_takes_a_value_for_its_text(value: Any, text: str) -> None:
    """``key="a"``: a worker that got the id out of JSON recognises what another one has done."""
    assert runs("a", value, text) == [value]


@pytest.mark.parametrize("value, text", PAIRS)
def test_a_list_of_names_keeps_the_types_apart(value: Any, text: str) -> None:
    """``key=["a"]``: the values are compared as arguments are, so ``1`` is not ``"1"``."""
    assert runs(["a"], value, text) == [value, text]
    assert runs(["a"], value, value) == [value]


@pytest.mark.parametrize("value, text", PAIRS)
def test_a_key_function_leaves_its_argument_in_the_payload(value: Any, text: str) -> None:
    """``key=lambda a: a``: one key, and other arguments under it are a conflict, not a run."""
    with pytest.raises(IdempotencyConflictError, match="a differs"):
        runs(lambda a: a, value, text)


@pytest.mark.parametrize("key", ["a", ["a"]])
def test_an_enum_counts_as_its_value(key: Any) -> None:
    """In either form."""
    assert runs(key, Number.ONE, 1) == [Number.ONE]
    assert runs(key, Word.ONE, "one") == [Word.ONE]
