"""``check_gateway``: what ``oncekey doctor --config`` says of a config and of its inbox."""

from __future__ import annotations

import asyncio
import ipaddress
import os
from typing import Final

from oncekey.doctor.findings import Finding, Report, Severity
from oncekey.errors import OncekeyError
from oncekey.inbox.abc import AsyncInbox
from oncekey.inbox.overview import Overview, overview
from oncekey.inbox.urls import open_inbox
from oncekey.server.config import read_config
from oncekey.server.problems import ConfigError
from oncekey.server.settings import ServerSettings

__all__ = ["check_gateway"]

_OLD_MS: Final = 3_600_000
_LATER: Final = ("orphans", "dead letters", "backlog", "stopped targets", "workers", "audit")


def check_gateway(file: str) -> Report:
    """Look at a gateway: its config with its secrets, who can sign in, and how its inbox stands.

    Args:
        file: The config. What it names must be in the environment, as where the gateway runs.
    """
    report = Report(file)
    try:
        settings = read_config(file)
    except ConfigError as error:
        for fault in error.faults:
            where = fault.key or "the file"
            line = f"line {fault.line}, " if fault.line is not None else ""
            told = f"{line}{where}: {fault.told}"
            report.findings.append(Finding("config", Severity.ERROR, told, fault.fix))
        for check in ("login", "public address", "memory of keys", "inbox", *_LATER):
            report.skipped[check] = "the config can't be used"
        return report
    report.passed.append("config")
    _people(settings, report)
    path = settings.store.partition(":///")[2]
    if settings.store.startswith("sqlite:") and not os.path.exists(path):
        for check in ("inbox", *_LATER):
            report.skipped[check] = "there is no inbox yet: oncekey serve makes it"
        return report
    asyncio.run(_inbox(settings, report))
    return report


def _people(settings: ServerSettings, report: Report) -> None:
    report.judge(
        "login",
        Severity.WARNING,
        not settings.users and not settings.tokens,
        "nobody can sign in",
        "set ONCEKEY_TOKEN where the gateway starts, or write [users.NAME]",
    )
    report.judge(
        "public address",
        Severity.WARNING,
        not _is_local(settings.host) and not settings.public_url.startswith("https:"),
        f"it listens on {settings.host}, and public_url is no https:// address: passwords, tokens "
        "and cookies may cross the network in the clear",
        "put a proxy that speaks TLS before it, and write public_url",
    )
    slowest = max(
        settings.sources.values(), key=lambda one: one.provider.retention_seconds, default=None
    )
    wanted = slowest.provider.retention_seconds if slowest is not None else 0
    report.judge(
        "memory of keys",
        Severity.ERROR,
        settings.remember < wanted,
        f"keys are remembered for {settings.remember / 3600:.0f} h, and a source may send an event "
        f"again for {wanted / 3600:.0f} h: a late copy is taken for a new event",
        "leave remember out, or make it longer",
    )


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _inbox(settings: ServerSettings, report: Report) -> None:
    try:
        async with await open_inbox(settings.store, remember=settings.remember) as inbox:
            await inbox.check()
            report.passed.append("inbox")
            _stands(settings, await overview(inbox), report)
            await _audit(inbox, report)
    except OncekeyError as error:
        report.judge("inbox", Severity.ERROR, True, str(error), "see what the message says")
        for check in _LATER:
            if check not in report.passed:
                report.skipped[check] = "the inbox can't be used as it is"


def _stands(settings: ServerSettings, look: Overview, report: Report) -> None:
    orphans = {
        one.target: one.waiting
        for one in look.depths
        if one.waiting and one.target not in settings.targets
    }
    report.judge(
        "orphans",
        Severity.ERROR,
        bool(orphans),
        f"{_counted(orphans)} wait for targets that the config does not have: nobody delivers them",
        "write [targets.NAME] again, or discard their events",
    )
    dead = {one.target: one.dead for one in look.depths if one.dead}
    report.judge(
        "dead letters",
        Severity.WARNING,
        bool(dead),
        f"{_counted(dead)} were given up",
        "see oncekey issues, or oncekey reconcile --config FILE; replay them, or settle them",
    )
    oldest = look.oldest_ms or 0
    report.judge(
        "backlog",
        Severity.WARNING,
        oldest > _OLD_MS,
        f"{look.waiting} deliveries wait, the oldest for {oldest / 3_600_000:.1f} h",
        "see which target is slow: oncekey stats --config FILE",
    )
    report.judge(
        "stopped targets",
        Severity.WARNING,
        bool(look.stopped),
        ", ".join(f"{name} is {status}" for name, status in sorted(look.stopped.items())),
        "make them active again on the page Targets, if that was forgotten",
    )
    report.judge(
        "workers",
        Severity.WARNING,
        bool(look.lapsed),
        f"{len(look.lapsed)} deliveries were in the hands of workers that are gone",
        "start the gateway: any worker takes them",
    )


def _counted(numbers: dict[str, int]) -> str:
    return ", ".join(f"{number} deliveries for {name}" for name, number in sorted(numbers.items()))


async def _audit(inbox: AsyncInbox, report: Report) -> None:
    found = await inbox.verify_audit()
    report.judge(
        "audit",
        Severity.ERROR,
        bool(found.problems),
        "; ".join(found.problems[:3]),
        "find out who can write to the inbox's tables; oncekey audit verify --config FILE has all",
    )
