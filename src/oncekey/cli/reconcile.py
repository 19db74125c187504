"""``oncekey reconcile DIRECTORY``: what went on without a store, and what somebody must look at."""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

from oncekey.cli._format import seconds_text
from oncekey.cli._output import Output, add_json_option, printable
from oncekey.cli._stores import add_store, store_url
from oncekey.errors import PolicyError

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "reconcile",
        help="put into a store what went on without it, and list what was done twice",
        description="With the URL of a store, puts into it what went on without it, from the "
        "journals in DIRECTORY whose processes are gone. Then lists what somebody must look at: "
        "duplicates that slipped, work that was begun by a process that died, late arrivals. "
        "Exits with 1 if there is anything.",
    )
    parser.add_argument(
        "directory",
        metavar="DIRECTORY",
        help="where the journals are, or the file of a queue of findings",
    )
    add_store(parser, optional=True)
    parser.add_argument(
        "--settle", metavar="ID", nargs="+", help="say that somebody has dealt with these"
    )
    parser.add_argument("--note", default="", metavar="TEXT", help="what they say about it")
    parser.add_argument("--all", action="store_true", help="list also what is settled")
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Reconcile, settle, list."""
    from oncekey.resilience import Findings, reconcile
    from oncekey.stores.urls import connect

    out, place = Output(arguments), Path(arguments.directory)
    if not place.exists():
        raise PolicyError(f"there is no {place}: give the directory that is journal= in the code")
    if arguments.note and not arguments.settle:
        raise PolicyError("--note says something about what is settled: give --settle ID too")
    findings = Findings(str(place / "findings.db" if place.is_dir() else place))
    made = None
    if arguments.url or arguments.url_env:
        if not place.is_dir():
            raise PolicyError("to reconcile, give the directory of the journals, not a file")
        with connect(store_url(arguments)) as store, out.progress("reconciling"):
            made = reconcile(place, store, findings=findings)
    settled = findings.settle(arguments.settle, arguments.note) if arguments.settle else 0
    listed = findings.list(settled=arguments.all)
    findings.close()
    left = [found for found in listed if found.settled_at is None]
    if out.as_json:
        out.json(
            {
                "reconciled": None if made is None else dataclasses.asdict(made),
                "settled": settled,
                "findings": [dataclasses.asdict(found) for found in listed],
            }
        )
        return 1 if left else 0
    if made is not None:
        out.pairs({name: str(value) for name, value in dataclasses.asdict(made).items()})
    if arguments.settle:
        out.line(f"{settled} settled")
    if listed:
        out.table(
            ["id", "kind", "key", "payload", ">found", "sides"], [_row(one) for one in listed]
        )
    out.line(f"{len(left)} to look at", "yellow" if left else "green")
    return 1 if left else 0


def _row(found: Any) -> list[str]:
    """A finding on one line."""
    payload = {True: "same", False: "another", None: "-"}[found.same_payload]
    sides = "; ".join(
        f"{side.where} {side.process} {side.state}".replace("  ", " ") for side in found.sides
    )
    told = f"{sides} {found.note}".strip()
    ago = f"{seconds_text(time.time() - found.found_at)} ago"
    return [found.id, found.kind, found.key[:12] or "-", payload, ago, printable(told)]
