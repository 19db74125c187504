"""What a check found, and what it could not look at."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Finding", "Report", "Severity"]


class Severity(StrEnum):
    """How bad it is."""

    ERROR = "error"  # work is lost or done twice, or strangers get in
    WARNING = "warning"  # that can happen on a bad day, or it gets slow


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is set up wrongly.

    Attributes:
        check: Which check found it, such as ``durability``.
        severity: How bad it is.
        evidence: What was seen.
        fix: What to do.
    """

    check: str
    severity: Severity
    evidence: str
    fix: str


@dataclass(slots=True)
class Report:
    """What was found about one target.

    Attributes:
        target: What was looked at, without secrets.
        findings: What is wrong. Empty: nothing was found.
        passed: The checks that found nothing.
        skipped: The checks that could not look, and why.
    """

    target: str
    findings: list[Finding] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def judge(
        self, check: str, severity: Severity | str, wrong: bool, evidence: str, fix: str
    ) -> bool:
        """Note a finding if something is ``wrong``, else that the check passed. Gives ``wrong``."""
        if wrong:
            self.findings.append(Finding(check, Severity(severity), evidence, fix))
            if check in self.passed:
                self.passed.remove(check)
        elif check not in self.passed and not any(one.check == check for one in self.findings):
            self.passed.append(check)
        return wrong
