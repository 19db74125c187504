"""``oncekey events [SEARCH]``: what came to a gateway, newest first."""

from __future__ import annotations

import argparse
from typing import Any

from oncekey.cli._gateway import GatewayClient, add_gateway
from oncekey.cli._output import Output, add_json_option, printable

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "events",
        help="list the events of a gateway",
        description="Lists events of a running gateway, newest first, by the search of its "
        "dashboard: source:shop type:invoice.* state:dead age:>1h",
    )
    parser.add_argument("search", metavar="SEARCH", nargs="*", help="such as state:dead")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="how many at most")
    add_gateway(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the rows."""
    page = GatewayClient(arguments).get(
        "events", q=" ".join(arguments.search), limit=arguments.limit
    )
    output = Output(arguments)
    if output.as_json:
        output.json(page)
        return 0
    rows = [
        [
            one["id"],
            (one["at"] or "")[:19].replace("T", " "),
            printable(one["source"]),
            printable(one["type"]),
            printable(one["key"]),
            one["state"] or "no target",
            str(one["attempts"]),
            str(one["duplicates"]),
        ]
        for one in page["items"]
    ]
    if not rows:
        output.line("no event fits")
        return 0
    names = ["id", "received (UTC)", "source", "type", "key", "state", ">attempts", ">copies"]
    output.table(names, rows)
    if page["next"]:
        output.line("there are more: give --limit, or a narrower search")
    return 0
