"""Events come in, and leave by deliveries."""

from __future__ import annotations

import asyncio

from oncekey.errors import InvalidKeyError, InvalidRequestError
from oncekey.inbox.abc import AsyncInbox
from oncekey.inbox.conformance.base import (
    LEASE,
    Nodes,
    arrival,
    check,
    detail,
    ended,
    next_one,
    states,
)
from oncekey.inbox.filters import Filter
from oncekey.inbox.models import Arrival, DeliveryState, Outcome, Route


@check
async def keeps_an_event_once(nodes: Nodes) -> None:
    """The first arrival is new, later ones are copies of it, and each copy is on record."""
    inbox, other = await nodes.node("a"), await nodes.node("b")
    first = await inbox.ingest(arrival("k", "app"))
    assert first.new
    again = await other.ingest(arrival("k", "app"))
    assert (again.id, again.new, again.same) == (first.id, False, True)
    changed = Arrival("shop", "k", "paid", b"other")
    third = await inbox.ingest(changed)
    assert (third.id, third.new, third.same) == (first.id, False, False)
    assert (await inbox.ingest(arrival("k", "app", source="bank"))).new
    found = await detail(other, first.id)
    assert found.event.body == b"\x00\xff k"
    assert found.event.headers == (("x-one", "1"),)
    assert (found.event.source, found.event.key, found.event.type) == ("shop", "k", "paid")
    assert [(copy.same, copy.body) for copy in found.duplicates] == [
        (True, None),
        (False, b"other"),
    ]
    assert sorted(await inbox.sources()) == ["bank", "shop"]


@check
async def of_many_at_once_one_is_new(nodes: Nodes) -> None:
    """Concurrent copies on two nodes, in one batch and in several, make one event."""
    inboxes = [await nodes.node("a"), await nodes.node("b")]
    kept = await asyncio.gather(
        *(inboxes[n % 2].ingest(arrival(f"k{n % 5}", "app")) for n in range(100))
    )
    assert sum(one.new for one in kept) == 5
    assert len({one.id for one in kept}) == 5
    rows = await inboxes[0].search(Filter())
    assert sorted(row.key for row in rows) == [f"k{n}" for n in range(5)]
    assert sum(row.duplicates for row in rows) == 95
    assert len(await inboxes[1].fetch({"app": 100}, LEASE)) == 5


@check
async def ids_are_in_order_of_arrival(nodes: Nodes) -> None:
    """An event that was acknowledged before another arrived has the lesser id."""
    inbox = await nodes.node()
    ids = [(await inbox.ingest(arrival(f"k{n}", "app"))).id for n in range(50)]
    assert ids == sorted(set(ids))


@check
async def refuses_what_cannot_be_kept(nodes: Nodes) -> None:
    """Bad names are refused before anything is written, and harm no neighbour."""
    inbox = await nodes.node()
    bad = [
        arrival("", "app"),
        arrival("k\0", "app"),
        arrival("x" * 2000, "app"),
        arrival("k", "app", source=""),
        arrival("k", "a\0"),
        arrival("k", "app", order="\ud800"),
    ]
    odd = [
        Arrival("shop", "k", "paid", "text"),  # type: ignore[arg-type]
        Arrival("shop", "k", "paid", b"", (("x", "\ud800"),)),
        Arrival("shop", "k", "paid", b"", (("x", "a\0b"),)),
        Arrival("shop", "k", "paid", b"", (), (Route("app"), Route("app"))),
    ]
    for one in odd:
        try:
            await inbox.ingest(one)
        except InvalidRequestError:
            continue
        raise AssertionError("what can't be kept was taken")
    calls = [inbox.ingest(one) for one in bad]
    *refused, kept = await asyncio.gather(
        *calls, inbox.ingest(arrival("good", "app")), return_exceptions=True
    )
    assert all(isinstance(error, InvalidKeyError) for error in refused), refused
    assert not isinstance(kept, BaseException)
    assert [row.key for row in await inbox.search(Filter())] == ["good"]
    for wrong in ("msg_1", "' OR 1=1", "msg_ffffffffffffffff"):
        try:
            await inbox.event(wrong)
        except InvalidKeyError:
            continue
        raise AssertionError(f"{wrong} was taken for an id")


# and leave by deliveries


@check
async def slots_are_bounds(nodes: Nodes) -> None:
    """A target gets no more than its slots, and nobody else's deliveries are in its way."""
    inbox = await nodes.node()
    await asyncio.gather(*(inbox.ingest(arrival(f"k{n}", "sick")) for n in range(50)))
    kept = await inbox.ingest(arrival("last", "sick", "well"))
    found = await inbox.fetch({"sick": 3, "well": 5, "none": 2, "zero": 0}, LEASE)
    assert sorted(one.target for one in found) == ["sick"] * 3 + ["well"]
    assert [one.event.id for one in found if one.target == "well"] == [kept.id]
    assert await inbox.fetch({"sick": 0}, LEASE) == []
    assert await inbox.fetch({}, LEASE) == []


@check
async def a_delivery_has_one_holder(nodes: Nodes) -> None:
    """Nodes that fetch at the same time share out what is due, each once; finished is finished."""
    inboxes = [await nodes.node(name) for name in "abc"]
    await asyncio.gather(*(inboxes[0].ingest(arrival(f"k{n}", "app")) for n in range(60)))
    parts = await asyncio.gather(*(one.fetch({"app": 40}, LEASE) for one in inboxes))
    got = [delivery.event.id for part in parts for delivery in part]
    assert len(got) == len(set(got))
    while more := await inboxes[1].fetch({"app": 40}, LEASE):
        parts.append(more)
    for inbox, part in zip([*inboxes, inboxes[1]], parts, strict=False):
        assert all(await inbox.finish([ended(one) for one in part]))
    assert sum(len(part) for part in parts) == 60
    assert await inboxes[2].fetch({"app": 100}, LEASE) == []
    assert (await inboxes[2].depths()) == []


@check
async def what_is_lapsed_is_due_and_fenced(nodes: Nodes) -> None:
    """After a lease another node gets the delivery; the first one's word no longer counts."""
    slow, quick = await nodes.node("slow"), await nodes.node("quick")
    kept = await slow.ingest(arrival("k", "app"))
    late = await next_one(slow, lease_ms=1)
    held = await next_one(quick)
    assert (held.fence > late.fence, held.attempt) == (True, 2)
    assert await slow.finish([ended(late)]) == [False]
    assert await slow.finish([ended(late, Outcome.DEAD, error="x")]) == [False]
    assert await slow.finish([ended(late, Outcome.RETRY, error="x")]) == [False]
    assert await slow.hand_back([late]) == [False]
    assert await slow.renew([late], LEASE) == [False]
    assert await quick.renew([held], LEASE) == [True]
    assert (await states(quick, kept.id)) == {"app": DeliveryState.RUNNING}
    assert await quick.finish([ended(held, status=200)]) == [True]
    assert await quick.finish([ended(held)]) == [False]
    found = await detail(slow, kept.id)
    assert [(one.number, one.outcome, one.status) for one in found.attempts] == [
        (late.fence, Outcome.LOST, 0),
        (held.fence, Outcome.DELIVERED, 200),
    ]


@check
async def an_attempt_without_an_end_is_told(nodes: Nodes) -> None:
    """One whose worker died is in the history as lost, between those before and after it."""
    inbox = await nodes.node()
    kept = await inbox.ingest(arrival("k", "app"))
    held = await next_one(inbox)
    assert (await detail(inbox, kept.id)).attempts == ()  # it is under way
    await inbox.finish([ended(held, Outcome.RETRY, error="no")])
    await next_one(inbox, lease_ms=1)
    last = await next_one(inbox)
    seen = [(one.number, one.outcome) for one in (await detail(inbox, kept.id)).attempts]
    assert seen == [(1, Outcome.RETRY), (2, Outcome.LOST)]
    await inbox.finish([ended(last)])
    found = await detail(inbox, kept.id)
    assert [one.outcome for one in found.attempts] == ["retry", "lost", "delivered"]
    assert [one.number for one in found.attempts] == [1, 2, 3]
    assert [one.attempts for one in found.deliveries] == [3]


@check
async def failures_wait_and_die(nodes: Nodes) -> None:
    """A retry is due later, a dead letter no more; both keep the cause, and issues group them."""
    inbox = await nodes.node()
    kept = await inbox.ingest(arrival("k", "app"))
    first = await next_one(inbox)
    failed = ended(first, Outcome.RETRY, status=503, error="busy", retry_in_ms=60_000)
    assert await inbox.finish([failed]) == [True]
    assert await inbox.fetch({"app": 5}, LEASE) == []
    row = (await detail(inbox, kept.id)).deliveries[0]
    assert (row.state, row.status, row.error) == (DeliveryState.WAITING, 503, "busy")
    assert row.due_at is not None
    assert row.due_at > await inbox.now() + 50_000
    issue = (await inbox.issues())[0]
    assert (issue.target, issue.status, issue.error, issue.dead, issue.failing) == (
        *("app", 503, "busy"),
        *(0, 1),
    )
    assert await inbox.replay(kept.id, actor="me") == 1  # now rather than later
    second = await next_one(inbox)
    assert second.attempt == 1
    dead = ended(second, Outcome.DEAD, status=400, error="refused", note="why")
    assert await inbox.finish([dead]) == [True]
    assert await inbox.fetch({"app": 5}, LEASE) == []
    letter = (await inbox.dead_letters(Filter())).items[0]
    assert (letter.id, letter.target, letter.status, letter.error, letter.note) == (
        *(kept.id, "app", 400),
        *("refused", "why"),
    )
    assert [one.dead for one in await inbox.issues()] == [1]
    assert (await inbox.depths())[0].dead == 1


@check
async def handed_back_counts_as_no_try(nodes: Nodes) -> None:
    """What is handed back is due at once for anybody, and the try does not count."""
    inbox, other = await nodes.node("a"), await nodes.node("b")
    await inbox.ingest(arrival("k", "app"))
    held = await next_one(inbox)
    assert await inbox.hand_back([held]) == [True]
    again = await next_one(other)
    assert (again.attempt, again.fence > held.fence) == (1, True)
    assert await inbox.finish([ended(held)]) == [False]


@check
async def entities_stay_in_order(nodes: Nodes) -> None:
    """Of events with one order key only the first is due, whatever becomes of it."""
    inbox, other = await nodes.node("a"), await nodes.node("b")
    ids = [(await inbox.ingest(arrival(f"k{n}", "app", order="7"))).id for n in range(3)] + [
        (await other.ingest(arrival("k3", "app", order="7"))).id
    ]
    free = await inbox.ingest(arrival("free", "app", order="8"))
    found = await inbox.fetch({"app": 9}, LEASE)
    assert [one.event.id for one in found] == [ids[0], free.id]
    head = found[0]
    assert (await states(inbox, ids[1])) == {"app": DeliveryState.PARKED}
    await inbox.finish([ended(head, Outcome.RETRY, error="x", retry_in_ms=0)])
    again = await inbox.fetch({"app": 9}, LEASE)
    assert [one.event.id for one in again] == [ids[0]]
    await inbox.finish([ended(again[0])])
    second = await other.fetch({"app": 9}, LEASE)
    assert [one.event.id for one in second] == [ids[1]]
    await other.finish([ended(second[0], Outcome.DEAD, error="x")])
    assert (await states(inbox, ids[2])) == {"app": DeliveryState.WAITING}
    assert await inbox.discard(ids[2], actor="me") == 1
    last = await inbox.fetch({"app": 9}, LEASE)
    assert [one.event.id for one in last] == [ids[3]]


@check
async def order_holds_under_concurrency(nodes: Nodes) -> None:
    """Whatever nodes ingest and finish at the same time, an entity has one delivery in hand."""
    inboxes = [await nodes.node(name) for name in "ab"]
    seen: list[str] = []
    total = 40

    async def come(inbox: AsyncInbox, name: str) -> None:
        for n in range(total // 2):
            await inbox.ingest(arrival(f"{name}{n}", "app", order="one"))

    async def go(inbox: AsyncInbox) -> None:
        while len(seen) < total:
            found = await inbox.fetch({"app": 9}, LEASE)
            assert len(found) <= 1
            for one in found:
                seen.append(one.event.id)
                await inbox.finish([ended(one)])
            await asyncio.sleep(0)

    async with asyncio.timeout(60):
        await asyncio.gather(
            *(come(inbox, name) for inbox, name in zip(inboxes, "ab", strict=True)),
            *(go(inbox) for inbox in inboxes),
        )
    assert seen == sorted(seen)
    assert len(set(seen)) == total


@check
async def a_history_is_bounded(nodes: Nodes) -> None:
    """A delivery that is taken and handed back again and again shows the last hundred of that."""
    inbox = await nodes.node()
    kept = await inbox.ingest(arrival("k", "app"))
    for _ in range(130):
        await inbox.hand_back([await next_one(inbox)])
    await inbox.finish([ended(await next_one(inbox))])
    found = (await detail(inbox, kept.id)).attempts
    assert len(found) == 100
    assert [one.outcome for one in found][-1] is Outcome.DELIVERED
