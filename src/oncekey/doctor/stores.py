"""What every store is looked at for: clock, sweeping, a race; and what only its kind has."""

from __future__ import annotations

import time
import warnings
from importlib import import_module
from typing import Final

from oncekey.abc import Browsable, Store, Sweepable
from oncekey.doctor.findings import Report, Severity
from oncekey.doctor.racing import KEYS, RACERS, race
from oncekey.errors import StoreConfigError, StoreError
from oncekey.operate import stats
from oncekey.stores.urls import SCHEMES, connect

__all__ = ["check_store"]

_KINDS: Final = {"sqlite", "postgres", "redis"}
SKEW: Final = 2.0  # seconds that clocks may differ
MANY: Final = 1000  # records past their time that are worth a word


def check_store(
    url: str, *, read_only: bool = False, snapshot_seconds: float = 300.0, shown: str = ""
) -> Report:
    """Look at a store: its server, settings, clock, permissions, schema, sweeping; and race it.

    Args:
        url: The store, as for ``connect``.
        read_only: Change nothing: no race, which leaves a few records for a minute.
        snapshot_seconds: How old a transaction of others may be, in PostgreSQL.
        shown: What the report calls the store, where the URL has a password in it.

    Raises:
        StoreError: The store can't be reached or opened.
    """
    kind = SCHEMES.get(url.partition("://")[0].lower(), "")
    report = Report(shown or url)
    usable = True
    if kind in _KINDS:
        examine = import_module(f"oncekey.doctor.{kind}").examine
        options = {"snapshot_seconds": snapshot_seconds} if kind == "postgres" else {}
        usable = examine(url, report, **options)
    if kind == "memory":
        report.judge(
            "durability",
            Severity.WARNING,
            True,
            "memory:// keeps records in one process: a restart forgets them all",
            "use sqlite:///file.db, postgresql:// or redis:// for anything but tests",
        )
    if not usable:
        for check in ("clock", "sweeping", "atomicity"):
            report.skipped[check] = "the store can't be used as it is"
        return report
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a store warns of when it is opened is looked at here
        with connect(url) as store:
            _clock(store, report)
            _sweeping(store, report)
    if read_only:
        report.skipped["atomicity"] = "a race leaves records, and nothing was to be changed"
    else:
        _atomicity(url, report)
    return report


def _clock(store: Store, report: Report) -> None:
    """The store's clock decides about leases; providers' signatures go by ours."""
    best = (float("inf"), 0.0)
    for _ in range(3):  # the quickest answer tells best
        begun = time.time()
        there = store.now() / 1000
        ended = time.time()
        best = min(best, (ended - begun, there - (begun + ended) / 2))
    took, skew = best
    report.judge(
        "clock",
        Severity.WARNING,
        abs(skew) > SKEW + took,
        f"the store's clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} ours",
        "synchronise both (chrony, systemd-timesyncd): leases and ends of records go by the "
        "store's clock, signatures by this machine's",
    )


def _sweeping(store: Store, report: Report) -> None:
    if not isinstance(store, Browsable):
        report.skipped["sweeping"] = "this store can't be looked through"
        return
    found = stats(store)
    ended = found.situations.get("ended", 0)
    lag = found.sweep_lag or 0.0
    swept = isinstance(store, Sweepable)
    patience = 3600 if swept else 3 * 86_400  # a TTL of the store's own, as DynamoDB's, takes days
    report.judge(
        "sweeping",
        Severity.WARNING,
        ended > MANY and ended > found.records / 2 and lag > patience,
        f"{ended} of {found.records} records are past their time, the oldest by {lag / 3600:.1f} h",
        "run oncekey sweep; records are swept by calls that make new ones, so see that those come, "
        "and that the store may delete"
        if swept
        else "the store itself should remove them: run oncekey migrate, which switches DynamoDB's "
        "TTL on",
    )


def _atomicity(url: str, report: Report) -> None:
    try:
        winners = race(url)
    except StoreConfigError:
        raise
    except StoreError as error:
        report.judge("atomicity", Severity.ERROR, True, str(error), "see what the message says")
        return
    told = ", ".join(f"{keys} keys with {many} winners" for many, keys in winners.items())
    report.judge(
        "atomicity",
        Severity.ERROR,
        winners != {1: KEYS},
        f"{RACERS} processes claimed {KEYS} keys at once: {told}",
        "use one store that all processes share, and that decides in one step: not memory:// with "
        "several processes, no SQLite file on a network share, no plug-in that checks and then "
        "writes",
    )
