"""``oncekey simulate PROVIDER URL``: send a sample, and retry it as that provider does."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from oncekey.cli._format import seconds_text
from oncekey.cli._output import Output, add_json_option
from oncekey.cli._schedule import Schedule, schedule_of
from oncekey.cli._sending import Answer, check_url, deliver, with_one_id
from oncekey.cli.sign import add_signing_options, bodies, make_provider, sign_body
from oncekey.errors import PolicyError

if TYPE_CHECKING:
    from oncekey.signatures import Provider
    from oncekey.signatures.base import Facts

__all__ = ["add_to"]

PATIENCE = 10.0
_ASKS_FOR_TIME = (429, 503)


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "simulate",
        help="send a sample webhook, and retry it as its provider does",
        description="Signs a sample as the provider would and sends it to URL, again and again by "
        "the provider's own schedule, until the answer is 2xx or the schedule ends. Each attempt "
        "is signed anew under the same event id. Where a provider does not publish its schedule, "
        "an approximation is used, and it says so. Exits with 1 if no answer was 2xx.",
    )
    parser.add_argument("provider", metavar="PROVIDER", help="such as stripe")
    parser.add_argument("url", metavar="URL", help="such as http://localhost:8000/webhooks/stripe")
    add_signing_options(parser)
    parser.add_argument(
        "--speed", type=float, default=1, metavar="N", help="divide the waits by this; 1"
    )
    parser.add_argument(
        "--max-attempts", type=int, metavar="N", help="end after so many, whatever the schedule"
    )
    parser.add_argument(
        "--copies", type=int, default=1, metavar="N", help="send so many at the same time; 1"
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Send until it is taken, and print each attempt."""
    _check(arguments)
    maker = make_provider(arguments)
    plan = schedule_of(maker.facts)
    out = Output(arguments)
    if not out.as_json:
        out.line(_plan_line(maker.facts, plan))
    rows: list[dict[str, Any]] = []
    failed = False
    for body in bodies(maker, arguments):
        row: dict[str, Any] = {}
        for row in _attempts(maker, with_one_id(maker, arguments), body, plan):
            rows.append(row)
            if not out.as_json:
                _show(out, row, arguments.speed)
        failed = failed or not row["taken"]
    if out.as_json:
        plan_fields = {"published": plan.published, "about": plan.about, "waits": plan.waits}
        out.json({"ok": not failed, "schedule": plan_fields, "attempts": rows})
    return 1 if failed else 0


def _check(arguments: argparse.Namespace) -> None:
    check_url(arguments.url)
    if not 0 < arguments.speed < float("inf"):
        raise PolicyError("--speed must be more than 0; 60 makes a minute a second")
    if arguments.max_attempts is not None and arguments.max_attempts < 1:
        raise PolicyError("--max-attempts must be 1 or more")
    if not 1 <= arguments.copies <= 256:
        raise PolicyError("--copies must be 1 to 256")


def _attempts(
    maker: Provider, arguments: argparse.Namespace, body: bytes, plan: Schedule
) -> Iterator[dict[str, Any]]:
    """Make each attempt, tell of it, and wait for the next. Copies that were taken rest."""
    timeout = maker.facts.timeout_seconds or PATIENCE
    open_copies = arguments.copies
    at = 0.0
    with ThreadPoolExecutor(arguments.copies) as pool:
        for number in range(1, len(plan.waits) + 2):
            requests = [
                sign_body(maker, arguments, arguments.url, body) for _ in range(open_copies)
            ]
            answers = list(pool.map(lambda one: deliver(one, timeout), requests))
            left = [one for one in answers if not one.taken]
            open_copies = len(left)
            wait, why = _next(maker.facts, plan, number, left, arguments.max_attempts)
            yield {
                "attempt": number,
                "at_seconds": at,
                "taken": not left,
                "answers": [
                    {"status": one.status, "milliseconds": one.milliseconds, "text": one.text}
                    for one in answers
                ],
                "next_wait": wait,
                "ends": why,
            }
            if wait is None:
                return
            time.sleep(wait / arguments.speed)
            at += wait


def _next(
    facts: Facts, plan: Schedule, number: int, left: list[Answer], most: int | None
) -> tuple[float | None, str]:
    """Seconds to the next attempt; or ``None``, and why there is none."""
    if not left:
        return None, "taken"
    rules = facts.retry_schedule
    statuses = {one.status for one in left}
    if statuses <= set(rules.get("ends", ())):
        return None, f"{facts.title} gives up on this answer"
    if "only" in rules and not statuses & set(rules["only"]):
        return None, f"{facts.title} does not retry on this answer"
    if number > len(plan.waits):
        return None, "the schedule ends" if plan.waits else f"{facts.title} does not retry"
    if number == most:
        return None, "--max-attempts"
    if facts.retry_after_most and statuses <= set(_ASKS_FOR_TIME):
        asked = max((_seconds(one.retry_after) for one in left), default=0)
        if not 0 < asked <= facts.retry_after_most:
            return None, f"it retries this only after a Retry-After up to {facts.retry_after_most}"
        return asked, ""
    return plan.waits[number - 1], ""


def _seconds(text: str) -> float:
    return float(text) if text.isascii() and text.isdigit() else 0.0


def _plan_line(facts: Facts, plan: Schedule) -> str:
    many = f"{len(plan.waits)} retries over {seconds_text(sum(plan.waits))}"
    return f"{facts.title}: {many if plan.waits else 'no retries'}, {plan.about}"


def _show(out: Output, row: dict[str, Any], speed: float) -> None:
    told = f"attempt {row['attempt']} at {seconds_text(row['at_seconds'])}"
    for answer in row["answers"]:
        status = str(answer["status"] or "none")
        out.line(f"{told:<24} {status:<5} {answer['milliseconds']:7.1f} ms  {answer['text']}")
    wait = row["next_wait"]
    if wait is None:
        out.line(row["ends"])
    else:
        here = f" ({seconds_text(wait / speed)} here)" if speed != 1 else ""
        out.line(f"  next in {seconds_text(wait)}{here}")
    sys.stdout.flush()
