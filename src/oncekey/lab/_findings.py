"""What experiments found: invariants, each with what was seen; and the report on all of them."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from oncekey.testing import Answer

__all__ = ["Finding", "Invariant", "LabReport"]


@dataclass(frozen=True, slots=True)
class Invariant:
    """Something that must hold.

    Attributes:
        statement: What.
        held: Whether it did.
        seen: What was seen, in numbers.
    """

    statement: str
    held: bool
    seen: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What one experiment found.

    Attributes:
        name: Which experiment.
        fault: What was broken.
        invariants: What had to hold.
        answers: Every answer of the receiver, for those who look closer.
        seconds: How long it took.
        skipped: Why it was not done; empty if it was.
        error: What kept it from being done; empty if nothing did.
    """

    name: str
    fault: str
    invariants: Sequence[Invariant] = ()
    answers: Sequence[Answer] = field(default=(), repr=False)
    seconds: float = 0.0
    skipped: str = ""
    error: str = ""

    @property
    def result(self) -> Literal["held", "broken", "skipped", "error"]:
        """One word."""
        if self.skipped:
            return "skipped"
        if self.error:
            return "error"
        return "held" if all(one.held for one in self.invariants) else "broken"

    @property
    def statuses(self) -> dict[str, int]:
        """How often each status came."""
        return dict(sorted(Counter(str(one.status or "none") for one in self.answers).items()))

    def percentile(self, part: float) -> float:
        """The seconds within which this part of the answers came."""
        times = sorted(one.seconds for one in self.answers)
        return times[min(len(times) - 1, int(part * len(times)))] if times else 0.0


@dataclass(frozen=True, slots=True)
class LabReport:
    """What all experiments found. ``str(report)`` is for people.

    Attributes:
        target: What was tested, without secrets.
        findings: One for each experiment.
        seed: Gives the same order of deliveries again.
    """

    target: str
    findings: Sequence[Finding]
    seed: int = 0

    @property
    def ok(self) -> bool:
        """Whether everything that was tried held."""
        return all(one.result in ("held", "skipped") for one in self.findings)

    def check(self) -> LabReport:
        """Give the report back if everything held.

        Raises:
            AssertionError: Something did not; says what.
        """
        __tracebackhide__ = True
        if not self.ok:
            raise AssertionError(str(self))
        return self

    def __str__(self) -> str:
        lines = []
        for one in self.findings:
            lines.append(f"{one.result:<8} {one.seconds:6.1f} s  {one.name}: {one.fault}")
            if one.skipped or one.error:
                lines.append(f"         {one.skipped or one.error}")
            lines += [
                f"         {'+' if fact.held else '-'} {fact.statement}: {fact.seen}"
                for fact in one.invariants
            ]
        counts = Counter(one.result for one in self.findings)
        told = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
        return "\n".join([*lines, f"{self.target}: {told} (seed {self.seed})"])

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return {
            "ok": self.ok,
            "target": self.target,
            "seed": self.seed,
            "experiments": [
                {
                    "name": one.name,
                    "fault": one.fault,
                    "result": one.result,
                    "seconds": round(one.seconds, 3),
                    "reason": one.skipped or one.error,
                    "statuses": one.statuses,
                    "invariants": [
                        {"statement": fact.statement, "held": fact.held, "seen": fact.seen}
                        for fact in one.invariants
                    ],
                }
                for one in self.findings
            ],
        }

    def write_json(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write it as one page with charts, which needs nothing else."""
        from oncekey.lab._html import page

        Path(path).write_text(page(self), encoding="utf-8")

    def write_junit(self, path: str | os.PathLike[str]) -> None:
        """Write it as JUnit XML, with a test case for each invariant."""
        suites = ElementTree.Element("testsuites", name="oncekey lab")
        for one in self.findings:
            cases = one.invariants or [Invariant(one.fault, one.result == "held", one.error)]
            broken = sum(not fact.held for fact in one.invariants)
            suite = ElementTree.SubElement(
                suites,
                "testsuite",
                name=one.name,
                tests=str(len(cases)),
                failures=str(broken),
                errors=str(int(one.result == "error")),
                skipped=str(int(one.result == "skipped")),
                time=f"{one.seconds:.3f}",
            )
            for fact in cases:
                case = ElementTree.SubElement(
                    suite, "testcase", classname=f"lab.{one.name}", name=fact.statement
                )
                if one.skipped:
                    ElementTree.SubElement(case, "skipped", message=one.skipped)
                elif one.error:
                    ElementTree.SubElement(case, "error", message=one.error)
                elif not fact.held:
                    ElementTree.SubElement(case, "failure", message=fact.seen)
        text = ElementTree.tostring(suites, encoding="unicode", xml_declaration=True)
        Path(path).write_text(text + "\n", encoding="utf-8")
