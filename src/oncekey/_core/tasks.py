"""Work that goes on, whatever becomes of the task that wants it done."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import sys
from collections.abc import Coroutine, Generator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from oncekey._core.call import Job
    from oncekey._core.flows import Claim

__all__ = ["deaf", "in_background", "outliving", "uncancelled"]

logger = logging.getLogger("oncekey")

T = TypeVar("T")

_background: set[asyncio.Task[Any]] = set()


def in_background(work: Coroutine[Any, Any, Any]) -> None:
    """Let ``work`` finish whatever becomes of the task that started it."""
    task = asyncio.get_running_loop().create_task(work)
    _background.add(task)
    task.add_done_callback(_done)


def _done(task: asyncio.Task[Any]) -> None:
    _background.discard(task)
    if not task.cancelled() and task.exception() is not None:
        logger.warning("releasing a cancelled claim failed: %s", task.exception())


async def uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """Finish ``work`` even if this task is cancelled meanwhile, then be cancelled."""
    loop = asyncio.get_running_loop()
    task = _begun(loop, work, contextvars.copy_context())
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        over: asyncio.Future[None] = loop.create_future()  # cancelled in the place of the task
        task.add_done_callback(functools.partial(_tell, over))
        try:
            await over
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # taken note of: the cancellation is what the caller gets
        raise cancelled
    return task.result()


def _tell(over: asyncio.Future[None], _: object) -> None:
    if not over.done():
        over.set_result(None)


class deaf:  # noqa: N801 - read as ``await deaf(work)``
    """``uncancelled`` without a task of its own, and without the turns of the loop that that takes.

    Only for work in which nobody cancels this task, as ``asyncio.timeout`` does: it would not be
    heard before the end.
    """

    __slots__ = ("_cancelled", "_work")

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work
        self._cancelled: asyncio.CancelledError | None = None

    def __await__(self) -> Generator[Any, None, Any]:
        """Finish the work, then be cancelled."""
        steps: Any = self._work
        error: BaseException | None = None
        result: Any = None
        while True:
            try:
                waits_for = steps.send(None) if error is None else steps.throw(error)
            except StopIteration as end:
                result = end.value
                break
            except BaseException:
                if self._cancelled is not None:
                    break  # the cancellation is what the caller gets
                raise
            error = None
            try:
                yield None if waits_for is None else _Deaf(waits_for, self)
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as thrown:  # noqa: BLE001 - it is the work's
                if waits_for is None and isinstance(thrown, asyncio.CancelledError):
                    self._cancelled = thrown
                else:
                    error = thrown
        if self._cancelled is not None:
            raise self._cancelled
        return result

    def cancel(self, message: Any) -> None:
        """Take note of it for later."""
        self._cancelled = asyncio.CancelledError(*(() if message is None else (message,)))


class _Deaf:
    """A future for a task to wait for, which goes on when the task is cancelled."""

    __slots__ = ("_asyncio_future_blocking", "_future", "_told")

    def __init__(self, future: Any, told: deaf) -> None:
        future._asyncio_future_blocking = False
        self._asyncio_future_blocking = True
        self._future = future
        self._told = told

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._future.get_loop()  # type: ignore[no-any-return]

    def add_done_callback(self, done: Any, *, context: Any = None) -> None:
        self._future.add_done_callback(done, context=context)

    def cancel(self, msg: Any = None) -> bool:
        self._told.cancel(msg)
        return True  # so the task need not be


FINISH_SECONDS = 3600.0  # how long a handler may go on without its caller, if nothing else is said


async def outliving(
    work: Coroutine[Any, Any, T],
    job: Job,
    claim: Claim,
    kept: set[asyncio.Task[Any]],
) -> T:
    """Wait for ``work`` in a task of its own, which goes on if this one is cancelled.

    It has until ``max_run`` from its claim. Then it is cancelled, as it is if the loop ends, and
    the lease decides when another may run.
    """
    loop = asyncio.get_running_loop()
    context = contextvars.copy_context()
    task = _begun(loop, work, context)
    if not task.done():
        kept.add(task)
        over: asyncio.Future[None] = loop.create_future()  # cancelled in the place of the task

        task.add_done_callback(kept.discard)
        task.add_done_callback(functools.partial(_tell, over))
        try:
            await over
        except asyncio.CancelledError:
            plan = job.plan
            longest = FINISH_SECONDS if plan.max_run is None else plan.max_run
            left = claim.started + longest - plan.monotonic()
            bound = loop.call_later(max(0.0, left), task.cancel)
            task.add_done_callback(functools.partial(_finished_alone, job, bound))
            raise
    for name, value in context.items():  # what the handler has set is seen as if it ran here
        if name.get(None) is not value:
            name.set(value)
    return task.result()


def _begun(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], context: contextvars.Context
) -> asyncio.Task[T]:
    """A task that has gone as far as it can without waiting, where Python has such tasks."""
    try:
        plain = loop.get_task_factory() is None
    except NotImplementedError:
        plain = False
    if not plain:  # and need not know of contexts
        return loop.create_task(_telling(work, context))
    if sys.version_info >= (3, 12):
        return asyncio.Task(work, loop=loop, context=context, eager_start=True)
    return loop.create_task(work, context=context)


async def _telling(work: Coroutine[Any, Any, T], context: contextvars.Context) -> T:
    """Do ``work``, and tell ``context`` what it has set."""
    try:
        return await work
    finally:
        for name, value in contextvars.copy_context().items():
            context.run(name.set, value)


def _finished_alone(job: Job, bound: asyncio.TimerHandle, task: asyncio.Task[Any]) -> None:
    """Nobody waits for this outcome any more: say what is lost with it."""
    bound.cancel()
    if task.cancelled():
        logger.warning(
            "%s was cut off after its caller had gone (scope=%s key=%s): what it did is unknown, "
            "and the lease decides when a retry may run",
            job.operation,
            job.key.scope.hash,
            job.key.shown,
        )
    elif (error := task.exception()) is not None:
        logger.warning(
            "%s failed after its caller had gone (scope=%s key=%s)",
            job.operation,
            job.key.scope.hash,
            job.key.shown,
            exc_info=error,
        )
