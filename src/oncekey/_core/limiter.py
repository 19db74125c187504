"""How many new keys one caller may make: counted in this process, or by the store for all."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import ceil
from typing import Any, NamedTuple

from oncekey._core.drive import Flow, Op
from oncekey._core.forks import Forking, watch_forks
from oncekey.abc import AsyncCountable, Countable
from oncekey.errors import BackendMismatchError, IdempotencyRateLimitedError, PolicyError
from oncekey.instrument.events import EventKind, emit
from oncekey.models import Key, Scope

__all__ = ["InsertLimiter", "KeyLimit", "SharedKeyLimit", "SharedLimit", "check_limits"]

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
        now = self._clock()
        with self._lock:
            counts = self._counts.get(scope)
            return None if counts is None else self._wait(counts, now)

    def _wait(self, counts: list[dict[int, int]], now: float) -> int | None:
        longest = 0.0
        for slices, (events, seconds) in zip(counts, self._windows, strict=True):
            # Slices that are over count until they are removed: a closer look is only needed then.
            if sum(slices.values()) >= events:
                longest = max(longest, self._wait_in(slices, events, seconds, now))
        return None if longest <= 0 else min(3600, max(1, ceil(longest)))

    @staticmethod
    def _wait_in(slices: dict[int, int], events: int, seconds: int, now: float) -> float:
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
        now = self._clock()
        with self._lock:
            counts = self._of(scope, now)
            wait = self._wait(counts, now)
            if wait is None:
                self._add(counts, now, number)
        return wait

    def count(self, scope: str, number: int = 1) -> None:
        """Take note of a new key of ``scope``, or with -1 of one that was none after all."""
        now = self._clock()
        with self._lock:
            self._add(self._of(scope, now), now, number)

    def _of(self, scope: str, now: float) -> list[dict[int, int]]:
        """The counts of a scope, which becomes the one that is forgotten last."""
        counts = self._counts.get(scope)
        if counts is None:
            self._forget(now)
            counts = self._counts[scope] = [{} for _ in self._windows]
        else:
            self._counts.move_to_end(scope)
        return counts

    def _forget(self, now: float) -> None:
        """Let go of some scopes that count no more, two for each that comes; or of the oldest."""
        for _ in range(2):
            oldest = next(iter(self._counts), None)
            if oldest is None:
                return
            if len(self._counts) < _SCOPES_KEPT and not self._is_over(self._counts[oldest], now):
                return
            del self._counts[oldest]

    def _is_over(self, counts: list[dict[int, int]], now: float) -> bool:
        for slices, (_, seconds) in zip(counts, self._windows, strict=True):
            if max(slices, default=0) > int(now / (seconds / _SLICES)) - _SLICES:
                return False
        return True

    def _add(self, counts: list[dict[int, int]], now: float, number: int) -> None:
        for slices, (_, seconds) in zip(counts, self._windows, strict=True):
            current = int(now / (seconds / _SLICES))
            if slices and current not in slices:
                for old in [s for s in slices if s <= current - _SLICES]:
                    del slices[old]
            slices[current] = slices.get(current, 0) + number


class SharedLimit:
    """At most so many in a window for each name, counted by the store for all who share it.

    Args:
        what: What is counted.
        limit: ``(events, seconds)``.
    """

    def __init__(self, what: str, limit: tuple[int, int]) -> None:
        self._scope = Scope("limit", what)
        self._most, seconds = limit
        self._window = seconds * 1000

    def admit(self, name: str) -> Flow[int | None]:
        """Count one. ``None``: there were not too many; else the whole seconds to wait."""
        count, left = yield Op("count", (Key(self._scope, name), self._window))
        return None if count <= self._most else max(1, ceil(left / 1000))


def check_limits(limits: str, store: Any) -> None:
    """Raise unless ``limits`` is a word for where limits are counted, and the store can do it.

    Raises:
        PolicyError: There is no such word.
        BackendMismatchError: The store can't count.
    """
    if limits not in ("process", "shared"):
        raise PolicyError(f"limits must be 'process' or 'shared', got {limits!r}")
    if limits == "shared" and not isinstance(store, (Countable, AsyncCountable)):
        raise BackendMismatchError(
            f"limits='shared' needs a store that counts for all processes, and a "
            f"{type(store).__name__} does not: use PostgreSQL or Redis, or limits='process'"
        )


class KeyLimit(NamedTuple):
    """The limit that holds for one call, and whose keys it counts, in this process."""

    limiter: InsertLimiter
    payer: str

    def may_be_reached(self) -> bool:
        """Whether ``check`` has to look. Most calls need none."""
        return self.limiter.retry_after(self.payer) is not None

    def check(self, key: Key, operation: str) -> Flow[None]:
        """Let a call pass whose key is known: those are never held up.

        Raises:
            IdempotencyRateLimitedError: This caller may make no new key now.
        """
        known = yield Op("read", (key,))
        if known is None:
            raise _refusal(key, operation, self.limiter.retry_after(self.payer) or 1)

    def counting(self, handler: Callable[..., Any]) -> AbstractContextManager[Callable[..., Any]]:
        """Count a new key before it is claimed, and give that back if ``handler`` did not run."""
        return _Counting(self, handler)


class SharedKeyLimit(NamedTuple):
    """The same, counted by the store for all who share it."""

    limits: tuple[SharedLimit, ...]
    payer: str

    def may_be_reached(self) -> bool:
        """Only the store knows."""
        return True

    def check(self, key: Key, operation: str) -> Flow[None]:
        """Let a call pass whose key is known, or is not one too many. It is then counted.

        Raises:
            IdempotencyRateLimitedError: This caller may make no new key now.
        """
        known = yield Op("read", (key,))
        if known is None:
            for limit in self.limits:
                wait = yield from limit.admit(self.payer)
                if wait is not None:
                    raise _refusal(key, operation, wait)

    def counting(self, handler: Callable[..., Any]) -> AbstractContextManager[Callable[..., Any]]:
        """Nothing is left to count."""
        return nullcontext(handler)


def _refusal(key: Key, operation: str, wait: int) -> IdempotencyRateLimitedError:
    emit(EventKind.LIMITED, key, operation)
    return IdempotencyRateLimitedError(operation, wait)


class _Counting:
    """A handler whose key was counted."""

    def __init__(self, limit: KeyLimit, handler: Callable[..., Any]) -> None:
        self._limit, self._handler, self._ran = limit, handler, False

    def __enter__(self) -> Callable[..., Any]:
        self._limit.limiter.count(self._limit.payer)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._ran = True
        return self._handler(*args, **kwargs)

    def __exit__(self, *exc: object) -> None:
        if not self._ran:
            self._limit.limiter.count(self._limit.payer, -1)
