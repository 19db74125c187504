"""``oncekey plan --rate --ttl --size``: the memory, disk and writes that a load needs."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from oncekey.cli._format import bytes_text, duration
from oncekey.cli._output import Output, add_json_option

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "plan",
        help="work out the memory, disk and writes that a load needs",
        description="Works out what each backend needs for a load, from bytes a key that were "
        "measured on real servers.",
    )
    parser.add_argument(
        "--rate", type=float, required=True, metavar="N", help="new keys in a second, on average"
    )
    parser.add_argument(
        "--ttl",
        type=duration,
        default=86_400.0,
        metavar="TIME",
        help="how long a key is remembered, such as 24h or 7d; 24h",
    )
    parser.add_argument(
        "--size", type=int, default=200, metavar="BYTES", help="how long an answer is; 200"
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a row for each backend."""
    from oncekey.operate import plan
    from oncekey.operate.planning import measured

    out = Output(arguments)
    plans = plan(arguments.rate, arguments.ttl, arguments.size)
    if out.as_json:
        out.json([dataclasses.asdict(one) for one in plans])
        return 0
    out.line(f"{plans[0].keys:,} records at a time")
    out.table(
        ["backend", ">memory", ">disk", ">written", ">commits", "note"],
        [
            [
                one.backend,
                bytes_text(one.memory_bytes) if one.memory_bytes else "-",
                bytes_text(one.disk_bytes) if one.disk_bytes else "-",
                f"{bytes_text(one.written_bytes)}/s" if one.written_bytes else "-",
                f"{one.commits:,}/s" if one.commits else "-",
                one.note,
            ]
            for one in plans
        ],
    )
    out.line(f"from bytes a key measured on {measured()['date']} ({measured()['made_by']})")
    return 0
