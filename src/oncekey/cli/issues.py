"""``oncekey issues``: what a gateway can't deliver, by target and cause."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any, Final

from oncekey.cli._gateway import GatewayClient, add_gateway
from oncekey.cli._output import CommandError, Output, add_json_option, printable

__all__ = ["add_to"]


_EXPLAINED: Final = 5  # of the most frequent issues
_SHOWN: Final = 200  # characters of an answer


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
    client = GatewayClient(arguments)
    found = client.get("issues")["items"]
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
        for one in found[:_EXPLAINED]:
            _explain(client, output, one)
    return 1 if found else 0


def _explain(client: GatewayClient, output: Output, one: Any) -> None:
    """What the target answered to one of these events, and what to look at."""
    answer = ""
    if one["status"]:
        with contextlib.suppress(CommandError):  # it was pruned just now
            for attempt in client.get("events", one["sample"])["attempts"]:
                if (attempt["target"], attempt["status"]) == (one["target"], one["status"]):
                    answer = attempt["note"]
    told = f'{one["target"]} answered {one["status"]}: "{answer[:_SHOWN]}"' if answer else ""
    for text in filter(None, [told, one.get("hint", "")]):
        output.line(printable(text))
