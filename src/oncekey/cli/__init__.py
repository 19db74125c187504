"""The ``oncekey`` command. One file a command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from oncekey._version import __version__
from oncekey.cli import conformance, migrate, providers, replay, send, sign
from oncekey.errors import OncekeyError

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    """Takes options by their whole names, and never says again what may be a secret.

    ``--secret`` would be short for ``--secret-env``, and a secret that is typed there, or after an
    option that does not exist, would be printed with the error.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        found, unknown = self.parse_known_args(args)
        if unknown:
            names = [one.partition("=")[0] for one in unknown if one.startswith("--")]
            told = (
                f"no option {', '.join(names)}" if names else f"{len(unknown)} arguments too many"
            )
            self.error(f"{told}: see oncekey {found.command} --help")
        return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Gives the exit code: 0 all well, 1 a check failed, 2 a wrong call."""
    parser = _Parser(
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
