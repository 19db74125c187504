"""What open dashboards are told: totals, every two seconds, by server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from oncekey.errors import StoreError
from oncekey.inbox.abc import AsyncInbox
from oncekey.server.percentiles import LATE

__all__ = ["Live"]

logger = logging.getLogger("oncekey")

EVERY: Final = 2.0
WINDOW_MS: Final = 3_600_000
MOST_WATCHERS: Final = 200
MOST_EACH: Final = 20  # of one person: nobody takes the places of all others


class Live:
    """Asks the inbox once for everybody who looks on, and not at all while nobody does."""

    def __init__(self, inbox: AsyncInbox) -> None:
        self._inbox = inbox
        self._told = asyncio.Condition()
        self._latest = ""
        self._number = 0
        self._watchers = 0
        self._places: Counter[str] = Counter()
        self._asking: asyncio.Task[None] | None = None
        self._closed = False
        self._waking: asyncio.Task[None] | None = None

    def is_full(self, who: str) -> bool:
        """Whether there is no place to look on for somebody."""
        return self._closed or self._watchers >= MOST_WATCHERS or self._places[who] >= MOST_EACH

    async def stream(
        self, who: str, allowed: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[bytes]:
        """The stream of one browser: a message when something changed, and a sign of life else.

        Args:
            who: Who looks on.
            allowed: Whether who looks on still may; asked before each message, and at the first no
                the stream ends.
        """
        self._watchers += 1
        self._places[who] += 1
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._asks())
        seen = 0
        try:
            yield b"retry: 2000\n\n"
            while not self._closed:
                async with self._told:
                    while self._number == seen and not self._closed:
                        await self._told.wait()
                    seen, latest = self._number, self._latest
                if self._closed or not await allowed():
                    break
                yield f"event: tick\ndata: {latest}\n\n".encode()
        finally:
            self._watchers -= 1
            self._places -= Counter([who])  # those of nobody are forgotten
            if self._watchers == 0 and self._asking is not None:
                self._asking.cancel()
                self._asking = None

    async def _asks(self) -> None:
        failed = False
        while True:
            try:
                told, failed = json.dumps(await self._snapshot()), False
            except StoreError as error:
                logger.warning("the dashboard can't be told what happens: %s", error)
                told = json.dumps({"error": "the inbox can't be reached"})
            except Exception:
                # Whatever it is, nobody else would ask: every stream would stay silent for ever.
                if not failed:
                    logger.exception("the dashboard can't be told what happens")
                told = json.dumps({"error": "a fault of the gateway; its log has more"})
                failed = True
            async with self._told:
                self._latest, self._number = told, self._number + 1
                self._told.notify_all()
            await asyncio.sleep(EVERY)

    async def _snapshot(self) -> dict[str, Any]:
        now = await self._inbox.now()
        totals: dict[str, int] = {}
        for one in await self._inbox.counts(now - WINDOW_MS):
            if one.kind in LATE:
                continue
            totals[one.kind] = totals.get(one.kind, 0) + one.n
        waiting = sum(one.waiting for one in await self._inbox.depths())
        return {"at": now, "totals": totals, "waiting": waiting}

    def close(self) -> None:
        """End every stream: the server is about to stop."""
        self._closed = True
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None
        if self._watchers:
            self._waking = asyncio.get_running_loop().create_task(self._wake())

    async def _wake(self) -> None:
        async with self._told:
            self._told.notify_all()
