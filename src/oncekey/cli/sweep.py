"""``oncekey sweep URL``: remove records past their time, now."""

from __future__ import annotations

import argparse
from typing import Any

from oncekey.cli._output import Output, add_json_option, counted
from oncekey.cli._stores import add_store, existing_store

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "sweep",
        help="remove records past their time, now",
        description="Removes records that are past their time. Stores do that by themselves, a few "
        "with every new record: this is for what is left when no new ones come.",
    )
    add_store(parser)
    parser.add_argument(
        "--limit", type=int, default=100_000, metavar="N", help="about how many to remove"
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Sweep, and say how many."""
    from oncekey.operate import sweep
    from oncekey.stores.urls import connect

    out = Output(arguments)
    with connect(existing_store(arguments)) as store, out.progress("sweeping"):
        swept = sweep(store, arguments.limit)
    if out.as_json:
        out.json(swept._asdict())
    elif swept.by_itself:
        out.line("nothing to do: this store removes records by itself")
    else:
        out.line(f"{counted(swept.removed, 'record')} removed")
    return 0
