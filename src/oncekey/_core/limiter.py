"""How many new keys one caller may make: sliding windows, counted in this process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from math import ceil

from oncekey._core.forks import Forking, watch_forks

__all__ = ["InsertLimiter"]

_SLICES = 10
_SCOPES_KEPT = 50_000


class InsertLimiter(Forking):
    """At most ``rate * window`` events in each of several windows, for every scope apart.

    A window is counted in ten slices, so that a scope costs a few numbers, not one for each event.

    Args:
        windows: ``(events, seconds)`` pairs, all of which must hold.
        clock: Seconds, any origin.
    """

    def __init__(self, windows: tuple[tuple[int, int], ...], clock: Callable[[], float]) -> None:
        self._windows = windows
        self._clock = clock
        self._lock = threading.Lock()
        watch_forks(self)
        self._counts: OrderedDict[str, list[dict[int, int]]] = OrderedDict()

    def after_fork_in_child(self) -> None:
        """A fresh lock: another thread of the parent may have held the old one."""
        self._lock = threading.Lock()

    def retry_after(self, scope: str) -> int | None:
        """``None`` if ``scope`` may make a key now, else the whole seconds until it may."""
        with self._lock:
            counts = self._counts.get(scope)
            if counts is None:
                return None
            longest = self._longest(counts)
        return None if longest <= 0 else min(3600, max(1, ceil(longest)))

    def _longest(self, counts: list[dict[int, int]]) -> float:
        """How long until all windows have room; 0 if they have."""
        longest = 0.0
        for slices, (events, seconds) in zip(counts, self._windows, strict=True):
            # Slices that are over count until they are removed: a look is only needed then.
            if sum(slices.values()) >= events:
                longest = max(longest, self._wait(slices, events, seconds, self._clock()))
        return longest

    @staticmethod
    def _wait(slices: dict[int, int], events: int, seconds: int, now: float) -> float:
        width = seconds / _SLICES
        current = int(now / width)
        live = {s: n for s, n in slices.items() if s > current - _SLICES}
        excess = sum(live.values()) - events + 1
        for number in sorted(live):
            if excess <= 0:
                break
            excess -= live[number]
            if excess <= 0:
                return (number + _SLICES) * width - now
        return 0.0

    def admit(self, scope: str, number: int = 1) -> int | None:
        """``retry_after``, and ``count`` if there is no need to wait."""
        with self._lock:
            counts = self._counts.get(scope)
            longest = 0.0 if counts is None else self._longest(counts)
            if longest > 0:
                return min(3600, max(1, ceil(longest)))
            self._count(scope, counts, number)
        return None

    def count(self, scope: str, number: int = 1) -> None:
        """Take note of a new key of ``scope``, or with -1 of one that was none after all."""
        with self._lock:
            self._count(scope, self._counts.get(scope), number)

    def _count(self, scope: str, counts: list[dict[int, int]] | None, number: int) -> None:
        now = self._clock()
        if counts is None:
            if len(self._counts) >= _SCOPES_KEPT:
                self._counts.popitem(last=False)
            counts = self._counts[scope] = [{} for _ in self._windows]
        else:
            self._counts.move_to_end(scope)
        for slices, (_, seconds) in zip(counts, self._windows, strict=True):
            current = int(now / (seconds / _SLICES))
            if current not in slices:
                for old in [s for s in slices if s <= current - _SLICES]:
                    del slices[old]
            slices[current] = slices.get(current, 0) + number
