"""One stream of frozen events. Free when nobody listens: an ``if`` on an empty tuple.

Events hold no secrets: hashes of the key and of its scope, and nothing that a sender wrote.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from oncekey.models import Key

__all__ = ["TIMINGS", "Event", "EventKind", "Subscription", "emit", "listening", "subscribe"]


class EventKind(StrEnum):
    """What happened."""

    FIRST = "first"  # a claim was won on a key that nobody held
    REPLAY = "replay"  # a stored answer, or "already handled", was given back
    IN_FLIGHT = "in_flight"  # a duplicate was told that the first call still runs
    WAITED = "waited"  # a duplicate waited for the first call
    TAKEOVER = "takeover"  # a claim was won from an owner whose lease ran out
    FENCED = "fenced"  # an owner came too late: its claim was somebody else's
    CONFLICT = "conflict"  # the key was used with another payload
    EXPIRED = "expired"  # the key was used so long ago that its answer is gone
    COMPLETED = "completed"  # an outcome was recorded
    RELEASED = "released"  # a failed call gave its key back
    SWEPT = "swept"  # records past their time were removed
    EVICTED = "evicted"  # an operator made the store forget a key
    IGNORED = "ignored"  # a webhook came whose type has no handler
    STORE_ERROR = "store_error"  # the store failed
    DELIVERY = "delivery"  # a webhook delivery was answered
    EFFECT = "effect"  # a webhook's event was handled, and that is recorded
    BREAKER = "breaker"  # the circuit breaker around a store changed its state
    BYPASS = "bypass"  # work ran, or a copy was answered, without the store, as a policy allows
    LATE = "late"  # an event came after its window, and was handled as new
    COLLISION = "collision"  # one key came with another payload, or from another sender
    RECONCILED = "reconciled"  # what ran without the store was entered into it afterwards
    SLIPPED = "slipped"  # reconciliation found work that was done more than once
    LIMITED = "limited"  # a call was refused, as there were too many
    # Only for those who subscribe with ``timings=True``:
    STORE_CALL = "store_call"  # a call of the store came back
    STARTED = "started"  # a handler began to run
    ENDED = "ended"  # a handler returned or raised


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        kind: What.
        operation: The guarded function or the store method. A name from your code, never one that
            a sender chose.
        scope: A hash of the key's scope.
        key: The first twelve hex digits of the key's digest, as the store has it.
        duration: Seconds that it took: a claim, a handler with its completion, or a wait.
        fence: The fence of the claim, where there is one.
        attempts: How many claims of this key were won so far.
        count: How many records, for ``swept`` and ``reconciled``.
        error: The error's class name, where there was one.
        store: The kind of store, such as ``postgres``, where one was asked or has failed.
        state: What became of it, one of a few words: the outcome of a ``delivery``, the state of a
            ``breaker``.
        lateness: Seconds since it was due: since a ``delivery`` or its ``effect`` was signed, or
            since the oldest of the ``swept`` records ended. ``None``: not known.
    """

    kind: EventKind
    operation: str = ""
    scope: str = ""
    key: str = ""
    duration: float = 0.0
    fence: int = 0
    attempts: int = 0
    count: int = 0
    error: str = ""
    store: str = ""
    state: str = ""
    lateness: float | None = None


TIMINGS: Final = frozenset((EventKind.STORE_CALL, EventKind.STARTED, EventKind.ENDED))
"""The kinds that only those hear who ask for them: several for each call."""

Listener = Callable[[Event], None]

_listeners: tuple[Listener, ...] = ()
_timers: tuple[Listener, ...] = ()  # those of them who also want timings
_change = threading.Lock()


def _fresh_lock() -> None:
    global _change
    _change = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fresh_lock)


def listening() -> bool:
    """Whether anybody listens: callers build an event only then."""
    return bool(_listeners)


def emit(
    kind: EventKind,
    key: Key | None = None,
    operation: str = "",
    *,
    duration: float = 0.0,
    fence: int = 0,
    attempts: int = 0,
    count: int = 0,
    error: str = "",
    store: str = "",
    state: str = "",
    lateness: float | None = None,
) -> None:
    """Tell every listener. A listener that raises is logged and never breaks the work."""
    listeners = _timers if kind in TIMINGS else _listeners
    if not listeners:
        return
    scope, shown = (key.scope.hash, key.shown) if key is not None else ("", "")
    event = Event(
        *(kind, operation, scope, shown, duration, fence, attempts, count, error),
        *(store, state, lateness),
    )
    for listener in listeners:
        try:
            listener(event)
        except Exception:
            import logging

            logger = logging.getLogger("oncekey")
            logger.exception("an event listener failed on a %r event", kind.value)


class Subscription:
    """A listener's place in the stream; leave the ``with`` block or call ``close`` to end it."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def close(self) -> None:
        """Stop listening. Closing twice does nothing."""
        global _listeners, _timers
        with _change:
            _listeners = tuple(item for item in _listeners if item is not self._listener)
            _timers = tuple(item for item in _timers if item is not self._listener)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def subscribe(listener: Listener, *, timings: bool = False) -> Subscription:
    """Call ``listener`` with every event of this process, until the subscription is closed.

    Args:
        listener: Called in the thread or task where it happened: be quick.
        timings: Tell it also of each store call and of each handler's begin and end.

    Example:
        >>> from oncekey.instrument import subscribe
        >>> seen = []
        >>> with subscribe(seen.append):
        ...     pass
    """
    global _listeners, _timers
    with _change:
        _listeners = (*_listeners, listener)
        if timings:
            _timers = (*_timers, listener)
    return Subscription(listener)
