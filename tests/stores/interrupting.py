"""Raises an exception in a thread wherever CPython could: see ``Interrupt``."""

from __future__ import annotations

import dis
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import CodeType, FrameType, ModuleType
from typing import Any, ParamSpec

from tests.scale import LIGHT

__all__ = ["Interrupt", "SoftLimit", "every_point", "in_own_thread"]

P = ParamSpec("P")

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
        at = frame.f_lasti
        steps = _steps(frame.f_code)
        if event == "opcode":
            before, self._before[frame] = self._before.get(frame, at), at
            # CPython raises it in the step that looked, which may be the last of a ``try``.
            looked = (
                steps.looks[before >> 1] and steps.handler[before >> 1] == steps.handler[at >> 1]
            )
        else:
            looked = event == "line" and not steps.leaves_with[at >> 1]
        if looked:
            self._left -= 1
            if self._left == 0:
                self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno} ({event})"
                self._before.clear()
                raise self.error
        return self._step


class _Steps:
    """What is known of each step of some code: worked out once, asked for by the million."""

    def __init__(self, code: CodeType) -> None:
        self.code = code  # so that its id stays its own
        text = code.co_code
        places = range(0, len(text), 2)
        table = dis._parse_exception_table(code)  # type: ignore[attr-defined]
        self.looks = [_looks(text, at) for at in places]
        # Where an exception at this step is handled.
        self.handler = [
            next((entry.target for entry in table if entry.start <= at < entry.end), None)
            for at in places
        ]
        self.leaves_with = [_leaves_with(text, code.co_consts, at) for at in places]


_known: dict[int, _Steps] = {}


def _steps(code: CodeType) -> _Steps:
    found = _known.get(id(code))
    if found is None:
        found = _known[id(code)] = _Steps(code)
    return found


def _looks(text: bytes, at: int) -> bool:
    name = dis.opname[text[at]]
    if name.endswith("_NO_INTERRUPT") or (name == "RESUME" and text[at + 1] & 3 >= 2):
        return False  # inside a ``yield from``
    return name.startswith(_LOOKS)


def _leaves_with(text: bytes, values: tuple[Any, ...], at: int) -> bool:
    """Whether ``__exit__(None, None, None)`` is what comes next."""
    if dis.opname[text[at]] in ("SWAP", "NOP"):  # with a value to return
        at += 2
    steps, consts = text[at : at + 6 : 2], text[at + 1 : at + 7 : 2]
    return steps == _NOTHING and all(values[const] is None for const in consts)


def every_point(*modules: ModuleType, stride: int = 1) -> Iterator[Interrupt]:
    """An ``Interrupt`` for every point of a run: until a run has gone by without one.

    Of the two kinds in turn: lines that do something have several points. Every third point, where
    another version of Python takes them all.
    """
    for number in range(1, LIMIT, stride * (3 if LIGHT else 1)):
        interrupt = Interrupt(modules, number, SoftLimit() if number % 2 else KeyboardInterrupt())
        yield interrupt
        if not interrupt.where:
            return
    raise AssertionError("a run without an end")


def in_own_thread(test: Callable[P, None]) -> Callable[P, None]:
    """Run a test in a thread that ends with it.

    What an interrupt leaves in its thread - a context variable, an exception that a traced step
    could not put away - is nothing that other tests should find. What they left to garbage
    collection is collected before: not in the midst of this one, where it would be interrupted.
    """

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        gc.collect()
        with ThreadPoolExecutor(1) as thread:
            thread.submit(test, *args, **kwargs).result()

    return run
