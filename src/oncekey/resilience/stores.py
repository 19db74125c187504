"""The two forms of a store around a store: they differ by what is awaited."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Final

from oncekey._core.drive import arun, run
from oncekey._core.tasks import uncancelled
from oncekey.abc import AsyncStore, Store
from oncekey.errors import StoreError, StoreUnavailableError
from oncekey.models import ClaimReply, Key, Record, Terms
from oncekey.resilience.around import AWAY_POLL, Around
from oncekey.resilience.fallback import Fallback
from oncekey.resilience.journal import Entry, Journal
from oncekey.resilience.reconcile import Reconciled
from oncekey.stores._answers import Answers

__all__ = ["AsyncJournalSteps", "AsyncResilientStore", "JournalSteps", "ResilientStore"]


class ResilientStore(Around, Store):
    """A synchronous store behind a breaker. Made by ``resilient``.

    Attributes:
        store: The store that keeps the records. Closing this one closes that one.
        breaker: What stands in front of it: ``breaker.state`` says how it is.
        on_outage: ``closed``: a call whose store can't answer is an error. ``open``: it goes on.
    """

    store: Store

    def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        """See ``Store``."""
        return run(self._claim(key, owner, fingerprint, terms), self.store)

    def complete(self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms) -> bool:
        """See ``Store``."""
        return run(self._complete(key, owner, fence, answer, terms), self.store)

    def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        """See ``Store``."""
        return run(self._renew(key, owner, fence, terms), self.store)

    def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        """See ``Store``."""
        return run(self._release(key, owner, fence), self.store)

    def first_seen(self, key: Key, terms: Terms) -> bool:
        """See ``Store``."""
        return run(self._first_seen(key, terms), self.store)

    def read(self, key: Key) -> Record | None:
        """See ``Store``."""
        return run(self._read(key), self.store)

    def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> None:
        """See ``Store``. Never goes on without the store."""
        run(self._op("write", key, fingerprint, answer, expires_at), self.store)

    def now(self) -> int:
        """See ``Store``."""
        return run(self._now(), self.store)

    def clear(self) -> None:
        """See ``Store``."""
        run(self._op("clear"), self.store)

    def wait(self, key: Key, seconds: float) -> None:
        """See ``Store``."""
        if here := self._wait(key, seconds):
            time.sleep(here)
        else:
            with contextlib.suppress(StoreUnavailableError):  # the claim after it says so
                self.store.wait(key, seconds)

    def reconcile(self) -> Reconciled:
        """Put what went on without the store into it now, and report what was done twice.

        Raises:
            StoreError: The store is away still.
            PolicyError: There is no journal.
        """
        return run(self._reconciled(), self.store)

    def _start(self, fallback: Fallback) -> None:
        def work() -> None:
            with contextlib.suppress(StoreError):  # it is tried again
                run(fallback.reconcile_due(), self.store)

        with contextlib.suppress(RuntimeError):  # no more threads: the call goes on all the same
            threading.Thread(target=work, name="oncekey-reconcile", daemon=True).start()

    def close(self) -> None:
        """Close the store, and leave the journal to whoever reconciles it."""
        if self._fallback is not None:
            self._fallback.close()
        self.store.close()


class AsyncResilientStore(Around, Answers):
    """An asynchronous store behind a breaker. Made by ``resilient``. See ``ResilientStore``."""

    store: AsyncStore
    _tasks: Final[set[asyncio.Task[None]]] = set()

    async def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        """See ``AsyncStore``."""
        return await arun(self._claim(key, owner, fingerprint, terms), self.store)

    async def complete(
        self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> bool:
        """See ``AsyncStore``."""
        return await arun(self._complete(key, owner, fence, answer, terms), self.store)

    async def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        """See ``AsyncStore``."""
        return await arun(self._renew(key, owner, fence, terms), self.store)

    async def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        """See ``AsyncStore``."""
        return await arun(self._release(key, owner, fence), self.store)

    async def first_seen(self, key: Key, terms: Terms) -> bool:
        """See ``AsyncStore``."""
        return await arun(self._first_seen(key, terms), self.store)

    async def read(self, key: Key) -> Record | None:
        """See ``AsyncStore``."""
        return await arun(self._read(key), self.store)

    async def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> None:
        """See ``AsyncStore``. Never goes on without the store."""
        await arun(self._op("write", key, fingerprint, answer, expires_at), self.store)

    async def now(self) -> int:
        """See ``AsyncStore``."""
        return await arun(self._now(), self.store)

    async def clear(self) -> None:
        """See ``AsyncStore``."""
        await arun(self._op("clear"), self.store)

    async def wait(self, key: Key, seconds: float) -> None:
        """See ``AsyncStore``."""
        if here := self._wait(key, seconds):
            await asyncio.sleep(here)
        else:
            with contextlib.suppress(StoreUnavailableError):  # the claim after it says so
                await self.store.wait(key, seconds)

    async def reconcile(self) -> Reconciled:
        """Put what went on without the store into it now. See ``ResilientStore.reconcile``."""
        self._forget_closed()
        return await arun(self._reconciled(), self.store)

    def _start(self, fallback: Fallback) -> None:
        async def work() -> None:
            with contextlib.suppress(StoreError):  # it is tried again
                await arun(fallback.reconcile_due(), self.store)

        task = asyncio.get_running_loop().create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _forget_closed(self) -> None:
        for task in [one for one in self._tasks.copy() if one.get_loop().is_closed()]:
            self._tasks.discard(task)
            if isinstance(work := task.get_coro(), Coroutine):
                work.close()  # lets go of what it holds: nobody will ever run it

    async def delete_expired(self, now_epoch: float | None = None) -> int:
        """Remove every record past its time, where the store can."""
        delete = getattr(self.store, "delete_expired", None)
        removed: int = 0 if delete is None else await delete(now_epoch)
        return removed

    async def aclose(self) -> None:
        """Close the store, and leave the journal to whoever reconciles it."""
        if self._fallback is not None:
            self._fallback.close()
        await self.store.aclose()


class JournalSteps:
    """What flows do with a journal and while they wait, in threads."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def append(self, entry: Entry) -> None:
        """Write one entry."""
        self._journal.append(entry)

    def turn(self, running: Callable[[], list[Entry]]) -> None:
        """Go on in a new file."""
        self._journal.turn(running)

    def pause(self) -> None:
        """Let somebody else go on."""
        time.sleep(AWAY_POLL)


class AsyncJournalSteps:
    """The same for event loops, which must not wait for a disk."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def turn(self, running: Callable[[], list[Entry]]) -> None:
        """Go on in a new file."""
        await asyncio.to_thread(self._journal.turn, running)

    async def pause(self) -> None:
        """Let somebody else go on."""
        await asyncio.sleep(AWAY_POLL)

    async def append(self, entry: Entry) -> None:
        """Write one entry, in a thread, which a cancellation does not stop: so it waits for it."""
        await uncancelled(asyncio.to_thread(self._journal.append, entry))
