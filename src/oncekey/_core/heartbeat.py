"""Keeps the claim of a running handler alive: a timer in the loop, or one thread a store.

A renewal is due every third of the lease, so that two may fail before the claim lapses.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import threading
import weakref
from collections.abc import Callable

from oncekey._core.drive import run
from oncekey._core.flows import Claim, Plan, renew
from oncekey.abc import AsyncStore, Store
from oncekey.instrument.events import EventKind, emit

__all__ = ["AsyncBeat", "Beat"]

IDLE_SECONDS = 30.0  # a heart with nothing to do ends its thread after this


class _Schedule:
    """When one claim is renewed next, and when that is hopeless."""

    __slots__ = ("claim", "dies_at", "due", "every", "plan", "stopped", "until")

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

    def may_renew(self) -> bool:
        return not self.stopped and (self.until is None or self.plan.monotonic() < self.until)

    def renewed(self, held: bool, sent: float) -> bool:
        """Take a renewal's answer. True: go on."""
        if self.stopped:
            return False
        if not held:
            self.claim.lost = True
            return False
        self.claim.leased_at = sent
        self.dies_at = sent + self.every * 3
        self.due = sent + self.every
        return True

    def failed(self, error: Exception) -> bool:
        """The store could not be asked. True: try again soon; after the lease the claim is lost."""
        emit(EventKind.STORE_ERROR, self.claim.key, "renew", error=type(error).__name__)
        now = self.plan.monotonic()
        if now >= self.dies_at:
            self.claim.lost = True
            return False
        self.due = now + min(self.every / 4, self.dies_at - now)
        return not self.stopped


class _Heart:
    """The thread that renews the claims of one sync store."""

    def __init__(self, store: Store) -> None:
        self._store = weakref.ref(store)
        self._wake = threading.Condition()
        self._heap: list[tuple[float, int, _Schedule]] = []
        self._order = itertools.count()
        self._alive = False
        self._compact_at = 64

    def add(self, schedule: _Schedule) -> None:
        with self._wake:
            if len(self._heap) >= self._compact_at:  # mostly calls that have ended long since
                self._heap = [entry for entry in self._heap if not entry[2].stopped]
                heapq.heapify(self._heap)
                self._compact_at = 64 + 2 * len(self._heap)
            first = not self._heap or schedule.due < self._heap[0][0]
            heapq.heappush(self._heap, (schedule.due, next(self._order), schedule))
            if not self._alive:
                self._alive = True
                threading.Thread(target=self._beat, name="oncekey-heartbeat", daemon=True).start()
            elif first:
                self._wake.notify()

    def _next(self) -> _Schedule | None:
        """The schedule that is due, once it is. ``None``: nothing to do, the thread may end."""
        with self._wake:
            while True:
                while self._heap and self._heap[0][2].stopped:
                    heapq.heappop(self._heap)
                if not self._heap:
                    if self._wake.wait(IDLE_SECONDS) or self._heap:
                        continue
                    self._alive = False
                    return None
                schedule = self._heap[0][2]
                left = schedule.due - schedule.plan.monotonic()
                if left <= 0:
                    heapq.heappop(self._heap)
                    return schedule
                self._wake.wait(left)

    def _beat(self) -> None:
        while (schedule := self._next()) is not None:
            store = self._store()
            if store is None:
                continue
            if not schedule.may_renew():
                continue
            sent = schedule.plan.monotonic()
            try:
                again = schedule.renewed(run(renew(schedule.claim), store), sent)
            except Exception as error:  # noqa: BLE001 - one bad store must not end the thread
                again = schedule.failed(error)
            del store
            if again:
                with self._wake:
                    heapq.heappush(self._heap, (schedule.due, next(self._order), schedule))


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
        heart = _hearts.get(self._store)
        if heart is None:
            with _making:
                heart = _hearts.setdefault(self._store, _Heart(self._store))
        heart.add(self._schedule)

    def __exit__(self, *exc: object) -> None:
        self._schedule.stopped = True


class _LoopHeart:
    """Renews the claims of one event loop that have the same lease.

    Such claims are due in the order in which they came, so that one timer, for the oldest of them,
    serves all: beginning and ending a call costs no timer of its own.
    """

    __slots__ = ("_armed", "_beats", "_every", "_monotonic")

    def __init__(self, every: float, monotonic: Callable[[], float]) -> None:
        self._beats: dict[AsyncBeat, None] = {}
        self._armed = False  # no handle is kept: it would keep a closed loop alive
        self._every = every
        self._monotonic = monotonic

    def add(self, beat: AsyncBeat) -> None:
        self._beats[beat] = None
        if not self._armed:
            self._arm(beat)

    def remove(self, beat: AsyncBeat) -> None:
        self._beats.pop(beat, None)

    def _due(self, beat: AsyncBeat) -> float:
        # Counted from when the claim was sent: its reply may have taken a part of the lease.
        return beat.claim.leased_at + self._every

    def _arm(self, beat: AsyncBeat) -> None:
        delay = max(0.0, self._due(beat) - self._monotonic())
        asyncio.get_running_loop().call_later(delay, self._fire)
        self._armed = True

    def _fire(self) -> None:
        self._armed = False
        now = self._monotonic()
        while self._beats:
            beat = next(iter(self._beats))
            if self._due(beat) > now:
                self._arm(beat)
                return
            del self._beats[beat]
            beat.renew_now()


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

    __slots__ = ("__weakref__", "_heart", "_renewing", "_schedule", "claim", "plan", "store")

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
        self._heart.remove(self)

    def renew_now(self) -> None:
        """The claim is due."""
        if self._schedule is None:
            self._schedule = _Schedule(self.claim, self.plan)
        if not self._schedule.stopped:
            self._renewing = asyncio.get_running_loop().create_task(self._renew(self._schedule))

    async def _renew(self, schedule: _Schedule) -> None:
        if not schedule.may_renew():
            return
        claim = schedule.claim
        sent = schedule.plan.monotonic()
        try:
            # A reply after the lease is too late. But if this loop stood still for that long, the
            # claim may well be ours still, so ask all the same.
            async with asyncio.timeout(max(schedule.every, schedule.dies_at - sent)):
                held = await self.store.renew(claim.key, claim.owner, claim.fence, claim.terms)
        except Exception as error:  # noqa: BLE001 - told of, and tried again within the lease
            if schedule.failed(error):
                delay = max(0.0, schedule.due - schedule.plan.monotonic())
                asyncio.get_running_loop().call_later(delay, self.renew_now)
                return
        else:
            if schedule.renewed(held, sent):
                self._heart.add(self)
                return
        if claim.lost and not schedule.stopped:
            self.lost()
