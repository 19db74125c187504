"""Work that goes on, whatever becomes of the task that wants it done."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from oncekey._core.call import Job
    from oncekey._core.flows import Claim

__all__ = ["in_background", "outliving", "uncancelled"]

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
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except BaseException:  # noqa: BLE001 - task.result() raises it again below
            break
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # taken note of: the cancellation is what the caller gets
        raise cancelled
    return task.result()


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

        def done(task: asyncio.Task[T]) -> None:
            kept.discard(task)
            if not over.done():
                over.set_result(None)

        task.add_done_callback(done)
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
    if not _makes_plain_tasks(loop):  # and need not know of contexts
        return loop.create_task(_telling(work, context))
    if sys.version_info >= (3, 12):
        return asyncio.Task(work, loop=loop, context=context, eager_start=True)
    return loop.create_task(work, context=context)


def _makes_plain_tasks(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return loop.get_task_factory() is None
    except NotImplementedError:
        return False


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
