"""A worker that dies after the effect and before anything is recorded; then the sender retries."""

from __future__ import annotations

import time
from typing import Final, Protocol

from oncekey.errors import PolicyError
from oncekey.policy import milliseconds
from oncekey.testing._clock import ManualClock
from oncekey.testing._kill import At, Kill, die, put_kill
from oncekey.testing._process import WorkerProcess
from oncekey.testing._report import Report
from oncekey.testing._run import Count, Effects, Flow, Pause, Planned, Send, arun, run
from oncekey.testing._samples import SignedDelivery
from oncekey.testing._targets import Answer, Destination, as_target

__all__ = ["acrash_after_effect", "crash_after_effect", "kill_after_effect"]

_LONG: Final = 3600.0  # longer than leases are, shorter than anything is remembered


def crash_after_effect(
    target: object,
    delivery: SignedDelivery,
    *,
    effects: Effects,
    at: At | None = None,
    clock: ManualClock | None = None,
    patience: float = 10.0,
) -> Report:
    """Let the effect happen, kill the worker before the outcome is recorded, and retry.

    In this process, a kill is an exception that nothing catches by ``Exception``; ``finally``
    blocks still run, and a database's roll-back is asked for where a real crash would leave it to
    the database. ``kill_after_effect`` has none of that.

    Then the lease passes, the sender retries until it is answered 2xx, and once more.

    Args:
        target: As for ``deliver``, but in this process: no URL.
        delivery: From ``sample`` or ``signed``.
        effects: Counts effects; see ``deliver_twice``. 1 is exactly once; 2 says that the retry
            did it again, 0 that it never happened.
        at: Where the worker dies. A store: when it is told to record the outcome. An object and
            the name of its method: when that is called, before it does anything. If not given,
            the receiver's own store.
        clock: The manual clock of the target's store, to let the lease pass. If not given, that
            of the receiver's store; if that has none, real time, up to ``patience``.
        patience: Seconds to wait for a lease to end on a real clock.

    Returns:
        What was found, for ``assert_handled_once``.

    Raises:
        PolicyError: The target never came to where it was to die.

    Example:
        >>> from oncekey import MemoryStore
        >>> from oncekey.receiver import WebhookReceiver
        >>> from oncekey.testing import ManualClock, sample
        >>> delivery, charged = sample("stripe"), []
        >>> receiver = WebhookReceiver(delivery.provider, MemoryStore(clock=ManualClock()))
        >>> _ = receiver.on("invoice.paid")(lambda event: charged.append(event.id))
        >>> crash_after_effect(receiver, delivery, effects=charged).effects
        2
    """
    there = as_target(target)
    doom = _Doom(there, at, clock)
    return run(_crash(delivery, effects, doom, patience), there)


async def acrash_after_effect(
    target: object,
    delivery: SignedDelivery,
    *,
    effects: Effects,
    at: At | None = None,
    clock: ManualClock | None = None,
    patience: float = 10.0,
) -> Report:
    """``crash_after_effect`` in the running event loop."""
    there = as_target(target)
    doom = _Doom(there, at, clock)
    return await arun(_crash(delivery, effects, doom, patience), there)


def kill_after_effect(
    target: str,
    delivery: SignedDelivery,
    *,
    effects: Effects,
    at: str | None = None,
    patience: float = 30.0,
) -> Report:
    """``crash_after_effect`` with a process that is really killed, by ``SIGKILL``.

    A new process imports the target and gets the delivery; it kills itself where the other form
    would raise. Another new process gets the retries. Nothing but what was committed survives, so
    the store and the effects must be outside of the process, in a file or on a server, and the
    lease passes in real time: make it short.

    Args:
        target: Where to import it from: ``shop.hooks:receiver``, or a function without arguments
            that makes it, ``shop.hooks:make_receiver``.
        delivery: From ``sample`` or ``signed``.
        effects: Counts effects from this process; see ``deliver_twice``.
        at: Where the worker dies: a store or a method, ``shop.hooks:inbox.mark_done``. If not
            given, the receiver's own store.
        patience: Seconds to wait for a lease to end.

    Returns:
        What was found, for ``assert_handled_once``.

    Raises:
        PolicyError: The target can't be imported, or never came to where it was to die.
    """
    with WorkerProcess(target, at) as worker:
        return run(
            _crash(delivery, effects, worker, patience), Destination("process", worker.call, False)
        )


class _Fate(Protocol):
    """What becomes of a worker: doomed from ``arm`` to ``disarm``."""

    @property
    def happened(self) -> bool: ...

    def arm(self) -> None: ...
    def disarm(self) -> None: ...
    def let_time_pass(self) -> bool: ...


class _Doom:
    """A worker in this process."""

    def __init__(self, target: Destination, at: At | None, clock: ManualClock | None) -> None:
        if target.url:
            raise PolicyError(
                "a worker behind a URL is out of reach: pass the app itself, or see "
                "kill_after_effect for one in a process of its own"
            )
        self._target = target
        self._at = at
        self._clock = clock
        self._kill = Kill(die)

    @property
    def happened(self) -> bool:
        return self._kill.happened

    def arm(self) -> None:
        store = put_kill(self._kill, self._at, self._target)
        if self._clock is None:
            found = getattr(store, "_clock", None)
            self._clock = found if isinstance(found, ManualClock) else None

    def disarm(self) -> None:
        self._kill.undo()

    def let_time_pass(self) -> bool:
        if self._clock is None:
            return False
        settings = getattr(self._target.receiver, "settings", None)
        lease = getattr(settings, "lease", None)
        self._clock.advance(_LONG if lease is None else milliseconds(lease, "lease") / 1000)
        return True


def _crash(
    delivery: SignedDelivery, effects: Effects, fate: _Fate, patience: float
) -> Flow[Report]:
    begun = time.perf_counter()
    before = yield Count(effects)
    fate.arm()
    try:
        answers: list[Answer] = yield Send([Planned(lambda: delivery)])
    finally:
        fate.disarm()
    if not fate.happened:
        raise PolicyError(
            f"the worker was not killed: it never came to where it was to die (its delivery was "
            f"answered {answers[0].status}: {answers[0].excerpt}). Pass at= with the store that "
            "the target records outcomes in, or with the method that does it"
        )
    end = time.monotonic() + (0 if fate.let_time_pass() else patience)
    pause = 0.02
    again = [Planned(delivery.again)]
    while True:
        answers += yield Send(again)
        if not answers[-1].retryable or time.monotonic() >= end:
            break
        yield Pause(pause)
        pause = min(pause * 2, 1)
    if answers[-1].ok:
        answers += yield Send(again)
    after = yield Count(effects)
    return Report("crash", answers, 1, after - before, time.perf_counter() - begun)
