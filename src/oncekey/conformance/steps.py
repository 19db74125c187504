"""What a check may ask for: an operation of the store, time to pass, or many operations at once."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from oncekey._core.drive import Op

__all__ = ["Can", "Check", "Elapse", "Race", "Step"]


class Elapse:
    """Let time pass on the store's clock."""

    def __init__(self, ms: int) -> None:
        self.ms = ms


class Race:
    """Do many operations at the same time; the results come back in order."""

    def __init__(self, ops: list[Op]) -> None:
        self.ops = ops


class Can:
    """Ask whether the store is one of these classes: what not every store has to be."""

    def __init__(self, *kinds: type) -> None:
        self.kinds = kinds


Step = Op | Elapse | Race | Can
Check = Callable[[], Generator[Step, Any, None]]
