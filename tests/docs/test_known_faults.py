"""The table of known faults names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "known-faults.md"
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text("utf-8"))


def test_every_test_of_the_table_exists() -> None:
    """A row without its test would be a claim."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    there = {
        (path, node.name)
        for path in {path for path, _ in NAMED}
        for node in ast.parse((ROOT / path).read_text("utf-8")).body
        if isinstance(node, kinds)
    }
    assert [row for row in NAMED if row not in there] == []


def test_every_row_has_one() -> None:
    """No fault is listed without a test."""
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    faults = [row for row in rows if not row.startswith("| fault ")]
    assert len(faults) == len(NAMED) > 20
