"""``oncekey explain``: what an error means, and what to do."""

from __future__ import annotations

import argparse
import difflib
import re
from importlib.resources import files
from typing import Any

from oncekey.cli._output import Output, add_json_option
from oncekey.errors import PolicyError

__all__ = ["add_to", "sections"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "explain",
        help="say what an error means, and what to do",
        description="Prints what is known of an error: give its class, such as StoreTimeoutError, "
        "or its code, such as STORE_TIMEOUT; or of a warning, of the code of a refused delivery "
        "(signature_mismatch), or of a problem (key-reused). Without a NAME, lists all of them.",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="a class or a code")
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the section of each error that has this name."""
    out, known = Output(arguments), sections()
    if not arguments.name:
        if out.as_json:
            out.json(known)
        else:
            out.line("\n".join(known))
        return 0
    asked = re.split(r"[.:]", arguments.name)[-1]
    coded = f"Code `{asked.upper()}`"
    found = {
        name: text
        for name, text in known.items()
        if asked.lower() == name.lower() or text.startswith(coded)
    }
    if not found and asked.endswith("Error") and asked != "Error":  # ConfigError: StoreConfigError
        found = {name: text for name, text in known.items() if name.endswith(asked)}
    if not found:
        near = difflib.get_close_matches(asked, known, n=1, cutoff=0.5)
        told = f": is it {near[0]}?" if near else ": see oncekey explain"
        raise PolicyError(f"there is no error of that name{told}")
    if out.as_json:
        out.json(found)
    else:
        out.line("\n\n".join(f"{name}\n{'-' * len(name)}\n{text}" for name, text in found.items()))
    return 0


def sections() -> dict[str, str]:
    """Each class of errors, warning and code, and what is to be said of it."""
    page = files("oncekey").joinpath("errors.md").read_text("utf-8")
    parts = re.split(r"^## ([\w-]+)\n", page, flags=re.MULTILINE)[1:]
    return {name: text.strip() for name, text in zip(parts[::2], parts[1::2], strict=True)}
