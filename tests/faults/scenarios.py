"""The table of fault scenarios; and, as a plugin of pytest, the choice of their tests.

``scripts/faults.py`` loads it with ``-p``, so that the workers of xdist choose as well.
"""

from __future__ import annotations

import json
import os
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest

__all__ = ["CHOSEN", "Scenario", "scenarios"]

TABLE = Path(__file__).with_name("scenarios.toml")
CHOSEN = "ONCEKEY_TEST_SCENARIOS"


class Scenario(NamedTuple):
    """A fault, what must hold, and the tests that show it."""

    name: str
    promise: str
    tests: tuple[str, ...]

    def has(self, test: str) -> bool:
        """Whether a test belongs to it. Brackets are part of a name, not of a pattern."""
        return any(fnmatchcase(test, one.replace("[", "[[]")) for one in self.tests)

    @property
    def files(self) -> list[str]:
        """The files that its tests are in."""
        return sorted({one.partition("::")[0] for one in self.tests})


def scenarios() -> list[Scenario]:
    """The table."""
    found = tomllib.loads(TABLE.read_text(encoding="utf-8"))["scenario"]
    return [Scenario(one["name"], one["promise"], tuple(one["tests"])) for one in found]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the chosen scenarios."""
    names = json.loads(os.environ[CHOSEN])
    chosen = [one for one in scenarios() if one.name in names]
    kept = [item for item in items if any(one.has(item.nodeid) for one in chosen)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
