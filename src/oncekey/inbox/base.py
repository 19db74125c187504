"""What both inboxes do alike: what people look at and do, counting, waking workers."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from oncekey.errors import InvalidRequestError, PolicyError
from oncekey.inbox import actions, views
from oncekey.inbox.abc import AsyncInbox
from oncekey.inbox.filters import Filter
from oncekey.inbox.models import (
    Arrival,
    AuditEntry,
    BulkReplay,
    Count,
    DeadLetter,
    Depth,
    EventDetail,
    EventRow,
    InHand,
    Issue,
    Outcome,
    Page,
    Rejected,
    Result,
    TargetState,
    TargetStatus,
    bucket_of,
)
from oncekey.instrument.audit import AuditReport, Head
from oncekey.models import check_text
from oncekey.policy import Duration, milliseconds

__all__ = ["InboxBase", "checked_arrival", "checked_results", "shown"]

T = TypeVar("T")

FLUSH_SECONDS: Final = 1.0  # for so long counters are in memory only
_REFUSED_HELD: Final = 1_000
_ROOM: Final = 32_768
_ROOM_MS: Final = 60_000
_SHOWN: Final = 500  # characters of a note or cause that are kept
_COUNTED_AS: Final = {
    Outcome.DELIVERED: "delivered",
    Outcome.RETRY: "failed",
    Outcome.DEAD: "dead",
}


class InboxBase(AsyncInbox):
    """An inbox that can run flows; what is hot is left to the backends."""

    def __init__(self, url: str, *, remember: Duration, node: str | None) -> None:
        self.url = url
        self.remember_ms = milliseconds(remember, "remember", least=60_000)
        self.node = node or f"{socket.gethostname()}:{os.getpid()}"
        self._work = asyncio.Event()
        self._counted: dict[tuple[int, str, str, int], int] = {}
        self._refused: list[tuple[int, str, str, str]] = []
        self._flushing: asyncio.Task[None] | None = None
        self._closed = False
        self._looks = 0

    @abstractmethod
    async def _read(self, flow: views.Flow[T]) -> T:
        """Run a flow that changes nothing."""

    @abstractmethod
    async def _write(self, flow: views.Flow[T]) -> T:
        """Run a flow in one transaction."""

    # Counting

    def _count(self, kind: str, name: str, bucket: int = 0, number: int = 1) -> None:
        minute = int(time.time() // 60) * 60_000
        place = (minute, kind, name, bucket)
        self._counted[place] = self._counted.get(place, 0) + number
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().create_task(self._flush_soon())

    def _count_results(self, results: Sequence[Result], held: Sequence[bool]) -> None:
        now = int(time.time() * 1000)
        sums: Counter[tuple[str, str, int]] = Counter()
        for result, counts in zip(results, held, strict=True):
            if counts:
                delivery, outcome = result.delivery, result.outcome
                sums[_COUNTED_AS[outcome], delivery.target, result.ms] += 1
                # Replays are left out: an old event says nothing of how late a new one is. A fence
                # above the tries is one's, or that of a delivery that a stop handed back.
                if outcome is Outcome.DELIVERED and delivery.fence <= delivery.attempt:
                    sums["late", delivery.target, now - delivery.event.at] += 1
        for (kind, target, ms), number in sums.items():
            self._count(kind, target, bucket_of(ms), number)

    def settled(self, result: Result) -> None:
        """See ``AsyncInbox``."""
        self._count_results([result], [True])
        if result.delivery.order_key is not None:
            self._wake()

    async def _flush_soon(self) -> None:
        try:
            await asyncio.sleep(FLUSH_SECONDS)
        finally:
            self._flushing = None
        await self._flush()

    async def _flush(self) -> None:
        counted, self._counted = self._counted, {}
        refused, self._refused = self._refused, []
        if not counted and not refused:
            return
        try:
            await self._write(actions.tally(self.node, counted, refused))
        except Exception:  # noqa: BLE001 - charts are worth no lost event: counted again, later
            for place, number in counted.items():
                self._counted[place] = self._counted.get(place, 0) + number

    def reject(self, source: str, cause: str, detail: str = "") -> None:
        """See ``AsyncInbox``."""
        if len(self._refused) < _REFUSED_HELD:
            now = int(time.time() * 1000)
            self._refused.append((now, source[:_SHOWN], cause[:_SHOWN], shown(detail)))
        self._count("rejected", source[:_SHOWN])

    # Waking

    def _wake(self) -> None:
        self._work.set()

    async def wait_for_work(self, timeout: float) -> bool:
        """See ``AsyncInbox``."""
        try:
            async with asyncio.timeout(timeout):
                await self._work.wait()
        except TimeoutError:
            return False
        self._work.clear()
        return True

    # What people look at

    async def search(
        self, filter: Filter, *, limit: int = 50, after: str | None = None
    ) -> Page[EventRow]:
        """See ``AsyncInbox``."""
        return await self._read(views.search(filter, limit, after))

    async def event(self, id: str) -> EventDetail | None:
        """See ``AsyncInbox``."""
        return await self._read(views.event(id))

    async def dead_letters(
        self, filter: Filter, *, limit: int = 50, after: str | None = None
    ) -> Page[DeadLetter]:
        """See ``AsyncInbox``."""
        return await self._read(views.dead_letters(filter, limit, after))

    async def issues(self, limit: int = 100) -> list[Issue]:
        """See ``AsyncInbox``."""
        return await self._read(views.issues(limit))

    async def counts(self, since: int, until: int | None = None) -> list[Count]:
        """See ``AsyncInbox``."""
        await self._flush()
        return await self._read(views.counts(since, until))

    async def depths(self) -> list[Depth]:
        """See ``AsyncInbox``."""
        return await self._read(views.depths())

    async def in_hand(self, limit: int = 100) -> list[InHand]:
        """See ``AsyncInbox``."""
        return await self._read(views.in_hand(limit))

    async def rejected(self, *, limit: int = 50, after: str | None = None) -> Page[Rejected]:
        """See ``AsyncInbox``."""
        await self._flush()
        return await self._read(views.rejected(limit, after))

    async def sources(self) -> list[str]:
        """See ``AsyncInbox``."""
        return await self._read(views.sources())

    async def last_received(self, source: str) -> int | None:
        """See ``AsyncInbox``."""
        await self._flush()
        return await self._read(views.last_received(source))

    async def targets(self) -> list[TargetState]:
        """See ``AsyncInbox``."""
        return await self._read(views.targets())

    async def audit(self, *, limit: int = 50, after: str | None = None) -> Page[AuditEntry]:
        """See ``AsyncInbox``."""
        return await self._read(views.audit(limit, after))

    async def verify_audit(self, expected: Head | None = None) -> AuditReport:
        """See ``AsyncInbox``."""
        return await self._read(views.verify_audit(expected))

    async def count_dead(self, filter: Filter) -> int:
        """See ``AsyncInbox``."""
        return await self._read(views.count_dead(filter))

    async def count_replays(self, filter: Filter) -> int:
        """See ``AsyncInbox``."""
        return await self._read(views.count_replays(filter))

    async def bulk_replays(self, limit: int = 20) -> list[BulkReplay]:
        """See ``AsyncInbox``."""
        return await self._read(views.bulk_replays(limit))

    async def get_note(self, name: str) -> bytes | None:
        """See ``AsyncInbox``."""
        return await self._read(views.note(name))

    async def now(self) -> int:
        """See ``AsyncInbox``."""
        return await self._read(views.now_of())

    # What people do

    async def replay(self, id: str, targets: Sequence[str] | None = None, *, actor: str) -> int:
        """See ``AsyncInbox``."""
        done = await self._write(actions.replay(id, targets, actor))
        self._wake()
        return done

    async def discard(self, id: str, targets: Sequence[str] | None = None, *, actor: str) -> int:
        """See ``AsyncInbox``."""
        done = await self._write(actions.discard(id, targets, actor))
        self._wake()  # a follower may be due
        return done

    async def set_target(
        self, name: str, status: TargetStatus, *, actor: str, reason: str = ""
    ) -> None:
        """See ``AsyncInbox``."""
        check_text(name, "the name of a target", 200)
        await self._write(actions.set_target(name, TargetStatus(status), actor, shown(reason)))
        self._wake()

    async def record(self, action: str, subject: str, detail: str = "", *, actor: str) -> None:
        """See ``AsyncInbox``."""
        await self._write(actions.record(action, subject, shown(detail), actor))

    async def begin_bulk_replay(self, filter: Filter, *, rate: float, actor: str) -> BulkReplay:
        """See ``AsyncInbox``."""
        return await self._write(actions.begin_bulk_replay(filter, float(rate), actor))

    async def advance_bulk_replays(self) -> float | None:
        """See ``AsyncInbox``."""
        wait = await self._write(actions.advance_bulk_replays())
        self._wake()
        return wait

    async def cancel_bulk_replay(self, id: int, *, actor: str) -> bool:
        """See ``AsyncInbox``."""
        return await self._write(actions.cancel_bulk_replay(id, actor))

    async def put_note(self, name: str, value: bytes, ttl_ms: int) -> None:
        """See ``AsyncInbox``."""
        await self._write(actions.put_note(check_text(name, "the name of a note"), value, ttl_ms))

    async def take_note(self, name: str) -> bytes | None:
        """See ``AsyncInbox``."""
        return await self._write(actions.take_note(name))

    async def drop_note(self, name: str) -> None:
        """See ``AsyncInbox``."""
        await self._write(_one(views.SQL["drop_note"], [name]))

    async def _check_room(self) -> None:
        """Write as much as an event takes with its rows; it is written over by the next look."""
        self._looks = (self._looks + 1) % 256  # SQLite writes no page that is as it was
        await self.put_note(f"room:{self.node}", bytes([self._looks]) * _ROOM, _ROOM_MS)

    async def _stop_counting(self) -> None:
        """Keep what was counted; for ``aclose``."""
        task, self._flushing = self._flushing, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._flush()


def _one(sql: str, args: list[Any]) -> views.Flow[None]:
    yield sql, args


def shown(text: str) -> str:
    """Text that any database keeps: no NUL, no half of a pair, cut short."""
    if not text:
        return text
    return text[:_SHOWN].replace("\0", "").encode("utf-8", "replace").decode()


def _is_text(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def checked_arrival(arrival: Arrival) -> Arrival:
    """An arrival that can be kept.

    Raises:
        InvalidKeyError: A name or the key of it can't be stored.
        InvalidRequestError: It is no arrival, names a target twice, or its body or a header can't
            be stored.
    """
    if not isinstance(arrival, Arrival):
        raise InvalidRequestError(f"ingest takes an Arrival, got a {type(arrival).__name__}")
    check_text(arrival.source, "source", 200)
    check_text(arrival.key, "the key of an event")
    if arrival.type != "":
        check_text(arrival.type, "the type of an event", 500)
    if not isinstance(arrival.body, bytes):
        raise InvalidRequestError(f"a body is bytes, got a {type(arrival.body).__name__}")
    for name, value in arrival.headers:
        if "\0" in name or "\0" in value or not _is_text(name + value):
            raise InvalidRequestError(
                "a header of an arrival holds a NUL or half of a surrogate pair: leave it out"
            )
    for route in arrival.routes:
        check_text(route.target, "the name of a target", 200)
        if route.order_key is not None:
            check_text(route.order_key, "the order key")
    routes = arrival.routes
    if len(routes) > 1 and len({route.target for route in routes}) < len(routes):
        raise InvalidRequestError("an arrival names a target twice: name each once")
    return arrival


def checked_results(results: Sequence[Result]) -> list[Result]:
    """Results that can be kept.

    Raises:
        PolicyError: An outcome is not one that an attempt may have, or a number is out of bounds.
    """
    for result in results:
        if not (abs(result.status) < 2**31 and 0 <= result.retry_in_ms < 2**43):
            raise PolicyError("a status has 32 bits, and the time until a retry is not negative")
        if result.outcome not in _COUNTED_AS:
            raise PolicyError("a result is delivered, retry or dead: discard() gives up for good")
    return list(results)
