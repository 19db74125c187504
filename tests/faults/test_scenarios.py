"""The table of fault scenarios is what is run and told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.scenarios import CHOSEN, scenarios

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explanation/faults.md"


@pytest.fixture(scope="module")
def collected() -> list[str]:
    """The names of all tests in the files that the table names."""
    files = sorted({file for one in scenarios() for file in one.files})
    assert [file for file in files if not (ROOT / file).is_file()] == []
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *files]
    command += ["-p", "no:cacheprovider"]
    every = {name: value for name, value in os.environ.items() if name != "ONCEKEY_TEST_SHORT"}
    done = subprocess.run(command, cwd=ROOT, env=every, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_every_pattern_of_the_table_finds_tests(collected: list[str]) -> None:
    """A test that was renamed is missed here, and not only when a fault comes."""
    lost = [
        f"{one.name}: {pattern}"
        for one in scenarios()
        for pattern in one.tests
        if not any(one._replace(tests=(pattern,)).has(name) for name in collected)
    ]
    assert lost == []


def test_names_are_told_once() -> None:
    """Each scenario has a name and a promise of its own."""
    for field in ("name", "promise"):
        words = [getattr(one, field) for one in scenarios()]
        assert len(set(words)) == len(words)


def test_the_report_has_every_scenario() -> None:
    """The page of the last run tells the table as it is."""
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")][
        1:
    ]
    told = [(row[0].removeprefix("| "), row[1]) for row in rows]
    assert told == [(one.name, one.promise) for one in scenarios()]


def test_one_scenario_can_be_run_alone() -> None:
    """The script runs its tests and no others, and says what came of it."""
    command = [sys.executable, "scripts/faults.py", "--only", "oversized answers"]
    environment = {**os.environ, CHOSEN: json.dumps([])}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 scenarios hold" in done.stdout
    wrong = subprocess.run([*command[:3], "nothing"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "no scenario nothing" in wrong.stderr
