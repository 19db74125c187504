"""Who is delivered to: the targets of the config, made and changed while deliveries go on."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from oncekey._core.drive import arun
from oncekey._core.secret import StoreSecret
from oncekey.abc import AsyncStore
from oncekey.inbox.abc import AsyncInbox
from oncekey.inbox.delivery import DeliveryWorker
from oncekey.inbox.lanes import Destination, LaneReport
from oncekey.inbox.models import Delivery
from oncekey.inbox.targets.http import HttpTarget
from oncekey.inbox.targets.replies import FRAMING
from oncekey.server.settings import TargetSettings

__all__ = ["Deliveries"]

logger = logging.getLogger("oncekey")

_NOT_PASSED_ON: Final = FRAMING | {"user-agent"}


class _Target(HttpTarget):
    """An HTTP target that is also told the source, the type, and what was kept of the headers."""

    def request_headers(self, delivery: Delivery) -> dict[str, str]:
        event = delivery.event
        kept = {name: value for name, value in event.headers if name not in _NOT_PASSED_ON}
        told = {"oncekey-source": event.source, "oncekey-type": _printable(event.type)}
        return {**kept, **super().request_headers(delivery), **told}


def _printable(text: str) -> str:
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in text)


class Deliveries:
    """The worker of this node, and the targets that it knows.

    Args:
        inbox: Where deliveries come from.
        store: Of the same database: signing secrets that nobody chose are derived from its own.
        keep: Seconds that finished events stay.
    """

    def __init__(self, inbox: AsyncInbox, store: AsyncStore, keep: float) -> None:
        self._worker = DeliveryWorker(inbox, {}, keep=keep)
        self._store = store
        self._secret = StoreSecret()
        self._known: dict[str, tuple[TargetSettings, Destination]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def prepare(self, targets: Mapping[str, TargetSettings]) -> Callable[[], None]:
        """Make these targets; what is given back puts them in place.

        What did not change is left alone, with its breaker.

        Raises:
            PolicyError: One can't work.
        """
        made: dict[str, tuple[TargetSettings, Destination]] = {}
        for name, settings in targets.items():
            if settings.pull:  # its events wait for whoever consumes them
                continue
            known = self._known.get(name)
            if known is None or known[0] != settings:
                known = (settings, Destination(await self._target(settings), settings.policy))
            made[name] = known

        def use() -> None:
            gone = self._worker.update({name: to for name, (_, to) in made.items()})
            self._known = made
            if gone:
                self._begin(self._close(gone))

        return use

    async def _target(self, settings: TargetSettings) -> HttpTarget:
        return _Target(
            settings.url,
            secret=await self.secret(settings),
            allow_private=settings.allow_private,
            connections=settings.policy.concurrency,
        )

    async def secret(self, settings: TargetSettings) -> str:
        """What deliveries to a target are signed with: its own, or one made of the store's.

        That one stays the same for as long as the inbox is there, on every node.
        """
        if settings.secret:
            return settings.secret
        root = await arun(self._secret.get(), self._store)
        digest = hmac.digest(root, f"target {settings.name}".encode(), hashlib.sha256)
        return "whsec_" + base64.b64encode(digest).decode("ascii")

    async def _close(self, gone: list[Destination]) -> None:
        await self._worker.drained()
        for one in gone:
            await one.target.aclose()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("deliveries have stopped: restart the gateway", exc_info=error)

    def start(self) -> None:
        """Begin to deliver."""
        self._begin(self._worker.run())

    async def stop(self, seconds: float) -> None:
        """Let attempts end for so long, hand the rest back."""
        back = await self._worker.stop(seconds)
        if back:
            logger.warning("%d deliveries were handed back, for others to make", back)
        for _, to in self._known.values():
            await to.target.aclose()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # How targets stand on this node

    def _report(self, name: str) -> LaneReport | None:
        return next((one for one in self._worker.report() if one.target == name), None)

    def breaker(self, name: str) -> str:
        """``closed``, ``open`` or ``trying``."""
        found = self._report(name)
        return str(found.breaker) if found else "closed"

    def running(self, name: str) -> int:
        """Attempts under way."""
        found = self._report(name)
        return found.in_flight if found else 0
