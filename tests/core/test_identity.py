"""Identities as text: typed apart, bounded, and nothing that merely has a ``str()``."""

from __future__ import annotations

import enum
import uuid

import pytest

from oncekey.errors import InvalidKeyError
from oncekey.models import identity_text


def test_identities_of_different_types_have_different_texts() -> None:
    """No text, number, UUID or bytes can pass for one of another type."""
    one = uuid.UUID(int=1)
    alike = [1, "1", b"1", "b'1'", "int:1", "str:int:1", "bytes:31", one, str(one), f"uuid:{one}"]
    assert len({identity_text(value, "scope") for value in alike}) == len(alike)


def test_plain_text_stands_for_itself() -> None:
    """Most identities read in a scope column as they were given, enums as their values."""

    class Tenant(enum.StrEnum):
        ACME = "acme"

    assert identity_text("user-7", "scope") == "user-7"
    assert identity_text(Tenant.ACME, "scope") == "acme"


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        b"",
        True,
        1.0,
        object(),
        ["a"],
        "a\0b",
        "x" * 1025,
        "\ud800",
        1 << 2000,
        b"x" * 999,
    ],
    ids=lambda value: f"{type(value).__name__}-{str(value)[:4]!r}",
)
def test_what_names_nobody_is_refused(value: object) -> None:
    """An object, a flag, nothing, a NUL or a text without end is an error, never an identity."""
    with pytest.raises(InvalidKeyError, match="scope"):
        identity_text(value, "scope")
