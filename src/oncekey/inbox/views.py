"""What people look at, as flows: each yields a statement with its arguments and gets the rows.

Both inboxes run them, so that a page is the same on either.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any, Final, TypeAlias, TypeVar

from oncekey.errors import InvalidKeyError, PolicyError
from oncekey.inbox.filters import Filter
from oncekey.inbox.models import (
    Attempt,
    AuditEntry,
    BulkReplay,
    BulkState,
    Count,
    DeadLetter,
    DeliveryRow,
    DeliveryState,
    Depth,
    Duplicate,
    Event,
    EventDetail,
    EventRow,
    InHand,
    Issue,
    Outcome,
    Page,
    Rejected,
    TargetState,
    TargetStatus,
    event_id,
    event_key,
    event_number,
    event_time,
)
from oncekey.inbox.search import PARKED, SCAN, dead_query, delivered_query, event_query
from oncekey.instrument.audit import AuditReport, Chain, Head, Link, verify_chain
from oncekey.stores._sql import load_statements

__all__ = [
    "CHAIN",
    "NOW",
    "REMEMBERED",
    "SQL",
    "Flow",
    "as_answer",
    "as_entry",
    "as_event",
    "now_of",
    "number_in",
    "written_headers",
]

T = TypeVar("T")
Flow: TypeAlias = Generator[tuple[str, list[Any]], Any, T]

SQL: Final = load_statements("statements.sql", "oncekey.inbox")
NOW: Final = "now"  # each inbox knows its own statement for this,
REMEMBERED: Final = "remembered"  # and for this
CHAIN: Final = Chain()  # without a secret: who verifies needs none
_LAST: Final = 2**62
_MOST: Final = 500
_NO_END: Final = "no end is on record: killed, cut off or handed back"
_LOST_SHOWN: Final = 100
_BULK: Final = ("id", "at", "actor", "query", "rate", "total", "done")


def as_answer(number: int) -> bytes:
    """What the record of a key holds: the id of its event, as any guard keeps a JSON answer."""
    return b'j"msg_%016x"' % number


def number_in(answer: bytes | None) -> int | None:
    """The number of the event that a record names, if it names one."""
    try:
        return event_number((answer or b"").decode().removeprefix('j"').removesuffix('"'))
    except (InvalidKeyError, UnicodeDecodeError):
        return None


def as_event(row: Any) -> Event:
    """An event of a row: id, source, type, key, headers, body."""
    number, source, type_, key, headers, body = row
    return Event(
        event_id(number), event_time(number), source, key, type_, read_headers(headers), body
    )


def written_headers(headers: tuple[tuple[str, str], ...]) -> bytes:
    """Headers as they are kept: names and values, each ended by a NUL, which none may hold."""
    return "".join([f"{name}\0{value}\0" for name, value in headers]).encode()


def read_headers(kept: bytes) -> tuple[tuple[str, str], ...]:
    """The headers again."""
    parts = kept.decode().split("\0")
    return tuple(zip(parts[0:-1:2], parts[1::2], strict=True)) if len(parts) > 1 else ()


def now_of() -> Flow[int]:
    """The time on the inbox's clock."""
    rows = yield NOW, []
    return int(rows[0][0])


def check_limit(limit: int) -> int:
    """A limit that a page may have.

    Raises:
        PolicyError: It may not.
    """
    if not 1 <= limit <= _MOST:
        raise PolicyError(f"limit must be 1 to {_MOST}, got {limit}")
    return limit


def _row_state(row: Any) -> DeliveryState | None:
    waiting, running, parked, dead, _, delivered, discarded, _ = row[5:13]
    if dead:
        return DeliveryState.DEAD
    if running:
        return DeliveryState.RUNNING
    if waiting > parked:
        return DeliveryState.WAITING
    if parked:
        return DeliveryState.PARKED
    if delivered:
        return DeliveryState.DELIVERED
    return DeliveryState.DISCARDED if discarded else None


def search(wanted: Filter, limit: int, after: str | None) -> Flow[Page[EventRow]]:
    """A page of events."""
    check_limit(limit)
    now = yield from now_of()
    least, most = wanted.numbers(now)
    if wanted.key is not None:
        known = yield from _known(wanted)
        if known:
            least, most = max(least, min(known)), min(most, max(known))
    if after is not None:
        most = min(most, event_number(after) - 1)
    text, args, last, last_args = event_query(wanted, least, most, now, limit)
    rows = yield text, args
    items = tuple(
        EventRow(
            id=event_id(row[0]),
            at=event_time(row[0]),
            source=row[1],
            key=row[3],
            type=row[2],
            size=row[4],
            state=_row_state(row),
            deliveries=row[5] + row[8] + row[10] + row[11],
            attempts=row[9],
            duplicates=row[12],
        )
        for row in rows
    )
    if len(items) == limit:
        return Page(items, items[-1].id)
    ends = yield last, last_args
    return Page(items, event_id(ends[0][0]) if ends else None)


def _known(wanted: Filter) -> Flow[list[int]]:
    """The events that a key is remembered for, in the source that is meant or in any."""
    key = wanted.key or ""
    if wanted.source is not None:
        names = [wanted.source]
    else:
        rows = yield SQL["sources"], []
        names = [row[0] for row in rows]
    found = []
    for name in names:
        rows = yield REMEMBERED, [event_key(name, key).digest]
        number = number_in(rows[0][0]) if rows else None
        if number is not None:
            found.append(number)
    return found


def event(id: str) -> Flow[EventDetail | None]:
    """All of one event."""
    number = event_number(id)
    rows = yield SQL["event"], [number]
    if not rows:
        return None
    now = yield from now_of()
    kept = as_event(rows[0])
    open_rows = yield SQL["event_deliveries"], [number]
    dead_rows = yield SQL["event_dead"], [number]
    attempt_rows = yield SQL["event_attempts"], [number]
    copies = yield SQL["event_duplicates"], [number]
    actions = yield SQL["event_actions"], [kept.id]
    known = [
        Attempt(row[0], row[1], row[2], row[3], Outcome(row[4]), *row[5:]) for row in attempt_rows
    ]
    lost = _lost(now, kept.at, open_rows, known)
    attempts = tuple(sorted([*known, *lost], key=lambda one: (one.at, one.target, one.number)))
    return EventDetail(
        event=kept,
        deliveries=_deliveries(now, open_rows, dead_rows, attempts),
        attempts=attempts,
        duplicates=tuple(
            Duplicate(at, bool(same), None if body is None else bytes(body))
            for at, same, body in copies
        ),
        actions=tuple(AuditEntry(*row) for row in actions),
    )


def _lost(now: int, arrived: int, waiting: Any, known: list[Attempt]) -> list[Attempt]:
    """Attempts that began, by their numbers, and of which nobody lived to say how they ended."""
    ended: dict[str, dict[int, Attempt]] = {}
    for one in known:
        ended.setdefault(one.target, {})[one.number] = one
    begun = {target: max(numbers) for target, numbers in ended.items()}
    lapsed: dict[tuple[str, int], int] = {}
    for target, due_at, *_, node, _, fence in waiting:
        in_hand = node and due_at > now
        begun[target] = max(begun.get(target, 0), fence - 1 if in_hand else fence)
        if not in_hand:
            lapsed[target, fence] = min(due_at, now)
    lost = []
    for target, last in begun.items():
        numbers = ended.get(target, {})
        # The newest: to take a delivery and hand it back, again and again, makes a number each.
        for number in range(max(1, last - _LOST_SHOWN + 1), last + 1):
            if number in numbers:
                continue
            later = [one.at - one.ms for place, one in numbers.items() if place > number]
            before = [one.at for place, one in numbers.items() if place < number]
            over = min(later) if later else lapsed.get((target, number), arrived)
            at = max(arrived, over, *before)
            lost.append(Attempt(target, number, at, 0, Outcome.LOST, 0, _NO_END, ""))
    return lost


def _deliveries(
    now: int, waiting: Any, dead: Any, attempts: tuple[Attempt, ...]
) -> tuple[DeliveryRow, ...]:
    found: dict[str, DeliveryRow] = {}
    for attempt in attempts:  # the last one counts, if nothing is open
        if attempt.outcome in (Outcome.DELIVERED, Outcome.DISCARDED):
            tries = sum(one.target == attempt.target for one in attempts)
            found[attempt.target] = DeliveryRow(
                attempt.target,
                DeliveryState(attempt.outcome.value),
                attempts=tries,
                status=attempt.status,
                error=attempt.error,
            )
    for target, tries, status, error, order_key in dead:
        found[target] = DeliveryRow(
            target, DeliveryState.DEAD, None, tries, status, error, "", order_key
        )
    for target, due_at, tries, status, error, node, order_key, _ in waiting:
        if due_at == PARKED:
            state = DeliveryState.PARKED
        else:
            held = node and due_at > now
            state = DeliveryState.RUNNING if held else DeliveryState.WAITING
        due = None if due_at == PARKED else due_at
        found[target] = DeliveryRow(target, state, due, tries, status, error, node, order_key)
    return tuple(found[target] for target in sorted(found))


def dead_letters(wanted: Filter, limit: int, after: str | None) -> Flow[Page[DeadLetter]]:
    """A page of dead letters. Its cursor is an id and a target."""
    check_limit(limit)
    now = yield from now_of()
    least, most = wanted.numbers(now)
    target = ""
    if after is not None:
        place, _, target = after.partition(":")
        most = min(most, event_number(place))
    text, args, _, _ = dead_query(wanted, least, most, target, limit)
    rows = yield text, args
    items = tuple(DeadLetter(event_id(row[0]), event_time(row[0]), *row[1:]) for row in rows)
    more = f"{items[-1].id}:{items[-1].target}" if len(items) == limit else None
    return Page(items, more)


def count_dead(wanted: Filter) -> Flow[int]:
    """How many dead letters match."""
    now = yield from now_of()
    least, most = wanted.numbers(now)
    _, _, text, args = dead_query(wanted, least, most, "", 1)
    rows = yield text, args
    return int(rows[0][0])


def count_replays(wanted: Filter) -> Flow[int]:
    """How many deliveries a bulk replay would send."""
    if wanted.state is not DeliveryState.DELIVERED:
        dead = yield from count_dead(wanted)
        return dead
    now = yield from now_of()
    least, most = wanted.numbers(now)
    found = 0
    while True:  # a step at a time, as the replay will
        text, args, last, last_args = delivered_query(wanted, least, most, "", SCAN * _MOST)
        rows = yield f"SELECT count(*) FROM ({text}) AS found", args  # noqa: S608 - made by us
        found += int(rows[0][0])
        ends = yield last, last_args
        if not ends:
            return found
        most = ends[0][0] - 1


def issues(limit: int) -> Flow[list[Issue]]:
    """Failures that are alike."""
    rows = yield SQL["issues"], [check_limit(limit)]
    return [
        Issue(
            target=row[0],
            status=row[1],
            error=row[2],
            dead=int(row[3]),
            failing=int(row[4]),
            first_at=event_time(row[5]),
            last_at=event_time(row[6]),
            sample=event_id(row[6]),
        )
        for row in rows
    ]


def counts(since: int, until: int | None) -> Flow[list[Count]]:
    """What happened in each minute."""
    rows = yield SQL["counts"], [since - since % 60_000, _LAST if until is None else until]
    return [Count(row[0], row[1], row[2], int(row[3]), row[4]) for row in rows]


def last_received(source: str) -> Flow[int | None]:
    """When something came from a source: to the millisecond if it is new, else to the minute."""
    found = yield from search(Filter(source=source), 1, None)
    if found.items:
        return found.items[0].at
    rows = yield SQL["last_received"], [source]
    return rows[0][0] if rows else None


def depths() -> Flow[list[Depth]]:
    """What waits for each target."""
    rows = yield SQL["depths"], []
    found = [
        Depth(row[0], row[1], row[2], None if row[3] is None else event_time(row[3]))
        for row in rows
    ]
    return sorted(found, key=lambda depth: depth.target)


def rejected(limit: int, after: str | None) -> Flow[Page[Rejected]]:
    """Requests that became no event."""
    rows = yield SQL["rejected"], [_cursor(after), check_limit(limit)]
    items = tuple(Rejected(*row) for row in rows)
    return Page(items, str(items[-1].id) if len(items) == limit else None)


def audit(limit: int, after: str | None) -> Flow[Page[AuditEntry]]:
    """What was done by whom."""
    rows = yield SQL["audit"], [_cursor(after), check_limit(limit)]
    items = tuple(AuditEntry(*row) for row in rows)
    return Page(items, str(items[-1].id) if len(items) == limit else None)


def as_entry(at: int, actor: str, action: str, subject: str, detail: str) -> dict[str, Any]:
    """An action as its link in the audit covers it."""
    return {"at": at, "actor": actor, "action": action, "subject": subject, "detail": detail}


def verify_audit(expected: Head | None) -> Flow[AuditReport]:
    """Look at every action of the audit."""
    links: list[Link | str] = []
    place = 0
    while True:
        rows = yield SQL["chained"], [place]
        for row, number, *action, before, digest in rows:
            text = json.dumps(as_entry(*action), sort_keys=True, separators=(",", ":"))
            links.append(Link(number, text, before, digest))
            place = row
        if not rows:
            break
    kept = yield SQL["head"], []
    return verify_chain(links, CHAIN, kept[0][0] or None, expected)


def in_hand(limit: int) -> Flow[list[InHand]]:
    """Deliveries that somebody took, those first whose lease ends first."""
    rows = yield SQL["in_hand"], [PARKED, check_limit(limit)]
    return [InHand(event_id(row[0]), event_time(row[0]), *row[1:]) for row in rows]


def _cursor(after: str | None) -> int:
    if after is None:
        return _LAST
    if not after.isascii() or not after.isdigit() or len(after) > 18:
        raise PolicyError("after must be what the page before gave as next")
    return int(after)


def sources() -> Flow[list[str]]:
    """Every source that events came from."""
    rows = yield SQL["sources"], []
    return [row[0] for row in rows]


def targets() -> Flow[list[TargetState]]:
    """What people set targets to."""
    rows = yield SQL["targets"], []
    return [TargetState(row[0], TargetStatus(row[1]), *row[2:]) for row in rows]


def bulk_replays(limit: int) -> Flow[list[BulkReplay]]:
    """The latest ones."""
    rows: list[Any] = yield SQL["bulks"], [check_limit(limit)]
    return [
        BulkReplay(**dict(zip(_BULK, row, strict=False)), state=BulkState(row[7])) for row in rows
    ]


def note(name: str) -> Flow[bytes | None]:
    """What is kept under a name."""
    now = yield from now_of()
    rows = yield SQL["get_note"], [name, now]
    return bytes(rows[0][0]) if rows else None
