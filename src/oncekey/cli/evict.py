"""``oncekey evict KEY URL``: make a store forget a key, so that a retry runs."""

from __future__ import annotations

import argparse
import dataclasses
import getpass
import sys
import time
from typing import Any

from oncekey.cli._inbox import add_source, source_key
from oncekey.cli._keys import add_key, key_of
from oncekey.cli._output import Output, add_json_option
from oncekey.cli._stores import add_store, existing_store
from oncekey.cli.inspect import shown
from oncekey.errors import PolicyError

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "evict",
        help="make a store forget a key, so that a retry runs",
        description="Makes a store forget a key: the next call of it runs, and may do its work a "
        "second time. Shows what is there and asks first, unless --yes is given. Exits with 1 if "
        "nothing was evicted. With --config and --source KEY is an event's: its next copy is taken "
        "as new, and the inbox's audit has who did it.",
    )
    add_key(parser)
    add_store(parser)
    add_source(parser)
    parser.add_argument("--yes", action="store_true", help="don't ask")
    parser.add_argument(
        "--audit-file", metavar="FILE", help="add entries about it, before and after"
    )
    parser.add_argument("--reason", metavar="TEXT", default="", help="why, for those entries")
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask, evict, and say what a retry gets now."""
    from oncekey.operate import evict, inspect
    from oncekey.stores.urls import connect

    out = Output(arguments)
    key = source_key(arguments) or key_of(arguments)
    url = existing_store(arguments)
    with connect(url) as store:
        before = inspect(store, key)
        if before.situation not in ("unknown", "released", "ended"):
            if not arguments.yes:
                _ask(out, before)
            _note(arguments, before, "evicting")
            if arguments.source is not None:
                _record(arguments, url)
        done = evict(store, key)
    _note(arguments, before, "evicted" if done.evicted else "unchanged")
    if out.as_json:
        out.json(dataclasses.asdict(done))
    else:
        out.line(done.outcome, "green" if done.evicted else "yellow")
    return 0 if done.evicted else 1


def _record(arguments: argparse.Namespace, url: str) -> None:
    """Put it into the inbox's audit, before it is done."""
    from oncekey.cli._inbox import ask

    what, why = f"{arguments.source}:{arguments.key}", arguments.reason
    ask(url, lambda inbox: inbox.record("evict", what, why, actor=getpass.getuser()))


def _ask(out: Output, before: Any) -> None:
    if out.as_json or not sys.stdin.isatty():
        raise PolicyError(
            "evicting lets the work of this key run again: give --yes where nobody can be asked"
        )
    out.pairs(shown(before))
    out.line()
    out.line("Evicting it lets the next call run its work again.", "yellow")
    if input("Evict? Type yes: ").strip().lower() != "yes":
        raise PolicyError("nothing was evicted")


def _note(arguments: argparse.Namespace, before: Any, what: str) -> None:
    """An entry in the audit file: who did what to which key, on disk before it is done."""
    if not arguments.audit_file:
        return
    from oncekey.instrument.audit import AuditEntry, AuditFile

    done = (getpass.getuser(), before.digest, what, 0, arguments.reason, 0.0)
    try:
        AuditFile(arguments.audit_file, sync=True)(AuditEntry(time.time(), "evict", *done))
    except OSError as error:
        raise PolicyError(f"{arguments.audit_file} can't be written: {error.strerror}") from None
