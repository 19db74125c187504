"""The table of known faults names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "known-faults.md"
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text("utf-8"))


@pytest.mark.parametrize("path, name", NAMED)
def test_every_test_of_the_table_exists(path: str, name: str) -> None:
    """A row without its test would be a claim."""
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    assert name in {node.name for node in tree.body if isinstance(node, kinds)}


def test_every_row_has_one() -> None:
    """No fault is listed without a test."""
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    faults = [row for row in rows if not row.startswith("| fault ")]
    assert len(faults) == len(NAMED) > 20
