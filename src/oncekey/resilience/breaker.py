"""A circuit breaker: after failures in a row nobody waits for the store, until it is seen to work.

It opens on failures that speak of the store, and closes on evidence alone: calls that the store
answered. Time only says when such a call may be tried.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from math import ceil

from oncekey._core.forks import Forking, watch_forks
from oncekey.errors import PolicyError, StoreCircuitOpenError
from oncekey.instrument.events import EventKind, emit
from oncekey.policy import Duration, milliseconds

__all__ = ["Breaker", "BreakerState"]

logger = logging.getLogger("oncekey")

LONGEST_PROBE = 60.0  # seconds; one that takes longer holds nobody else up


class BreakerState(StrEnum):
    """What a breaker does with calls."""

    CLOSED = "closed"  # all go to the store
    OPEN = "open"  # none does
    HALF_OPEN = "half_open"  # one at a time does, and what becomes of it decides


_CLOSED, _OPEN, _HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


class Breaker(Forking):
    """Counts the failures of one store. Threads, event loops and tasks may share it.

    A call asks ``admit`` for a pass, and says with it how it ended. A pass from before the last
    change of state says nothing of the store as it is now, and is not counted.

    Args:
        failures: After so many failures in a row it opens. A call that is answered starts the count
            anew, so that conflicts and busy moments never open it.
        retry_after: How long it stays open before one call may try the store.
        successes: How many such calls, one after another, must be answered before it closes.
        clock: Seconds, any origin.

    Raises:
        PolicyError: A number is not positive.
    """

    def __init__(
        self,
        *,
        failures: int = 5,
        retry_after: Duration = 5,
        successes: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if failures < 1 or successes < 1:
            raise PolicyError(
                f"failures and successes of a breaker must be positive, got {failures} and "
                f"{successes}"
            )
        self._most = failures
        self._needed = successes
        self._pause = milliseconds(retry_after, "retry_after", least=1) / 1000
        self._clock = clock
        self._state = _CLOSED
        self._count = 0  # failures while closed, answers while half open
        self._pass = 0  # rises with every change of state, and with every probe
        self._probe_until = 0.0  # while one is under way
        self._try_at = 0.0
        self._lock = threading.Lock()
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        """A fresh lock, and no probe: the one under way is the parent's."""
        self._lock = threading.Lock()
        self._probe_until = 0.0

    def __repr__(self) -> str:
        return f"Breaker({self._state.value})"

    @property
    def state(self) -> BreakerState:
        """What it does with calls now."""
        return self._state

    def admit(self) -> int:
        """A pass for one call of the store.

        Raises:
            StoreCircuitOpenError: Not now.
        """
        if self._state is _CLOSED:
            return self._pass
        with self._lock:
            if self._state is _CLOSED:
                return self._pass
            now = self._clock()
            self._refuse(now)
            opening = self._state is _OPEN
            if opening:
                self._become(_HALF_OPEN)
            self._pass += 1
            self._probe_until = now + LONGEST_PROBE
            given = self._pass
        if opening:
            self._tell(_HALF_OPEN)
        return given

    def check(self) -> None:
        """Raise what ``admit`` would, for a step before the one that needs a pass.

        Raises:
            StoreCircuitOpenError: Not now.
        """
        if self._state is not _CLOSED:
            with self._lock:
                self._refuse(self._clock())

    def _refuse(self, now: float) -> None:
        state = self._state
        wait = (self._try_at if state is _OPEN else self._probe_until) - now
        if state is not _CLOSED and wait > 0:
            seconds = max(1, ceil(min(wait, self._pause)))
            raise StoreCircuitOpenError(
                f"the store failed {self._most} times in a row, and is not asked again for "
                f"another {seconds} s: look at the server, or at the network between",
                retry_after=seconds,
            )

    def succeeded(self, given: int) -> bool:
        """The store has answered. True: that closed the breaker."""
        if self._state is _CLOSED:
            if self._count:
                with self._lock:
                    if self._state is _CLOSED and given == self._pass:
                        self._count = 0
            return False
        with self._lock:
            if self._state is not _HALF_OPEN or given != self._pass:
                return False
            self._count += 1
            self._probe_until = 0.0
            if self._count < self._needed:
                return False
            self._become(_CLOSED)
        self._tell(_CLOSED)
        return True

    def failed(self, given: int, error: Exception) -> None:
        """The store could not be reached, or did not answer in time."""
        with self._lock:
            if self._state is _OPEN or given != self._pass:
                return
            self._count += 1
            if self._state is _CLOSED and self._count < self._most:
                return
            again = self._state is _HALF_OPEN
            self._become(_OPEN)
            self._try_at = self._clock() + self._pause
        self._tell(_OPEN, error, again)

    def noticed(self, error: Exception) -> None:
        """The store failed in a place that needs no pass: inside of a transaction."""
        self.failed(self._pass, error)

    def abandoned(self, given: int) -> None:
        """The call ended in a way that says nothing of the store: it was cancelled, say."""
        with self._lock:
            if self._state is _HALF_OPEN and given == self._pass:
                self._probe_until = 0.0

    def _become(self, state: BreakerState) -> None:
        self._state = state
        self._count = 0
        self._pass += 1
        self._probe_until = 0.0

    def _tell(
        self, state: BreakerState, error: Exception | None = None, again: bool = False
    ) -> None:
        """Say so, outside of the lock: listeners may ask for the state."""
        name = "" if error is None else type(error).__name__
        emit(EventKind.BREAKER, None, "breaker", error=name, state=state.value)
        if state is not _HALF_OPEN and not again:
            logger.warning(
                "the breaker of a store is %s%s", state.value, f": {error}" if error else ""
            )
