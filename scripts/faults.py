"""Runs the fault scenarios of tests/faults/scenarios.toml and reports on each: ``make faults``.

A scenario passes if each of its tests passed and all of them together took less than a minute. On a
machine that others keep busy, it is a minute of CPU time: of the tests and of the processes that
they start and wait for. A scenario that this machine can't run (no server, no Spin, no small disk)
is skipped, with the reason.

    python scripts/faults.py                         # all
    python scripts/faults.py --only "kill -9 storm"  # one
    python scripts/faults.py --docs                  # and write docs/explanation/faults.md
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.faults.scenarios import CHOSEN, CPU, Scenario, cpu_seconds, scenarios  # noqa: E402

PAGE = ROOT / "docs/explanation/faults.md"
LIMIT = 60.0
QUIET = 0.25  # processors that others may use before the wall's time says little


class Outcome(NamedTuple):
    """What became of a scenario."""

    scenario: Scenario
    passed: int
    skipped: int
    failed: list[str]
    seconds: float
    cpu: float
    reasons: list[str]

    def result(self, others: float) -> str:
        """One or two words. ``others``: how many processors they kept busy meanwhile."""
        if self.failed:
            return "failed"
        if (self.cpu if others > QUIET else self.seconds) > LIMIT:
            return "too slow"
        return "passed" if self.passed else "skipped" if self.skipped else "not run"


class Watch:
    """A plugin of pytest: notes what becomes of each test."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self.results: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A part of a test is over. Setting up is not counted: tests share most of it."""
        name = report.nodeid
        if report.when == "call" or report.outcome != "passed":
            self.results[name] = report.outcome
            self.seconds[name] = self.seconds.get(name, 0.0) + report.duration
        if report.when == "call":
            self.cpu[name] = float(str(dict(report.user_properties).get(CPU, 0.0)))
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            self.reasons[name] = report.longrepr[2].removeprefix("Skipped: ")

    def outcome(self, scenario: Scenario) -> Outcome:
        """What became of the tests of one scenario."""
        names = [name for name in self.results if scenario.has(name)]
        return Outcome(
            scenario,
            sum(self.results[name] == "passed" for name in names),
            sum(self.results[name] == "skipped" for name in names),
            [name for name in names if self.results[name] == "failed"],
            sum(self.seconds[name] for name in names),
            sum(self.cpu.get(name, 0.0) for name in names),
            sorted({self.reasons[name] for name in names if name in self.reasons}),
        )


def busy_seconds() -> float:
    """What all processors of this machine have done so far; 0 where it does not say."""
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq = map(int, words[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


class Run(NamedTuple):
    """What became of all of them.

    Attributes:
        code: The exit code of pytest.
        outcomes: One for each scenario.
        seconds: On the wall.
        others: How many processors others kept busy meanwhile.
    """

    code: int
    outcomes: list[Outcome]
    seconds: float
    others: float


def run(chosen: Sequence[Scenario], extra: Sequence[str]) -> Run:
    """Run the tests of these scenarios, each once, and say what became of them."""
    os.chdir(ROOT)
    files = sorted({file for one in chosen for file in one.files if (ROOT / file).exists()})
    os.environ[CHOSEN] = json.dumps([one.name for one in chosen])
    watch = Watch()
    begun, busy, used = time.monotonic(), busy_seconds(), cpu_seconds()
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.faults.scenarios"]
    options += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    code = pytest.main([*options, *extra, *files], plugins=[watch])
    seconds = time.monotonic() - begun
    others = (busy_seconds() - busy - (cpu_seconds() - used)) / seconds
    return Run(int(code), [watch.outcome(one) for one in chosen], seconds, max(0.0, others))


def page(done: Run) -> str:
    """The report, as a page of the documentation."""
    outcomes = done.outcomes
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    machine = f"{platform.system()} {platform.machine()} with {os.cpu_count()} processors"
    told = [f"Last run: {today}, Python {platform.python_version()} on {machine}:"]
    told += [f"{len(outcomes)} scenarios in {done.seconds:.0f} seconds, while others kept"]
    told += [f"{done.others:.1f} processors busy."]
    if not any(one.passed for one in outcomes):
        told = ["No whole run is kept yet: `make faults FAULTS_ARGS=--docs` writes it here."]
    lines = [
        "# Faults",
        "",
        "What `make faults` breaks, what must hold all the same, and what its last run found. A",
        "scenario is a row in `tests/faults/scenarios.toml`; its tests use real servers, processes",
        "and networks, and together they take less than a minute (where others keep more than",
        f"{QUIET} processors busy: less than a minute of CPU time, of the tests and of the",
        "processes that they start and wait for). Servers that tests share are started before, and",
        "not counted. Beside them stand a model of the protocol that",
        "[Spin](https://spinroot.com) searches, `models/claim_protocol.pml`, and",
        "[mutants](mutants.md), which show that the tests would notice. The same faults for your",
        "own receiver and store: [The fault laboratory](../howto/fault-laboratory.md).",
        "",
        *told,
        "",
        "| fault | what must hold | tests | passed | skipped | seconds | CPU | result |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    for one in outcomes:
        tests = "<br>".join(f"`{file.removeprefix('tests/')}`" for file in one.scenario.files)
        lines.append(
            f"| {one.scenario.name} | {one.scenario.promise} | {tests} | {one.passed} |"
            f" {one.skipped} | {one.seconds:.1f} | {one.cpu:.1f} | {one.result(done.others)} |"
        )
    reasons = sorted({reason for one in outcomes for reason in one.reasons})
    if reasons:
        lines += ["", "Skipped, because:", "", *(f"- {reason}" for reason in reasons)]
    return "\n".join(lines) + "\n"


def tell(done: Run) -> int:
    """Print what became of each; gives how many do not hold."""
    bad = 0
    print()
    for one in done.outcomes:
        result = one.result(done.others)
        bad += result not in ("passed", "skipped")
        times = f"{one.seconds:6.1f} s {one.cpu:6.1f} s of CPU"
        print(f"{result:<9} {times} {one.passed:>4} tests  {one.scenario.name}")
        for failed in one.failed:
            print(f"          {failed}")
    held = len(done.outcomes) - bad
    print(f"{held} of {len(done.outcomes)} scenarios hold, in {done.seconds:.0f} s,", end=" ")
    print(f"while others kept {done.others:.1f} processors busy")
    return bad


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print a table, and exit with 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--only", action="append", metavar="NAME", help="only this scenario")
    parser.add_argument("--docs", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--json", metavar="FILE", help="write what was found")
    arguments, extra = parser.parse_known_args(argv)
    table = scenarios()
    unknown = set(arguments.only or ()) - {one.name for one in table}
    if unknown:
        parser.error(f"no scenario {', '.join(sorted(unknown))}")
    chosen = [one for one in table if not arguments.only or one.name in arguments.only]
    done = run(chosen, extra)
    bad = tell(done)
    if arguments.json:
        found: list[dict[str, Any]] = [
            {
                "name": one.scenario.name,
                "result": one.result(done.others),
                "seconds": round(one.seconds, 2),
                "cpu": round(one.cpu, 2),
            }
            for one in done.outcomes
        ]
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if arguments.docs:
        PAGE.write_text(page(done), encoding="utf-8")
    return 1 if done.code or bad else 0


if __name__ == "__main__":
    sys.exit(main())
