"""What a check may ask for: an operation of the store, time to pass, or many operations at once."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from oncekey._core.drive import Op

__all__ = ["Check", "Elapse", "Race", "Step"]


class Elapse:
    """Let time pass on the store's clock."""

    def __init__(self, ms: int) -> None:
        self.ms = ms


class Race:
    """Do many operations at the same time; the results come back in order."""

    def __init__(self, ops: list[Op]) -> None:
        self.ops = ops


Step = Op | Elapse | Race
Check = Callable[[], Generator[Step, Any, None]]
