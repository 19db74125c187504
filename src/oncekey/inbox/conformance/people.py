"""What people do and look at, and housekeeping."""

from __future__ import annotations

import asyncio
import dataclasses

from oncekey.errors import InvalidKeyError, PolicyError
from oncekey.inbox.conformance.base import (
    LEASE,
    SOON,
    Nodes,
    arrival,
    check,
    detail,
    ended,
    next_one,
    states,
)
from oncekey.inbox.filters import Filter
from oncekey.inbox.models import (
    BulkState,
    DeliveryState,
    Outcome,
    TargetStatus,
    event_key,
)


@check
async def a_replay_keeps_the_history(nodes: Nodes) -> None:
    """Replays of what is delivered or dead are new attempts with higher fences, and audited."""
    inbox = await nodes.node()
    kept = await inbox.ingest(arrival("k", "app", "log"))
    found = await inbox.fetch({"app": 1, "log": 1}, LEASE)
    by_target = {one.target: one for one in found}
    assert await inbox.replay(kept.id, actor="me") == 0  # in hand just now
    await inbox.finish([ended(by_target["app"]), ended(by_target["log"], Outcome.DEAD, error="no")])
    assert await inbox.replay(kept.id, ["app", "new"], actor="me") == 2
    assert await inbox.replay(kept.id, ["log"], actor="me") == 1
    again = await inbox.fetch({"app": 1, "log": 1, "new": 1}, LEASE)
    assert {one.target: one.attempt for one in again} == {"app": 1, "log": 1, "new": 1}
    assert all(one.fence > by_target[one.target].fence for one in again if one.target != "new")
    assert await inbox.finish([ended(by_target["app"])]) == [False]
    assert await inbox.finish([ended(one) for one in again]) == [True] * 3
    history = await detail(inbox, kept.id)
    assert len([one for one in history.attempts if one.target == "app"]) == 2
    assert (await states(inbox, kept.id)) == dict.fromkeys(
        ("app", "log", "new"), DeliveryState.DELIVERED
    )
    assert [(one.actor, one.action) for one in history.actions] == [("me", "replay")] * 3
    for wrong in (
        inbox.replay("msg_0000000000000001", actor="me"),
        inbox.replay(kept.id, actor=""),
    ):
        try:
            await wrong
        except (InvalidKeyError, PolicyError):
            continue
        raise AssertionError("a replay of nothing, or by nobody, was taken")


@check
async def a_replay_is_not_late(nodes: Nodes) -> None:
    """Of how long after its arrival an event was delivered, only the first delivery counts."""
    inbox = await nodes.node()
    kept = await inbox.ingest(arrival("k", "app"))
    held = await next_one(inbox)
    await inbox.finish([ended(held, Outcome.RETRY, error="no")])
    await inbox.finish([ended(await next_one(inbox))])
    await inbox.replay(kept.id, actor="me")
    await inbox.finish([ended(await next_one(inbox))])
    counted = await inbox.counts(0)
    numbers = {
        kind: sum(one.n for one in counted if one.kind == kind) for kind in ("delivered", "late")
    }
    assert numbers == {"delivered": 2, "late": 1}


@check
async def a_discard_is_for_good(nodes: Nodes) -> None:
    """What waits, runs or is dead is given up; whoever has it in hand is fenced."""
    inbox = await nodes.node()
    kept = await inbox.ingest(arrival("k", "app", "dead", "other"))
    found = await inbox.fetch({"app": 1, "dead": 1}, LEASE)
    by_target = {one.target: one for one in found}
    await inbox.finish([ended(by_target["dead"], Outcome.DEAD, error="x")])
    assert await inbox.discard(kept.id, ["app", "dead"], actor="me") == 2
    assert await inbox.finish([ended(by_target["app"])]) == [False]
    assert await states(inbox, kept.id) == {
        "app": DeliveryState.DISCARDED,
        "dead": DeliveryState.DISCARDED,
        "other": DeliveryState.WAITING,
    }
    assert len((await inbox.dead_letters(Filter())).items) == 0
    assert await inbox.replay(kept.id, ["app"], actor="me") == 1
    again = await next_one(inbox)
    assert again.fence > by_target["app"].fence


@check
async def a_paused_target_gets_nothing(nodes: Nodes) -> None:
    """Pausing stops what is queued on every node; disabling queues no more either."""
    inbox, other = await nodes.node("a"), await nodes.node("b")
    await inbox.ingest(arrival("k1", "app", "log"))
    await inbox.set_target("app", TargetStatus.PAUSED, actor="me", reason="deploy")
    assert [one.target for one in await other.fetch({"app": 5, "log": 5}, LEASE)] == ["log"]
    await other.ingest(arrival("k2", "app"))
    await inbox.set_target("app", TargetStatus.DISABLED, actor="me")
    assert await other.fetch({"app": 5}, LEASE) == []
    await other.ingest(arrival("k3", "app"))
    await inbox.set_target("app", TargetStatus.ACTIVE, actor="me")
    assert [one.event.key for one in await other.fetch({"app": 5}, LEASE)] == ["k1", "k2"]
    assert [(one.name, one.status) for one in await other.targets()] == [
        ("app", TargetStatus.ACTIVE)
    ]
    entries = (await inbox.audit()).items
    assert [(one.action, one.detail) for one in reversed(entries)] == [
        ("target paused", "deploy"),
        ("target disabled", ""),
        ("target active", ""),
    ]
    page = await inbox.audit(limit=2)
    assert page.next is not None
    assert [one.action for one in await inbox.audit(limit=2, after=page.next)] == ["target paused"]


# What people look at


@check
async def searches_find_by_every_qualifier(nodes: Nodes) -> None:
    """Source, type, state, target, cause, age, id and key each find what they should."""
    inbox = await nodes.node()
    done = await inbox.ingest(arrival("k1", "app", type="invoice.paid"))
    dead = await inbox.ingest(arrival("k2", "app", type="invoice.failed"))
    wait = await inbox.ingest(arrival("k3", "log", source="bank", type="transfer"))
    none = await inbox.ingest(arrival("k4", source="bank", type="ping"))
    by_id = {one.event.id: one for one in await inbox.fetch({"app": 5}, LEASE)}
    await inbox.finish(
        [ended(by_id[done.id]), ended(by_id[dead.id], Outcome.DEAD, status=500, error="server")]
    )
    every = [none.id, wait.id, dead.id, done.id]
    for query, wanted in {
        "": every,
        "source:shop": [dead.id, done.id],
        "type:invoice.*": [dead.id, done.id],
        "type:ping": [none.id],
        "state:dead": [dead.id],
        "state:delivered": [done.id],
        "state:waiting": [wait.id],
        "state:running": [],
        "target:app": [dead.id, done.id],
        "target:app state:delivered": [done.id],
        "state:dead target:log": [],
        "status:500": [dead.id],
        "error:server source:shop": [dead.id],
        "age:<1h": every,
        "age:>1h": [],
        "k3": [wait.id],
        "k3 source:bank": [wait.id],
        "k3 source:shop": [],
        "nothing": [],
        dead.id: [dead.id],
        dead.id[:8]: every,
    }.items():
        found = [row.id for row in await inbox.search(Filter.parse(query))]
        assert found == wanted, (query, found, wanted)
    assert {row.id: row.state for row in await inbox.search(Filter())} == {
        done.id: DeliveryState.DELIVERED,
        dead.id: DeliveryState.DEAD,
        wait.id: DeliveryState.WAITING,
        none.id: None,
    }


@check
async def pages_follow_one_another(nodes: Nodes) -> None:
    """Pages by cursor give each event once, whatever comes meanwhile."""
    inbox = await nodes.node()
    ids = [(await inbox.ingest(arrival(f"k{n}", "app"))).id for n in range(10)]
    found: list[str] = []
    after: str | None = None
    while True:
        page = await inbox.search(Filter(), limit=3, after=after)
        found += [row.id for row in page]
        after = page.next
        if after is None:
            break
        await inbox.ingest(arrival(f"new{len(found)}", "app"))
    assert found == ids[::-1]


@check
async def minutes_are_counted(nodes: Nodes) -> None:
    """Charts get what was received, copied, refused and delivered, summed over nodes."""
    inbox, other = await nodes.node("a"), await nodes.node("b")
    since = await inbox.now() - 60_000
    await inbox.ingest(arrival("k", "app"))
    await other.ingest(arrival("k", "app"))
    other.reject("shop", "bad signature", "no match")
    await inbox.finish([ended(await next_one(inbox))])
    assert [(one.cause, one.detail) for one in await other.rejected()] == [
        ("bad signature", "no match")
    ]
    sums: dict[tuple[str, str], int] = {}
    await other.counts(since)
    for one in await inbox.counts(since):
        sums[one.kind, one.name] = sums.get((one.kind, one.name), 0) + one.n
    assert sums == {
        ("received", "shop"): 2,
        ("duplicate", "shop"): 1,
        ("rejected", "shop"): 1,
        ("delivered", "app"): 1,
        ("late", "app"): 1,
    }


@check
async def bulk_replays_go_by_filter_and_rate(nodes: Nodes) -> None:
    """A bulk replay takes what matched, counts, can be cancelled, and takes nothing twice."""
    inbox, other = await nodes.node("a"), await nodes.node("b")
    for n in range(6):
        await inbox.ingest(arrival(f"k{n}", "app", type="a" if n < 4 else "b"))
    for one in await inbox.fetch({"app": 9}, LEASE):
        await inbox.finish([ended(one, Outcome.DEAD, status=500, error="x")])
    wanted = Filter.parse("type:a")
    assert await inbox.count_dead(wanted) == 4
    for asked in (
        inbox.count_dead(Filter.parse("type:a state:waiting")),
        inbox.begin_bulk_replay(Filter.parse("state:waiting"), rate=1, actor="me"),
        inbox.begin_bulk_replay(Filter.parse("state:delivered status:500"), rate=1, actor="me"),
        inbox.dead_letters(Filter.parse("state:parked")),
    ):
        try:
            await asked
        except PolicyError:
            continue
        raise AssertionError("dead letters of another state were found")
    begun = await inbox.begin_bulk_replay(wanted, rate=1000, actor="me")
    assert (begun.total, begun.state) == (4, BulkState.RUNNING)
    async with asyncio.timeout(SOON):
        while (wait := await other.advance_bulk_replays()) is not None:
            await asyncio.sleep(wait)
    latest = (await inbox.bulk_replays())[0]
    assert (latest.done, latest.state) == (4, BulkState.DONE)
    assert await inbox.count_dead(Filter()) == 2
    assert len(await inbox.fetch({"app": 9}, LEASE)) == 4
    second = await inbox.begin_bulk_replay(Filter(), rate=0.001, actor="me")
    assert await other.cancel_bulk_replay(second.id, actor="you")
    assert not await other.cancel_bulk_replay(second.id, actor="you")
    assert await inbox.advance_bulk_replays() is None
    assert (await inbox.bulk_replays())[0].state is BulkState.CANCELLED
    assert "cancel bulk replay" in [one.action for one in await inbox.audit()]


@check
async def what_was_delivered_is_replayed_in_bulk(nodes: Nodes) -> None:
    """With ``state:delivered``: each delivery of the window once, to the targets that have it."""
    inbox, other = await nodes.node("a"), await nodes.node("b")
    for n in range(5):
        await inbox.ingest(arrival(f"k{n}", "app", "log", type="a" if n < 3 else "b"))
    await inbox.ingest(arrival("dead", "app", type="a"))
    for one in await inbox.fetch({"app": 9, "log": 9}, LEASE):
        dead = one.event.key == "dead"
        await inbox.finish([ended(one, Outcome.DEAD if dead else Outcome.DELIVERED)])
    rows = {row.key: row.id for row in await inbox.search(Filter())}
    assert await inbox.replay(rows["k0"], ["app"], actor="me") == 1
    (again,) = await inbox.fetch({"app": 1}, LEASE)
    await inbox.finish([ended(again)])  # delivered twice, and still one delivery
    everything = Filter.parse("state:delivered")
    assert await inbox.count_replays(everything) == 10
    wanted = Filter.parse("state:delivered type:a age:<1d")
    assert await inbox.count_replays(wanted) == 6
    assert await inbox.count_replays(Filter.parse("state:delivered type:a target:log")) == 3
    begun = await inbox.begin_bulk_replay(wanted, rate=1000, actor="me")
    async with asyncio.timeout(SOON):
        while (wait := await other.advance_bulk_replays()) is not None:
            await asyncio.sleep(wait)
    latest = (await inbox.bulk_replays())[0]
    assert (latest.id, latest.total, latest.done) == (begun.id, 6, 6)
    found = await inbox.fetch({"app": 9, "log": 9}, LEASE)
    assert sorted((one.event.key, one.target) for one in found) == [
        (f"k{n}", target) for n in range(3) for target in ("app", "log")
    ]
    assert await inbox.count_replays(everything) == 4  # what waits is no more delivered


@check
async def notes_last_for_their_time(nodes: Nodes) -> None:
    """Nodes share notes until they end or are dropped."""
    inbox, other = await nodes.node("a"), await nodes.node("b")
    await inbox.put_note("session", b"\x00one", 60_000)
    assert await other.get_note("session") == b"\x00one"
    await other.put_note("session", b"two", 60_000)
    assert await inbox.get_note("session") == b"two"
    taken = await asyncio.gather(*(one.take_note("session") for one in (inbox, other) * 4))
    assert sorted(one or b"" for one in taken) == [b""] * 7 + [b"two"]
    await inbox.put_note("session", b"three", 60_000)
    await other.drop_note("session")
    assert await inbox.get_note("session") is None
    assert await inbox.take_note("session") is None
    await inbox.put_note("short", b"x", 1)
    await asyncio.sleep(0.02)
    assert await other.get_note("short") is None


@check
async def pruning_takes_only_what_is_finished(nodes: Nodes) -> None:
    """Old finished events go with their history; unfinished and dead ones stay."""
    inbox = await nodes.node()
    ids = [(await inbox.ingest(arrival(f"k{n}", "app"))).id for n in range(4)]
    by_id = {one.event.id: one for one in await inbox.fetch({"app": 3}, LEASE)}
    await inbox.finish([ended(by_id[ids[0]]), ended(by_id[ids[1]], Outcome.DEAD, error="x")])
    await inbox.prune(86_400_000)
    assert len(await inbox.search(Filter())) == 4
    await asyncio.sleep(0.01)
    await inbox.prune(1)  # whole days may be what goes at once
    assert {row.id for row in await inbox.search(Filter())} >= set(ids[1:])
    copy = await inbox.ingest(arrival("k0", "app"))
    assert (copy.id, copy.new) == (ids[0], False)  # its key outlives it
    await inbox.check()


@check
async def its_keys_are_records(nodes: Nodes) -> None:
    """A digest names the event; the inbox wakes whoever waits for work."""
    inbox = await nodes.node()
    assert not await inbox.wait_for_work(0.01)
    kept = await inbox.ingest(arrival("k", "app"))
    assert await inbox.wait_for_work(SOON)
    assert [row.id for row in await inbox.search(Filter(text="k"))] == [kept.id]
    assert event_key("shop", "k") == event_key("shop", "k")


@check
async def the_last_arrival_is_known(nodes: Nodes) -> None:
    """Of each source, also when its event is gone; a source that never sent has none."""
    inbox = await nodes.node()
    assert await inbox.last_received("shop") is None
    kept = await inbox.ingest(arrival("k"))
    await inbox.ingest(arrival("other", source="bank"))
    found = await inbox.search(Filter(source="shop"))
    assert await inbox.last_received("shop") == found.items[0].at
    assert kept.id == found.items[0].id
    assert await inbox.last_received("nobody") is None


@check
async def copies_fit_into_memory(nodes: Nodes) -> None:
    """Each copy is listed; of those that differ the last 20 are shown with their bodies."""
    inbox = await nodes.node()
    kept = await inbox.ingest(arrival("k"))
    for n in range(25):
        other = dataclasses.replace(arrival("k"), body=b"%d" % n)
        assert not (await inbox.ingest(other)).same
    for _ in range(3):
        assert (await inbox.ingest(arrival("k"))).same
    found = (await detail(inbox, kept.id)).duplicates
    assert len(found) == 28
    assert sum(one.body is not None for one in found) == 20
    assert sum(one.same for one in found) == 3
    assert b"24" in [one.body for one in found]


@check
async def the_audit_is_a_chain(nodes: Nodes) -> None:
    """Actions of all nodes, at the same time too, are links of one chain that can be verified."""
    inbox, other = await nodes.node(), await nodes.node()
    kept = await inbox.ingest(arrival("k", "app"))
    assert (await inbox.verify_audit()).head.number == 0
    await asyncio.gather(
        *(
            one.record("look", f"subject {n}", actor="anna")
            for n in range(8)
            for one in (inbox, other)
        )
    )
    noted = (await inbox.verify_audit()).head
    await inbox.replay(kept.id, actor="anna")
    await other.set_target("app", TargetStatus.PAUSED, actor="anna")
    found = await other.verify_audit(noted)
    assert (found.head.number, found.problems) == (18, [])
    wrong = await other.verify_audit(noted._replace(hash="0" * 64))
    assert wrong.problems == ["entry 16 is not the one that was noted"]


@check
async def what_is_in_hand_is_listed(nodes: Nodes) -> None:
    """Deliveries that a node took are listed with it, until they are finished."""
    inbox, other = await nodes.node(), await nodes.node()
    kept = await inbox.ingest(arrival("k", "app"))
    await inbox.ingest(arrival("other", "app"))
    assert await inbox.in_hand() == []
    (delivery,) = await inbox.fetch({"app": 1}, LEASE)
    (held,) = await other.in_hand()
    assert (held.id, held.target, held.node, held.attempt) == (kept.id, "app", inbox.node, 1)
    assert held.lease_until == delivery.lease_until
    await inbox.finish([ended(delivery)])
    assert await other.in_hand() == []
