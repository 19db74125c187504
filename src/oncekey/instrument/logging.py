"""Events as log lines: hashes of the key and of its scope, and nothing that a sender wrote."""

from __future__ import annotations

import logging
from typing import Final

from oncekey.instrument.events import Event, EventKind, Subscription, subscribe

__all__ = ["log_events"]

LEVELS: Final[dict[EventKind, int]] = {
    EventKind.TAKEOVER: logging.WARNING,
    EventKind.FENCED: logging.WARNING,
    EventKind.EVICTED: logging.WARNING,
    EventKind.STORE_ERROR: logging.ERROR,
    EventKind.SLIPPED: logging.ERROR,
    EventKind.CONFLICT: logging.INFO,
    EventKind.EXPIRED: logging.INFO,
    EventKind.RELEASED: logging.INFO,
    EventKind.IGNORED: logging.INFO,
    EventKind.BREAKER: logging.WARNING,
    EventKind.BYPASS: logging.WARNING,
    EventKind.LATE: logging.WARNING,
    EventKind.COLLISION: logging.WARNING,
    EventKind.RECONCILED: logging.INFO,
    EventKind.LIMITED: logging.INFO,
}


def log_events(logger: logging.Logger | None = None, *, timings: bool = False) -> Subscription:
    """Write every event to ``logger`` (default: ``oncekey.events``) until the result is closed.

    Store errors are errors; takeovers, fenced owners, late events, collisions, and all that runs
    without the store are warnings; the rest is debug or info. The fields also stand on the record
    as ``record.oncekey``, for structured log handlers.

    Args:
        logger: Where to.
        timings: Write of each store call and of each handler's begin and end, too: as debug.
    """
    target = logger if logger is not None else logging.getLogger("oncekey.events")

    def write(event: Event) -> None:
        level = LEVELS.get(event.kind, logging.DEBUG)
        if not target.isEnabledFor(level):
            return
        details = {
            "kind": event.kind.value,
            "operation": event.operation,
            "scope": event.scope,
            "key": event.key,
            "duration_ms": round(event.duration * 1000, 3),
            "fence": event.fence,
            "attempts": event.attempts,
            "count": event.count,
            "error": event.error,
            "store": event.store,
            "state": event.state,
            "late_ms": None if event.lateness is None else round(event.lateness * 1000, 3),
        }
        shown = " ".join(f"{name}={value}" for name, value in details.items() if value)
        target.log(level, "%s", shown, extra={"oncekey": details})

    return subscribe(write, timings=timings)
