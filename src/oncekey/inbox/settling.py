"""How attempts are put on record: those that end within a moment go together.

A slot is free as soon as its attempt has ended; the record of it may wait for company. So a busy
worker commits some times for a hundred deliveries, and not a hundred times.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from oncekey.errors import OncekeyError
from oncekey.inbox.abc import AsyncInbox
from oncekey.inbox.models import Outcome, Result

__all__ = ["Settling"]

logger = logging.getLogger("oncekey.inbox")

LINGER: Final = 0.02  # seconds that a result waits for others, or for the next fetch
MOST: Final = 128  # results that go without waiting
UNSETTLED: Final = 1_000  # results that may wait for the inbox before no more is fetched
_AGAIN: Final = 0.5


class _Ended(NamedTuple):
    """A result, and until when nobody else has its delivery, on the monotonic clock."""

    result: Result
    until: float


class Settling:
    """Tells the inbox how attempts ended.

    Args:
        inbox: Whom to tell.
        look: Called with the seconds after which there may be more to fetch: a retry is due, or
            there is room for results again.
    """

    def __init__(self, inbox: AsyncInbox, look: Callable[[float], None]) -> None:
        self._inbox = inbox
        self._look = look
        self._waiting: list[_Ended] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: dict[asyncio.Task[None], int] = {}

    def __len__(self) -> int:
        """How many results are not on record yet."""
        return len(self._waiting) + sum(self._tasks.values())

    @property
    def is_full(self) -> bool:
        """Whether no more is to be fetched before some are on record."""
        return len(self) >= UNSETTLED

    def add(self, result: Result, lease: float) -> None:
        """Put a result on record soon; at once if other deliveries wait for it."""
        self._waiting.append(_Ended(result, time.monotonic() + lease))
        if result.delivery.order_key is not None or len(self._waiting) >= MOST:
            self.go()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LINGER, self.go)

    def go(self) -> bool:
        """Begin to put on record what there is now. False: there is nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting = self._waiting, []
        if batch:
            task = asyncio.get_running_loop().create_task(self._together(batch))
            self._tasks[task] = len(batch)
            task.add_done_callback(self._done)
        return bool(batch)

    def _done(self, task: asyncio.Task[None]) -> None:
        was_full = self.is_full
        del self._tasks[task]
        if was_full and not self.is_full:
            self._look(0)

    async def _together(self, batch: list[_Ended]) -> None:
        try:
            held = await self._inbox.finish([one.result for one in batch])
        except OncekeyError as error:
            logger.warning("attempts could not be recorded, trying again: %s", error)
            await asyncio.sleep(_AGAIN)
            # Each by itself: if one of them is the reason, it is the only one that is lost.
            await asyncio.gather(*(self._alone(one) for one in batch))
            return
        for one, counts in zip(batch, held, strict=True):
            self._tell(one, counts)

    async def _alone(self, one: _Ended) -> None:
        """Again, until the lease is over and another worker has it anyway."""
        while True:
            try:
                held = await self._inbox.finish([one.result])
            except OncekeyError as error:
                if time.monotonic() > one.until:
                    logger.warning("an attempt could not be recorded, it will be made again")
                    return
                logger.warning("an attempt could not be recorded, trying again: %s", error)
                await asyncio.sleep(_AGAIN)
                continue
            self._tell(one, held[0])
            return

    def _tell(self, one: _Ended, counts: bool) -> None:
        if counts and one.result.outcome is Outcome.RETRY:
            self._look(one.result.retry_in_ms / 1000)
        if not counts:
            logger.warning(
                "an attempt at %s took longer than its lease and does not count",
                one.result.delivery.target,
            )

    async def drain(self, seconds: float) -> None:
        """Put all that is left on record, within the time."""
        self.go()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=seconds)
