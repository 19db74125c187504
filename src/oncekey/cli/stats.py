"""``oncekey stats URL``: what is in a store."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from oncekey.cli._format import bytes_text, seconds_text
from oncekey.cli._output import Output, add_json_option, printable
from oncekey.cli._stores import add_store, store_url

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "stats",
        help="count what is in a store",
        description="Counts the records of a store by state and scope. In a large store it looks "
        "at some and estimates the rest.",
    )
    add_store(parser)
    parser.add_argument(
        "--most", type=int, default=10_000, metavar="N", help="how many records to look at"
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the numbers."""
    from oncekey.operate import stats
    from oncekey.stores.urls import connect

    out = Output(arguments)
    with connect(store_url(arguments)) as store, out.progress("counting"):
        found = stats(store, most=arguments.most)
    if out.as_json:
        out.json(dataclasses.asdict(found))
        return 0
    about = "" if found.exact else f", estimated from {found.looked_at}"
    out.line(f"{found.records:,} records{about}")
    out.table(
        ["state", ">records"], [[name, f"{many:,}"] for name, many in found.situations.items()]
    )
    if found.scopes:
        out.line()
        rows = [[printable(name), f"{many:,}"] for name, many in found.scopes.items()]
        out.table(["scope", ">records"], rows)
    out.line()
    out.pairs(
        {
            "answers": f"{bytes_text(found.answer_bytes)} on average",
            "oldest claim in flight": seconds_text(found.oldest_pending),
            "oldest record to sweep": seconds_text(found.sweep_lag),
        }
    )
    return 0
