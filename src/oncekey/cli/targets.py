"""``oncekey targets [NAME]``: how the targets of a gateway stand; pause, disable and resume one."""

from __future__ import annotations

import argparse
from typing import Any

from oncekey.cli._gateway import GatewayClient, add_gateway
from oncekey.cli._output import CommandError, Output, add_json_option, printable

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "targets",
        help="list the targets of a gateway; pause and resume one",
        description="Lists the targets of a running gateway and how they stand. With a name and "
        "--set, pauses, disables or resumes one on every node: while it is paused its events wait, "
        "while it is disabled none are queued for it. Needs a token of the role operate.",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="only this one")
    parser.add_argument(
        "--set",
        choices=("active", "paused", "disabled"),
        help="what it becomes; active resumes it",
    )
    parser.add_argument("--reason", default="", metavar="TEXT", help="with --set: for the audit")
    add_gateway(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print them, after one was changed."""
    if (arguments.set and not arguments.name) or (arguments.reason and not arguments.set):
        raise CommandError("--set goes with the NAME of a target, --reason with --set")
    client = GatewayClient(arguments)
    if arguments.set:
        asked = {"status": arguments.set, "reason": arguments.reason}
        found = [client.post("targets", arguments.name, "status", **asked)]
    else:
        found = client.get("targets")["items"]
        if arguments.name:
            found = [one for one in found if one["name"] == arguments.name]
            if not found:
                raise CommandError("no such target")
    output = Output(arguments)
    if output.as_json:
        output.json({"items": found})
        return 0
    rows = [
        [
            one["name"],
            one["status"],
            one["breaker"],
            str(one["waiting"]),
            str(one["dead"]),
            (one["oldest_at"] or "")[:19].replace("T", " "),
            printable(one["url"]) or "pulled",
        ]
        for one in found
    ]
    output.table(["target", "status", "breaker", ">waiting", ">dead", "oldest (UTC)", "to"], rows)
    return 0
