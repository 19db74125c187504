"""How a command line is read: whole names only, one command loaded, no secret said again."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from oncekey._version import __version__
from oncekey.cli._table import COMMANDS, GROUPS, START

__all__ = ["Parser", "overview", "parse", "whole_parser"]

ABOUT = "Makes retries safe: one recorded outcome for each key."


class Parser(argparse.ArgumentParser):
    """Takes options by their whole names, and never says again what may be a secret.

    ``--secret`` would be short for ``--secret-env``, and a secret that is typed there, or after an
    option that does not exist, would be printed with the error.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The arguments in ``words``, in any order; ends the process for those that are wrong."""
        nested = any(isinstance(one, argparse._SubParsersAction) for one in self._actions)
        # Where an argument may be left out, argparse by itself wants it beside the others.
        parse = self.parse_known_args if nested else self.parse_known_intermixed_args
        found, unknown = parse(list(words))
        if unknown:
            names = [one.partition("=")[0] for one in unknown if one.startswith("--")]
            told = (
                f"no option {', '.join(names)}" if names else f"{len(unknown)} arguments too many"
            )
            self.error(f"{told}: see {self.prog} --help")
        return found


class _OneCommand:
    """Stands where ``add_to`` expects the parsers of commands: makes one, by itself."""

    parser: Parser

    def add_parser(self, name: str, *, help: str | None = None, **options: Any) -> Parser:
        """The parser of the command; ``help`` is in the table."""
        self.parser = Parser(prog=f"oncekey {name}", **options)
        return self.parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command that ``words`` start with, loaded, and its arguments."""
    name = words[0]
    if name not in COMMANDS:
        _no_such_command(name)
    commands = _OneCommand()
    import_module(f"oncekey.cli.{COMMANDS[name].module}").add_to(commands)
    return commands.parser.read(words[1:])


def _no_such_command(name: str) -> NoReturn:
    if name.startswith("-"):
        told = "options come after the command"
    else:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        told = "there is no such command" + (f"; is it {near[0]}?" if near else "")
    Parser(prog="oncekey", usage="oncekey COMMAND ...").error(f"{told}: see oncekey --help")


def whole_parser() -> Parser:
    """A parser of everything, with every command loaded: for completion."""
    parser = Parser(prog="oncekey", description=ABOUT)
    parser.add_argument("--version", action="version", version=f"oncekey {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS.values():
        import_module(f"oncekey.cli.{command.module}").add_to(commands)
    return parser


def overview() -> str:
    """What a bare ``oncekey`` shows: where to start, and the commands by group."""
    lines = [ABOUT, "", "usage: oncekey COMMAND ...   (oncekey COMMAND --help has its options)"]
    lines += ["", "Start here"]
    width = max(map(len, START))
    lines += [f"  {typed:<{width}}  {what}" for typed, what in START.items()]
    for group, title in GROUPS.items():
        members = {name: one for name, one in COMMANDS.items() if one.group == group}
        if members:
            lines += ["", title, *(f"    {name:<12}  {one.help}" for name, one in members.items())]
    lines += ["", "  --help     show this, or the options of a command"]
    lines += ["  --version  print the version"]
    lines += ["", "Exit codes: 0 all well, 1 something was found, 2 could not look or a wrong call"]
    return "\n".join(lines)
