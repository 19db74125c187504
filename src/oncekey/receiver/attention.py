"""What somebody should look at: events that came after their window, and keys that collide."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from typing import TYPE_CHECKING, Final

from oncekey.instrument.events import EventKind, emit
from oncekey.models import Key, Record

if TYPE_CHECKING:
    from oncekey.resilience.findings import Findings

__all__ = ["Attention"]

logger = logging.getLogger("oncekey")

IDS_KEPT: Final = 10_000  # of those that senders are looked up by, while somebody listens

_senders: dict[bytes, str] = {}


class Attention:
    """Tells of late and colliding events: in the stream, and in a queue where there is one.

    Args:
        operation: The receiver, in events.
        findings: The queue for late arrivals, or the path of its SQLite file.
    """

    def __init__(self, operation: str, findings: Findings | str | None) -> None:
        self._operation = operation
        self._findings: Findings | None = None
        if isinstance(findings, str):
            from oncekey.resilience.findings import Findings

            self._findings = Findings(findings)
        else:
            self._findings = findings

    def late(self, key: Key, fingerprint: bytes, before: Record | None) -> None:
        """An event came after its window, and is about to be handled as new."""
        emit(EventKind.LATE, key, self._operation)
        if self._findings is None:
            return
        from oncekey.resilience.findings import Finding, Side, finding_id
        from oncekey.resilience.journal import process_name

        now = time.time()
        first = Side("store", "", "expired", 0.0, 0.0)
        same: bool | None = None
        if before is not None:
            began = before.fence / 1_000_000
            first = Side("store", "", "expired", began, 0.0, before.owner.hex()[:12])
            if fingerprint and before.fingerprint:
                same = fingerprint == before.fingerprint
        sides = (first, Side("receiver", process_name(), "running", now, 0.0))
        name = finding_id("late", key.digest, str(time.time_ns()))
        shown, scope = key.digest.hex(), key.scope.hash
        try:
            self._findings.add(Finding(name, "late", shown, scope, now, sides, same))
        except Exception:
            # The event matters more than what is noted about it, and is handled all the same.
            logger.exception(
                "a late event (scope=%s key=%s) could not be put into the queue of findings",
                scope,
                key.shown,
            )

    def changed(self, key: Key) -> None:
        """A key came with another payload."""
        emit(EventKind.COLLISION, key, self._operation, state="payload")

    def met(self, key: Key, sender: str) -> None:
        """A key came from a sender. One that came from another before is told: it is no copy.

        Their keys are apart whatever their names are. It is known for the last ones that came to
        the receivers of this provider in this process, while somebody listens.
        """
        name = hashlib.sha256(f"{self._operation}\0{key.name}".encode()).digest()
        known = _senders.get(name)
        _senders[name] = sender
        if known is None:
            if len(_senders) > IDS_KEPT:
                with contextlib.suppress(StopIteration, RuntimeError):  # another thread was faster
                    _senders.pop(next(iter(_senders)), None)
        elif known != sender:
            emit(EventKind.COLLISION, key, self._operation, state="sender")
