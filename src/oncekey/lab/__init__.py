"""The fault laboratory: experiments on your own receiver and your own store, with a report.

Each experiment breaks one thing (a network, a worker, a clock, a store) while deliveries are made,
and says what must hold all the same, and what was seen. ``oncekey lab`` is the same from a shell.
"""

from __future__ import annotations

from oncekey.lab._bench import Lab
from oncekey.lab._findings import Finding, Invariant, LabReport

__all__ = ["Finding", "Invariant", "Lab", "LabReport"]
