"""Counts what a call costs in a way that no other process can change: bytecodes and Python calls.

``spent(call)`` counts one call, ``hold(path, call, budgets)`` fails if it costs more than it may.
``PYTHONPATH=src python -m tests.core.test_budgets`` shows where it goes.
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, Coroutine
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest

__all__ = ["Spent", "awaited", "hold", "spent", "where"]

WARM_UPS = 20  # calls before those that count: caches are full, and code is specialised
TRIES = 9  # the cheapest counts: now and then a call also makes room, or reads a stock of ids anew


class Spent(NamedTuple):
    """What a call has cost: bytecodes that were run, and Python functions that were entered."""

    bytecodes: int
    calls: int


def awaited(make: Callable[[], Coroutine[Any, Any, Any]]) -> Callable[[], object]:
    """A coroutine that never waits as a plain call, so that no event loop is counted."""

    def call() -> object:
        try:
            make().send(None)
        except StopIteration as stop:
            return stop.value
        raise AssertionError("it waits")

    return call


def where(call: Callable[[], object]) -> dict[CodeType, Spent]:
    """What a call costs, function by function."""
    found: dict[CodeType, list[int]] = {}

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes = True
        counts = found.setdefault(frame.f_code, [0, 0])
        counts[0] += event == "opcode"
        counts[1] += event == "call"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    found.pop(where.__code__, None)
    return {code: Spent(*counts) for code, counts in found.items()}


def spent(call: Callable[[], object]) -> Spent:
    """What ``call`` costs once it is warm."""
    for _ in range(WARM_UPS):
        call()
    costs = [where(call).values() for _ in range(TRIES)]
    # Each by itself: a try with fewer bytecodes may be one with more calls.
    bytecodes = min(sum(c.bytecodes for c in cost) for cost in costs)
    return Spent(bytecodes, min(sum(c.calls for c in cost) for cost in costs))


def hold(path: str, call: Callable[[], object], budgets: dict[tuple[int, int], Spent]) -> None:
    """Fail, with the path's name, if ``call`` costs more than its budget for this Python."""
    version = sys.version_info[:2]
    if version not in budgets:
        pytest.skip(f"nobody has counted {path} on Python {version[0]}.{version[1]} yet")
    found = contextvars.Context().run(spent, call)  # inside no call of another test
    budget = budgets[version]
    fits = found.bytecodes <= budget.bytecodes and found.calls <= budget.calls
    assert fits, f"{path} costs {found}, more than its budget of {budget}"
