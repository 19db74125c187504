"""``ManualClock``: time that passes when a test says so."""

from __future__ import annotations

import threading

from oncekey.errors import PolicyError

__all__ = ["ManualClock"]


class ManualClock:
    """A clock that stands still until it is told to move. Pass it as ``clock=``.

    Example:
        >>> from oncekey import MemoryStore, WebhookDedup
        >>> from oncekey.testing import ManualClock
        >>> clock = ManualClock()
        >>> dedup = WebhookDedup(MemoryStore(clock=clock))
        >>> dedup.check_and_record("sender", "evt_1")
        True
        >>> clock.advance(86_400)
        >>> dedup.check_and_record("sender", "evt_1")
        True
    """

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """Seconds since 1970."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward.

        Raises:
            PolicyError: ``seconds`` is negative: use ``set`` to move a clock back.
        """
        if seconds < 0:
            raise PolicyError("a clock advances by a positive time; use set() to move it back")
        with self._lock:
            self._now += seconds

    def set(self, now: float) -> None:
        """Move to ``now``, forward or back."""
        with self._lock:
            self._now = now
