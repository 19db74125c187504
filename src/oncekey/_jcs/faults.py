"""Faults: found by a second walk, so that a good value never pays for its path."""

from __future__ import annotations

import json
import re
from math import isfinite
from typing import Any, TypeAlias, cast

from oncekey._jcs.writer import MAX_DEPTH, MAX_INT, UnfitError, plain, type_of
from oncekey.errors import CanonicalJSONError

# The link of the value's holder, its place there, and the holder itself.
_Link: TypeAlias = tuple["_Link | None", "str | int", object]
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*").fullmatch
TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels (flatten the value)"
_CYCLE = "the value holds itself (break the cycle)"
_LONE_SURROGATE = "holds a lone surrogate, which UTF-8 can't express (repair the text)"


class Refused:
    """Stands in a parsed tree for a literal that must not be accepted."""

    def __init__(self, fault: str) -> None:
        self.fault = fault


CONTAINERS: tuple[object, ...] = (dict, list, tuple)
_BUILTINS = (*CONTAINERS, str, int, float, bool, type(None), Refused)


def explain(root: object) -> CanonicalJSONError:
    """Return the error for a value that the writer refused."""
    found = first_fault(root)
    # Nothing wrong with the value itself: this thread's stack was almost used up already.
    return found or CanonicalJSONError("too deep for the stack that is left (flatten the value)")


def first_fault(root: object, *, any_int: bool = False) -> CanonicalJSONError | None:
    """Find the first fault in document order, without recursion."""
    todo: list[tuple[Any, _Link | None, int]] = [(root, None, MAX_DEPTH)]
    while todo:
        value, link, room = todo.pop()
        children: list[tuple[str | int, Any]] = []
        try:
            value = value if type(value) in _BUILTINS else plain(value)
            fault = _fault_of(value, any_int=any_int)
            if fault is None and type(value) in CONTAINERS:
                if not room:
                    fault = _CYCLE if _is_cyclic(link) else TOO_DEEP
                children = _children(value)
        except UnfitError:
            fault = _foreign_type(value)
        if fault is not None:
            return CanonicalJSONError(fault, _render(link))
        for place, child in reversed(children):
            todo.append((child, (link, place, value), room - 1))
    return None


def _children(holder: Any) -> list[tuple[str | int, Any]]:
    if type(holder) is dict:
        return list(cast("dict[str, Any]", holder).items())
    return list(enumerate(cast("list[Any]", holder)))


def _fault_of(value: Any, *, any_int: bool) -> str | None:
    kind = type_of(value)
    if kind is Refused:
        return cast("Refused", value).fault
    if kind is str and not _is_unicode(value):
        return f"the string {_LONE_SURROGATE}"
    if kind is int and not any_int and not -MAX_INT <= value <= MAX_INT:
        return "an integer past 2**53-1 would lose digits as a JSON number (send it as a string)"
    if kind is float and not isfinite(value):
        return f"{value!r} is no JSON number (send null or a string, or leave it out)"
    if kind is dict:
        for key in cast("dict[Any, Any]", value):
            if not isinstance(key, str):
                return f"an object key is of type {type(key).__name__} (make it a string)"
            if not _is_unicode(key):
                return f"an object key {_LONE_SURROGATE}"
    return None


def _foreign_type(value: object) -> str:
    hint = "convert it to a dict, list, string or number first"
    if type(value).__name__ in {"Decimal", "UUID", "date", "datetime", "time", "bytes"}:
        hint = "send it as a string"
    return f"{type(value).__name__} is no JSON type ({hint})"


def _is_unicode(text: str) -> bool:
    try:
        str.encode(text)
    except UnicodeEncodeError:
        return False
    return True


def _is_cyclic(link: _Link | None) -> bool:
    seen: set[int] = set()
    while link is not None:
        link, _, holder = link
        if id(holder) in seen:
            return True
        seen.add(id(holder))
    return False


def _render(link: _Link | None) -> str:
    places: list[str] = []
    while link is not None:
        link, place, _ = link
        if isinstance(place, int):
            places.append(f"[{place}]")
        else:
            short = place if len(place) <= 64 else place[:63] + "\u2026"
            places.append(f".{short}" if _NAME(short) else f"[{json.dumps(short)}]")
    if len(places) > 40:
        places[20:-20] = ["\u2026"]
    return "$" + "".join(reversed(places))
