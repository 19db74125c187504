"""``oncekey conformance URL``: does a store keep the contract?"""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING, Any

from oncekey.cli._output import Output, add_json_option
from oncekey.cli._stores import add_store, store_url
from oncekey.models import Key, Scope

if TYPE_CHECKING:
    from oncekey.conformance import Conformance

__all__ = ["add_to"]

_PROBE = Key(Scope("conformance", "probe"), "probe")


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "conformance",
        help="check that a store keeps the contract",
        description="Runs the contract suite on the store at URL, sync and async. It adds records "
        "of its own under fresh random scopes and removes nothing.",
    )
    add_store(parser)
    parser.add_argument("--only", choices=("sync", "async"), help="one form only")
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the suite and print a line a check."""
    from oncekey.conformance import CHECKS, arun_all, run_all
    from oncekey.stores.urls import aconnect, connect

    out = Output(arguments)
    url = store_url(arguments)
    outcomes: dict[str, list[Conformance]] = {}
    if arguments.only != "async":
        with connect(url) as store:  # what is wrong with all of it is said once, here
            store.read(_PROBE)
        with out.progress(f"running {len(CHECKS)} checks, sync"):
            outcomes["sync"] = run_all(lambda: connect(url))
    if arguments.only != "sync":

        async def everything() -> list[Conformance]:
            async with aconnect(url) as store:
                await store.read(_PROBE)
            return await arun_all(lambda: aconnect(url))

        with out.progress(f"running {len(CHECKS)} checks, async"):
            outcomes["async"] = asyncio.run(everything())
    if out.as_json:
        out.json([_plain(form, one) for form, results in outcomes.items() for one in results])
    else:
        _print(out, outcomes)
    return 1 if any(one.error for results in outcomes.values() for one in results) else 0


def _plain(form: str, result: Conformance) -> dict[str, Any]:
    error = None if result.error is None else f"{type(result.error).__name__}: {result.error}"
    return {"form": form, "check": result.name, "promise": result.promise, "error": error}


def _print(out: Output, outcomes: dict[str, list[Conformance]]) -> None:
    failed = 0
    for form, results in outcomes.items():
        for result in results:
            if result.error is None:
                out.line(f"ok    {form:<5}  {result.promise}")
                continue
            failed += 1
            out.line(f"FAIL  {form:<5}  {result.promise}", "red")
            out.line(f"             {type(result.error).__name__}: {result.error}")
    total = sum(map(len, outcomes.values()))
    out.line(f"{total - failed} passed, {failed} failed")
