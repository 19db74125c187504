"""The table of mutants fits the source: what each replaces is there, once."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts/mutants.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("mutant", _script().mutants(), ids=lambda one: str(one.name))
def test_what_a_mutant_replaces_is_there(mutant: object) -> None:
    """Who rewrites such a line also rewrites its mutant, or ``make mutants`` can't begin."""
    assert mutant.source()  # type: ignore[attr-defined]
