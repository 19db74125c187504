"""``oncekey providers``: which webhook providers are known, and what is known of each."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from oncekey.cli._output import add_json_option

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "providers",
        help="list the webhook providers that are known",
        description="Lists the providers whose signatures can be verified and signed. With a NAME, "
        "prints all that is known of it, with its source and date.",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="such as stripe")
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or one row of it."""
    from oncekey.signatures.table import known_provider, providers

    chosen = [known_provider(arguments.name)] if arguments.name else list(providers().values())
    if arguments.json:
        rows = [{**_plain(one), "retention_seconds": one.retention} for one in chosen]
        print(json.dumps(rows[0] if arguments.name else rows, indent=2))
    elif arguments.name:
        for key, value in {**_plain(chosen[0]), "retention_seconds": chosen[0].retention}.items():
            if value not in (None, "", {}, (), []):
                shown = value if key != "setup" else "; ".join(value)
                print(f"{key + ':':<19} {shown}")
    else:
        print(f"{'name':<18} {'scheme':<18} {'keep':>6}  {'checked':<8} event id")
        for one in chosen:
            days = f"{one.retention / 86_400:.1f} d"
            place = one.event_id or "-"
            print(f"{one.name:<18} {one.scheme:<18} {days:>6}  {one.checked:<8} {place}")
        print(f"{len(chosen)} providers; `oncekey providers NAME` has sources and notes")
    return 0


def _plain(facts: Any) -> dict[str, Any]:
    row = dataclasses.asdict(facts)
    return {key: dict(value) if key == "settings" else value for key, value in row.items()}
