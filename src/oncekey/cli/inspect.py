"""``oncekey inspect KEY URL``: what a store has of a key, and what a retry would get."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from oncekey.cli._format import bytes_text, seconds_text
from oncekey.cli._keys import add_key, key_of
from oncekey.cli._output import Output, add_json_option, printable
from oncekey.cli._stores import add_store, store_url

__all__ = ["add_to", "shown"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "inspect",
        help="show what a store has of a key",
        description="Shows what a store has of a key and what a retry of it would get. Exits with "
        "1 if there is no record. Changes nothing.",
    )
    add_key(parser)
    add_store(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what is there."""
    from oncekey.operate import inspect
    from oncekey.stores.urls import connect

    out = Output(arguments)
    key = key_of(arguments)
    with connect(store_url(arguments)) as store:
        found = inspect(store, key)
    if out.as_json:
        out.json(dataclasses.asdict(found))
    else:
        out.pairs(shown(found))
    return 1 if found.situation == "unknown" else 0


def shown(found: Any) -> dict[str, str]:
    """An inspection, for people."""
    pairs = {"digest": found.digest, "scope": printable(found.scope) or "-"}
    if found.situation != "unknown":
        pairs |= {
            "state": found.situation,
            "attempts": str(found.attempts),
            "fence": str(found.fence),
            "claimed": "-" if found.age is None else f"{seconds_text(found.age)} ago",
            "lease left": seconds_text(found.lease_left),
            "ends in": seconds_text(found.ends_in),
            "answer": "-" if found.answer_bytes is None else bytes_text(found.answer_bytes),
        }
    return {**pairs, "a retry": found.retry}
