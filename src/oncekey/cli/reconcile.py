"""``oncekey reconcile DIRECTORY``: what went on without a store, and what somebody must look at."""

from __future__ import annotations

import argparse
import dataclasses
import getpass
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from oncekey.cli._format import seconds_text
from oncekey.cli._inbox import add_inbox, has_inbox
from oncekey.cli._output import Output, add_json_option, printable
from oncekey.cli._stores import add_store, existing_store
from oncekey.errors import PolicyError

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "reconcile",
        help="put into a store what went on without it, and list what was done twice",
        description="With the URL of a store, puts into it what went on without it, from the "
        "journals in DIRECTORY whose processes are gone. Then lists what somebody must look at: "
        "duplicates that slipped, work that was cut off or whose process died, late arrivals; with "
        "--config or --inbox, what a gateway could not deliver. Exits with 1 if there is anything.",
    )
    parser.add_argument(
        "directory",
        metavar="DIRECTORY",
        nargs="?",
        help="where the journals are, or the file of a queue of findings",
    )
    add_store(parser, optional=True)
    add_inbox(parser)
    parser.add_argument(
        "--settle", metavar="ID", nargs="+", help="say that somebody has dealt with these"
    )
    parser.add_argument("--note", default="", metavar="TEXT", help="what they say about it")
    parser.add_argument("--all", action="store_true", help="list also what is settled")
    add_json_option(parser)
    parser.set_defaults(run=run)


class _Queue(NamedTuple):
    """What is left to look at in one place."""

    told: dict[str, Any]
    headings: Sequence[str]
    rows: list[list[str]]
    settled: int
    left: int


def run(arguments: argparse.Namespace) -> int:
    """Reconcile, settle, list."""
    if has_inbox(arguments) and "://" in (arguments.directory or "") and not arguments.url:
        arguments.directory, arguments.url = None, arguments.directory  # there are no journals
    if arguments.directory is None and not has_inbox(arguments):
        raise PolicyError("what is to be looked at? Give a DIRECTORY of journals, or --config FILE")
    if arguments.note and not arguments.settle:
        raise PolicyError("--note says something about what is settled: give --settle ID too")
    out = Output(arguments)
    queues = []
    if arguments.directory is not None:
        queues.append(_journals(arguments, out))
    if has_inbox(arguments):
        queues.append(_dead_letters(arguments))
    left = sum(queue.left for queue in queues)
    settled = sum(queue.settled for queue in queues)
    if out.as_json:
        told: dict[str, Any] = {"reconciled": None, "settled": settled, "findings": []}
        for queue in queues:
            told |= queue.told
        out.json(told)
        return 1 if left else 0
    if arguments.settle:
        out.line(f"{settled} settled")
    for queue in queues:
        if queue.rows:
            out.table(queue.headings, queue.rows)
    out.line(f"{left} to look at", "yellow" if left else "green")
    return 1 if left else 0


def _journals(arguments: argparse.Namespace, out: Output) -> _Queue:
    from oncekey.resilience import Findings, reconcile
    from oncekey.stores.urls import connect

    place = Path(arguments.directory)
    if not place.exists():
        raise PolicyError(f"there is no {place}: give the directory that is journal= in the code")
    findings = Findings(str(place / "findings.db" if place.is_dir() else place))
    made = None
    if arguments.url or arguments.url_env or arguments.config:
        if not place.is_dir():
            raise PolicyError("to reconcile, give the directory of the journals, not a file")
        with connect(existing_store(arguments)) as store, out.progress("reconciling"):
            made = reconcile(place, store, findings=findings)
        if not out.as_json:
            out.pairs({name: str(value) for name, value in dataclasses.asdict(made).items()})
    settled = findings.settle(arguments.settle, arguments.note) if arguments.settle else 0
    listed = findings.list(settled=arguments.all)
    findings.close()
    told = {
        "reconciled": None if made is None else dataclasses.asdict(made),
        "findings": [dataclasses.asdict(found) for found in listed],
    }
    headings = ["id", "kind", "key", "payload", ">found", "sides"]
    left = sum(found.settled_at is None for found in listed)
    return _Queue(told, headings, [_row(one) for one in listed], settled, left)


def _dead_letters(arguments: argparse.Namespace) -> _Queue:
    """What a gateway gave up. Settled is what was discarded, which its event's history has."""
    from oncekey.cli._inbox import ask
    from oncekey.inbox.filters import Filter

    async def look(inbox: Any) -> tuple[int, list[Any], int]:
        settled = 0
        for name in arguments.settle or ():
            if name.startswith("msg_"):
                settled += await _settled(inbox, name, arguments.note)
        found = (await inbox.dead_letters(Filter(), limit=500)).items
        return settled, list(found), await inbox.count_dead(Filter())

    settled, found, left = ask(existing_store(arguments), look)
    rows = [
        [
            one.id,
            printable(one.target),
            str(one.status or "-"),
            printable(one.error),
            str(one.attempts),
            f"{seconds_text(time.time() - one.at / 1000)} ago",
        ]
        for one in found
    ]
    told = {"dead_letters": [dataclasses.asdict(one) for one in found]}
    headings = ["event", "target", ">status", "cause", ">attempts", ">came"]
    return _Queue(told, headings, rows, settled, left)


async def _settled(inbox: Any, id: str, note: str) -> int:
    """Give up an event's dead deliveries for good; those that wait stay."""
    found = await inbox.event(id)
    dead = [one.target for one in found.deliveries if str(one.state) == "dead"] if found else []
    if not dead:
        return 0
    actor = getpass.getuser()
    if note:
        await inbox.record("settle", id, note, actor=actor)
    number: int = await inbox.discard(id, dead, actor=actor)
    return number


def _row(found: Any) -> list[str]:
    """A finding on one line."""
    payload = {True: "same", False: "another", None: "-"}[found.same_payload]
    sides = "; ".join(
        f"{side.where} {side.process} {side.state}".replace("  ", " ") for side in found.sides
    )
    told = f"{sides} {found.note}".strip()
    ago = f"{seconds_text(time.time() - found.found_at)} ago"
    return [found.id, found.kind, found.key[:12] or "-", payload, ago, printable(told)]
