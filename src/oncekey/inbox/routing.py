"""Which targets an event goes to: by its type and by what its body holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from oncekey.errors import PolicyError
from oncekey.inbox.models import Route
from oncekey.inbox.policy import TargetPolicy

__all__ = ["Router"]

_STEP = re.compile(r"\.([A-Za-z_][\w-]*)|\[(\d{1,9})\]|\[\"([^\"]*)\"\]")
_RULE = re.compile(r"\s*(\$\S*?)\s*(==|!=)\s*(.+?)\s*")
_NOTHING: Final = object()


class Router:
    """Finds an event's routes. Everything is read once, when it is made.

    Args:
        policies: The targets by name.

    Raises:
        PolicyError: A path or a rule can't be read; says which and how to write it.
    """

    def __init__(self, policies: Mapping[str, TargetPolicy]) -> None:
        self._rules = {name: _Rules.of(name, policy) for name, policy in policies.items()}

    def routes(self, names: Iterable[str], type: str, body: bytes) -> tuple[Route, ...]:
        """The routes of an event to those of the named targets that want it.

        Raises:
            PolicyError: A target is not known.
        """
        found = []
        parsed: Any = _NOTHING
        for name in names:
            rules = self._rules.get(name)
            if rules is None:
                raise PolicyError(f"there is no target {name!r}: add it, or correct the name")
            if rules.looks_inside and parsed is _NOTHING:
                parsed = _parsed(body)
            if rules.wants(type, parsed):
                found.append(Route(name, rules.order_key(parsed)))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class _Rules:
    types: tuple[str, ...]
    where: tuple[tuple[tuple[str | int, ...], bool, Any], ...]
    order_by: tuple[str | int, ...] | None

    @classmethod
    def of(cls, name: str, policy: TargetPolicy) -> _Rules:
        try:
            where = tuple(_rule(text) for text in policy.where)
            order_by = None if policy.order_by is None else _path(policy.order_by)
        except PolicyError as error:
            raise PolicyError(f"target {name!r}: {error}") from None
        return cls(policy.types, where, order_by)

    @property
    def looks_inside(self) -> bool:
        return bool(self.where) or self.order_by is not None

    def wants(self, type: str, body: Any) -> bool:
        if self.types and not any(_fits(pattern, type) for pattern in self.types):
            return False
        return all(
            same is (_dumped(_at(body, path)) == wanted) for path, same, wanted in self.where
        )

    def order_key(self, body: Any) -> str | None:
        if self.order_by is None:
            return None
        value = _at(body, self.order_by)
        return None if value is _NOTHING or value is None else _dumped(value)[:512]


def _fits(pattern: str, type: str) -> bool:
    return type.startswith(pattern[:-1]) if pattern.endswith("*") else type == pattern


def _rule(text: str) -> tuple[tuple[str | int, ...], bool, Any]:
    read = _RULE.fullmatch(text)
    if read is not None:
        try:
            wanted = json.loads(read.group(3))
        except ValueError:
            pass
        else:
            return _path(read.group(1)), read.group(2) == "==", _dumped(wanted)
    raise PolicyError(
        f"the rule {text!r} can't be read: write $.path.to == value, with the value in JSON, such "
        'as $.data.livemode == true or $.kind != "test"'
    )


def _path(text: str) -> tuple[str | int, ...]:
    steps: list[str | int] = []
    place = 1
    while place < len(text):
        read = _STEP.match(text, place)
        if read is None:
            break
        name, index, quoted = read.groups()
        steps.append(int(index) if index else name or quoted or "")
        place = read.end()
    if not text.startswith("$") or place < len(text):
        raise PolicyError(f'the path {text!r} can\'t be read: write $.a.b, $.a[0] or $.a["b c"]')
    return tuple(steps)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None  # no JSON: no path leads anywhere in it


def _at(value: Any, path: tuple[str | int, ...]) -> Any:
    found = value
    for step in path:
        if isinstance(step, int):
            if not isinstance(found, list) or step >= len(found):
                return _NOTHING
            found = found[step]
        else:
            if not isinstance(found, dict) or step not in found:
                return _NOTHING
            found = found[step]
    return found


def _dumped(value: Any) -> str:
    return "" if value is _NOTHING else json.dumps(value, sort_keys=True)
