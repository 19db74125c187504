"""What commands print: JSON for programs, colour and progress for a terminal, else plain text."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, TextIO

from oncekey.errors import PolicyError

__all__ = ["CommandError", "Output", "add_json_option", "counted", "printable"]


class CommandError(PolicyError):
    """A command can't do what it was asked for, and its text says all that there is to say."""


def counted(number: int, one: str, many: str = "") -> str:
    """``1 target``, ``2 targets``."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, which every command has."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def printable(text: str) -> str:
    """Text on one line, with nothing in it that a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _console(stream: TextIO) -> Any:
    """The console of rich, where it is installed and a terminal wants it; else ``None``."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return None
    try:
        return import_module("rich.console").Console(file=stream, highlight=False, markup=False)
    except ModuleNotFoundError:  # the extra "cli" is for looks alone
        return None


class Output:
    """Where a command prints to.

    Args:
        arguments: Those of the command: ``json`` asks for JSON and nothing else.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.as_json: bool = arguments.json
        self._rich: Any = None if self.as_json else _console(sys.stdout)

    def json(self, value: Any) -> None:
        """One JSON document."""
        print(json.dumps(value, indent=2))

    def line(self, text: str = "", style: str = "") -> None:
        """A line; ``style`` is a colour of rich's, for terminals."""
        if self._rich is None:
            print(text)
        else:
            self._rich.print(text, style=style or None, soft_wrap=True)

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Rows in columns; those whose heading starts with ``>`` are aligned to the right."""
        names = [one.removeprefix(">") for one in headings]
        right = [one.startswith(">") for one in headings]
        if self._rich is not None:
            self._rich_table(names, right, rows)
            return
        lines = [names, *rows]
        widths = [max(len(line[place]) for line in lines) for place in range(len(names))]
        for line in lines:
            cells = [
                cell.rjust(width) if to_right else cell.ljust(width)
                for cell, width, to_right in zip(line, widths, right, strict=True)
            ]
            print("  ".join(cells).rstrip())

    def _rich_table(
        self, names: Sequence[str], right: Sequence[bool], rows: Sequence[Sequence[str]]
    ) -> None:
        table = import_module("rich.table").Table(box=None, pad_edge=False, header_style="bold")
        for name, to_right in zip(names, right, strict=True):
            table.add_column(name, justify="right" if to_right else "left", overflow="fold")
        text = import_module("rich.text").Text
        for row in rows:
            table.add_row(*map(text, row))
        self._rich.print(table)

    def pairs(self, pairs: dict[str, str]) -> None:
        """Names and values, one a line."""
        width = max(map(len, pairs), default=0)
        for name, value in pairs.items():
            self.line(f"{name + ':':<{width + 1}} {value}")

    @contextlib.contextmanager
    def progress(self, text: str) -> Iterator[None]:
        """Say what is going on, for as long as it does, where somebody looks on."""
        console = None if self.as_json else _console(sys.stderr)
        if console is not None:
            with console.status(text):
                yield
            return
        if sys.stderr.isatty():
            print(f"{text} ...", file=sys.stderr)
        yield
