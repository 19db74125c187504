"""``oncekey stats URL``: what is in a store."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from oncekey.cli._format import bytes_text, seconds_text
from oncekey.cli._inbox import add_inbox, has_inbox
from oncekey.cli._output import Output, add_json_option, counted, printable
from oncekey.cli._stores import add_store, existing_store

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "stats",
        help="count what is in a store",
        description="Counts the records of a store by state and scope. In a large store it looks "
        "at some and estimates the rest. With --config or --inbox it also says what waits in a "
        "gateway's inbox, and what was given up.",
    )
    add_store(parser)
    add_inbox(parser)
    parser.add_argument(
        "--most", type=int, default=10_000, metavar="N", help="how many records to look at"
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the numbers."""
    from oncekey.operate import stats
    from oncekey.stores.urls import connect

    out = Output(arguments)
    url = existing_store(arguments)
    with connect(url) as store, out.progress("counting"):
        found = stats(store, most=arguments.most)
    look = _look(url) if has_inbox(arguments) else None
    if out.as_json:
        inbox = {} if look is None else {"inbox": _plain(look)}
        out.json(dataclasses.asdict(found) | inbox)
        return 0
    about = "" if found.exact else f", estimated from {found.looked_at}"
    out.line(f"{counted(found.records, 'record')}{about}")
    out.table(
        ["state", ">records"], [[name, f"{many:,}"] for name, many in found.situations.items()]
    )
    if found.scopes:
        out.line()
        rows = [[printable(name), f"{many:,}"] for name, many in found.scopes.items()]
        out.table(["scope", ">records"], rows)
    out.line()
    out.pairs(
        {
            "answers": f"{bytes_text(found.answer_bytes)} on average",
            "oldest claim in flight": seconds_text(found.oldest_pending),
            "oldest record to sweep": seconds_text(found.sweep_lag),
        }
    )
    if look is not None:
        out.line()
        _print(out, look)
    return 0


def _look(url: str) -> Any:
    from oncekey.cli._inbox import ask
    from oncekey.inbox.overview import overview

    return ask(url, overview)


def _plain(look: Any) -> dict[str, Any]:
    return dataclasses.asdict(look) | {
        "waiting": look.waiting,
        "dead": look.dead,
        "oldest_ms": look.oldest_ms,
    }


def _print(out: Output, look: Any) -> None:
    """How the inbox stands."""
    rows = [
        [
            printable(one.target),
            look.stopped.get(one.target, "active"),
            f"{one.waiting:,}",
            f"{one.dead:,}",
            "-" if one.oldest_at is None else seconds_text((look.at - one.oldest_at) / 1000),
        ]
        for one in look.depths
    ]
    out.line(f"inbox: {look.waiting:,} waiting, {look.dead:,} dead")
    if rows:
        out.table(["target", "status", ">waiting", ">dead", ">oldest"], rows)
    oldest = look.oldest_ms
    happened = ", ".join(f"{number:,} {kind}" for kind, number in sorted(look.totals.items()))
    out.pairs(
        {
            "in hand": f"{len(look.in_hand)}, {len(look.lapsed)} past their lease",
            "oldest pending": "-" if oldest is None else seconds_text(oldest / 1000),
            "last hour": happened or "nothing",
        }
    )
