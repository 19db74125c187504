"""Raises an exception in a thread wherever CPython could: see ``Interrupt``."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any

__all__ = ["Interrupt", "SoftLimit", "every_point"]

LIMIT = 20_000  # a run that has more points than this has no end


class SoftLimit(Exception):
    """As a task queue's time limit raises it in the middle of a task: no BaseException."""


# After these CPython looks whether a signal has come, or an exception from another thread.
_LOOKS = ("CALL", "JUMP_BACKWARD", "POP_JUMP_BACKWARD", "RESUME")
_NOTHING = bytes([dis.opmap["LOAD_CONST"]] * 3)


class Interrupt:
    """Raises ``error`` once in this thread, at the n-th point of some modules where it could come.

    These are the steps after each call and each turn of a loop, and the beginning of each line.
    Only where a ``with`` block ends well no interrupt can come between its last step and the
    ``__exit__`` of its lock: CPython looks at neither.
    """

    def __init__(self, modules: tuple[ModuleType, ...], number: int, error: BaseException) -> None:
        self._files = {module.__file__ for module in modules}
        self._left = number
        self.error = error
        self._before: dict[FrameType, int] = {}
        self.where = ""

    def __enter__(self) -> None:
        sys.settrace(self._enter)

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)
        self._before.clear()

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        code, at = frame.f_code, frame.f_lasti
        if event == "opcode":
            before, self._before[frame] = self._before.get(frame, at), at
            looked = _looks(code, before)
            # CPython raises it in the step that looked, which may be the last of a ``try``.
            looked = looked and _handler(code, before) == _handler(code, at)
        else:
            looked = event == "line" and not _leaves_with(code, at)
        if looked:
            self._left -= 1
            if self._left == 0:
                self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno} ({event})"
                self._before.clear()
                raise self.error
        return self._step


def _looks(code: CodeType, at: int) -> bool:
    name = dis.opname[code.co_code[at]]
    if name.endswith("_NO_INTERRUPT") or (name == "RESUME" and code.co_code[at + 1] & 3 >= 2):
        return False  # inside a ``yield from``
    return name.startswith(_LOOKS)


@functools.cache
def _handler(code: CodeType, at: int) -> int | None:
    """Where an exception at this step is handled."""
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        if entry.start <= at < entry.end:
            return int(entry.target)
    return None


def _leaves_with(code: CodeType, at: int) -> bool:
    """Whether ``__exit__(None, None, None)`` is what comes next."""
    if dis.opname[code.co_code[at]] in ("SWAP", "NOP"):  # with a value to return
        at += 2
    steps, consts = code.co_code[at : at + 6 : 2], code.co_code[at + 1 : at + 7 : 2]
    return steps == _NOTHING and all(code.co_consts[const] is None for const in consts)


def every_point(*modules: ModuleType, stride: int = 1) -> Iterator[Interrupt]:
    """An ``Interrupt`` for every point of a run: until a run has gone by without one.

    Of the two kinds in turn: lines that do something have several points.
    """
    for number in range(1, LIMIT, stride):
        interrupt = Interrupt(modules, number, SoftLimit() if number % 2 else KeyboardInterrupt())
        yield interrupt
        if not interrupt.where:
            return
    raise AssertionError("a run without an end")
