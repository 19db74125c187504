"""Identities as text: typed apart, bounded, and nothing that merely has a ``str()``."""

from __future__ import annotations

import dataclasses
import enum
import pickle
import subprocess
import sys
import uuid

import pytest

import oncekey
from oncekey import models
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


def test_a_cached_response_is_a_dataclass_that_is_found_where_it_was() -> None:
    """Backends call ``asdict`` on one, or pickle it, whatever module it is written in."""
    one = models.CachedResponse("hash", {"a": 1}, 2.5)
    assert dataclasses.asdict(one) == {
        "payload_hash": "hash",
        "response": {"a": 1},
        "expires_at_epoch": 2.5,
    }
    assert pickle.loads(pickle.dumps(one)) == one
    assert oncekey.CachedResponse is models.CachedResponse


def test_a_memory_store_is_imported_without_dataclasses() -> None:
    """They take longer to import than all of it."""
    code = "import sys; from oncekey import MemoryBackend; print('dataclasses' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


def test_a_memory_store_needs_no_digests() -> None:
    """OpenSSL, a sixth of the first import, is loaded when somebody makes a digest."""
    code = (
        "import sys; from oncekey import MemoryBackend; from oncekey.models import Key, Scope;"
        "before = '_hashlib' in sys.modules; Key(Scope('once', 's'), 'k').digest;"
        "print(before, '_hashlib' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "True"]


def test_the_verdict_on_a_claim_has_one_name_of_its_own() -> None:
    """``Verdict`` of a claim is an older name; that of a signature is another thing."""
    from oncekey import signatures

    assert models.Verdict is models.ClaimVerdict
    assert signatures.Verdict is not models.ClaimVerdict
    assert repr(models.ClaimVerdict.WON) == "<ClaimVerdict.WON: 'won'>"
