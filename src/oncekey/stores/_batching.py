"""Calls that share a round trip: between threads, and between the tasks of an event loop.

No timer anywhere: a call that comes alone is sent at once. Calls that come while a batch is under
way gather and are sent together as the next, so that throughput rises with load and nobody waits
for company.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from oncekey._core.forks import Forking, watch_forks
from oncekey.errors import StoreUnavailableError

__all__ = ["MAX_BATCH", "Job", "LoopBatch", "ThreadBatch"]

MAX_BATCH = 512
ALONE = 8  # who was alone so many times is taken to be so again


class Job:
    """One call that waits for its batch; whoever runs the batch fills in ``result`` or ``error``.

    ``method`` is whatever the runner makes of it: a function, or the name of a command. ``begun``
    is when the call came, on the monotonic clock: its deadline is counted from there.
    """

    __slots__ = ("args", "begun", "done", "error", "method", "result")

    result: Any
    done: bool

    def __init__(self, method: Any, args: tuple[Any, ...]) -> None:
        self.method = method
        self.args = args
        self.begun = time.monotonic()
        self.error: BaseException | None = None

    def outcome(self) -> Any:
        """The result, or raise what went wrong."""
        if self.error is not None:
            raise self.error
        return self.result


class _Party:
    """Calls that go together. Whoever has the gate looks after all that still wait here."""

    __slots__ = ("gate", "waiting")

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.waiting: deque[Job] = deque()


class ThreadBatch(Forking):
    """For threads: the first to come leads, those who come meanwhile follow in its next batch.

    The caller's own thread does the work: no thread of our own, nothing to start after a fork.

    An exception may come to a thread between any two steps (Ctrl-C, a task's time limit). So no
    thread depends on another to wake it or to hand anything over: a lock is held by ``with`` only,
    which can't be left without releasing it, and each thread does what is left to do of its own
    call. What several threads change is changed in one step: a deque, an attribute.

    Args:
        run: Runs the jobs of a batch and fills each in. What it raises goes to the leader.
        most: The most jobs of one batch.
    """

    def __init__(self, run: Callable[[Sequence[Job]], None], most: int = MAX_BATCH) -> None:
        self._run = run
        self._most = most
        self.after_fork_in_child()
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        """Start over: whoever waited or led is not in this process."""
        self._leads = threading.Lock()
        self._gathering = _Party()

    @property
    def busy(self) -> bool:
        """Whether a batch is under way or about to be."""
        return self._leads.locked()

    def submit(self, method: Any, args: tuple[Any, ...]) -> Any:
        """Run a call in the next batch; returns when that is done."""
        job = Job(method, args)
        job.done = False
        party = self._gathering
        try:
            party.waiting.append(job)
            with party.gate:  # the first leads, the others come in when it is through
                if job in party.waiting:
                    with self._leads:
                        self._lead(party)
        except BaseException:
            with contextlib.suppress(ValueError):
                party.waiting.remove(job)  # not begun yet: nobody is to make it for us
            raise
        if not job.done:
            raise StoreUnavailableError(
                "the thread that was making this change was interrupted, so that nobody knows "
                "whether it was made: try again"
            )
        return job.outcome()

    def _lead(self, party: _Party) -> None:
        if self._gathering is party:
            self._gathering = _Party()  # whoever read the old one just now leads it once more
        batch: list[Job] = []
        while party.waiting and len(batch) < self._most:
            batch.append(party.waiting.popleft())
        self._run(batch)
        for job in batch:
            job.done = True


class LoopBatch:
    """For the tasks of one event loop: calls of one tick go together, later ones in the next batch.

    A task that is cancelled while it waits does not stop the batch that carries its call; a call
    that no batch has taken yet is not sent.

    Args:
        run: Runs the jobs of a batch and fills each in. What it raises goes to all that it left
            without an error of their own.
        most: The most jobs of one batch.
        stepped: ``run`` needs no task of its own (it uses neither ``asyncio.timeout`` nor what does
            so). Then none is made, and who was alone for a while does not wait for company.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Job]], Awaitable[None]],
        most: int = MAX_BATCH,
        stepped: bool = False,
    ) -> None:
        self._run = run
        self._most = most
        self._stepped = stepped
        self._busy = False
        self._alone = 0  # how many batches in a row were of one call
        self._queue: list[tuple[Job, asyncio.Future[Any]]] = []
        self._task: asyncio.Task[None] | None = None
        self._drained: asyncio.Future[None] | None = None

    def submit(self, method: Any, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Run a call in the next batch; the future is done when that is."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._queue.append((Job(method, args), future))
        if not self._busy:
            self._busy = True
            if not self._stepped:
                self._task = loop.create_task(self._work())
            elif self._alone < ALONE:
                loop.call_soon(_step, self._work())
            else:
                _step(self._work())
        return future

    async def _work(self) -> None:
        futures: list[asyncio.Future[Any]] = []
        try:
            while self._queue:
                queue, self._queue = self._queue, []
                jobs: list[Job] = []
                futures = []
                for job, future in queue:
                    if len(jobs) == self._most:
                        self._queue.append((job, future))
                    elif not future.done():
                        jobs.append(job)
                        futures.append(future)
                if not jobs:
                    break
                self._alone = self._alone + 1 if len(jobs) == 1 else 0
                try:
                    await self._run(jobs)
                except Exception as error:  # noqa: BLE001 - nobody may be left waiting
                    for job in jobs:
                        job.error = job.error or error
                for job, future in zip(jobs, futures, strict=True):
                    if future.done():
                        continue
                    if job.error is not None:
                        future.set_exception(job.error)
                    else:
                        future.set_result(job.result)
        except BaseException:  # the loop is being shut down
            for future in [*futures, *(future for _, future in self._queue)]:
                future.cancel()
            self._queue.clear()
            raise
        finally:
            self._busy = False
            if self._drained is not None:
                self._drained.set_result(None)
                self._drained = None

    async def drain(self) -> None:
        """Wait until nothing is queued or under way."""
        while self._busy:
            if self._drained is None:
                self._drained = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._drained)


def _step(work: Coroutine[Any, Any, None], done: Any = None) -> None:
    """Go on with ``work`` until it waits for something, and then when that is there.

    What a task does, without a turn of the loop before it starts, and for a third of its price.
    """
    try:
        awaited = work.send(None)
    except StopIteration:
        return
    if awaited is None:  # it only lets others go first
        asyncio.get_running_loop().call_soon(_step, work)
        return
    awaited._asyncio_future_blocking = False  # so a future asks for: this is how one is awaited
    awaited.add_done_callback(functools.partial(_step, work))
