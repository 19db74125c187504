"""What people do, as flows that run in one transaction: see ``views``. Each is in the audit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from oncekey.errors import InvalidKeyError, PolicyError, StoreCorruptError
from oncekey.inbox.filters import Filter
from oncekey.inbox.models import (
    BulkReplay,
    BulkState,
    DeliveryState,
    Outcome,
    TargetStatus,
    event_id,
    event_number,
)
from oncekey.inbox.search import PARKED, dead_query, delivered_query
from oncekey.inbox.views import CHAIN, SQL, Flow, as_entry, count_replays, now_of
from oncekey.instrument.audit import START, Head

__all__ = [
    "LOCK_ORDER",
    "advance_bulk_replays",
    "begin_bulk_replay",
    "cancel_bulk_replay",
    "discard",
    "put_note",
    "record",
    "replay",
    "set_target",
    "take_note",
    "tally",
]

LOCK_ORDER: Final = "lock_order"
"""Nobody else queues or finishes events of these entities: each inbox has its own statement."""

_STEP: Final = 100  # replays of one step, so that it is short
_REJECTED_KEPT: Final = 10_000


def _told(now: int, actor: str, action: str, subject: str, detail: str = "") -> Flow[None]:
    yield from _all_told([(now, actor, action, subject, detail)])


def _all_told(actions: Sequence[tuple[int, str, str, str, str]]) -> Flow[None]:
    """Put actions into the audit, each bound to the one before it.

    The last thing that a transaction does: from here to its end others wait who do the same, so
    that it must wait for nobody.
    """
    if not actions:
        return
    if not all(actor for _, actor, *_ in actions):
        raise PolicyError("actor is empty: say who does this, for the audit")
    rows = yield SQL["hold_head"], []
    head = CHAIN.unseal(rows[0][0]) if rows[0][0] else START
    if head is None:
        raise StoreCorruptError(
            "the head of the inbox's audit was changed by somebody: find out by whom, then restore "
            "the inbox from a backup"
        )
    for action in actions:
        link = CHAIN.follow(head, as_entry(*action))
        head = Head(link.number, link.hash)
        yield SQL["add_audit"], [*action, link.number, link.before, link.hash]
    yield SQL["move_head"], [CHAIN.seal(head)]


def record(action: str, subject: str, detail: str, actor: str) -> Flow[None]:
    """An action that is somebody else's to carry out."""
    now = yield from now_of()
    yield from _told(now, actor, action, subject, detail)


def _targets(number: int, targets: Sequence[str] | None) -> Flow[list[str]]:
    rows = yield SQL["event_exists"], [number]
    if not rows:
        raise InvalidKeyError(f"there is no event {event_id(number)}: it may have been pruned")
    if targets is not None:
        return sorted(set(targets))
    rows = yield SQL["event_targets"], [number]
    return sorted(row[0] for row in rows)


def replay(id: str, targets: Sequence[str] | None, actor: str) -> Flow[int]:
    """Queue deliveries of an event anew, after whatever came before."""
    number = event_number(id)
    now = yield from now_of()
    names = yield from _targets(number, targets)
    done = []
    for name in names:
        queued = yield from _again(number, name, now)
        done += [name] if queued else []
    yield from _told(now, actor, "replay", id, ", ".join(done))
    return len(done)


def _again(number: int, target: str, now: int) -> Flow[bool]:
    if (yield SQL["hurry"], [number, target, now, PARKED]):
        return True
    if (yield SQL["is_waiting"], [number, target]):
        return False  # in hand, or parked behind another
    exhumed = yield SQL["exhume"], [number, target]
    last = yield SQL["last_attempt"], [number, target]
    fence = max(exhumed[0][0] if exhumed else 0, last[0][0] or 0)
    rows = yield SQL["queue"], [number, target, now, fence]
    return bool(rows)


def discard(id: str, targets: Sequence[str] | None, actor: str) -> Flow[int]:
    """Give up what waits, runs or is dead."""
    number = event_number(id)
    now = yield from now_of()
    names = yield from _targets(number, targets)
    ordered = yield SQL["order_key"], [number]
    if ordered:
        keys = {row[0] for row in ordered}
        yield LOCK_ORDER, [[name for name in names for _ in keys], [*sorted(keys)] * len(names)]
    done = []
    for name in names:
        rows = yield SQL["drop_delivery"], [number, name]
        if rows and rows[0][1] is not None:
            yield SQL["promote"], [name, rows[0][1], now, PARKED]
        rows = rows or (yield SQL["exhume"], [number, name])
        if rows:
            args = [number, name, rows[0][0] + 1, now, 0, Outcome.DISCARDED.value, 0, "", "", actor]
            yield SQL["add_attempt"], args
            done.append(name)
    yield from _told(now, actor, "discard", id, ", ".join(done))
    return len(done)


def set_target(name: str, status: TargetStatus, actor: str, reason: str) -> Flow[None]:
    """Pause, disable or resume."""
    now = yield from now_of()
    yield SQL["set_target"], [name, status.value, now, actor, reason]
    yield from _told(now, actor, f"target {status.value}", name, reason)


# Bulk replay


def begin_bulk_replay(wanted: Filter, rate: float, actor: str) -> Flow[BulkReplay]:
    """Start one; it goes from the newest event to the oldest."""
    if not 0 < rate <= 100_000:
        raise PolicyError(f"rate must be more than 0 a second, got {rate}")
    now = yield from now_of()
    total = yield from count_replays(wanted)
    query = str(wanted)
    _, most = wanted.numbers(now)
    place = min(most, (now + 1) << 20)
    rows = yield SQL["add_bulk"], [now, actor, query, rate, total, place]
    number: int = rows[0][0]
    yield from _told(now, actor, "bulk replay", f"bulk:{number}", f"{total} of {query or 'all'}")
    return BulkReplay(number, now, actor, query, rate, total, 0, BulkState.RUNNING)


def advance_bulk_replays() -> Flow[float | None]:
    """Take one step of each that runs."""
    rows = yield SQL["running_bulks"], []
    waits: list[float] = []
    done: list[tuple[int, str, str, str, str]] = []
    for (number,) in [tuple(row) for row in rows]:
        wait = yield from _advance(number, done)
        if wait is not None:
            waits.append(wait)
    yield from _all_told(done)
    return min(waits) if waits else None


def _advance(number: int, told: list[tuple[int, str, str, str, str]]) -> Flow[float | None]:
    rows = yield SQL["hold_bulk"], [number]
    if not rows:
        return None
    query, _, place, target, moved_at, actor, began = rows[0]
    rate = float(rows[0][1])
    now = yield from now_of()
    due = min(int((now - moved_at) * rate / 1000), _STEP)
    if due < 1:
        waited: int = now - moved_at
        return max(0.01, 1 / rate - waited / 1000)
    wanted = Filter.parse(query)
    # An age is counted from when the replay began, so that it takes what was counted then.
    least = wanted.numbers(began)[0]
    made = wanted.state is DeliveryState.DELIVERED
    find = delivered_query if made else dead_query
    text, args, last, last_args = find(wanted, least, place, target, due)
    found = yield text, args
    ends = (yield last, last_args) if made and len(found) < due else []
    done = 0
    for row in found:
        place, target = row[0], row[3]
        if (yield from _again(place, target, now)):
            told.append((now, actor, "replay", event_id(place), f"{target}, bulk:{number}"))
            done += 1
    over = len(found) < due
    if ends:  # all of a step's events were looked at, and there are older ones
        place, target, over = ends[0][0] - 1, "", False
    state = BulkState.DONE if over else BulkState.RUNNING
    yield SQL["move_bulk"], [number, place, target, done, state.value, now]
    return None if over else max(0.01, 1 / rate)


def cancel_bulk_replay(number: int, actor: str) -> Flow[bool]:
    """Stop one."""
    now = yield from now_of()
    rows = yield SQL["cancel_bulk"], [number]
    if rows:
        yield from _told(now, actor, "cancel bulk replay", f"bulk:{number}")
    return bool(rows)


# Counters, rejected requests and notes


def tally(
    node: str,
    counted: dict[tuple[int, str, str, int], int],
    refused: list[tuple[int, str, str, str]],
) -> Flow[None]:
    """Add what was counted in memory."""
    for (minute, kind, name, bucket), number in sorted(counted.items()):
        yield SQL["add_count"], [minute, node, kind, name, bucket, number]
    for entry in refused:
        yield SQL["add_rejected"], list(entry)
    if refused:
        yield SQL["prune_rejected"], [_REJECTED_KEPT]


def put_note(name: str, value: bytes, ttl_ms: int) -> Flow[None]:
    """Keep a few bytes."""
    now = yield from now_of()
    yield SQL["prune_notes"], [now]
    yield SQL["put_note"], [name, value, now + ttl_ms]


def take_note(name: str) -> Flow[bytes | None]:
    """What was kept, for one taker."""
    now = yield from now_of()
    rows = yield SQL["take_note"], [name, now]
    return bytes(rows[0][0]) if rows else None
