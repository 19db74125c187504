"""Delivering events of a gateway again: one by its id, or all that match a search."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import Any, Final

from oncekey.cli._format import seconds_text
from oncekey.cli._gateway import GatewayClient
from oncekey.cli._output import CommandError, Output, counted

__all__ = ["cancel", "replay_event", "replay_matching"]

_EVERY: Final = 0.5
_RATE: Final = 20.0
_BUSY: Final = {
    "running": "an attempt is under way",
    "parked": "an earlier event of the same entity comes first",
}


def replay_event(arguments: argparse.Namespace, id: str) -> int:
    """Queue one event once more, for all its targets or for those that are named."""
    asked = {"targets": arguments.target} if arguments.target else {}
    told = GatewayClient(arguments).post("events", id, "replay", **asked)
    queued, left = told["queued"], told.get("left_out", {})  # an older gateway does not say
    output = Output(arguments)
    if output.as_json:
        output.json({"queued": queued, "left_out": left})
        return 0 if queued else 1
    if queued:
        output.line(f"{id} is delivered again, to {counted(queued, 'target')}")
    for name, state in left.items():
        output.line(f"nothing was queued for {name}: {_BUSY.get(state, state)}", "yellow")
    if not queued and not left:
        output.line("nothing was queued: it goes to no target, or is in hand just now", "yellow")
    return 0 if queued else 1


def replay_matching(arguments: argparse.Namespace) -> int:
    """Replay what matches, and look on until it is done; Ctrl-C cancels it."""
    client, output = GatewayClient(arguments), Output(arguments)
    rate = _RATE if arguments.rate is None else arguments.rate
    asked = {"q": arguments.search, "rate": rate, "dry_run": arguments.dry_run}
    begun = client.post("bulk-replays", **asked)
    if arguments.dry_run:
        if output.as_json:
            output.json(begun)
        else:
            takes = seconds_text(begun["total"] / rate)
            found = counted(begun["total"], "delivery", "deliveries")
            output.line(f"{found} would be delivered again, in {takes}; nothing was done")
            _hint(output, begun, arguments.search)
        return 0
    try:
        total = counted(begun["total"], "delivery", "deliveries")
        _say(
            output,
            f"bulk replay {begun['id']}: {total}, at most {rate:g} a second; Ctrl-C stops it",
        )
        ended = _followed(client, output, begun)
    except KeyboardInterrupt:
        _told(output, _cancelled(client, begun))
        return 130
    _told(output, ended)
    _hint(output, begun, arguments.search)
    return 0 if ended["state"] == "done" else 1  # somebody else has stopped it


def cancel(arguments: argparse.Namespace) -> int:
    """Stop one that somebody began, here or elsewhere."""
    found = GatewayClient(arguments).post("bulk-replays", str(arguments.cancel), "cancel")
    _told(Output(arguments), found)
    return 0


def _found(client: GatewayClient, number: int) -> Any:
    """How it stands; ``None``: so many were begun since that it is not listed."""
    rows = client.get("bulk-replays")["items"]
    return next((one for one in rows if one["id"] == number), None)


def _followed(client: GatewayClient, output: Output, begun: Any) -> Any:
    """How it ended."""
    now = begun
    shows = not output.as_json and sys.stderr.isatty()
    try:
        while now["state"] == "running":
            if shows:
                sys.stderr.write(f"\r{now['done']:,} of {now['total']:,} ")
                sys.stderr.flush()
            time.sleep(_EVERY)
            now = _found(client, begun["id"])
            if now is None:
                raise CommandError(
                    f"bulk replay {begun['id']} goes on, but many others were begun since: look at "
                    "the dashboard's Issues"
                )
    finally:
        if shows:
            print(file=sys.stderr)
    return now


def _cancelled(client: GatewayClient, begun: Any) -> Any:
    """How it stands after it was stopped; it may have been done just then."""
    with contextlib.suppress(CommandError):
        return client.post("bulk-replays", str(begun["id"]), "cancel")
    return _found(client, begun["id"]) or begun


def _hint(output: Output, begun: Any, search: str) -> None:
    """Why nothing was found, perhaps."""
    if not begun["total"] and "state:" not in search and not output.as_json:
        output.line("dead letters only; add state:delivered for what was delivered")


def _say(output: Output, text: str) -> None:
    if not output.as_json:
        print(text, file=sys.stderr, flush=True)


def _told(output: Output, found: Any) -> None:
    if output.as_json:
        output.json(found)
    else:
        total = counted(found["total"], "delivery", "deliveries")
        output.line(f"bulk replay {found['id']} is {found['state']}: {found['done']:,} of {total}")
