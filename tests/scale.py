"""How much the longest tests do: less in ``make test``, all of it in ``make test-all``."""

from __future__ import annotations

import os

__all__ = ["LONG", "SHORT", "scaled"]

LONG = bool(os.environ.get("ONCEKEY_TEST_LONG"))
SHORT = bool(os.environ.get("ONCEKEY_TEST_SHORT"))  # make test


def scaled(number: int) -> int:
    """``number`` in a long run, a quarter of it in a short one."""
    return number if LONG else max(1, number // 4)
