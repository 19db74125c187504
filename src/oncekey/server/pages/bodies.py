"""Bodies as people read them, and the lines in which a copy differs from the first."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from typing import Final

__all__ = ["SHOWN", "Line", "compared", "readable"]

SHOWN: Final = 65_536
"""Characters of a body that a page shows."""

MOST_LINES: Final = 2000
"""Of each of two bodies that are compared: comparing costs the product of both."""

_LOOKS: Final = {"-": "gone", "+": "added", "@": "place"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a comparison: ``gone`` was only in the first, ``added`` only in the copy."""

    look: str
    mark: str
    text: str


def readable(body: bytes) -> tuple[str, bool]:
    """A body to show: JSON in lines, other text as it is, else its hex digits, and False."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        return body[:4096].hex(" "), False
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False), True
    except (ValueError, RecursionError):
        return text, True


def compared(first: bytes, other: bytes) -> list[Line] | None:
    """What a copy says otherwise, with some lines around it; ``None``: too long to compare.

    Empty: they read alike, and differ only in spaces, in how JSON is written, or after what is
    shown.
    """
    old, new = (readable(body)[0][:SHOWN].splitlines() for body in (first, other))
    if max(len(old), len(new)) > MOST_LINES:
        return None
    told = list(difflib.unified_diff(old, new, lineterm=""))[2:]  # without the names of files
    return [Line(_LOOKS.get(one[:1], ""), one[:1], one[1:]) for one in told]
