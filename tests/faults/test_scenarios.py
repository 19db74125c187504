"""The table of fault scenarios is what is run and told."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.scenarios import CHOSEN, scenarios

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explanation/faults.md"


def found_in(file: str) -> list[str]:
    """The names of the tests in a file, without their parameters."""
    names = re.findall(r"^(?:async )?def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE)
    return [f"{file}::{name}" for name in names]


def test_every_pattern_of_the_table_finds_tests() -> None:
    """A test that was renamed is missed here, and not only when a fault comes."""
    there = {file: found_in(file) for one in scenarios() for file in one.files}
    lost = [
        f"{one.name}: {pattern}"
        for one in scenarios()
        for pattern in one.tests
        for file, _, name in [pattern.partition("::")]
        if not fnmatch.filter(there[file], f"{file}::{name.partition('[')[0]}")
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


def test_one_scenario_can_be_run_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """The script runs its tests and no others, and says what came of it."""
    command = [sys.executable, "scripts/faults.py", "--only", "heartbeat past five leases"]
    environment = {**os.environ, CHOSEN: json.dumps([])}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 scenarios hold" in done.stdout
    script = runpy.run_path(str(ROOT / "scripts/faults.py"))
    with pytest.raises(SystemExit) as wrong:
        script["main"](["--only", "nothing"])
    assert wrong.value.code == 2
    assert "no scenario nothing" in capsys.readouterr().err


def test_the_minute_is_one_of_cpu_time_on_a_busy_machine() -> None:
    """On a quiet one it is the wall's; a test that failed has failed on both."""
    outcome = runpy.run_path(str(ROOT / "scripts/faults.py"))["Outcome"]
    slow = outcome(scenarios()[0], 1, 0, [], seconds=90.0, cpu=20.0, reasons=[])
    assert (slow.result(0.1), slow.result(1.5)) == ("too slow", "passed")
    assert slow._replace(cpu=70.0).result(1.5) == "too slow"
    assert slow._replace(failed=["a test"]).result(1.5) == "failed"
