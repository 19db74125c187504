"""``oncekey replay URL FILE``: make recorded deliveries again, and judge the answers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from oncekey.cli._output import Output, add_json_option
from oncekey.cli.sign import add_secret_options, make_provider
from oncekey.errors import PolicyError

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "replay",
        help="make recorded webhook deliveries again",
        description="Sends the deliveries of a recording (oncekey.testing.Recorder) to URL. Old "
        "signatures are refused by most receivers: with --provider each delivery is signed anew, "
        "under its own id. Exits with 1 if an answer is not as it should be.",
    )
    parser.add_argument("url", metavar="URL", help="an endpoint; or only the host, for all paths")
    parser.add_argument("file", metavar="FILE", help="the recording")
    parser.add_argument("--provider", metavar="NAME", help="sign anew, as this provider would")
    add_secret_options(parser)
    parser.add_argument(
        "--seed", type=int, metavar="N", help="shuffle; the same number gives the same order"
    )
    parser.add_argument("--copies", type=int, default=1, metavar="N", help="copies of each")
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="how many to send at the same time"
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Replay, and print what was found."""
    from oncekey.testing import replay

    if not Path(arguments.file).is_file():
        raise PolicyError(f"{arguments.file} can't be read: there is no such file")
    report = replay(
        arguments.url,
        arguments.file,
        provider=make_provider(arguments) if arguments.provider else None,
        seed=arguments.seed,
        copies=arguments.copies,
        at_once=arguments.at_once,
    )
    out = Output(arguments)
    if out.as_json:
        statuses = [answer.status for answer in report.answers]
        out.json({"ok": report.ok, "problems": list(report.problems), "statuses": statuses})
    else:
        out.line(str(report))
        for problem in report.problems:
            out.line(f"- {problem}")
    return 0 if report.ok else 1
