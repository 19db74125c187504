"""``oncekey stuck URL``: claims past their lease, or that have been running for long."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from oncekey.cli._format import duration, seconds_text
from oncekey.cli._inbox import add_inbox, has_inbox
from oncekey.cli._output import Output, add_json_option, counted, printable
from oncekey.cli._stores import add_store, existing_store

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "stuck",
        help="list claims past their lease, or running for long",
        description="Lists claims whose lease is over, so that their worker died or hangs and no "
        "retry came, and those that have been running for long. Exits with 1 if there are any. "
        "With --config or --inbox it also lists deliveries in workers' hands; those count whose "
        "lease is over, and that no worker takes again.",
    )
    add_store(parser)
    add_inbox(parser)
    parser.add_argument(
        "--longer-than",
        type=duration,
        default=300.0,
        metavar="TIME",
        help="also list claims that have been running for so long, such as 90s or 15m; 5m",
    )
    parser.add_argument("--scope", metavar="LABEL", help="only this scope, such as once:orders")
    parser.add_argument("--limit", type=int, default=100, metavar="N", help="how many to list")
    parser.add_argument("--cursor", default="", help="go on where an earlier listing ended")
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the list."""
    from oncekey.operate import stuck
    from oncekey.stores.urls import connect

    out = Output(arguments)
    url = existing_store(arguments)
    with connect(url) as store, out.progress("looking through the records"):
        listing = stuck(
            store,
            longer_than=arguments.longer_than,
            scope=arguments.scope,
            cursor=arguments.cursor,
            limit=arguments.limit,
        )
    look = _look(url) if has_inbox(arguments) else None
    found = bool(listing.found or (look is not None and look.lapsed))
    if out.as_json:
        inbox = {}
        if look is not None:
            held, late = ([dataclasses.asdict(x) for x in y] for y in (look.in_hand, look.lapsed))
            inbox = {"inbox": {"in_hand": held, "lapsed": late}}
        out.json(dataclasses.asdict(listing) | inbox)
        return 1 if found else 0
    if listing.found:
        out.table(
            ["digest", "state", ">claimed", ">lease left", ">attempts", "scope"],
            [
                [
                    one.digest,
                    one.situation,
                    f"{seconds_text(one.age)} ago",
                    seconds_text(one.lease_left),
                    str(one.attempts),
                    printable(one.scope) or "-",
                ]
                for one in listing.found
            ],
        )
    count = f"{len(listing.found)} stuck, {counted(listing.looked_at, 'record')} looked at"
    more = f"; go on with --cursor {listing.cursor}" if listing.cursor else ""
    out.line(count + more, "yellow" if listing.found else "green")
    if listing.found:
        out.line("`oncekey inspect DIGEST --digest` says what a retry gets; `evict` frees a key")
    if look is not None:
        _print(out, look)
    return 1 if found else 0


def _look(url: str) -> Any:
    from oncekey.cli._inbox import ask
    from oncekey.inbox.overview import overview

    return ask(url, overview)


def _print(out: Output, look: Any) -> None:
    """Deliveries in somebody's hands."""
    out.line()
    if look.in_hand:
        rows = [
            [
                one.id,
                printable(one.target),
                printable(one.node),
                str(one.attempt),
                seconds_text((one.lease_until - look.at) / 1000),
            ]
            for one in look.in_hand
        ]
        out.table(["event", "target", "node", ">attempt", ">lease left"], rows)
    count = f"{counted(len(look.in_hand), 'delivery', 'deliveries')} in hand, "
    count += f"{len(look.lapsed)} past their lease"
    out.line(count, "yellow" if look.lapsed else "green")
    if look.lapsed:
        out.line("no worker takes them again: is a gateway running, and does it know the target?")
