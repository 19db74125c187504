"""An asynchronous store made of a synchronous one, whose calls wait in threads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, Self, TypeVar

from oncekey.abc import AsyncBrowsable, Clock
from oncekey.errors import StoreClosedError
from oncekey.models import ClaimReply, Entry, Key, Page, Record, Terms
from oncekey.stores._answers import Answers

__all__ = ["Threaded"]

R = TypeVar("R")
S = TypeVar("S", bound=Any)


class _Threads(ThreadPoolExecutor):
    """The threads of a process, and what owners have under way in them."""

    def __init__(self, most: int, name: str) -> None:
        super().__init__(most, f"oncekey-{name}")
        self.owned: dict[bytes, Future[Any]] = {}


class Threaded(Answers, AsyncBrowsable, Generic[S]):
    """A store whose calls are those of another, in threads.

    A call that is cancelled leaves its request to end by itself, if it has begun; a release by the
    same owner comes after it, so that a claim which nobody waits for is given back.
    """

    def __init__(self, store: S, threads: int, name: str) -> None:
        self._store = store
        self._most, self._name = threads, name
        self._pools: dict[int, _Threads] = {}  # by process: a fork takes no threads along
        self._closed = False
        self._view = False

    def with_clock(self, clock: Clock) -> Self:
        view = object.__new__(type(self))
        vars(view).update(vars(self), _store=self._store.with_clock(clock), _view=True)
        return view

    def _threads(self) -> _Threads:
        if self._closed:
            raise StoreClosedError("this store is closed: open another")
        there = self._pools.get(os.getpid())
        return there or self._pools.setdefault(os.getpid(), _Threads(self._most, self._name))

    async def _do(self, call: Callable[..., R], *arguments: Any, owner: bytes | None = None) -> R:
        threads = self._threads()
        future = threads.submit(call, *arguments)
        if owner is not None:
            threads.owned[owner] = future
            future.add_done_callback(lambda _: threads.owned.pop(owner, None))
        return await asyncio.wrap_future(future)

    async def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        return await self._do(self._store.claim, key, owner, fingerprint, terms, owner=owner)

    async def complete(
        self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> bool:
        return await self._do(self._store.complete, key, owner, fence, answer, terms, owner=owner)

    async def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        return await self._do(self._store.renew, key, owner, fence, terms)

    async def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        before = self._threads().owned.get(owner)  # of a call that was cancelled

        def after() -> bool:
            wait(() if before is None else (before,))
            held: bool = self._store.release(key, owner, fence)
            return held

        return await self._do(after)

    async def first_seen(self, key: Key, terms: Terms) -> bool:
        return await self._do(self._store.first_seen, key, terms)

    async def read(self, key: Key) -> Record | None:
        return await self._do(self._store.read, key)

    async def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> None:
        await self._do(self._store.write, key, fingerprint, answer, expires_at)

    async def browse(self, cursor: str = "", limit: int = 1000) -> Page:
        return await self._do(self._store.browse, cursor, limit)

    async def find(self, digest: bytes) -> Entry | None:
        return await self._do(self._store.find, digest)

    async def now(self) -> int:
        return await self._do(self._store.now)

    async def clear(self) -> None:
        await self._do(self._store.clear)

    async def aclose(self) -> None:
        """Close what this store opened. Calls that are under way in threads end by themselves."""
        if self._view or self._closed:
            return
        self._closed = True
        threads = self._pools.pop(os.getpid(), None)
        if threads is None:
            self._store.close()
            return
        closing = threads.submit(self._store.close)
        threads.shutdown(wait=False)
        await asyncio.wrap_future(closing)
