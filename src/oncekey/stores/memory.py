"""``memory://``: one process, nothing survives it. For tests, tools and single-process apps.

Safe under threads and several event loops. Records lie in many small dicts, so that no claim
ever pays for the size of the whole: neither growing nor expiring touches more than one of them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Self

from oncekey._core import transitions
from oncekey._core.transitions import Event
from oncekey.abc import AsyncSweepable, Clock, ClockInjectable, Markable, Store, Sweepable
from oncekey.errors import StoreConfigError
from oncekey.models import ClaimReply, Key, Record, Scope, State, Terms
from oncekey.stores._answers import Answers
from oncekey.stores._memory_browsing import AsyncBrowsing, Browsing
from oncekey.stores._memory_table import SHARDS, Table, completed, pack, replay, unpack

__all__ = ["AsyncMemoryStore", "MemoryBackend", "MemoryStore"]

DEFAULT_MAX_ENTRIES: Final = 10_000_000

_COMPLETE, _RENEW, _RELEASE = Event.COMPLETE, Event.RENEW, Event.RELEASE
_NO_TERMS: Final = Terms(lease_ms=0, ttl_ms=0)

_named: dict[str, Table] = {}
_naming = threading.Lock()


def _fresh_naming() -> None:
    global _naming
    _naming = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fresh_naming)


def _table(name: str, max_entries: int) -> Table:
    if "/" in name:
        raise StoreConfigError(f"{name!r} can't name a memory store: write memory://name")
    if not name:
        return Table(max_entries)
    with _naming:
        table = _named.get(name)
        if table is None or table.closed:
            table = _named[name] = Table(max_entries)
        return table


class _OnTable(ClockInjectable):
    """What the sync and the async store have in common: a table, and a clock to see it by."""

    poll_seconds = 1.0  # rarely needed: a settled key wakes its waiters

    def __init__(
        self,
        name: str = "",
        *,
        max_entries: int = DEFAULT_MAX_ENTRIES,
        clock: Clock = time.time,
    ) -> None:
        table = _table(name, max_entries)
        table.users += 1
        self._closed = False
        self._see(table, clock)

    def _see(self, table: Table, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self.never_waits = type(self) in (MemoryStore, AsyncMemoryStore)  # a subclass may wait

    def with_clock(self, clock: Clock) -> Self:
        """The same records, seen by another clock."""
        return self._view(self._table, clock)

    @classmethod
    def _view(cls, table: Table, clock: Clock) -> Self:
        view = object.__new__(cls)
        view._closed = True  # not opened by it, so not closed by it
        view._see(table, clock)
        return view

    def _marker(self, scope: Scope, terms: Terms) -> Callable[[str], bool]:
        return self._table.marker(scope, terms, self._clock)

    def _claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        table = self._table
        scope = table.scopes.get(key.scope.prefix)
        name = table.name(key) if scope is None else scope + key.name
        now_us = int(self._clock() * 1_000_000)
        place = hash(name) % SHARDS
        slots = table.shards[place]
        while True:
            slot = slots.get(name)
            if slot is None:
                if len(slots) >= table.limits[place]:
                    table.make_room(place, now_us // 1000)
                reply, record = transitions.first(owner, fingerprint, terms, now_us)
                if slots.setdefault(name, record) is record:
                    return reply
            elif type(slot) is bytes:
                found = replay(slot, fingerprint, terms, now_us // 1000)
                if found is not None:
                    return found
            with table.lock:
                slot = slots.get(name)
                if slot is None:
                    continue  # swept meanwhile: without the lock, it is anybody's again
                reply, new = transitions.claim(unpack(slot), owner, fingerprint, terms, now_us)
                if new is not None:
                    slots[name] = new
                return reply

    def _complete(self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms) -> bool:
        table = self._table
        scope = table.scopes.get(key.scope.prefix)
        name = table.name(key) if scope is None else scope + key.name
        slots = table.shards[hash(name) % SHARDS]
        now = int(self._clock() * 1000)
        with table.lock:
            slot = slots.get(name)
            packed = completed(slot, owner, fence, answer, terms, now)
            if packed is not None:
                slots[name] = packed
        if packed is None:
            return self._settle(_COMPLETE, key, owner, fence, terms, answer)
        if table.waiters._waiting:
            table.waiters.wake(name)
        return True

    def _settle(
        self,
        event: Event,
        key: Key,
        owner: bytes,
        fence: int | None,
        terms: Terms,
        answer: bytes | None = None,
    ) -> bool:
        table = self._table
        scope = table.scopes.get(key.scope.prefix)
        name = table.name(key) if scope is None else scope + key.name
        now = int(self._clock() * 1000)
        slots = table.shards[hash(name) % SHARDS]
        with table.lock:
            slot = slots.get(name)
            if slot is None:
                return False
            found = slot if type(slot) is Record else unpack(slot)
            held, record = transitions.settle(found, event, owner, fence, terms, now, answer)
            if record is not None:
                slots[name] = record if event is _RENEW else pack(record)
        if held and event is not _RENEW and table.waiters._waiting:
            table.waiters.wake(name)
        return held

    def _written(self, fingerprint: bytes, answer: bytes, expires_at: int) -> tuple[Record, int]:
        now = int(self._clock() * 1000)
        fields = (fingerprint, 0, expires_at, expires_at, 1, answer)
        return Record(State.COMPLETED, b"", now * 1000, *fields), now

    def _close(self) -> None:
        """The last store of a name to close forgets its records."""
        if not self._closed:
            self._closed = True
            self._table.close()


class MemoryStore(Browsing, _OnTable, Store, Sweepable, Markable):
    """The synchronous memory store.

    Promises: atomic within one process. Everything is lost when the process ends, and other
    processes see nothing of it.

    Args:
        name: Stores of one name share their records, sync and async ones alike. Empty: alone.
        max_entries: With that many live records, new keys get a ``StoreFullError``.
        clock: Seconds since 1970; inject one in tests.
    """

    # As they are, not by another call; pyright holds the abstract method's self against them.
    claim = _OnTable._claim  # pyright: ignore[reportAssignmentType]
    complete = _OnTable._complete  # pyright: ignore[reportAssignmentType]
    marker = _OnTable._marker  # pyright: ignore[reportAssignmentType]

    def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        """See ``Store``."""
        return self._settle(_RENEW, key, owner, fence, terms)

    def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        """See ``Store``."""
        return self._settle(_RELEASE, key, owner, fence, _NO_TERMS)

    def first_seen(self, key: Key, terms: Terms) -> bool:
        """See ``Store``."""
        return self.marker(key.scope, terms)(key.name)

    def read(self, key: Key) -> Record | None:
        """See ``Store``."""
        return self._table.read(key)

    def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> None:
        """See ``Store``."""
        self._table.write(key, *self._written(fingerprint, answer, expires_at))

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
        """Close; the last store of a name to close forgets its records."""
        self._close()


class AsyncMemoryStore(AsyncBrowsing, _OnTable, Answers, AsyncSweepable, Markable):
    """The asynchronous memory store; ``MemoryStore`` is its synchronous twin.

    Promises: atomic within one process, for any number of threads and event loops. Everything is
    lost when the process ends, and other processes see nothing of it.

    Args:
        name: Stores of one name share their records, sync and async ones alike. Empty: alone.
        max_entries: With that many live records, new keys get a ``StoreFullError``.
        clock: Seconds since 1970; inject one in tests.
    """

    marker = _OnTable._marker  # pyright: ignore[reportAssignmentType]

    def _see(self, table: Table, clock: Clock) -> None:
        super()._see(table, clock)
        if self.never_waits:
            self.at_once = MemoryStore._view(table, clock)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in ("claim", "complete"):  # replaced, as tests do: nothing goes past it
            object.__setattr__(self, "at_once", None)

    async def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        """See ``AsyncStore``."""
        return self._claim(key, owner, fingerprint, terms)

    async def complete(
        self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> bool:
        """See ``AsyncStore``."""
        return self._complete(key, owner, fence, answer, terms)

    async def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        """See ``AsyncStore``."""
        return self._settle(_RENEW, key, owner, fence, terms)

    async def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        """See ``AsyncStore``."""
        return self._settle(_RELEASE, key, owner, fence, _NO_TERMS)

    async def first_seen(self, key: Key, terms: Terms) -> bool:
        """See ``AsyncStore``."""
        return self.marker(key.scope, terms)(key.name)

    async def read(self, key: Key) -> Record | None:
        """See ``AsyncStore``."""
        return self._table.read(key)

    async def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> None:
        """See ``AsyncStore``."""
        self._table.write(key, *self._written(fingerprint, answer, expires_at))

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
        """Close; the last store of a name to close forgets its records."""
        self._close()

    async def _size(self) -> int:
        """How many records there are. For tests."""
        return self._table.count


MemoryBackend = AsyncMemoryStore
"""The name of ``AsyncMemoryStore`` in the ``adcp`` package and in earlier versions."""


def open_sync(url: str, options: dict[str, Any]) -> MemoryStore:
    """``memory://`` or ``memory://name``."""
    return MemoryStore(_name_in(url), **options)


def open_async(url: str, options: dict[str, Any]) -> AsyncMemoryStore:
    """``memory://`` or ``memory://name``."""
    return AsyncMemoryStore(_name_in(url), **options)


def _name_in(url: str) -> str:
    name = url.partition("://")[2]
    if "?" in name:
        raise StoreConfigError(
            "memory:// takes no options in its URL: pass them to connect() or aconnect() as "
            "keywords, behind it"
        )
    return name
