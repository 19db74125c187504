"""What is wrong with a config: every fault at once, each with its place and what to write."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from oncekey.errors import PolicyError

__all__ = ["ConfigError", "Fault", "Faults", "lines_of", "nearest"]

_HEADER: Final = re.compile(r"\s*\[\[?\s*(?P<path>[^\[\]#]+?)\s*\]\]?\s*(?:#.*)?$")
_PART: Final = r"(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')"
_KEY: Final = re.compile(rf"\s*(?P<path>{_PART}(?:\s*\.\s*{_PART})*)\s*=")
_SHOWN: Final = 12


class Fault(NamedTuple):
    """One thing that is wrong."""

    key: str  # such as "sources.shop.provider"; empty: the file as a whole
    told: str
    fix: str
    line: int | None = None

    def text(self, file: str) -> str:
        """As it is printed: where, what, and what to do."""
        where = file if self.line is None else f"{file}:{self.line}"
        key = f" {self.key}:" if self.key else ""
        return f"{where}:{key} {self.told}. {self.fix}"


class ConfigError(PolicyError):
    """A config that can't be used. The message has a line for each fault.

    Attributes:
        faults: All of them, in the order of the file.
    """

    code = "INVALID_CONFIG"

    def __init__(self, file: str, faults: Iterable[Fault]) -> None:
        self.faults = sorted(faults, key=lambda fault: (fault.line is None, fault.line or 0))
        lines = [fault.text(file) for fault in self.faults]
        count = "1 fault" if len(lines) == 1 else f"{len(lines)} faults"
        super().__init__("\n  ".join([f"{count} in the config", *lines]))


class Faults:
    """Collects faults while a config is read."""

    def __init__(self, lines: dict[str, int]) -> None:
        self._lines = lines
        self.found: list[Fault] = []

    def add(self, key: str, told: str, fix: str) -> None:
        """Note one; its line is that of the key, or of the table that it is missing from."""
        at = key
        while at and at not in self._lines:
            at = at.rpartition(".")[0]
        self.found.append(Fault(key, told, fix, self._lines.get(at)))


def lines_of(text: str) -> dict[str, int]:
    """The line of each key and table of a TOML text, by its dotted path."""
    found: dict[str, int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = _parts(header["path"])
            found.setdefault(".".join(table), number)
        elif key := _KEY.match(line):
            found.setdefault(".".join((*table, *_parts(key["path"]))), number)
    return found


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in re.findall(_PART, path))


def nearest(name: str, known: Iterable[str]) -> str:
    """What to say of a name that nobody knows: the nearest known one, else all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, 1, 0.6)
    if near:
        return f"Did you mean {near[0]!r}?"
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return f"Known are {shown}" if names else "There is none yet"
