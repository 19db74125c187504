"""``oncekey conformance URL``: does a store keep the contract?"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "conformance",
        help="check that a store keeps the contract",
        description="Runs the contract suite on the store at URL, sync and async. It adds records "
        "of its own under fresh random scopes and removes nothing.",
    )
    parser.add_argument("url", metavar="URL", help="such as memory:// or sqlite:///file.db")
    parser.add_argument("--only", choices=("sync", "async"), help="one form only")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the suite and print a line a check."""
    from oncekey.conformance import CHECKS, Conformance, arun_all, run_all
    from oncekey.stores.urls import aconnect, connect

    url: str = arguments.url
    outcomes: dict[str, list[Conformance]] = {}
    if arguments.only != "async":
        _progress(f"running {len(CHECKS)} checks, sync")
        connect(url).close()  # a wrong URL is said once, here, and not once a check
        outcomes["sync"] = run_all(lambda: connect(url))
    if arguments.only != "sync":
        _progress(f"running {len(CHECKS)} checks, async")

        async def everything() -> list[Conformance]:
            await aconnect(url).aclose()
            return await arun_all(lambda: aconnect(url))

        outcomes["async"] = asyncio.run(everything())
    failed = 0
    for form, results in outcomes.items():
        for result in results:
            if result.error is None:
                print(f"ok    {form:<5}  {result.promise}")
                continue
            failed += 1
            print(f"FAIL  {form:<5}  {result.promise}")
            print(f"             {type(result.error).__name__}: {result.error}")
    total = sum(map(len, outcomes.values()))
    print(f"{total - failed} passed, {failed} failed")
    return 1 if failed else 0


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr)
