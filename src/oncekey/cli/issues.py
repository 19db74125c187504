"""``oncekey issues``: what a gateway can't deliver, by target and cause."""

from __future__ import annotations

import argparse
from typing import Any

from oncekey.cli._gateway import GatewayClient, add_gateway
from oncekey.cli._output import Output, add_json_option, printable

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "issues",
        help="list what a gateway can't deliver, by target and cause",
        description="Lists failures that are alike, with the search that finds their events. Exits "
        "with 1 if there are any.",
    )
    add_gateway(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print them."""
    found = GatewayClient(arguments).get("issues")["items"]
    output = Output(arguments)
    if output.as_json:
        output.json({"items": found})
    elif not found:
        output.line("nothing fails")
    else:
        rows = [
            [
                printable(one["target"]),
                str(one["status"] or ""),
                printable(one["error"]),
                str(one["dead"]),
                str(one["failing"]),
                printable(one["query"]),
            ]
            for one in found
        ]
        output.table(["target", "status", "cause", ">dead", ">failing", "search"], rows)
    return 1 if found else 0
