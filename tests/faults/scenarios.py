"""The table of fault scenarios; and, as a plugin of pytest, the choice of their tests.

``scripts/faults.py`` loads it with ``-p``, so that the workers of xdist choose as well.
"""

from __future__ import annotations

import json
import os
import resource
import tomllib
from collections.abc import Generator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest

__all__ = ["CHOSEN", "CPU", "Scenario", "scenarios"]

TABLE = Path(__file__).with_name("scenarios.toml")
CHOSEN = "ONCEKEY_TEST_SCENARIOS"
CPU = "cpu seconds"  # what a test used, in its report


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


def cpu_seconds() -> float:
    """What this process has used, and the processes that it started and saw end."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Note what a test uses: on a busy machine the time on the wall tells of others."""
    before = cpu_seconds()
    try:
        return (yield)
    finally:
        item.user_properties.append((CPU, cpu_seconds() - before))
