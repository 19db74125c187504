"""Two ways for event loops to share a commit: through a writer thread, and once a tick.

A commit waits for the disk. Whoever comes while one is under way is taken along by the next, so
that throughput rises with load and a lone caller never waits for a timer.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any

from oncekey._core.forks import Forking, watch_forks
from oncekey.errors import StoreClosedError
from oncekey.stores._batching import MAX_BATCH, Job
from oncekey.stores.sqlite.database import Database

__all__ = ["TickCommit", "WriterCommit"]


class _Call(Job):
    """A call that a task of this loop waits for."""

    __slots__ = ("future",)

    def __init__(
        self, method: Callable[..., Any], args: tuple[Any, ...], loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(method, args)
        self.future: asyncio.Future[Any] = loop.create_future()


class WriterCommit(Forking):
    """For event loops: one thread writes, so that no loop waits for the disk.

    Args:
        database: What to write to.
        gathers: All calls come from one loop, and those of one tick go to the thread together:
            fewer commits, and less change between threads, for a turn of the loop.
    """

    def __init__(self, database: Database, gathers: bool = False) -> None:
        self._database = database
        self._gathers = gathers
        self.after_fork_in_child()
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        """Start over: whoever waited or wrote is not in this process."""
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._gathered: list[_Call] = []
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether a commit is under way or about to be."""
        return not self._queue.empty()

    def submit(self, method: Callable[..., Any], args: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Run ``method`` in the next transaction; the future is done when it is durable."""
        if self._closed:
            raise StoreClosedError("this store is closed: connect again")
        if self._thread is None:
            self._start()
        loop = asyncio.get_running_loop()
        call = _Call(method, args, loop)
        if not self._gathers:
            self._queue.put(call)
        else:
            if not self._gathered:
                loop.call_soon(self._hand_over)
            self._gathered.append(call)
        return call.future

    def _hand_over(self) -> None:
        calls, self._gathered = self._gathered, []
        for call in calls:
            self._queue.put(call)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_write_forever,
                    args=(self._queue, self._database),
                    name="oncekey-sqlite-writer",
                    daemon=True,
                )
                self._thread.start()

    def __del__(self) -> None:
        if self._thread is not None:
            self._queue.put(None)

    async def aclose(self) -> None:
        """Let the thread finish what is queued, and end it."""
        self._closed = True  # first, so that nothing comes into the queue behind the end
        self._hand_over()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            await asyncio.get_running_loop().run_in_executor(None, thread.join)


def _write_forever(jobs: queue.SimpleQueue[Any], database: Database) -> None:
    """The writer thread: take all that waits, commit it, wake each loop once. Ends on ``None``."""
    while True:
        item = jobs.get()
        batch: list[_Call] = []
        while item is not None:
            batch.append(item)
            if len(batch) == MAX_BATCH:
                break
            try:
                item = jobs.get_nowait()
            except queue.Empty:
                break
        if batch:
            _commit(database, batch)
            by_loop: dict[asyncio.AbstractEventLoop, list[_Call]] = {}
            for call in batch:
                by_loop.setdefault(call.future.get_loop(), []).append(call)
            for loop, calls in by_loop.items():
                try:
                    loop.call_soon_threadsafe(_resolve, calls)
                except RuntimeError:
                    pass  # that loop is closed: nobody waits there any more
        if item is None:
            return


def _commit(database: Database, calls: list[_Call]) -> None:
    try:
        database.commit(calls)
    except BaseException as error:  # noqa: BLE001 - nobody may be left waiting
        for call in calls:
            call.error = call.error or error


def _resolve(calls: list[_Call]) -> None:
    for call in calls:
        future = call.future
        if future.done():
            continue
        if call.error is not None:
            future.set_exception(call.error)
        else:
            future.set_result(call.result)


class TickCommit(Forking):
    """For event loops that may wait for the disk: all calls of one tick share a commit, in place.

    Faster than a thread, but the loop stands still during each commit.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.after_fork_in_child()
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        """Start over: whoever waited or wrote is not in this process."""
        self._waiting: dict[asyncio.AbstractEventLoop, list[_Call]] = {}
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether a commit is about to be."""
        return bool(self._waiting)

    def submit(self, method: Callable[..., Any], args: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Run ``method`` in this tick's transaction; the future is done when it is durable."""
        if self._closed:
            raise StoreClosedError("this store is closed: connect again")
        loop = asyncio.get_running_loop()
        call = _Call(method, args, loop)
        calls = self._waiting.get(loop)
        if calls is None:
            self._waiting[loop] = [call]
            loop.call_soon(self._flush, loop)
        else:
            calls.append(call)
        return call.future

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        calls = self._waiting.pop(loop)
        _commit(self._database, calls)
        _resolve(calls)

    async def aclose(self) -> None:
        """Refuse further calls."""
        self._closed = True
