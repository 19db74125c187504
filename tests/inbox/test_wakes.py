"""Nothing waits for the worker's next look by chance: whatever makes work due wakes it.

The looks for what other nodes queued are an hour apart here, so that a wake-up that is lost or
late is a delivery that never comes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.inbox.test_delivery import (
    QUICK,
    Counting,
    Recorder,
    come,
    inbox,
    settled,
    until,
    working,
)

from oncekey.inbox import AsyncInbox, Delivery, DeliveryState, Filter, TargetPolicy, TargetStatus
from oncekey.inbox.delivery import Destination
from oncekey.inbox.targets import Answer

__all__ = ["inbox"]

HOUR = 3600.0


@pytest.fixture(autouse=True)
def _no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncekey.inbox.delivery.POLL", (HOUR, HOUR))


async def resting(inbox: AsyncInbox, app: Recorder) -> None:
    """The worker has delivered something, and found nothing more."""
    made = await come(inbox, "first", "app")
    assert await settled(inbox, made) is DeliveryState.DELIVERED
    app.seen.clear()


async def test_an_event_wakes_a_worker_at_rest(inbox: AsyncInbox) -> None:
    """What comes while nothing is due goes out at once."""
    app = Recorder()
    async with working(inbox, app=Destination(app)):
        await resting(inbox, app)
        await come(inbox, "a", "app")
        await until(lambda: len(app.seen) == 1)


@pytest.mark.parametrize("before, after", [(1, 3), (2, 1), (2, 9), (0, 40)])
async def test_a_slot_that_is_free_again_is_used(
    inbox: AsyncInbox, before: int, after: int
) -> None:
    """Events that came while a target was busy, in part or wholly, follow as its slots free."""
    app = Recorder()
    async with working(inbox, app=Destination(app, TargetPolicy(concurrency=2))):
        await resting(inbox, app)
        app.gate.clear()
        for number in range(before):
            await come(inbox, f"b{number}", "app")
        await until(lambda: len(app.seen) == before)
        for number in range(after):
            await come(inbox, f"a{number}", "app")
        app.gate.set()
        await until(lambda: len(app.seen) == before + after)


async def test_a_busy_target_takes_no_other_ones_wake(inbox: AsyncInbox) -> None:
    """A target whose slots all hang keeps nobody else's events from going out at once."""
    stuck, app = Recorder(), Recorder()
    stuck.gate.clear()
    one = TargetPolicy(concurrency=1)
    async with working(inbox, app=Destination(app, one), stuck=Destination(stuck, one)):
        await resting(inbox, app)
        for number in range(5):
            await come(inbox, f"e{number}", "app", "stuck")
        await until(lambda: len(app.seen) == 5)
        stuck.gate.set()
        await until(lambda: len(stuck.seen) == 5)


async def test_a_retry_goes_out_when_it_is_due(inbox: AsyncInbox) -> None:
    """Whoever put a delivery off looks when it is due."""
    app = Recorder(lambda one: Answer(one.attempt == 3, error="" if one.attempt == 3 else "no"))
    async with working(inbox, app=Destination(app, QUICK)) as worker:
        made = await come(inbox, "a", "app")
        assert await settled(inbox, made) is DeliveryState.DELIVERED
        assert not worker._ticks
    assert [one.attempt for one in app.seen] == [1, 2, 3]


async def test_a_stopped_worker_leaves_no_timer(inbox: AsyncInbox) -> None:
    """Retries that are due after a stop are nobody's to look for here."""
    app = Recorder(lambda _: Answer(False, error="no"))
    slow = TargetPolicy(first_delay=30, jitter=0)
    async with working(inbox, app=Destination(app, slow)) as worker:
        await come(inbox, "a", "app")
        await until(lambda: len(worker._ticks) == 1)
    assert not worker._ticks


async def test_a_rate_and_a_breaker_end_by_time_alone(inbox: AsyncInbox) -> None:
    """A target that must wait for a token, or to be well again, is looked at when it may."""
    app, sick = Recorder(), Recorder(lambda one: Answer(one.attempt > 1, error="no"))
    rate = TargetPolicy(rate=40, concurrency=50)
    fragile = TargetPolicy(
        first_delay=0.01, jitter=0, breaker_after=1, breaker_pause=0.05, concurrency=2
    )
    async with working(inbox, app=Destination(app, rate), sick=Destination(sick, fragile)):
        for number in range(50):
            await come(inbox, f"e{number}", "app")
        made = await come(inbox, "s", "sick")
        await until(lambda: len(app.seen) == 50)
        assert await settled(inbox, made) is DeliveryState.DELIVERED


async def test_followers_and_people_wake_it(inbox: AsyncInbox) -> None:
    """The next of an entity, a target that is resumed, and replays, one and many, go out."""
    bad = True
    app = Recorder(lambda _: Answer(not bad, error="no" if bad else "", permanent=True))
    async with working(inbox, app=Destination(app, QUICK)):
        first = await come(inbox, "a", "app")
        second = await come(inbox, "b", "app")
        for made in (first, second):
            assert await settled(inbox, made) is DeliveryState.DEAD
        bad = False
        await inbox.replay(first, actor="me")
        assert await settled(inbox, first) is DeliveryState.DELIVERED
        await inbox.begin_bulk_replay(Filter(), rate=1000, actor="me")
        await until(lambda: len(app.seen) == 4)
        ordered = [await come(inbox, f"o{number}", "app", order="x") for number in range(4)]
        for made in ordered:
            assert await settled(inbox, made) is DeliveryState.DELIVERED
        await inbox.set_target("app", TargetStatus.PAUSED, actor="me")
        third = await come(inbox, "c", "app")
        await inbox.set_target("app", TargetStatus.ACTIVE, actor="me")
        assert await settled(inbox, third) is DeliveryState.DELIVERED


async def test_room_for_results_is_noticed(
    inbox: AsyncInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While too many results wait for the inbox nothing is fetched; then it goes on at once."""
    monkeypatch.setattr("oncekey.inbox.settling.UNSETTLED", 2)
    gate = asyncio.Event()

    class Slow(Counting):
        async def finish(self, results: Any) -> Any:
            await gate.wait()
            return await self._inbox.finish(results)

    slow: Any = Slow(inbox, lambda results: False)
    app = Recorder()
    async with working(slow, app=Destination(app, TargetPolicy(concurrency=2))) as worker:
        for number in range(8):
            await come(inbox, f"e{number}", "app")
        await until(lambda: worker._settling.is_full)
        held = len(app.seen)
        await come(inbox, "late", "app")
        assert len(app.seen) == held < 8
        gate.set()
        await until(lambda: len(app.seen) == 9)


async def test_a_plug_in_that_keeps_no_time_is_ended(inbox: AsyncInbox) -> None:
    """Half as long again as it may take, then the attempt is a failure and its slot is free."""

    class Endless(Recorder):
        async def send(self, delivery: Delivery, timeout_ms: int) -> Answer:
            if delivery.event.key == "endless":
                await asyncio.Event().wait()
            return await super().send(delivery, timeout_ms)

    app = Endless()
    one = TargetPolicy(concurrency=1, timeout=0.05, tries=1)
    async with working(inbox, app=Destination(app, one)):
        made = await come(inbox, "endless", "app")
        after = await come(inbox, "after", "app")
        assert await settled(inbox, made) is DeliveryState.DEAD
        assert await settled(inbox, after) is DeliveryState.DELIVERED
    found = await inbox.event(made)
    assert found is not None
    assert found.deliveries[0].error == "timeout"
