"""The ``oncekey`` command. One file a command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from oncekey._version import __version__
from oncekey.cli import conformance, migrate, providers, replay, send, sign
from oncekey.errors import OncekeyError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Gives the exit code: 0 all well, 1 a check failed, 2 a wrong call."""
    parser = argparse.ArgumentParser(
        prog="oncekey", description="Makes retries safe: one recorded outcome for each key."
    )
    parser.add_argument("--version", action="version", version=f"oncekey {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    conformance.add_to(commands)
    migrate.add_to(commands)
    providers.add_to(commands)
    sign.add_to(commands)
    send.add_to(commands)
    replay.add_to(commands)
    arguments = parser.parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except OncekeyError as error:
        print(f"oncekey: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # somebody read as much as they wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code
