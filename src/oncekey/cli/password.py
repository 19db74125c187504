"""``oncekey password``: the hash of a password, for a user of the dashboard."""

from __future__ import annotations

import argparse
import getpass
import sys
from typing import Any

from oncekey.cli._output import Output, add_json_option
from oncekey.errors import PolicyError

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "password",
        help="hash a password, for a user of the dashboard",
        description="Asks for a password, twice, and prints the argon2 hash that goes into "
        "[users.NAME] of the config. Reads one line where there is no terminal.",
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask, and print the hash."""
    from oncekey.server.auth import hash_password

    if sys.stdin.isatty():
        given = getpass.getpass("password: ")
        if getpass.getpass("once more: ") != given:
            raise PolicyError("the two are not the same")
    else:
        given = sys.stdin.readline().rstrip("\r\n")
    hashed = hash_password(given)
    output = Output(arguments)
    if output.as_json:
        output.json({"password_hash": hashed})
    else:
        output.line(f'password_hash = "{hashed}"')
    return 0
