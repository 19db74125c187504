"""``memory://``: one process, nothing survives it. For tests, tools and single-process apps.

Safe under threads and several event loops. Records lie in many small dicts, so that no claim
ever pays for the size of the whole: neither growing nor expiring touches more than one of them.
"""

from __future__ import annotations

import struct
import threading
import time
from typing import Any, Final

from oncekey._core import transitions
from oncekey._core.transitions import Event
from oncekey.abc import AsyncSweepable, Clock, ClockInjectable, Store, Sweepable
from oncekey.errors import PolicyError, StoreClosedError, StoreFullError
from oncekey.instrument.events import EventKind, emit
from oncekey.models import ClaimReply, Key, Record, State, Terms
from oncekey.stores._answers import Answers
from oncekey.stores._fork import reset_after_fork
from oncekey.stores._waiters import Waiters

__all__ = ["MemoryBackend", "MemoryStore"]

SHARDS: Final = 1024
SHORT_SCOPES: Final = 65_536
GRACE_MS: Final = 60_000  # records outlive their time by this, so that clocks may differ a little
DEFAULT_MAX_ENTRIES: Final = 10_000_000

# A settled record is one bytes object: the garbage collector never looks at it, and nobody can
# change it. Fence, expiry, purge time, attempts, state, lengths of owner and fingerprint; then
# owner, fingerprint and answer.
_HEAD = struct.Struct("<qqqIBBH?")
_PURGE_AT = struct.Struct("<q")
_PURGE_OFFSET: Final = 16
_STATES: Final = tuple(State)

_Slot = int | bytes | Record  # a first-seen mark (its expiry), a settled record, a pending one


def _pack(record: Record) -> bytes:
    answer = record.answer
    head = _HEAD.pack(
        record.fence,
        record.expires_at,
        record.purge_at,
        record.attempts,
        record.state,
        len(record.owner),
        len(record.fingerprint),
        answer is not None,
    )
    return b"".join((head, record.owner, record.fingerprint, answer or b""))


def _unpack(slot: _Slot) -> Record:
    kind = type(slot)
    if kind is Record:
        return slot  # type: ignore[return-value]
    if kind is int:
        return Record(State.COMPLETED, b"", 0, b"", 0, slot, slot, 1, None)  # type: ignore[arg-type]
    raw: bytes = slot  # type: ignore[assignment]
    fence, expires_at, purge_at, attempts, state, owners, prints, answered = _HEAD.unpack_from(raw)
    cut = _HEAD.size + owners
    owner, fingerprint = raw[_HEAD.size : cut], raw[cut : cut + prints]
    answer = raw[cut + prints :] if answered else None
    return Record(
        _STATES[state], owner, fence, fingerprint, 0, expires_at, purge_at, attempts, answer
    )


def _purge_at(slot: _Slot) -> int:
    kind = type(slot)
    if kind is int:
        return slot  # type: ignore[return-value]
    if kind is bytes:
        return int(_PURGE_AT.unpack_from(slot, _PURGE_OFFSET)[0])  # type: ignore[arg-type]
    return slot.purge_at  # type: ignore[union-attr]


class _Shard:
    """A small dict, and how many records came in since it was last swept."""

    __slots__ = ("news", "slots")

    def __init__(self) -> None:
        self.slots: dict[str, _Slot] = {}
        self.news = 0


class _Table:
    """The records of one memory store; sync and async faces share it."""

    def __init__(self, max_entries: int) -> None:
        if max_entries < 1:
            raise PolicyError(f"max_entries must be at least 1, got {max_entries}")
        self.max_entries = max_entries
        self.closed = False
        self.count = 0
        self.shards = [_Shard() for _ in range(SHARDS)]
        self.scopes: dict[bytes, str] = {}
        self.last_mark = 0
        self.next_shard = 0
        self.after_fork()
        reset_after_fork(self)

    def after_fork(self) -> None:
        self.lock = threading.Lock()
        self.waiters = Waiters()

    def name(self, key: Key) -> str:
        """The dict key of ``key``: exact, and short for the first scopes that come."""
        scope = self.scopes.get(key.scope.prefix)
        if scope is None:
            scope = self.new_scope(key.scope.prefix)
        return scope + key.name

    def new_scope(self, prefix: bytes) -> str:
        with self.lock:
            if len(self.scopes) < SHORT_SCOPES:
                return self.scopes.setdefault(prefix, f"{len(self.scopes):x}|")
        # Scopes past that number keep their full name: a scope never has two names, and the
        # table of short ones stays bounded.
        return prefix.decode() + "|"

    def claim(
        self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms, clock: Clock
    ) -> ClaimReply:
        name = self.name(key)
        now_us = int(clock() * 1_000_000)
        shard = self.shards[hash(name) & (SHARDS - 1)]
        with self.lock:
            slot = shard.slots.get(name)
            if slot is None:
                self.make_room(shard, now_us // 1000)
                reply, record = transitions.claim(None, owner, fingerprint, terms, now_us)
                shard.slots[name] = record  # type: ignore[assignment]
                self.count += 1
                return reply
            reply, record = transitions.claim(_unpack(slot), owner, fingerprint, terms, now_us)
            if record is not None:
                shard.slots[name] = record
            return reply

    def settle(
        self,
        key: Key,
        event: Event,
        owner: bytes,
        fence: int | None,
        terms: Terms,
        clock: Clock,
        answer: bytes | None = None,
    ) -> bool:
        name = self.name(key)
        now = int(clock() * 1000)
        shard = self.shards[hash(name) & (SHARDS - 1)]
        with self.lock:
            slot = shard.slots.get(name)
            if slot is None:
                return False
            held, record = transitions.settle(
                _unpack(slot), event, owner, fence, terms, now, answer
            )
            if record is not None:
                pending = record.state is State.PENDING
                shard.slots[name] = record if pending else _pack(record)
        if held and event is not Event.RENEW:
            self.waiters.wake(name)
        return held

    def first_seen(self, key: Key, terms: Terms, clock: Clock) -> bool:
        name = self.name(key)
        now_us = int(clock() * 1_000_000)
        now = now_us // 1000
        shard = self.shards[hash(name) & (SHARDS - 1)]
        with self.lock:
            slot = shard.slots.get(name)
            if slot is None:
                self.make_room(shard, now)
                self.count += 1
            elif type(slot) is int:
                if now < slot:
                    return False
            elif transitions.mark(_unpack(slot), terms, now_us) is None:
                return False
            expires_at = now + terms.ttl_ms
            if expires_at == self.last_mark:
                expires_at = self.last_mark  # marks of one millisecond share one int object
            else:
                self.last_mark = expires_at
            shard.slots[name] = expires_at
            return True

    def write(self, key: Key, record: Record) -> None:
        name = self.name(key)
        shard = self.shards[hash(name) & (SHARDS - 1)]
        with self.lock:
            old = shard.slots.get(name)
            if old is None:
                self.make_room(shard, 0)
                self.count += 1
            else:
                fence = max(_unpack(old).fence + 1, record.fence)
                record = record._replace(fence=fence)
            shard.slots[name] = _pack(record)
        self.waiters.wake(name)

    def read(self, key: Key) -> Record | None:
        name = self.name(key)
        with self.lock:
            slot = self.shards[hash(name) & (SHARDS - 1)].slots.get(name)
        return None if slot is None else _unpack(slot)

    def settled(self, key: Key) -> bool:
        """Whether there is nothing to wait for."""
        record = self.read(key)
        return record is None or record.state is not State.PENDING

    def make_room(self, shard: _Shard, now: int) -> None:
        """Count a new record; sweep its shard when enough came in since it was swept last.

        Called under the lock. A shard holds a few thousand records at five million in all, so
        that this never takes a millisecond, and each record pays for about two looks.
        """
        if self.closed:
            raise StoreClosedError("this memory store is closed: connect again")
        shard.news += 1
        if shard.news > 64 + len(shard.slots) // 2 and now:
            self.sweep_shard(shard, now - GRACE_MS)
        if self.count < self.max_entries:
            return
        for _ in range(SHARDS):
            if self.sweep_shard(self.shards[self.next_shard], now):
                return
            self.next_shard = (self.next_shard + 1) % SHARDS
        raise StoreFullError(
            f"the memory store holds {self.count} live records, its max_entries: raise "
            "max_entries, shorten the TTL, or use sqlite:///file.db. No live record is evicted"
        )

    def sweep_shard(self, shard: _Shard, cutoff: int) -> int:
        slots = shard.slots
        shard.news = 0
        dead = [name for name, slot in slots.items() if _purge_at(slot) <= cutoff]
        for name in dead:
            del slots[name]
        if not slots:
            shard.slots = {}  # gives the dict's memory back
        self.count -= len(dead)
        return len(dead)

    def sweep(self, limit: int | None, cutoff: int) -> int:
        removed = 0
        for shard in self.shards:
            with self.lock:  # given back between shards, so that claims get through
                removed += self.sweep_shard(shard, cutoff)
            if limit is not None and removed >= limit:
                break
        if removed:
            emit(EventKind.SWEPT, operation="sweep", count=removed)
        return removed

    def clear(self) -> None:
        with self.lock:
            self.shards = [_Shard() for _ in range(SHARDS)]
            self.count = 0


_named: dict[str, _Table] = {}
_naming = threading.Lock()


def _table(name: str, max_entries: int) -> _Table:
    if not name:
        return _Table(max_entries)
    with _naming:
        table = _named.get(name)
        if table is None or table.closed:
            table = _named[name] = _Table(max_entries)
        return table


class MemoryStore(Store, Sweepable, ClockInjectable):
    """The synchronous memory store.

    Promises: atomic within one process. Everything is lost when the process ends, and other
    processes see nothing of it.

    Args:
        name: Stores of one name share their records, also with a ``MemoryBackend``. Empty: alone.
        max_entries: With that many live records, new keys get a ``StoreFullError``.
        clock: Seconds since 1970; inject one in tests.
    """

    poll_seconds = 1.0

    def __init__(
        self,
        name: str = "",
        *,
        max_entries: int = DEFAULT_MAX_ENTRIES,
        clock: Clock = time.time,
    ) -> None:
        self._table = _table(name, max_entries)
        self._clock = clock

    def with_clock(self, clock: Clock) -> MemoryStore:
        """The same records, seen by another clock."""
        view = object.__new__(type(self))
        view._table = self._table
        view._clock = clock
        return view

    def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        """See ``Store``."""
        return self._table.claim(key, owner, fingerprint, terms, self._clock)

    def complete(self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms) -> bool:
        """See ``Store``."""
        return self._table.settle(key, Event.COMPLETE, owner, fence, terms, self._clock, answer)

    def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        """See ``Store``."""
        return self._table.settle(key, Event.RENEW, owner, fence, terms, self._clock)

    def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        """See ``Store``."""
        return self._table.settle(key, Event.RELEASE, owner, fence, _NO_TERMS, self._clock)

    def first_seen(self, key: Key, terms: Terms) -> bool:
        """See ``Store``."""
        return self._table.first_seen(key, terms, self._clock)

    def read(self, key: Key) -> Record | None:
        """See ``Store``."""
        return self._table.read(key)

    def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> None:
        """See ``Store``."""
        self._table.write(key, _written(fingerprint, answer, expires_at, self.now()))

    def now(self) -> int:
        """See ``Store``."""
        return int(self._clock() * 1000)

    def wait(self, key: Key, seconds: float) -> None:
        """See ``Store``. Wakes as soon as the key is settled."""
        table = self._table
        table.waiters.wait(table.name(key), seconds, lambda: table.settled(key))

    def sweep(self, limit: int = 1000, now: int | None = None) -> int:
        """See ``Sweepable``."""
        return self._table.sweep(limit, self.now() if now is None else now)

    def clear(self) -> None:
        """Remove every record. For tests."""
        self._table.clear()

    def close(self) -> None:
        """Forget every record; new keys get a ``StoreClosedError``."""
        self._table.closed = True
        self._table.clear()


_NO_TERMS = Terms(lease_ms=0, ttl_ms=0)


def _written(fingerprint: bytes, answer: bytes, expires_at: int, now: int) -> Record:
    fence = now * 1000
    return Record(State.COMPLETED, b"", fence, fingerprint, 0, expires_at, expires_at, 1, answer)


class MemoryBackend(Answers, AsyncSweepable, ClockInjectable):
    """The asynchronous memory store; ``MemoryStore`` is its synchronous twin.

    Promises: atomic within one process, for any number of threads and event loops. Everything is
    lost when the process ends, and other processes see nothing of it.

    Args:
        name: Stores of one name share their records, also with a ``MemoryStore``. Empty: alone.
        max_entries: With that many live records, new keys get a ``StoreFullError``.
        clock: Seconds since 1970; inject one in tests.
    """

    poll_seconds = 1.0

    def __init__(
        self,
        name: str = "",
        *,
        max_entries: int = DEFAULT_MAX_ENTRIES,
        clock: Clock = time.time,
    ) -> None:
        self._table = _table(name, max_entries)
        self._clock = clock

    def with_clock(self, clock: Clock) -> MemoryBackend:
        """The same records, seen by another clock."""
        view = object.__new__(type(self))
        view._table = self._table
        view._clock = clock
        return view

    async def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        """See ``AsyncStore``."""
        return self._table.claim(key, owner, fingerprint, terms, self._clock)

    async def complete(
        self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> bool:
        """See ``AsyncStore``."""
        return self._table.settle(key, Event.COMPLETE, owner, fence, terms, self._clock, answer)

    async def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        """See ``AsyncStore``."""
        return self._table.settle(key, Event.RENEW, owner, fence, terms, self._clock)

    async def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        """See ``AsyncStore``."""
        return self._table.settle(key, Event.RELEASE, owner, fence, _NO_TERMS, self._clock)

    async def first_seen(self, key: Key, terms: Terms) -> bool:
        """See ``AsyncStore``."""
        return self._table.first_seen(key, terms, self._clock)

    async def read(self, key: Key) -> Record | None:
        """See ``AsyncStore``."""
        return self._table.read(key)

    async def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> None:
        """See ``AsyncStore``."""
        now = int(self._clock() * 1000)
        self._table.write(key, _written(fingerprint, answer, expires_at, now))

    async def now(self) -> int:
        """See ``AsyncStore``."""
        return int(self._clock() * 1000)

    async def wait(self, key: Key, seconds: float) -> None:
        """See ``AsyncStore``. Wakes as soon as the key is settled."""
        table = self._table
        await table.waiters.wait_async(table.name(key), seconds, lambda: table.settled(key))

    async def sweep(self, limit: int = 1000, now: int | None = None) -> int:
        """See ``AsyncSweepable``."""
        return self._table.sweep(limit, int(self._clock() * 1000) if now is None else now)

    async def delete_expired(self, now_epoch: float | None = None) -> int:
        """Remove every record past its time."""
        cutoff = self._clock() if now_epoch is None else now_epoch
        return self._table.sweep(None, int(cutoff * 1000))

    async def clear(self) -> None:
        """Remove every record. For tests."""
        self._table.clear()

    async def aclose(self) -> None:
        """Forget every record; new keys get a ``StoreClosedError``."""
        self._table.closed = True
        self._table.clear()

    async def _size(self) -> int:
        """How many records there are. For tests."""
        return self._table.count


def open_sync(rest: str, options: dict[str, Any]) -> MemoryStore:
    """``memory://`` or ``memory://name``."""
    return MemoryStore(rest, **options)


def open_async(rest: str, options: dict[str, Any]) -> MemoryBackend:
    """``memory://`` or ``memory://name``."""
    return MemoryBackend(rest, **options)
