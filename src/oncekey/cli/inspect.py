"""``oncekey inspect KEY URL``: what a store has of a key, and what a retry would get."""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

from oncekey.cli._format import bytes_text, seconds_text
from oncekey.cli._inbox import add_source, source_key
from oncekey.cli._keys import add_key, key_of
from oncekey.cli._output import Output, add_json_option, printable
from oncekey.cli._stores import add_store, existing_store

__all__ = ["add_to", "shown"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "inspect",
        help="show what a store has of a key",
        description="Shows what a store has of a key and what a retry of it would get. Exits with "
        "1 if there is no record. Changes nothing. With --config and --source KEY is an event's, "
        "and its deliveries are shown too.",
    )
    add_key(parser)
    add_store(parser)
    add_source(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what is there."""
    from oncekey.operate import inspect
    from oncekey.stores.urls import connect

    out = Output(arguments)
    key = source_key(arguments) or key_of(arguments)
    url = existing_store(arguments)
    with connect(url) as store:
        found = inspect(store, key)
    event = _event(arguments, url)
    if out.as_json:
        calls = [one._asdict() for one in found.calls]
        told = dataclasses.asdict(found) | {"calls": calls}
        out.json(told | ({} if event is None else {"event": event}))
    else:
        out.pairs(shown(found) | ({} if event is None else _told(event)))
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
    now = time.time()
    calls = [
        f"{printable(one.provider)} {printable(one.request_id)} (attempt {one.attempt}, "
        f"{seconds_text(max(0.0, now - one.at))} ago)"
        for one in found.calls
    ]
    if calls:
        pairs["calls"] = ", ".join(calls)
    return {**pairs, "a retry": found.retry}


def _event(arguments: argparse.Namespace, url: str) -> dict[str, Any] | None:
    """The event that a key of a source is known for; empty, if it is pruned."""
    if arguments.source is None:
        return None
    from oncekey.cli._inbox import ask
    from oncekey.inbox.filters import Filter

    wanted = Filter(source=arguments.source, text=arguments.key)

    async def look(inbox: Any) -> dict[str, Any]:
        rows = (await inbox.search(wanted, limit=1)).items
        known = bool(rows) and rows[0].key == arguments.key
        found = await inbox.event(rows[0].id) if known else None
        if found is None:
            return {}
        return {
            "id": found.event.id,
            "type": found.event.type,
            "copies": len(found.duplicates),
            "deliveries": {one.target: str(one.state) for one in found.deliveries},
        }

    return ask(url, look)


def _told(event: dict[str, Any]) -> dict[str, str]:
    if not event:
        return {"event": "pruned, or never kept"}
    states = ", ".join(f"{name} {state}" for name, state in event["deliveries"].items())
    return {
        "event": f"{event['id']} {printable(event['type'])}",
        "copies": str(event["copies"]),
        "deliveries": states or "-",
    }
