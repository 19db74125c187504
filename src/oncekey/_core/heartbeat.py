"""Keeps the claim of a running handler alive: a timer in the loop, or threads beside a sync store.

A renewal is due every third of the lease, so that two may fail before the claim lapses.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from oncekey._core.drive import run
from oncekey._core.flows import Claim, Plan, renew
from oncekey.abc import AsyncStore, Store
from oncekey.instrument import events
from oncekey.instrument.events import EventKind, emit
from oncekey.instrument.timings import Timed, started

__all__ = ["AsyncBeat", "Beat"]

IDLE_SECONDS = 30.0  # a heart with nothing to do ends its thread after this
MAX_THREADS = 512  # of one heart; a round trip carries as many renewals
MOMENT = 0.1  # of the time between two renewals: claims that come out of order by less are in order
MAX_NEW = 1024  # calls that come before a thread looks which of them have ended


class _Schedule:
    """When one claim is renewed next, and when that is hopeless."""

    __slots__ = ("__weakref__", "claim", "dies_at", "due", "every", "plan", "stopped", "until")

    def __init__(self, claim: Claim, plan: Plan) -> None:
        lease = claim.terms.lease_ms / 1000
        self.claim = claim
        self.plan = plan
        self.every = lease / 3
        # Counted from when the claim was sent: its reply may have taken a part of the lease.
        self.due = claim.leased_at + self.every
        self.dies_at = claim.leased_at + lease
        self.until = None if plan.max_run is None else claim.started + plan.max_run
        self.stopped = False

    @property
    def over(self) -> bool:
        return self.stopped or self.claim.ended

    def may_renew(self) -> bool:
        return not self.over and (self.until is None or self.plan.monotonic() < self.until)

    def renewed(self, held: bool, sent: float) -> bool:
        """Take a renewal's answer. True: go on."""
        if self.over:
            return False
        if not held:
            self.claim.lost = True
            return False
        self.claim.leased_at = sent
        self.dies_at = sent + self.every * 3
        self.due = sent + self.every
        return True

    def failed(self, error: BaseException) -> bool:
        """The store could not be asked. True: try again soon; after the lease the claim is lost."""
        emit(EventKind.STORE_ERROR, self.claim.key, "renew", error=type(error).__name__)
        now = self.plan.monotonic()
        if now >= self.dies_at:
            self.claim.lost = True
            return False
        self.due = now + min(self.every / 4, self.dies_at - now)
        return not self.over


class _Heart:
    """The threads that renew the claims of one sync store.

    While the store is quick, one of them renews what is due. Another watches, and takes a claim
    that is late: so a slow store has a renewal under way for every claim that is due, and carries
    them together. A thread that finds nothing to do while another watches ends.

    A handler's thread may be interrupted at any step, so it takes no lock: it appends to ``_new``
    and rings. A claim is held weakly: once its call is gone, it is renewed no more.
    """

    def __init__(self, store: Store) -> None:
        self._store = weakref.ref(store)
        self._new: deque[weakref.ref[_Schedule]] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._watched = False
        self._wakes_at = 0.0  # when the thread that watches looks again by itself
        # What only the threads use:
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, weakref.ref[_Schedule]]] = []
        self._order = itertools.count()
        self._compact_at = 64
        self._threads = 0
        self._busy = 0

    def add(self, schedule: _Schedule) -> None:
        self._new.append(weakref.ref(schedule))
        if not self._watched:
            self._start()
        elif schedule.due < self._wakes_at or len(self._new) % MAX_NEW == 0:
            self._bell.put(None)

    def _start(self) -> None:
        threading.Thread(target=self._beat, name="oncekey-heartbeat", daemon=True).start()

    def _beat(self) -> None:
        with self._lock:
            if self._threads >= MAX_THREADS:
                return
            self._threads += 1
        working = False
        while (schedule := self._next(working)) is not None:
            working = True
            if self._renew(schedule):
                with self._lock:
                    self._push(schedule)
            del schedule  # else it would outlive its call

    def _renew(self, schedule: _Schedule) -> bool:
        store = self._store()
        if store is None or not schedule.may_renew():
            return False
        sent = schedule.plan.monotonic()
        try:
            return schedule.renewed(run(renew(schedule.claim), store), sent)
        except BaseException as error:  # noqa: BLE001 - whatever it is must not end the thread
            return schedule.failed(error)

    def _next(self, working: bool) -> _Schedule | None:
        """A claim to renew, once it is due. ``None``: nothing to do, this thread may end."""
        watching = idle = False
        while True:
            with self._lock:
                schedule, wait = self._look(patient=not working)
                if schedule is not None:
                    self._busy += not working
                    if watching:
                        self._watched = False
                    alone = not self._watched and bool(self._heap)
                    break
                self._busy -= working
                working = False
                if (self._watched and not watching) or (idle and wait == math.inf):
                    # Whoever comes from here on starts a thread; whoever came before is in _new.
                    self._watched = self._watched and not watching
                    if self._watched or not self._new:
                        self._threads -= 1
                        return None
                self._watched = watching = True
            if not self._new:  # looked at after _wakes_at was set: whoever comes later rings
                try:
                    self._bell.get(timeout=min(wait, IDLE_SECONDS))
                    while not self._bell.empty():
                        self._bell.get_nowait()
                    idle = False
                except queue.Empty:
                    idle = True
        if alone:
            with contextlib.suppress(RuntimeError):  # no more threads: this one goes on
                self._start()
        return schedule

    def _look(self, patient: bool) -> tuple[_Schedule | None, float]:
        """Take the claim that is due, or say how long until one is."""
        first = self._first()
        if first is None:
            self._wakes_at = math.inf
            return None, math.inf
        # The one that watches leaves a claim to those at work for a moment: if they are quick, no
        # more threads are needed.
        self._wakes_at = first.due + (first.every / 10 if patient and self._busy else 0.0)
        wait = self._wakes_at - first.plan.monotonic()
        if wait > 0:
            return None, wait
        heapq.heappop(self._heap)
        return first, 0.0

    def _first(self) -> _Schedule | None:
        """The claim that is due first. Takes in what is new, forgets calls that have ended."""
        while self._new:
            new = self._new.popleft()()
            if new is not None:
                self._push(new)
        if len(self._heap) >= self._compact_at:
            self._heap = [entry for entry in self._heap if _live(entry[2])]
            heapq.heapify(self._heap)
            self._compact_at = 64 + 2 * len(self._heap)
        while self._heap:
            first = _live(self._heap[0][2])
            if first is not None:
                return first
            heapq.heappop(self._heap)
        return None

    def _push(self, schedule: _Schedule) -> None:
        if not schedule.over:
            entry = (schedule.due, next(self._order), weakref.ref(schedule))
            heapq.heappush(self._heap, entry)


def _live(held: weakref.ref[_Schedule]) -> _Schedule | None:
    schedule = held()
    return None if schedule is None or schedule.over else schedule


_hearts: weakref.WeakKeyDictionary[Store, _Heart] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def _forget_hearts() -> None:
    """In a forked child: threads and locks of the parent are not there."""
    global _hearts, _making
    _hearts = weakref.WeakKeyDictionary()
    _making = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_hearts)


class Beat:
    """Renews a sync store's claim while the ``with`` block runs, in a thread beside it."""

    def __init__(self, store: Store, claim: Claim, plan: Plan) -> None:
        self._schedule = _Schedule(claim, plan)
        self._store = store

    def __enter__(self) -> None:
        try:
            heart = _hearts.get(self._store)
            if heart is None:
                with _making:
                    heart = _hearts.setdefault(self._store, _Heart(self._store))
            heart.add(self._schedule)
            if events._timers:
                started(self._schedule.claim)
        except BaseException:
            self._schedule.stopped = True
            raise

    def __exit__(self, *exc: object) -> None:
        self._schedule.stopped = True


class _LoopHeart:
    """Renews the claims of one event loop that have the same lease.

    Such claims are due in the order in which they were sent, which is nearly always the one in
    which they come: so one timer, for the oldest of them, serves all, and beginning and ending a
    call costs no timer of its own. One that comes late, because its reply was slow, has its own:
    those that were sent after it say nothing of when it is due.
    """

    __slots__ = ("_armed", "_every", "_monotonic", "_newest", "beats")

    def __init__(self, every: float, monotonic: Callable[[], float]) -> None:
        self.beats: dict[AsyncBeat, None] = {}
        self._armed = False  # no handle is kept: it would keep a closed loop alive
        self._every = every
        self._monotonic = monotonic
        self._newest = -math.inf  # when the youngest of all that came was sent

    def add(self, beat: AsyncBeat) -> None:
        sent = beat.claim.leased_at
        if sent < self._newest:
            # Replies that pass each other by a moment are usual. In line they wait for that moment
            # longer than they are due, which is no more than this.
            if sent < self._newest - self._every * MOMENT:
                beat.renew_after(self._delay(beat))
                return
        else:
            self._newest = sent
        self.beats[beat] = None
        if not self._armed:
            self._arm()

    def _delay(self, beat: AsyncBeat) -> float:
        # Counted from when the claim was sent: its reply may have taken a part of the lease.
        return max(0.0, beat.claim.leased_at + self._every - self._monotonic())

    def _arm(self) -> None:
        delay = self._delay(next(iter(self.beats)))
        asyncio.get_running_loop().call_later(delay, self._fire)
        self._armed = True

    def _fire(self) -> None:
        self._armed = False
        try:
            while self.beats:
                beat = next(iter(self.beats))
                if self._delay(beat) > 0:
                    return
                del self.beats[beat]
                beat.renew_now()
        finally:
            if self.beats:
                self._arm()


_Name = tuple[int, Callable[[], float]]
_loop_hearts: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Name, _LoopHeart]] = (
    weakref.WeakKeyDictionary()
)
_latest = threading.local()  # the hearts of this thread's loop, looked up once


def _heart_of(claim: Claim, plan: Plan) -> _LoopHeart:
    loop = asyncio.get_running_loop()
    known = getattr(_latest, "hearts", None)
    if known is None or known[0]() is not loop:
        hearts = _loop_hearts.get(loop)
        if hearts is None:
            for known_loop in _loop_hearts.keyrefs():
                old = known_loop()
                if old is not None and old.is_closed():  # calls that nobody ended keep it alive
                    _loop_hearts.pop(old, None)
            hearts = _loop_hearts[loop] = {}
        known = _latest.hearts = (weakref.ref(loop), hearts)
    name = (claim.terms.lease_ms, plan.monotonic)
    heart: _LoopHeart | None = known[1].get(name)
    if heart is None:
        heart = known[1][name] = _LoopHeart(claim.terms.lease_ms / 3000, plan.monotonic)
    return heart


class AsyncBeat:
    """Renews an async store's claim while a call runs; ``lost`` is called if it is lost.

    One object a call, and nothing more until a renewal is due.
    """

    __slots__ = (
        "__weakref__",
        "_heart",
        "_renewing",
        "_schedule",
        "_timer",
        "claim",
        "plan",
        "store",
    )
    _timer: asyncio.TimerHandle | None  # where there is a schedule

    def __init__(self, store: AsyncStore, claim: Claim, plan: Plan) -> None:
        self.store = store
        self.claim = claim
        self.plan = plan
        self._heart = _heart_of(claim, plan)
        self._schedule: _Schedule | None = None
        self._renewing: asyncio.Task[None] | None = None

    def lost(self) -> None:
        """Another worker has the key."""

    def start(self) -> None:
        """Begin to renew."""
        self._heart.add(self)

    def stop(self) -> None:
        """Renew no more. Stopping twice does nothing."""
        if self._schedule is not None:
            self._schedule.stopped = True
            if self._timer is not None:
                self._timer.cancel()
        self._heart.beats.pop(self, None)

    def renew_now(self) -> None:
        """The claim is due."""
        schedule = self._scheduled()
        if not schedule.stopped:
            self._timer = None
            self._renewing = asyncio.get_running_loop().create_task(self._renew(schedule))

    def renew_after(self, delay: float) -> None:
        """The claim is due then, whatever becomes of others."""
        if not self._scheduled().stopped:
            self._timer = asyncio.get_running_loop().call_later(delay, self.renew_now)

    def _scheduled(self) -> _Schedule:
        if self._schedule is None:  # made here, as most calls are over before a renewal is due
            self._schedule = _Schedule(self.claim, self.plan)
            self._timer = None
        return self._schedule

    async def _renew(self, schedule: _Schedule) -> None:
        if not schedule.may_renew():
            return
        claim = schedule.claim
        sent = schedule.plan.monotonic()
        store: Any = Timed(self.store) if events._timers else self.store
        try:
            # A reply after the lease is too late. But if this loop stood still for that long, the
            # claim may well be ours still, so ask all the same.
            async with asyncio.timeout(max(schedule.every, schedule.dies_at - sent)):
                held = await store.renew(claim.key, claim.owner, claim.fence, claim.terms)
        except asyncio.CancelledError:
            # Whoever cancels all tasks of a loop means the handlers. One that goes on for a while,
            # to clean up or because its work is not to be cut off, has its lease for as long.
            if schedule.may_renew():
                self.renew_after(schedule.every / 4)
            raise
        except Exception as error:  # noqa: BLE001 - told of, and tried again within the lease
            if schedule.failed(error):
                self.renew_after(max(0.0, schedule.due - schedule.plan.monotonic()))
                return
        else:
            if schedule.renewed(held, sent):
                self._heart.add(self)
                return
        if claim.lost and not schedule.stopped:
            self.lost()
