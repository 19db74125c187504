"""``DeliveryWorker``: takes what is due and brings it to its targets, until they have it."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Mapping
from typing import Final

from oncekey.errors import OncekeyError, PolicyError
from oncekey.inbox.abc import AsyncInbox
from oncekey.inbox.lanes import Destination, Lane, LaneReport
from oncekey.inbox.models import Delivery, Outcome, Result
from oncekey.inbox.settling import Settling
from oncekey.inbox.targets.base import Answer
from oncekey.policy import Duration, milliseconds

__all__ = ["DeliveryWorker", "Destination"]

logger = logging.getLogger("oncekey.inbox")

POLL: Final = (0.05, 0.25)  # seconds between looks for what other nodes queued
LINGER: Final = 0.01  # seconds that a free slot waits for others, where more is due anyway
TICK: Final = 0.05  # seconds: retries that are due within one are looked for together
HORIZON: Final = 60.0  # seconds: a retry that is due later is found by a look at that time
_HOUSEKEEPING: Final = 3_600.0
_BULK_LOOK: Final = 2.0
_HAND_BACK: Final = 5.0
_WATCH: Final = 60.0


class DeliveryWorker:
    """Delivers what is due to the targets it knows, beside any number of other workers.

    A worker that dies with deliveries in hand leaves them to the others when their leases end.

    Args:
        inbox: Where deliveries come from. The worker does not close it.
        destinations: The targets by name.
        keep: How long finished events stay; old ones are removed once an hour. ``None``: for ever.
        clock: Monotonic seconds, for tests.

    Example:
        A worker runs until it is stopped::

            worker = DeliveryWorker(inbox, {"app": Destination(HttpTarget(url, secret=secret))})
            task = asyncio.create_task(worker.run())
            ...
            await worker.stop(grace=10)
    """

    def __init__(
        self,
        inbox: AsyncInbox,
        destinations: Mapping[str, Destination],
        *,
        keep: Duration | None = 30 * 86_400,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inbox = inbox
        self._clock = clock
        self._keep_ms = None if keep is None else milliseconds(keep, "keep", least=60_000)
        self._lanes = {name: Lane(name, to, clock) for name, to in destinations.items()}
        self._retired: list[Lane] = []
        self._stopping = asyncio.Event()
        self._stirred = asyncio.Event()  # something was queued, a slot is free, the lanes changed
        self._soon: asyncio.TimerHandle | None = None
        self._full: set[str] = set()  # lanes that got all they asked for: more may be due
        self._ticks: dict[int, asyncio.TimerHandle] = {}  # when retries of ours are due
        self._settling = Settling(inbox, self._look_in)
        self._running = False
        self._over = asyncio.Event()

    def report(self) -> list[LaneReport]:
        """How each target stands on this node."""
        return [lane.report() for lane in self._lanes.values()]

    def update(self, destinations: Mapping[str, Destination]) -> list[Destination]:
        """Use other targets from now on; attempts under way end as they began.

        Returns:
            Those that are no longer used, for the caller to close when ``drained`` says so.
        """
        old = self._lanes
        self._lanes = {}
        for name, to in destinations.items():
            lane = old.get(name)
            same = lane is not None and lane.to is to
            self._lanes[name] = lane if lane is not None and same else Lane(name, to, self._clock)
        gone = [lane for name, lane in old.items() if self._lanes.get(name) is not lane]
        self._retired += gone
        self._stirred.set()
        return [lane.to for lane in gone]

    async def drained(self) -> None:
        """Wait until no attempt of a target that is no longer used is under way."""
        while tasks := [task for lane in self._retired for task in lane.running]:
            await asyncio.wait(tasks)
        self._retired.clear()

    async def run(self) -> None:
        """Deliver until ``stop`` is called. An inbox that can't be reached is tried again.

        Raises:
            PolicyError: It runs already.
        """
        if self._running:
            raise PolicyError("this worker runs already: make another one")
        self._running = True
        beside = [asyncio.create_task(self._keep_house()), asyncio.create_task(self._watch())]
        try:
            while not self._stopping.is_set():
                try:
                    await self._round()
                except Exception:
                    # A fault of ours, or of a plug-in: one round is lost, and no event.
                    logger.exception("a look for deliveries failed, trying again")
                    await self._rest(1.0)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            for timer in self._ticks.values():
                timer.cancel()
            self._ticks.clear()
            self._over.set()

    async def _watch(self) -> None:
        """Look again when this process has queued something."""
        while True:
            if await self._inbox.wait_for_work(_WATCH):
                self._stirred.set()

    async def _round(self) -> None:
        self._stirred.clear()  # whatever comes from here on is looked for in the next round
        found: list[Delivery] = []
        slots = {name: lane.free() for name, lane in self._lanes.items()}
        slots = {name: free for name, free in slots.items() if free}
        if self._settling.is_full:
            slots = {}  # it says when there is room again
        if slots:
            lease = max(self._lanes[name].lease_ms for name in slots)
            if self._settling.go():
                await asyncio.sleep(0)  # on a file the record and the fetch are then one commit
            try:
                found = await self._inbox.fetch(slots, lease)
            except OncekeyError as error:
                logger.warning("no deliveries could be fetched, trying again: %s", error)
                await self._rest(1.0)
                return
        got = dict.fromkeys(slots, 0)
        strangers = []  # of targets that went while they were fetched
        for delivery in found:
            got[delivery.target] += 1
            lane = self._lanes.get(delivery.target)
            if lane is None:
                strangers.append(delivery)
            else:
                self._begin(lane, delivery)
        if strangers:
            await self._hand_back(strangers)
        for name, free in slots.items():
            (self._full.add if got[name] == free else self._full.discard)(name)
        if self._full:
            await asyncio.sleep(0)  # attempts that end at once leave slots for more
            if any(lane.is_worth_a_look() for name, lane in self._lanes.items() if got.get(name)):
                return
        self._end_overdue()
        await self._rest(random.uniform(*POLL))  # noqa: S311 - no secret

    async def _rest(self, seconds: float) -> None:
        """Wait for work, free slots, the end, or the time at which a lane wakes by itself."""
        lanes = (*self._lanes.values(), *self._retired)
        seconds = max(0.0, min([seconds, *(lane.waits() for lane in lanes)]))
        try:
            async with asyncio.timeout(seconds):
                await self._stirred.wait()
        except TimeoutError:
            pass

    def _look_in(self, seconds: float) -> None:
        """Look again after so long: what this worker put off is due then."""
        if seconds <= 0:
            self._stirred.set()
        elif seconds < HORIZON:
            loop = asyncio.get_running_loop()
            tick = math.ceil((loop.time() + seconds) / TICK)
            if self._running and tick not in self._ticks:
                self._ticks[tick] = loop.call_at(tick * TICK, self._tick, tick)

    def _tick(self, tick: int) -> None:
        del self._ticks[tick]
        self._stirred.set()

    # Attempts

    def _begin(self, lane: Lane, delivery: Delivery) -> None:
        task = asyncio.get_running_loop().create_task(self._attempt(lane, delivery))
        lane.begun(task, delivery)

    def _ended(self, lane: Lane) -> None:
        """A slot is free. Where more is due, a look for one costs as much as a look for many."""
        task = asyncio.current_task()
        if task is not None:
            lane.running.pop(task, None)
        if lane.name not in self._full:
            return  # nothing is due that a slot was missing for
        if lane.is_worth_a_look():
            self._stirred.set()
        elif self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(LINGER, self._look_again)

    def _look_again(self) -> None:
        self._soon = None
        self._stirred.set()

    def _end_overdue(self) -> None:
        """A plug-in keeps its own time; this is for one that does not."""
        for lane in (*self._lanes.values(), *self._retired):
            for task in lane.overdue():
                task.cancel()

    async def _attempt(self, lane: Lane, delivery: Delivery) -> None:
        try:
            await self._made(lane, delivery)
        finally:
            self._ended(lane)

    async def _made(self, lane: Lane, delivery: Delivery) -> None:
        if delivery.attempt > lane.to.policy.tries:
            # Nobody lived to say how the last try ended: an event that kills workers ends here.
            cause = "no worker lived to finish it"
            self._settle(lane, Result(delivery, Outcome.DEAD, error=cause))
            return
        began = self._clock()
        answer = await self._sent(lane, delivery)
        lane.learn(answer)
        result = lane.judged(delivery, answer, round((self._clock() - began) * 1000))
        if answer.settled:
            self._inbox.settled(result)
        else:
            self._settle(lane, result)

    def _settle(self, lane: Lane, result: Result) -> None:
        self._settling.add(result, lane.lease_ms / 1000)

    async def _sent(self, lane: Lane, delivery: Delivery) -> Answer:
        try:
            return await lane.to.target.send(delivery, lane.timeout_ms)
        except TimeoutError:
            return Answer(False, error="timeout")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task not in lane.overdue():
                raise
            task.uncancel()
            return Answer(False, error="timeout")
        except Exception as error:  # noqa: BLE001 - a plug-in's failure is an outcome
            logger.warning("target %s failed with %s", lane.name, type(error).__name__)
            return Answer(False, error=type(error).__name__)

    # Stopping

    def halt(self) -> None:
        """Fetch no more, so that ``run`` ends. ``stop`` sees to what is in hand."""
        self._stopping.set()
        self._stirred.set()

    async def stop(self, grace: Duration = 10) -> int:
        """Stop fetching, let attempts end for a while, hand the rest back.

        Args:
            grace: How long attempts may still take.

        Returns:
            How many deliveries were handed back.
        """
        self.halt()
        if self._running:
            await self._over.wait()
        lanes = [*self._lanes.values(), *self._retired]
        seconds = milliseconds(grace, "grace") / 1000
        if tasks := [task for lane in lanes for task in lane.running]:
            await asyncio.wait(tasks, timeout=seconds)
        running = [one for lane in lanes for one in lane.running.items()]
        left = {task: held.delivery for task, held in running if not task.done()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        back = await self._hand_back(list(left.values())) if left else 0
        await self._settling.drain(_HAND_BACK)
        return back

    async def _hand_back(self, deliveries: list[Delivery]) -> int:
        """Give up deliveries that were not made: they are due at once, and it was no try."""
        try:
            async with asyncio.timeout(_HAND_BACK):
                return sum(await self._inbox.hand_back(deliveries))
        except (OncekeyError, TimeoutError) as error:
            logger.warning("deliveries could not be handed back, their leases end: %s", error)
            return 0

    # Housekeeping

    async def _keep_house(self) -> None:
        due = 0.0
        while True:
            wait: float | None = None
            try:
                wait = await self._inbox.advance_bulk_replays()
                if self._keep_ms is not None and time.monotonic() >= due:
                    due = time.monotonic() + _HOUSEKEEPING
                    await self._inbox.prune(self._keep_ms)
            except OncekeyError as error:
                logger.warning("housekeeping of the inbox failed, trying again: %s", error)
            except Exception:
                # It goes on beside the deliveries: nobody would see that it ended.
                logger.exception("housekeeping of the inbox failed, trying again")
            await asyncio.sleep(_BULK_LOOK if wait is None else min(wait, _BULK_LOOK))
