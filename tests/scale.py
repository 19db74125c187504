"""How much the longest tests do: less in ``make test``, all of it in ``make test-all``."""

from __future__ import annotations

import os

__all__ = ["LIGHT", "LONG", "SHORT", "scaled"]

LONG = bool(os.environ.get("ONCEKEY_TEST_LONG"))
SHORT = bool(os.environ.get("ONCEKEY_TEST_SHORT"))  # make test
LIGHT = bool(os.environ.get("ONCEKEY_TEST_LIGHT"))  # make test, on the second version of Python


def scaled(number: int) -> int:
    """``number`` in a long run, a quarter of it without a word, an eighth in ``make test``."""
    return number if LONG else max(1, number // (8 if SHORT else 4))
