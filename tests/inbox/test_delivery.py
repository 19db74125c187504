"""The worker: retries, the dead, sick targets, pauses, order, stopping."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from oncekey.errors import StoreUnavailableError
from oncekey.inbox import (
    Arrival,
    AsyncInbox,
    Delivery,
    DeliveryState,
    Event,
    Filter,
    Route,
    TargetPolicy,
    TargetStatus,
    open_inbox,
)
from oncekey.inbox.delivery import DeliveryWorker, Destination
from oncekey.inbox.lanes import BreakerState, Lane
from oncekey.inbox.models import Outcome
from oncekey.inbox.targets import Answer, CallableTarget

SOON = 30.0
QUICK = TargetPolicy(first_delay=0.01, factor=1, jitter=0, tries=3)


class Recorder:
    """A target that answers as it is told, and remembers what came."""

    def __init__(self, answer: Callable[[Delivery], Answer] = lambda _: Answer(True)) -> None:
        self.answer = answer
        self.seen: list[Delivery] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.came = asyncio.Event()
        self.most = 0
        self._now = 0

    async def send(self, delivery: Delivery, timeout_ms: int) -> Answer:
        self._now += 1
        self.most = max(self.most, self._now)
        self.seen.append(delivery)
        self.came.set()
        try:
            await self.gate.wait()
        finally:
            self._now -= 1
        return self.answer(delivery)

    async def aclose(self) -> None: ...


@pytest.fixture
async def inbox(tmp_path: Path) -> AsyncIterator[AsyncInbox]:
    async with await open_inbox(f"sqlite:///{tmp_path / 'inbox.db'}") as opened:
        yield opened


@contextlib.asynccontextmanager
async def working(inbox: AsyncInbox, **targets: Destination) -> AsyncIterator[DeliveryWorker]:
    worker = DeliveryWorker(inbox, targets)
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        await worker.stop(grace=5)
        await task


async def come(inbox: AsyncInbox, key: str, *targets: str, order: str | None = None) -> str:
    routes = tuple(Route(target, order) for target in targets)
    return (await inbox.ingest(Arrival("shop", key, "paid", b"{}", routes=routes))).id


async def until(condition: Callable[[], Any]) -> None:
    """Wait for what a worker does."""
    async with asyncio.timeout(SOON):
        while not condition():
            await asyncio.sleep(0.005)


async def settled(inbox: AsyncInbox, id: str) -> DeliveryState:
    """How the one delivery of an event ended."""
    async with asyncio.timeout(SOON):
        while True:
            found = await inbox.event(id)
            assert found is not None
            state = found.deliveries[0].state
            if state in (DeliveryState.DELIVERED, DeliveryState.DEAD):
                return state
            await asyncio.sleep(0.01)


async def test_an_event_reaches_its_targets(inbox: AsyncInbox) -> None:
    """What is queued before and while the worker runs is delivered once to each target."""
    app, log = Recorder(), Recorder()
    first = await come(inbox, "a", "app", "log")
    async with working(inbox, app=Destination(app), log=Destination(log)):
        second = await come(inbox, "b", "app")
        assert await settled(inbox, second) is DeliveryState.DELIVERED
        await until(lambda: len(log.seen) == 1)
        await until(lambda: len(app.seen) == 2)
    assert sorted(one.event.id for one in app.seen) == [first, second]
    assert await inbox.depths() == []


async def test_failures_are_retried_then_dead_with_the_cause(inbox: AsyncInbox) -> None:
    """As many tries as the policy says, then a dead letter; a replay has as many again."""
    app = Recorder(lambda _: Answer(False, 500, "HTTP 500", "oops"))
    made = await come(inbox, "a", "app")
    async with working(inbox, app=Destination(app, QUICK)):
        assert await settled(inbox, made) is DeliveryState.DEAD
        assert [one.attempt for one in app.seen] == [1, 2, 3]
        letter = (await inbox.dead_letters(Filter())).items[0]
        assert (letter.status, letter.error, letter.note, letter.attempts) == (
            *(500, "HTTP 500"),
            *("oops", 3),
        )
        app.answer = lambda _: Answer(True, 200)
        assert await inbox.replay(made, actor="me") == 1
        assert await settled(inbox, made) is DeliveryState.DELIVERED
    assert [one.attempt for one in app.seen] == [1, 2, 3, 1]
    assert [one.fence for one in app.seen] == [1, 2, 3, 4]
    detail = await inbox.event(made)
    assert detail is not None
    assert [one.outcome for one in detail.attempts] == ["retry", "retry", "dead", "delivered"]


async def test_a_permanent_failure_is_dead_at_once(inbox: AsyncInbox) -> None:
    """What no retry can help is tried once."""
    app = Recorder(lambda _: Answer(False, 410, "HTTP 410", permanent=True))
    made = await come(inbox, "a", "app")
    async with working(inbox, app=Destination(app, QUICK)):
        assert await settled(inbox, made) is DeliveryState.DEAD
    assert len(app.seen) == 1


async def test_a_target_that_raises_harms_nobody(inbox: AsyncInbox) -> None:
    """A plug-in that raises is a failure of its own."""

    def explode(_: Delivery) -> Answer:
        raise ZeroDivisionError

    made = await come(inbox, "a", "app")
    async with working(inbox, app=Destination(Recorder(explode), QUICK)):
        assert await settled(inbox, made) is DeliveryState.DEAD
    assert (await inbox.dead_letters(Filter())).items[0].error == "ZeroDivisionError"


async def test_a_sick_target_takes_nobodys_slots(inbox: AsyncInbox) -> None:
    """A target that hangs fills its own slots only; another's deliveries go on."""
    sick, well = Recorder(), Recorder()
    sick.gate.clear()
    for n in range(20):
        await come(inbox, f"s{n}", "sick")
    policy = TargetPolicy(concurrency=4)
    async with working(
        inbox, sick=Destination(sick, policy), well=Destination(well, policy)
    ) as work:
        await until(lambda: len(sick.seen) == 4)
        for n in range(50):
            await come(inbox, f"w{n}", "well")
        await until(lambda: len(well.seen) == 50)
        assert len(sick.seen) == 4
        reports = {one.target: one for one in work.report()}
        assert (reports["sick"].in_flight, reports["sick"].slots) == (4, 4)
        sick.gate.set()
        await until(lambda: len(sick.seen) == 20)
    assert sick.most == 4


async def test_pausing_stops_what_is_queued(inbox: AsyncInbox) -> None:
    """A paused target gets nothing of its queue until it is resumed."""
    app, other = Recorder(), Recorder()
    await inbox.set_target("app", TargetStatus.PAUSED, actor="me")
    await come(inbox, "a", "app")
    async with working(inbox, app=Destination(app), other=Destination(other)):
        await come(inbox, "b", "other")
        await until(lambda: other.seen)
        assert app.seen == []
        await inbox.set_target("app", TargetStatus.ACTIVE, actor="me")
        await until(lambda: app.seen)


async def test_an_entitys_events_come_in_order(inbox: AsyncInbox) -> None:
    """One at a time and in order, over a failure of the first; other entities don't wait."""
    failing = {"left": 2}

    def sometimes(one: Delivery) -> Answer:
        if one.event.key == "a0" and failing["left"]:
            failing["left"] -= 1
            return Answer(False, error="x")
        return Answer(True)

    app = Recorder(sometimes)
    ids = [await come(inbox, f"a{n}", "app", order="7") for n in range(5)]
    await come(inbox, "b", "app", order="8")
    async with working(inbox, app=Destination(app, QUICK)):
        assert await settled(inbox, ids[-1]) is DeliveryState.DELIVERED
    keys = [one.event.key for one in app.seen if one.event.key != "b"]
    assert keys == ["a0", "a0", "a0", "a1", "a2", "a3", "a4"]
    assert "b" in [one.event.key for one in app.seen]


async def test_stopping_lets_attempts_end(inbox: AsyncInbox) -> None:
    """What ends within the grace counts; what does not is handed back, untried."""
    quick, slow = Recorder(), Recorder()
    quick.gate.clear()
    slow.gate.clear()
    first = await come(inbox, "a", "quick")
    second = await come(inbox, "b", "slow")
    targets = {"quick": Destination(quick), "slow": Destination(slow)}
    worker = DeliveryWorker(inbox, targets)
    task = asyncio.create_task(worker.run())
    await until(lambda: quick.seen and slow.seen)
    stopping = asyncio.create_task(worker.stop(grace=1))
    await asyncio.sleep(0)
    quick.gate.set()
    assert await stopping == 1
    await task
    assert await settled(inbox, first) is DeliveryState.DELIVERED
    again = await inbox.fetch({"slow": 1}, 1000)
    assert [(one.event.id, one.attempt) for one in again] == [(second, 1)]


async def test_an_event_that_kills_workers_ends_as_dead(inbox: AsyncInbox) -> None:
    """When nobody lived to say how its tries ended, the tries count all the same."""
    made = await come(inbox, "a", "app")
    for _ in range(3):
        async with asyncio.timeout(SOON):
            while not await inbox.fetch({"app": 1}, 1):
                await asyncio.sleep(0.01)
    app = Recorder()
    async with working(inbox, app=Destination(app, QUICK)):
        assert await settled(inbox, made) is DeliveryState.DEAD
    assert app.seen == []
    assert (await inbox.dead_letters(Filter())).items[0].error == "no worker lived to finish it"


async def test_an_inbox_that_is_away_is_tried_again(
    inbox: AsyncInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of the inbox stop nothing: fetch and finish are tried again."""
    fetch, finish = inbox.fetch, inbox.finish
    failures = {"fetch": 1, "finish": 2}

    def failing(name: str, method: Any) -> Any:
        async def call(*args: Any) -> Any:
            if failures[name]:
                failures[name] -= 1
                raise StoreUnavailableError("away")
            return await method(*args)

        return call

    monkeypatch.setattr(inbox, "fetch", failing("fetch", fetch))
    monkeypatch.setattr(inbox, "finish", failing("finish", finish))
    app = Recorder()
    made = await come(inbox, "a", "app")
    async with working(inbox, app=Destination(app)):
        assert await settled(inbox, made) is DeliveryState.DELIVERED
    assert len(app.seen) == 1
    assert failures == {"fetch": 0, "finish": 0}


async def test_other_targets_take_over_while_old_attempts_end(inbox: AsyncInbox) -> None:
    """After an update new deliveries use the new target; the old one is given back when idle."""
    old, new = Recorder(), Recorder()
    old.gate.clear()
    await come(inbox, "a", "app")
    async with working(inbox, app=Destination(old)) as worker:
        await until(lambda: old.seen)
        gone = worker.update({"app": Destination(new)})
        assert [one.target for one in gone] == [old]
        await come(inbox, "b", "app")
        await until(lambda: new.seen)
        old.gate.set()
        async with asyncio.timeout(SOON):
            await worker.drained()
    assert [one.event.key for one in old.seen] == ["a"]
    assert [one.event.key for one in new.seen] == ["b"]


async def test_a_target_that_goes_while_its_events_are_fetched_stops_nothing(
    inbox: AsyncInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its deliveries are handed back, for whoever knows it; the others' go on."""
    fetch, others = inbox.fetch, Recorder()
    made = await come(inbox, "a", "gone")
    worker: DeliveryWorker

    async def during(slots: Any, lease_ms: int) -> Any:
        found = await fetch(slots, lease_ms)
        if any(one.target == "gone" for one in found):
            worker.update({"app": Destination(others)})
        return found

    monkeypatch.setattr(inbox, "fetch", during)
    async with working(inbox, gone=Destination(Recorder()), app=Destination(others)) as worker:
        await until(lambda: [one.target for one in worker.report()] == ["app"])
        await come(inbox, "b", "app")
        await until(lambda: others.seen)
        (back,) = await fetch({"gone": 1}, 60_000)
        assert (back.event.id, back.attempt) == (made, 1)  # it was no try


async def test_a_fault_of_a_round_is_told_and_the_next_one_delivers(
    inbox: AsyncInbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What nobody foresaw ends neither the deliveries nor the housekeeping."""
    left = {"fetch": 1, "prune": 1}
    pruned = asyncio.Event()

    def once_wrong(name: str) -> None:
        method = getattr(inbox, name)

        async def call(*args: Any) -> Any:
            if left[name]:
                left[name] -= 1
                raise KeyError(name)
            if name == "prune":
                pruned.set()
            return await method(*args)

        monkeypatch.setattr(inbox, name, call)

    once_wrong("fetch")
    once_wrong("prune")
    monkeypatch.setattr("oncekey.inbox.delivery._HOUSEKEEPING", 0.0)
    monkeypatch.setattr("oncekey.inbox.delivery._BULK_LOOK", 0.01)
    app = Recorder()
    made = await come(inbox, "a", "app")
    async with working(inbox, app=Destination(app)):
        assert await settled(inbox, made) is DeliveryState.DELIVERED
        async with asyncio.timeout(SOON):
            await pruned.wait()
    assert "a look for deliveries failed" in caplog.text
    assert "housekeeping of the inbox failed" in caplog.text


async def test_bulk_replays_move_while_the_worker_runs(inbox: AsyncInbox) -> None:
    """What a bulk replay queues is delivered by the worker that moves it."""
    app = Recorder(lambda _: Answer(False, 500, "HTTP 500", permanent=True))
    for n in range(5):
        await come(inbox, f"k{n}", "app")
    async with working(inbox, app=Destination(app, TargetPolicy(breaker_after=0))):
        async with asyncio.timeout(SOON):
            while await inbox.count_dead(Filter()) < 5:
                await asyncio.sleep(0.01)
        app.answer = lambda _: Answer(True)
        await inbox.begin_bulk_replay(Filter.parse("status:500"), rate=100, actor="me")
        await until(lambda: len(app.seen) == 10)


async def test_a_plain_function_is_delivered_to(inbox: AsyncInbox) -> None:
    """The same worker drives functions."""
    seen: list[str] = []
    to = CallableTarget(lambda one: seen.append(one.event.key))
    await come(inbox, "a", "app")
    async with working(inbox, app=Destination(to)):
        await until(lambda: seen == ["a"])
    await to.aclose()


# Lanes, on a clock of the test's own


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def one_delivery(attempt: int = 1) -> Delivery:
    event = Event("msg_0000000000000001", 1, "s", "k", "t", (), b"")
    return Delivery(event, "app", attempt, attempt, 0)


def test_the_breaker_opens_on_evidence_and_tries_one() -> None:
    """Failures in a row open it; then one attempt at a time decides, and pauses grow."""
    clock = Clock()
    policy = TargetPolicy(breaker_after=3, breaker_pause=10, concurrency=8)
    lane = Lane("app", Destination(Recorder(), policy), clock)
    sick, well = Answer(False, 500, "HTTP 500"), Answer(True)
    lane.learn(sick)
    lane.learn(sick)
    lane.learn(well)
    lane.learn(sick)
    lane.learn(sick)
    assert (lane.breaker, lane.free()) == (BreakerState.CLOSED, 8)
    lane.learn(sick)
    assert (lane.breaker, lane.free(), lane.waits()) == (BreakerState.OPEN, 0, 10)
    lane.learn(sick)  # one that was under way: no longer pause for it
    assert lane.waits() == 10
    clock.now += 10
    assert (lane.breaker, lane.free()) == (BreakerState.TRYING, 1)
    lane.learn(sick)
    assert (lane.breaker, lane.waits()) == (BreakerState.OPEN, 20)
    clock.now += 20
    lane.learn(well)
    assert (lane.breaker, lane.free()) == (BreakerState.CLOSED, 8)


def test_an_events_own_failure_is_no_evidence() -> None:
    """A target that refuses events is well."""
    clock = Clock()
    lane = Lane("app", Destination(Recorder(), TargetPolicy(breaker_after=1)), clock)
    lane.learn(Answer(False, 400, "HTTP 400", sick=False))
    assert lane.breaker is BreakerState.CLOSED


def test_a_rate_is_kept() -> None:
    """No more attempts begin than the rate allows, and a lane says when the next may."""
    clock = Clock()
    policy = TargetPolicy(rate=4, concurrency=100)
    lane = Lane("app", Destination(Recorder(), policy), clock)
    assert lane.free() == 4
    task: Any = None
    for _ in range(4):
        lane.begun(task, one_delivery(1))
    lane.running.clear()
    assert (lane.free(), lane.waits()) == (0, 0.25)
    clock.now += 0.5
    assert lane.free() == 2
    clock.now += 60
    assert lane.free() == 4


def test_a_result_follows_the_policy() -> None:
    """Retry with the delay, the target's own wish, dead at the last try."""
    policy = TargetPolicy(first_delay=1, factor=2, jitter=0, tries=3, max_delay=100)
    lane = Lane("app", Destination(Recorder(), policy), Clock())
    failed = Answer(False, 503, "HTTP 503")
    assert lane.judged(one_delivery(2), failed, 5).retry_in_ms == 2000
    asked = Answer(False, 503, "HTTP 503", retry_after_ms=50_000)
    assert lane.judged(one_delivery(1), asked, 5).retry_in_ms == 50_000
    assert lane.judged(one_delivery(3), failed, 5).outcome is Outcome.DEAD
    assert lane.judged(one_delivery(3), Answer(True, 200), 5).outcome is Outcome.DELIVERED


class Counting:
    """An inbox that notes how many results came in each call, and can fail."""

    def __init__(self, inbox: AsyncInbox, fails: Callable[[list[Any]], bool]) -> None:
        self._inbox = inbox
        self.fails = fails
        self.calls: list[int] = []

    async def finish(self, results: Any) -> list[bool]:
        self.calls.append(len(results))
        if self.fails(results):
            raise StoreUnavailableError("not now")
        return await self._inbox.finish(results)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inbox, name)


async def test_attempts_that_end_together_are_recorded_together(inbox: AsyncInbox) -> None:
    """Sixteen deliveries that end in one moment are few calls to the inbox, and few commits."""
    app = Recorder()
    app.gate.clear()
    counting: Any = Counting(inbox, lambda results: False)
    ids = [await come(inbox, f"e{number}", "app") for number in range(16)]
    async with working(counting, app=Destination(app)):
        await until(lambda: len(app.seen) == 16)
        app.gate.set()
        for made in ids:
            assert await settled(inbox, made) is DeliveryState.DELIVERED
    assert sum(counting.calls) == 16
    assert len(counting.calls) <= 4  # a look for more may come between them


async def test_results_that_can_not_be_recorded_together_are_tried_apart(
    inbox: AsyncInbox,
) -> None:
    """One result that the inbox refuses keeps no other from being recorded."""
    app = Recorder()
    app.gate.clear()
    ids = [await come(inbox, f"e{number}", "app") for number in range(3)]
    refused = ids[1]

    def fails(results: list[Any]) -> bool:
        return any(result.delivery.event.id == refused for result in results)

    counting: Any = Counting(inbox, fails)
    async with working(counting, app=Destination(app)):
        await until(lambda: len(app.seen) == 3)
        app.gate.set()
        assert await settled(inbox, ids[0]) is DeliveryState.DELIVERED
        assert await settled(inbox, ids[2]) is DeliveryState.DELIVERED
        counting.fails = lambda results: False
        assert await settled(inbox, refused) is DeliveryState.DELIVERED
    assert len(app.seen) == 3
    assert counting.calls[0] == 3


async def test_a_stop_records_what_has_ended(inbox: AsyncInbox) -> None:
    """Results that still wait for company are on record when the worker has stopped."""
    app = Recorder()
    async with working(inbox, app=Destination(app)) as worker:
        made = await come(inbox, "a", "app")
        await until(lambda: len(app.seen) == 1)
        assert await worker.stop(grace=5) == 0
        found = await inbox.event(made)
        assert found is not None
        assert found.deliveries[0].state is DeliveryState.DELIVERED
    assert len(app.seen) == 1


async def test_a_full_target_is_looked_at_again_for_many(inbox: AsyncInbox) -> None:
    """While more is due than there are slots, a fetch waits for half of them to be free."""
    asked: list[int] = []

    class Noting(Counting):
        async def fetch(self, slots: Any, lease_ms: int) -> Any:
            found = await self._inbox.fetch(slots, lease_ms)
            asked.append(len(found))
            return found

    noting: Any = Noting(inbox, lambda results: False)
    app = Recorder()
    for number in range(64):
        await come(inbox, f"e{number}", "app")
    async with working(noting, app=Destination(app)):
        await until(lambda: len(app.seen) == 64)
    assert asked[0] == 16
    assert sum(asked) == 64
