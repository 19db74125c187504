"""What the writer thread does, each call inside a transaction that others may share."""

from __future__ import annotations

import hashlib
import sqlite3
from typing import Any

from oncekey._core.transitions import mark_fence
from oncekey.abc import Clock
from oncekey.errors import StoreCorruptError
from oncekey.inbox.base import shown
from oncekey.inbox.models import (
    ID_SHIFT,
    Arrival,
    Delivery,
    Ingested,
    Outcome,
    Result,
    event_id,
    event_key,
    event_number,
)
from oncekey.inbox.search import PARKED
from oncekey.inbox.sqlite.schema import SQL
from oncekey.inbox.views import SQL as SHARED
from oncekey.inbox.views import as_answer, as_event, number_in, written_headers

__all__ = ["Writing"]

_REMEMBER, _FREE = SQL["remember"], SQL["free"]
_ADD_EVENT, _ADD_DELIVERY = SQL["add_event"], SQL["add_delivery"]
_PROMOTE = SHARED["promote"].replace("$", "?")
_ADD_SOURCE = SHARED["add_source"].replace("$", "?")


class Writing:
    """Changes of one inbox. ``on`` is the cursor of a transaction: another one is another."""

    def __init__(self, node: str, remember_ms: int, clock: Clock) -> None:
        self._node = node
        self._remember_ms = remember_ms
        self._clock = clock
        self._on: sqlite3.Cursor | None = None
        self._last = 0
        self._disabled: frozenset[str] = frozenset()
        self._sources: set[str] = set()

    def _now(self) -> int:
        return int(self._clock() * 1000)

    def _begun(self, on: sqlite3.Cursor) -> None:
        """What is read once in a transaction, as nobody else can change it meanwhile."""
        if on is not self._on:
            self._on = on
            self._last = on.execute(SQL["last_id"]).fetchone()[0] or 0
            self._sources.clear()  # what was added before may have been rolled back
            rows = on.execute(SQL["stopped"]).fetchall()
            self._disabled = frozenset(name for name, status in rows if status == "disabled")

    def ingest(self, on: sqlite3.Cursor, arrival: Arrival) -> Ingested:
        """Claim the key; keep the event and its deliveries, or the copy's arrival."""
        self._begun(on)
        now = self._now()
        number = max(now << ID_SHIFT, self._last + 1)
        key = event_key(arrival.source, arrival.key)
        fingerprint = hashlib.sha256(arrival.body).digest()
        ends = now + self._remember_ms
        digest = key.digest
        claim = (digest, key.scope.label, mark_fence(ends), fingerprint, ends, as_answer(number))
        # Most keys are new, so the insert is tried before anything is read.
        if not on.execute(_REMEMBER, claim).rowcount:
            free = on.execute(_FREE, (digest, now)).rowcount
            if not free or not on.execute(_REMEMBER, claim).rowcount:
                return self._copy(on, arrival, digest, fingerprint, now)
        self._last = number
        headers = written_headers(arrival.headers)
        event = (number, arrival.source, arrival.type, arrival.key, headers, arrival.body)
        on.execute(_ADD_EVENT, event)
        if arrival.source not in self._sources:
            on.execute(_ADD_SOURCE, (arrival.source,))
            self._sources.add(arrival.source)
        for route in arrival.routes:
            if route.target not in self._disabled:
                due = now
                if route.order_key is not None:
                    earlier = (route.target, route.order_key)
                    due = PARKED if on.execute(SQL["has_earlier"], earlier).fetchone() else now
                on.execute(_ADD_DELIVERY, (number, route.target, due, route.order_key))
        return Ingested(event_id(number), True)

    def _copy(
        self, on: sqlite3.Cursor, arrival: Arrival, digest: bytes, fingerprint: bytes, now: int
    ) -> Ingested:
        first, answer = on.execute(SQL["remembered"], (digest,)).fetchone()
        number = number_in(answer)
        if number is None:
            raise StoreCorruptError(
                "the record of a key names no event: remove it with 'oncekey evict', or restore "
                "the file from a backup"
            )
        same = first == fingerprint
        on.execute(SQL["add_duplicate"], (number, now, same, None if same else arrival.body))
        return Ingested(event_id(number), False, same)

    def fetch(self, on: sqlite3.Cursor, slots: dict[str, int], lease_ms: int) -> list[Delivery]:
        """Hold what is due."""
        now = self._now()
        until = now + lease_ms
        stopped = {row[0] for row in on.execute(SQL["stopped"])}
        found: list[Delivery] = []
        held: list[tuple[Any, ...]] = []
        for target, free in slots.items():
            if free <= 0 or target in stopped:
                continue
            for row in on.execute(SQL["due"], (target, now, free)).fetchall():
                number, tries, fence, order_key, *event = row
                held.append((until, self._node, number, target))
                found.append(
                    Delivery(
                        as_event((number, *event)), target, tries + 1, fence + 1, until, order_key
                    )
                )
        on.executemany(SQL["hold"], held)
        return found

    def finish(self, on: sqlite3.Cursor, results: list[Result]) -> list[bool]:
        """Say how attempts ended, where they are still the last."""
        now = self._now()
        places = [_place(result.delivery) for result in results]  # before anything is written
        plain = len(results) > 1 and all(_is_plain(result) for result in results)
        if plain and self._finish_delivered(on, results, places, now):
            return [True] * len(results)
        return [
            self._finish(on, result, place, now)
            for result, place in zip(results, places, strict=True)
        ]

    def _finish_delivered(
        self,
        on: sqlite3.Cursor,
        results: list[Result],
        places: list[tuple[int, str, int]],
        now: int,
    ) -> bool:
        """Finish deliveries that all went well, if each is still the last; else change nothing."""
        on.execute("SAVEPOINT oncekey_finish")
        held = on.executemany(SQL["finish"], places).rowcount == len(places)
        if held:
            done = Outcome.DELIVERED.value
            on.executemany(
                SQL["add_attempt"],
                [
                    (*place, now, result.ms, done, result.status, "", shown(result.note))
                    for place, result in zip(places, results, strict=True)
                ],
            )
        else:
            on.execute("ROLLBACK TO oncekey_finish")
        on.execute("RELEASE oncekey_finish")
        return held

    def _finish(
        self, on: sqlite3.Cursor, result: Result, place: tuple[int, str, int], now: int
    ) -> bool:
        delivery = result.delivery
        error = shown(result.error)
        if result.outcome is Outcome.RETRY:
            due = now + result.retry_in_ms
            held = on.execute(
                SQL["retry"], (due, result.status, error or "failed", *place)
            ).rowcount
        else:
            held = on.execute(SQL["finish"], place).rowcount
        if not held:
            return False
        note = shown(result.note)
        outcome = result.outcome.value
        on.execute(
            SQL["add_attempt"], (*place, now, result.ms, outcome, result.status, error, note)
        )
        if result.outcome is Outcome.DEAD:
            order_key = delivery.order_key
            cause = (delivery.fence, result.status, error, order_key, note)
            on.execute(SQL["bury"], (*place[:2], delivery.attempt, *cause))
        if delivery.order_key is not None and result.outcome is not Outcome.RETRY:
            on.execute(_PROMOTE, (delivery.target, delivery.order_key, now, PARKED))
        return True

    def hand_back(self, on: sqlite3.Cursor, deliveries: list[Delivery]) -> list[bool]:
        """Due at once, and no try."""
        now = self._now()
        return [
            bool(on.execute(SQL["hand_back"], (now, *_place(delivery))).rowcount)
            for delivery in deliveries
        ]

    def renew(self, on: sqlite3.Cursor, deliveries: list[Delivery], lease_ms: int) -> list[bool]:
        """Leases from now."""
        until = self._now() + lease_ms
        return [
            bool(on.execute(SQL["renew"], (until, *_place(delivery))).rowcount)
            for delivery in deliveries
        ]

    def prune_some(
        self, on: sqlite3.Cursor, place: int, end: int, step: int
    ) -> tuple[int, int | None]:
        """Remove some finished events; gives how many, and where to go on, if there are more."""
        rows = on.execute(SQL["old_events"], (place, end, step)).fetchall()
        gone = [(number,) for number, wanted in rows if not wanted]
        for name in ("drop_event", "drop_attempts", "drop_duplicates"):
            on.executemany(SQL[name], gone)
        return len(gone), rows[-1][0] if len(rows) == step else None

    def prune_strays(self, on: sqlite3.Cursor, end: int, step: int) -> bool:
        """Remove some copies of events that are gone; says whether there may be more."""
        return on.execute(SQL["drop_strays"], (end, step)).rowcount == step


def _is_plain(result: Result) -> bool:
    """Whether it is delivered, and nobody waits for that."""
    return (
        result.outcome is Outcome.DELIVERED
        and not result.error
        and result.delivery.order_key is None
    )


def _place(delivery: Delivery) -> tuple[int, str, int]:
    return event_number(delivery.event.id), delivery.target, delivery.fence
