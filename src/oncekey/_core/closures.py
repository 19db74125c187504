"""What a function has around it: functions of one code may do different things, under one name."""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import enum
import hashlib
import inspect
import types
import uuid
import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from oncekey._core.fingerprint import form

__all__ = ["Around", "SharedKeysWarning", "around", "differs", "may_differ"]

_PLAIN: Final = (str, bytes, int, float, type(None), decimal.Decimal, uuid.UUID, dt.date)
_MANY: Final = 1000
_STEPS: Final = 3  # into functions that a function has around it, and those around these


class SharedKeysWarning(UserWarning):
    """Functions that may do different things have one name, and so share their keys."""


class _Kept(NamedTuple):
    """One value, so that another can be compared with it later; it is not kept alive."""

    kind: str
    mark: Any = None  # equal marks: the same; others of a kind that is certain: not
    certain: bool = False
    alive: Callable[[], Any] | None = None
    inside: Around = {}
    place: int = 0  # of what no weak reference can be made to


Around = dict[str, _Kept]
"""What a function has around it, by the names of its variables."""


def around(function: Callable[..., Any], steps: int = _STEPS) -> Around:
    """What ``function`` has around it now."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    found: Around = {}
    for name, cell in zip(code.co_freevars if code else (), cells or (), strict=False):
        with contextlib.suppress(ValueError):  # not bound yet, as its own name is
            found[name] = _kept(cell.cell_contents, steps)
    return found


def differs(one: Around, other: Around) -> list[str]:
    """The variables that are certainly not the same: numbers, texts, other functions, classes."""
    return [name for name, kept in one.items() if name in other and _differ(kept, other[name])]


def may_differ(one: Around, other: Around) -> list[str]:
    """The variables that may be the same or not: objects, such as clients of two providers."""
    return [name for name in one if name in other and not _same(one[name], other[name])]


def _kept(value: Any, steps: int) -> _Kept:
    if isinstance(value, types.MethodType):
        inner = _kept(value.__func__, steps)
        return inner._replace(inside={**inner.inside, "self": _kept(value.__self__, steps)})
    if inspect.isroutine(value) or isinstance(value, type):
        value = value if isinstance(value, type) else inspect.unwrap(value)
        named = (getattr(value, "__module__", None), getattr(value, "__qualname__", None))
        code = getattr(value, "__code__", None)
        # Code that was loaded again may have changed; a lambda has no name of its own.
        certain = "<lambda>" not in str(named[1])
        inside = around(value, steps - 1) if code is not None and steps else {}
        return _Kept("code", (named, code), certain, inside=inside)
    if isinstance(value, types.ModuleType):
        return _Kept("code", ((value.__name__, None), None), certain=True)
    if isinstance(value, enum.Enum):
        return _Kept("plain", (type(value).__qualname__, value.name), certain=True)
    if isinstance(value, _PLAIN):
        return _Kept("plain", (type(value).__qualname__, value), certain=True)
    mark = None
    with contextlib.suppress(Exception):  # it is asked for its values, which may be anything
        if not hasattr(value, "__len__") or len(value) <= _MANY:
            mark = hashlib.sha256(form(value)).digest()
    if mark is not None and isinstance(value, tuple):
        return _Kept("plain", ("tuple", mark), certain=True)
    try:
        return _Kept("object", mark, alive=weakref.ref(value))
    except TypeError:
        return _Kept("object", mark, place=id(value))


def _differ(one: _Kept, other: _Kept) -> bool:
    if not one.certain or not other.certain:
        return False
    if one.kind == other.kind == "code":
        return bool(one.mark[0] != other.mark[0] or differs(one.inside, other.inside))
    return one.kind != other.kind or bool(one.mark != other.mark)


def _same(one: _Kept, other: _Kept) -> bool:
    if one.kind != other.kind:
        return False
    if one.kind == "object":
        if one.mark is not None and one.mark == other.mark:
            return True
        if one.alive is None or other.alive is None:
            return one.place == other.place
        was, now = one.alive(), other.alive()
        with contextlib.suppress(Exception):  # an array has no one answer
            return was is not None and (was is now or bool(was == now))
        return False
    return bool(one.mark == other.mark) and not may_differ(one.inside, other.inside)
