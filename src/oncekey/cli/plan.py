"""``oncekey plan --rate``: the memory, disk and writes of a load, or the cores of a gateway."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Final

from oncekey.cli._format import bytes_text, duration
from oncekey.cli._output import CommandError, Output, add_json_option, counted

__all__ = ["add_to"]

_USUAL: Final = 16
"""The ``concurrency`` of a target whose config says nothing."""

_WEEK: Final = 604_800
"""The seconds for which a gateway knows keys at least."""

_OF_A_GATEWAY: Final = ("targets", "seconds", "fails", "body", "retention", "remember")


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "plan",
        help="work out the memory, disk and writes that a load needs",
        description="Works out what each backend needs for a load, from bytes a key that were "
        "measured on real servers. With --gateway: the cores, slots and disk of a gateway.",
    )
    parser.add_argument(
        "--rate",
        type=float,
        required=True,
        metavar="N",
        help="new keys, or events, in a second, on average",
    )
    parser.add_argument(
        "--ttl",
        type=duration,
        default=86_400.0,
        metavar="TIME",
        help="how long a key is remembered, such as 24h or 7d; 24h",
    )
    parser.add_argument(
        "--size", type=int, default=200, metavar="BYTES", help="how long an answer is; 200"
    )
    gateway = parser.add_argument_group("of a gateway")
    gateway.add_argument("--gateway", action="store_true", help="size a gateway")
    for flag, kind, name, what in (
        ("--targets", int, "N", "to how many targets an event goes; 1"),
        ("--seconds", float, "N", "how long an attempt takes; 0.1"),
        ("--fails", float, "PART", "which part of the attempts fails; 0.02"),
        ("--body", int, "BYTES", "how long an event is; 1000"),
        ("--retention", duration, "TIME", "how long events are kept; 30d"),
        ("--remember", duration, "TIME", "how long their keys are known; 7d"),
    ):
        gateway.add_argument(flag, type=kind, metavar=name, help=what)
    gateway.add_argument(
        "--provider",
        metavar="NAME",
        help="whose events they are: its keys are known for as long as it may send again",
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a row for each backend, or for each store of a gateway."""
    given = {
        name: value for name in _OF_A_GATEWAY if (value := getattr(arguments, name)) is not None
    }
    if arguments.gateway:
        return _gateway(arguments, given)
    if given:
        raise CommandError(f"--{next(iter(given))} goes with --gateway")
    if arguments.provider:
        raise CommandError("--provider goes with --gateway")
    from oncekey.operate import plan
    from oncekey.operate.planning import measured

    out = Output(arguments)
    plans = plan(arguments.rate, arguments.ttl, arguments.size)
    if out.as_json:
        out.json([dataclasses.asdict(one) for one in plans])
        return 0
    out.line(f"{plans[0].keys:,} records at a time")
    out.table(
        ["backend", ">memory", ">disk", ">written", ">commits", "note"],
        [
            [
                one.backend,
                bytes_text(one.memory_bytes) if one.memory_bytes else "-",
                bytes_text(one.disk_bytes) if one.disk_bytes else "-",
                f"{bytes_text(one.written_bytes)}/s" if one.written_bytes else "-",
                f"{one.commits:,}/s" if one.commits else "-",
                one.note,
            ]
            for one in plans
        ],
    )
    out.line(f"from bytes a key measured on {measured()['date']} ({measured()['made_by']})")
    return 0


def _gateway(arguments: argparse.Namespace, given: dict[str, Any]) -> int:
    from oncekey.operate import GatewayLoad, plan_gateway
    from oncekey.operate.sizing import BUSY, MEASURED

    if arguments.provider:
        if "remember" in given:
            raise CommandError("--provider says how long keys are known: leave out --remember")
        given["remember"] = _remembered(arguments.provider)
    load = GatewayLoad(arguments.rate, **given)
    plans = {store: plan_gateway(load, store=store) for store in ("sqlite", "postgresql")}
    out = Output(arguments)
    if out.as_json:
        out.json({store: dataclasses.asdict(one) for store, one in plans.items()})
        return 0
    one = plans["postgresql"]
    out.line(
        f"{one.attempts:.3g} attempts of a delivery, {one.in_flight:,.1f} at a time for each "
        f"target: {counted(one.slots, 'slot')} on all nodes together (concurrency x nodes)"
    )
    out.table(
        ["store", ">gateway", ">postgresql", ">events a day", ">history", ">keys"],
        [
            [
                store,
                f"{plan.gateway_cores:,.2f} cores",
                f"{plan.store_cores:,.2f} cores" if plan.store_cores else "-",
                bytes_text(plan.events_a_day),
                bytes_text(plan.history),
                bytes_text(plan.keys),
            ]
            for store, plan in plans.items()
        ],
    )
    if plans["sqlite"].gateway_cores > 1:
        out.line("SQLite is for the processes of one machine: this load is PostgreSQL's")
    if one.slots > _USUAL:
        out.line(
            f"{one.slots:,} slots are more than the {_USUAL} of a target on one node: set "
            f"concurrency = {one.slots} in [targets.NAME], divided by the nodes"
        )
    if "remember" not in given:
        stripe = _remembered("stripe") / 86_400
        out.line(
            "keys are known for 7d here; a gateway knows them for as long as the provider may send "
            f"again, which for stripe is {stripe:.0f}d: give --provider NAME"
        )
    out.line(
        f"cores and slots {BUSY:.0%} busy; costs measured on {MEASURED} with 32 callers at a time: "
        "a lone event costs up to ten times as much, so few a second need more than these cores; "
        "see docs: Scale"
    )
    return 0


def _remembered(name: str) -> float:
    """How long a gateway knows the keys of a provider's events, where its config says nothing."""
    from oncekey.signatures.table import known_provider

    return max(known_provider(name).retention, _WEEK)
