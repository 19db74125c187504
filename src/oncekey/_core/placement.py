"""Whether a guard stands where it guards nothing: above a decorator that has the function already.

A route or task decorator keeps the function that it gets, and calls that one. A guard that is put
around it afterwards is never asked.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

from oncekey.errors import BackendMismatchError, PolicyError

__all__ = ["FRESH", "UnguardedWarning", "check_placed", "refuse_generators", "users_level"]

# Packages that call what is registered with them: web frameworks, task queues, schedulers, tools.
# fmt: off
_CALLERS: Final = frozenset((
    "aiohttp", "apscheduler", "arq", "blacksheep", "bottle", "celery", "click", "dramatiq",
    "falcon", "fastapi", "fastmcp", "faust", "flask", "huey", "litestar", "mcp", "ninja",
    "prefect", "procrastinate", "quart", "robyn", "rq", "sanic", "starlette", "taskiq",
    "tornado", "typer",
))
# fmt: on
_QUEUED: Final = ("delay", "apply_async", "send_with_options", "kiq", "defer")
_CARRIERS: Final = (dict, list, tuple, set, frozenset, types.CellType, types.MethodType)
_DESCRIPTORS: Final = (staticmethod, classmethod, property, functools.cached_property)
_STEPS: Final = 5  # from a function over lists and dicts to whoever has them
_MANY: Final = 200


# Code that was looked for and found nowhere: looking goes over everything that the process has, so
# that a function which is made or guarded again and again must not cost it each time.
_placed: Final[weakref.WeakSet[types.CodeType]] = weakref.WeakSet()


class UnguardedWarning(UserWarning):
    """Something has a function already that is guarded only now, and would call it unguarded."""


def users_level() -> int:
    """The ``stacklevel`` of the first caller that is not in this library."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("oncekey."):
        frame, level = frame.f_back, level + 1
    return level


def refuse_generators(function: Callable[..., Any]) -> None:
    """Refuse a function whose values come one by one.

    Raises:
        BackendMismatchError: It is one.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise BackendMismatchError(
            f"{function.__qualname__} is a generator, whose values can't be replayed: return a "
            "list of them"
        )


class _Probe:
    def count(self, function: Callable[..., Any]) -> int:
        return sys.getrefcount(function)


def _calibrated() -> int:
    """How many references a function has that nobody but its decorator knows.

    As seen from a method that a decorator calls, one that keeps the function in its closure.
    """
    probe = _Probe()

    def decorate(function: Callable[..., Any]) -> Any:
        found = probe.count(function)
        return found, lambda: function

    @decorate
    def fresh() -> None: ...

    return int(fresh[0])


FRESH: Final = _calibrated() if hasattr(sys, "getrefcount") else 0


def check_callable(function: Any) -> None:
    """Refuse what is no plain function, or gives its values one by one.

    Raises:
        PolicyError: It is a class, a property or the like.
        BackendMismatchError: It is a generator.
    """
    _refuse_others(function)
    refuse_generators(function)


def _refuse_others(function: Any) -> str:
    """Raise for what is no function; gives the name of one."""
    name = getattr(function, "__qualname__", type(function).__name__)
    if isinstance(function, type):
        raise PolicyError(f"{name} is a class: guard its methods, or a function that makes one")
    if isinstance(function, _DESCRIPTORS) or not callable(function):
        raise PolicyError(
            f"a {type(function).__name__} can't be guarded: put @{type(function).__name__} above "
            "the guard, and the guard next to the function"
        )
    return name


def check_placed(function: Any, known: bool) -> None:
    """Refuse what can't be guarded, or would not be, from here.

    Args:
        function: What is decorated.
        known: Somebody else may have it, so look who: that takes milliseconds.

    Raises:
        PolicyError: It is no function, or something is going to call it unguarded.
    """
    name = _refuse_others(function)
    if _is_callers(type(function)) or any(hasattr(function, one) for one in _QUEUED):
        raise PolicyError(
            f"{name} is a task or a handler of a framework already, which would run it unguarded: "
            "put the guard below that decorator, next to the function"
        )
    if known and isinstance(function, types.FunctionType) and function.__code__ not in _placed:
        _refuse_registered(function, name)


def _is_callers(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] in _CALLERS for base in kind.__mro__)


def _refuse_registered(function: types.FunctionType, name: str) -> None:
    seen = _Seen(function)
    owner = next((one for one in seen.holders() if one), None)
    if owner is not None:
        raise PolicyError(
            f"{name} was registered with {owner} before it is guarded here, and would be called "
            f"unguarded: put the guard below the decorator of {owner}, next to the function"
        )
    if seen.kept and not seen.bound:
        warnings.warn(
            f"{name} is guarded only now, and a decorator below has put it into a {seen.kept}: "
            "calls from there are not guarded. Put the guard below that decorator, next to the "
            "function; if nothing calls it from there, filter oncekey.guard.UnguardedWarning",
            UnguardedWarning,
            stacklevel=users_level(),
        )
    else:
        _placed.add(function.__code__)


class _Seen:
    """Who has a function, as the garbage collector sees it.

    Attributes:
        bound: It stands under its own name somewhere: it was defined before, and is decorated by
            a plain call, as in ``guarded = once(key="id")(charge)``.
        kept: In what else it is, of whatever type.
    """

    __slots__ = ("bound", "function", "kept")

    def __init__(self, function: types.FunctionType) -> None:
        self.function = function
        self.bound = False
        self.kept = ""

    def holders(self) -> Iterator[str]:
        """Packages that have it and call what they have. Empty: something else."""
        skip = self._stack() | {id(self)}
        skip |= {id(cell) for cell in self.function.__closure__ or ()}
        level: list[Any] = [self.function]
        for step in range(_STEPS):
            found = gc.get_referrers(*level)
            skip |= {id(level), id(found)}
            above: list[Any] = []
            for one in found:
                if id(one) in skip or isinstance(one, (type, types.ModuleType, types.FrameType)):
                    continue
                skip.add(id(one))
                if type(one) is dict and ("__builtins__" in one or "__module__" in one):
                    self._found_in(one)  # a module's or a class's own names
                elif isinstance(one, _DESCRIPTORS):
                    self.bound = True  # a method of a class, that is decorated from outside
                elif isinstance(one, types.FunctionType):  # of a closure
                    yield _package(one.__module__ or "")
                elif isinstance(one, _CARRIERS):
                    above.append(one)
                    if step == 0 and not isinstance(one, (tuple, types.CellType)):
                        self.kept = self.kept or str(type(one).__name__)
                else:
                    if step == 0:
                        self.kept = self.kept or str(type(one).__name__)
                    yield next(filter(None, map(_package, _modules(type(one)))), "")
            level = above
            if not level or len(level) > _MANY:
                return

    def _stack(self) -> set[int]:
        """The names of the calls that are running now."""
        ids, frame = set(), sys._getframe(2)
        while frame is not None:
            names = frame.f_locals
            if not frame.f_globals.get("__name__", "").startswith("oncekey."):
                self._found_in(names)
            ids.add(id(names))
            frame = frame.f_back  # type: ignore[assignment]
        return ids

    def _found_in(self, names: Any) -> None:
        self.bound = self.bound or names.get(self.function.__name__) is self.function


def _modules(kind: type) -> Iterator[str]:
    return (base.__module__ for base in kind.__mro__)


def _package(module: str) -> str:
    top = module.partition(".")[0]
    return top if top in _CALLERS else ""
