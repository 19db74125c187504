"""``oncekey completion SHELL``: the script that completes commands and options."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from oncekey.errors import StoreConfigError

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "completion",
        help="print the completion script of a shell",
        description="Prints a script that completes oncekey's commands and options. Load it with "
        'eval "$(oncekey completion bash)", or put it where your shell looks for such scripts.',
    )
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh"), help="bash or zsh")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    from oncekey.cli._parser import whole_parser

    try:
        shtab = import_module("shtab")
    except ModuleNotFoundError as error:
        raise StoreConfigError(
            "completion needs the package shtab, which is not installed: run "
            "pip install 'oncekey[cli]'"
        ) from error
    print(shtab.complete(whole_parser(), arguments.shell))
    return 0
