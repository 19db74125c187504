"""``oncekey event ID``: one event of a gateway, with all that happened to it."""

from __future__ import annotations

import argparse
import base64
import sys
from typing import Any, Final

from oncekey.cli._gateway import GatewayClient, add_gateway
from oncekey.cli._output import CommandError, Output, add_json_option, printable
from oncekey.cli._replaying import replay_event

__all__ = ["add_to", "moments"]


_SHOWN: Final = 100  # characters of what a target answered


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "event",
        help="show one event of a gateway, with its attempts and copies",
        description="Shows one event of a running gateway: its deliveries, attempts and copies.",
    )
    parser.add_argument("id", metavar="ID", help="msg_ and 16 hex digits")
    parser.add_argument(
        "--body", action="store_true", help="print the raw body and nothing else, for a file"
    )
    parser.add_argument(
        "--replay", action="store_true", help="deliver it again, as a new attempt that is audited"
    )
    parser.add_argument(
        "--target",
        action="append",
        metavar="NAME",
        help="with --replay: to this one only; may repeat",
    )
    add_gateway(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print it, or replay it."""
    if arguments.target and not arguments.replay:
        raise CommandError("--target goes with --replay")
    if arguments.replay:
        return replay_event(arguments, arguments.id)
    found = GatewayClient(arguments).get("events", arguments.id)
    output = Output(arguments)
    if arguments.body:
        text = found["body"]
        raw = base64.b64decode(text) if found["body_encoding"] == "base64" else text.encode()
        sys.stdout.buffer.write(raw)
        sys.stdout.buffer.flush()
        return 0
    if output.as_json:
        output.json(found)
        return 0
    shown = ("id", "at", "source", "type", "key", "size")
    output.pairs({name: printable(str(found[name])) for name in shown})
    output.line()
    for at, what, more in moments(found):
        output.line(f"{at}  {printable(what):<24} {printable(more)}".rstrip())
    waiting = [one for one in found["deliveries"] if one["due_at"]]
    for one in waiting:
        output.line(f"{one['due_at']}  next try of {one['target']} ({one['state']})")
    return 0


def moments(found: Any) -> list[tuple[str, str, str]]:
    """What happened and when; of one millisecond, in the order in which it can have happened."""
    known = [(found["at"], "received", f"from {found['source']}")]
    known += [(one["at"], "copy stopped", "" if one["same"] else "another body")
                for one in found["duplicates"]]  # fmt: skip
    known += [(one["at"], one["action"], f"by {one['actor']}") for one in found["actions"]]
    for one in found["attempts"]:
        took = "" if one["outcome"] == "lost" else f"{one['ms']} ms"
        said = str(one["status"]) in one["error"]  # "HTTP 401"
        status = f"status {one['status']}" if one["status"] and not said else ""
        answer = f'"{one["note"][:_SHOWN]}"' if one["error"] and one["note"] else ""
        told = ", ".join(filter(None, [took, status, one["error"], answer]))
        known.append((one["at"], f"{one['target']}: {one['outcome']}", told))
    return sorted(known, key=lambda moment: moment[0])
