"""The ``oncekey`` command. One file a command; the table of them is ``_table.py``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from oncekey._version import __version__
from oncekey.cli._flags import in_flags
from oncekey.cli._output import CommandError
from oncekey.cli._parser import overview, parse
from oncekey.errors import OncekeyError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Gives the exit code: 0 all well, 1 a check failed or something was found, 2 it could not look
    or the call was wrong, 130 interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return 0
    if words[0] == "--version":
        print(f"oncekey {__version__}")
        return 0
    arguments = parse(words)
    try:
        code: int = arguments.run(arguments)
    except OncekeyError as error:
        told = in_flags(str(error), arguments)
        if getattr(arguments, "json", False):
            print(json.dumps({"error": {"code": error.code, "message": told}}, indent=2))
        more = (
            "" if isinstance(error, CommandError) else f"\nHelp: oncekey explain {error.explained}"
        )
        print(f"oncekey: {told}{more}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # somebody read as much as they wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code
