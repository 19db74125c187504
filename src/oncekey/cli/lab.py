"""``oncekey lab``: break things around your own receiver and store, and see what holds."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from oncekey.cli._output import Output, add_json_option, printable
from oncekey.cli._stores import from_environment
from oncekey.cli.sign import add_secret_options, make_provider
from oncekey.errors import PolicyError

if TYPE_CHECKING:
    from oncekey.lab import Finding
    from oncekey.testing import SignedDelivery

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "lab",
        help="break things around a receiver or a store, and report what held",
        description="Makes deliveries to a receiver while networks, workers, clocks and its store "
        "fail, and says what must hold and what was seen. The receiver is at --receiver; with "
        "--run it is started, killed and stopped as well. With --store-env alone, the store is "
        "tested by itself. Exits with 1 if something does not hold. Use test systems: events are "
        "really delivered, and the receiver is really killed.",
    )
    parser.add_argument("--receiver", metavar="URL", help="such as http://localhost:8000/hooks")
    parser.add_argument("--provider", metavar="NAME", help="who the deliveries are from")
    parser.add_argument("--type", metavar="TYPE", help="the type of the events")
    add_secret_options(parser)
    _add_faults(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


def _add_faults(parser: argparse.ArgumentParser) -> None:
    """What is broken, how much of it, and where the report goes."""
    parser.add_argument("--run", metavar="COMMAND", dest="start", help="starts the receiver")
    parser.add_argument(
        "--store-env",
        metavar="NAME",
        help="the environment variable with the store's URL; the command gets it with an address "
        "that leads through a failing network",
    )
    parser.add_argument(
        "--effects",
        metavar="COMMAND",
        help="prints how often the effect happened so far; or a URL that says it",
    )
    parser.add_argument(
        "--exactly-once",
        action="store_true",
        help="a crash may not repeat an effect either: it is in the mark's transaction",
    )
    parser.add_argument("--recording", metavar="FILE", help="deliveries to make again")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="only this experiment"
    )
    parser.add_argument("--list", action="store_true", help="list the experiments")
    parser.add_argument("--events", type=int, default=40, metavar="N", help="for each experiment")
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="deliveries at once")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="gives the same order")
    parser.add_argument(
        "--patience", type=float, default=60, metavar="SECONDS", help="longer than a lease"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with charts")
    parser.add_argument("--junit", metavar="FILE", help="write JUnit XML")


def run(arguments: argparse.Namespace) -> int:
    """Do the experiments, and print what was found."""
    from oncekey.lab import Lab

    out = Output(arguments)
    if arguments.list:
        if out.as_json:
            out.json(Lab.experiments())
        else:
            out.table(["experiment", "what is broken"], list(Lab.experiments().items()))
        return 0
    store = arguments.store_env and from_environment("--store-env", arguments.store_env)
    lab = Lab(
        arguments.receiver,
        _delivery(arguments),
        command=arguments.start,
        store=store,
        store_env=arguments.store_env,
        effects=_effects(arguments.effects) if arguments.effects else None,
        exactly_once=arguments.exactly_once,
        recording=arguments.recording,
        events=arguments.events,
        workers=arguments.workers,
        seed=arguments.seed,
        patience=arguments.patience,
    )
    with _unwound():
        report = lab.run(arguments.only, tell=None if out.as_json else _tell)
    if arguments.html:
        report.write_html(arguments.html)
    if arguments.junit:
        report.write_junit(arguments.junit)
    if out.as_json:
        out.json(report.as_dict())
    else:
        for line in str(report).splitlines():
            out.line(printable(line))
    return 0 if report.ok else 1


@contextmanager
def _unwound() -> Iterator[None]:
    """A signal to end leaves as Ctrl-C does, so that the receiver that was started ends too."""

    def leave(number: int, frame: object) -> None:
        for one in before:
            signal.signal(one, signal.SIG_IGN)  # a second one must not cut the first's work short
        raise SystemExit(128 + number)

    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():  # no other may ask for signals
        for one in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(one) is not signal.SIG_IGN:  # as nohup has it
                before[one] = signal.signal(one, leave)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _tell(finding: Finding) -> None:
    """Progress, for who waits."""
    print(f"{finding.name}: {finding.result}", file=sys.stderr, flush=True)


def _delivery(arguments: argparse.Namespace) -> SignedDelivery | None:
    if not arguments.receiver:
        return None
    if not arguments.provider:
        raise PolicyError("who sends to that receiver? Give --provider NAME, and its --secret-env")
    from oncekey.testing import sample

    return sample(make_provider(arguments), type=arguments.type, url=arguments.receiver)


def _effects(source: str) -> Callable[[], int]:
    """Counts effects by a command, or by a URL."""

    def count() -> int:
        try:
            if source.startswith(("http://", "https://")):
                with urllib.request.urlopen(source, timeout=30) as answer:  # noqa: S310 - as asked
                    return int(answer.read(100))
            done = subprocess.run(  # noqa: S603 - the caller's own command
                shlex.split(source), capture_output=True, text=True, check=True, env=os.environ
            )
            return int(done.stdout)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            raise PolicyError(f"--effects gave no number: {type(error).__name__}") from None

    return count
