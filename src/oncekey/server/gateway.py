"""The gateway itself: the inbox, what takes events in, what delivers them, and who may look.

One process has one; several of them may share an inbox in PostgreSQL, with no leader.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from typing import Final

from oncekey.abc import AsyncStore
from oncekey.errors import OncekeyError, StoreError
from oncekey.inbox.abc import AsyncInbox
from oncekey.inbox.models import Arrival, Ingested, Route, TargetStatus
from oncekey.inbox.routing import Router
from oncekey.inbox.urls import open_inbox
from oncekey.models import Key
from oncekey.server.auth import Doorman, Person
from oncekey.server.deliveries import Deliveries
from oncekey.server.figures import Figures, Own
from oncekey.server.ingest import Intake
from oncekey.server.live import Live
from oncekey.server.percentiles import ATTEMPTS, LATE
from oncekey.server.proxies import Proxies
from oncekey.server.settings import ServerSettings
from oncekey.server.views import SourceView, TargetView, span_view, when
from oncekey.stores.urls import aconnect

__all__ = ["Gateway"]

logger = logging.getLogger("oncekey")

TEST_SOURCE: Final = "oncekey"
_LOOK_AGAIN: Final = 1.0
_LOOK_SECONDS: Final = 5


class Gateway:
    """Everything that runs behind the doors. Make one with ``open``."""

    def __init__(
        self,
        settings: ServerSettings,
        inbox: AsyncInbox,
        store: AsyncStore,
        figures: Figures | None = None,
    ) -> None:
        self.settings = settings
        self.inbox = inbox
        self.store = store
        self.doorman = Doorman(settings, inbox)
        self.intake = Intake(inbox, store)
        self.live = Live(inbox)
        self.proxies = Proxies(store)
        self.started_at = time.time()
        self._figures = figures or Figures()
        self._writing: asyncio.Task[None] | None = None
        self._looking = asyncio.Lock()
        self._look_again = 0.0
        self._not_ready = ""
        self.deliveries = Deliveries(inbox, store, settings.retention)

    @classmethod
    async def open(cls, settings: ServerSettings, figures: Figures | None = None) -> Gateway:
        """Open the inbox and make the gateway; nothing runs yet.

        Args:
            settings: What it does.
            figures: Those of the workers beside this one.

        Raises:
            StoreError: The inbox can't be used; says what to run.
        """
        inbox = await open_inbox(settings.store, remember=settings.remember)
        try:
            gateway = cls(settings, inbox, aconnect(settings.store), figures)
            await gateway.use(settings)
        except BaseException:
            await inbox.aclose()
            raise
        return gateway

    async def use(self, settings: ServerSettings) -> None:
        """Go by other settings from now on: all of them, or none.

        Raises:
            OncekeyError: Something in them can't work, and nothing was changed.
        """
        router = Router({name: one.policy for name, one in settings.targets.items()})
        take_sources = self.intake.prepare(settings.sources, router)
        take_targets = await self.deliveries.prepare(settings.targets)
        take_routes = self.proxies.prepare(settings.proxies)  # the last that can fail
        take_targets()
        take_routes()
        take_sources()
        self.doorman.use(settings)
        self.settings = settings

    # Life

    async def start(self) -> None:
        """Begin to deliver, after a look at the inbox."""
        await self.inbox.check(quick=True)  # for damage it was looked through when it was opened
        self.deliveries.start()
        self._writing = asyncio.create_task(self._figures.keep_writing(self._own))

    async def stop(self, seconds: float) -> None:
        """End within the time: attempts under way end, or are handed back for others to make."""
        self.live.close()
        if self._writing is not None:
            self._writing.cancel()
        try:
            async with asyncio.timeout(seconds):
                await self.deliveries.stop(seconds / 2)
                await self.proxies.aclose()
                with contextlib.suppress(StoreError):
                    await self.store.aclose()
                await self.inbox.aclose()
        except TimeoutError:
            logger.error(
                "the inbox did not let go in time: what is in hand is due again when its lease ends"
            )

    # What is told of it

    def _own(self) -> Own:
        names = self.settings.targets
        breakers = {name: self.deliveries.breaker(name) for name in names}
        return Own(
            Counter(self.intake.outcomes),
            Counter({name: self.deliveries.running(name) for name in names}),
            {name: how for name, how in breakers.items() if how != "closed"},
            Counter(self.proxies.answers),
        )

    def figures(self) -> Own:
        """What this node did, all workers of it together."""
        return self._figures.together(self._own())

    async def target_views(self) -> list[TargetView]:
        """Every target with what waits for it, and how long it took in the last hour."""
        counts = await self.inbox.counts(await self.inbox.now() - 3_600_000)
        states = {one.name: one for one in await self.inbox.targets()}
        depths = {one.target: one for one in await self.inbox.depths()}
        figures = self.figures()
        found: list[TargetView] = []
        for name, one in self.settings.targets.items():
            state, depth = states.get(name), depths.get(name)
            found.append(
                {
                    "name": name,
                    "url": one.url,
                    "allow_private": one.allow_private,
                    "secret_from": one.secret_from,
                    "status": str(state.status if state else TargetStatus.ACTIVE),
                    "breaker": figures.breakers.get(name, "closed"),
                    "running": figures.running[name],
                    "waiting": depth.waiting if depth else 0,
                    "dead": depth.dead if depth else 0,
                    "oldest_at": when(depth.oldest_at) if depth else None,
                    "tries": one.policy.tries,
                    "concurrency": one.policy.concurrency,
                    "types": list(one.policy.types),
                    "took": span_view(counts, ATTEMPTS, name),
                    "late": span_view(counts, LATE, name),
                }
            )
        return found

    async def source_views(self) -> list[SourceView]:
        """Every source with the address to paste."""
        base = self.settings.public_url.rstrip("/")
        found: list[SourceView] = []
        for name, one in self.settings.sources.items():
            found.append(
                {
                    "name": name,
                    "provider": one.provider.name,
                    "path": f"/hooks/{name}",
                    "url": f"{base}/hooks/{name}" if base else "",
                    "secret_from": one.secret_from,
                    "targets": list(one.targets),
                    "last_at": await self.last_arrival(name),
                }
            )
        return found

    async def last_arrival(self, source: str) -> str | None:
        """When the last event of a source came."""
        found = await self.inbox.last_received(source)
        return None if found is None else when(found)

    async def ready(self) -> str:
        """Empty if events can be kept; else why not. Looked at once a second, whoever asks."""
        async with self._looking:
            if time.monotonic() >= self._look_again:
                self._not_ready = await self._look()
                self._look_again = time.monotonic() + _LOOK_AGAIN
            return self._not_ready

    async def _look(self) -> str:
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                await self.inbox.check(quick=True)
        except OncekeyError as error:
            logger.warning("not ready: %s", error)
            return error.code
        except TimeoutError:
            logger.warning("not ready: the inbox says nothing for %d s", _LOOK_SECONDS)
            return "INBOX_SLOW"
        return ""

    # What people do

    async def send_test(self, target: str, person: Person) -> Ingested:
        """Queue a test event for one target, by the way that every event takes."""
        name = f"test-{uuid.uuid4()}"
        body = f'{{"id":"{name}","type":"oncekey.test"}}'.encode()
        headers = (("content-type", "application/json"),)
        arrival = Arrival(TEST_SOURCE, name, "oncekey.test", body, headers, (Route(target),))
        kept = await self.inbox.ingest(arrival)
        await self.inbox.record("test", target, kept.id, actor=person.name)
        return kept

    async def knows_key(self, key: Key) -> bool:
        """Whether copies of this event are told from it."""
        record = await self.store.read(key)
        return record is not None and record.expires_at > await self.store.now()

    async def evict_key(self, key: Key, person: Person) -> None:
        """Forget a key: its record ends now."""
        record = await self.store.read(key)
        if record is not None:
            ends = await self.store.now() - 1
            await self.store.write(key, record.fingerprint, record.answer or b"", ends)
        await self.inbox.record("evict", key.name, "", actor=person.name)
