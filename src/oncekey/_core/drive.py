"""The one driver of flows: ``drive`` in this thread, ``adrive`` in this task.

A flow is a generator. It yields what it wants done and gets the result sent back, or what went
wrong thrown in, so that a protocol is written once and neither form hides a loop or a thread.
What a step is and how it is done is up to ``do``. ``run`` and ``arun`` do it on a store.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Generator
from typing import Any, NamedTuple, TypeVar, cast

from oncekey.abc import AsyncStore, Store
from oncekey.errors import BackendMismatchError
from oncekey.instrument import events
from oncekey.instrument.timings import Timed
from oncekey.models import Key

__all__ = ["Flow", "Op", "Pause", "adrive", "arun", "drive", "is_async", "run"]

S = TypeVar("S")
T = TypeVar("T")


def drive(flow: Generator[S, Any, T], do: Callable[[S], Any]) -> T:
    """Run a flow in this thread: ``do`` each step that it yields. Gives what it returns.

    Whatever is raised while the flow stands at a step is the flow's to handle: also an interrupt
    (Ctrl-C, a task's time limit) that comes between two steps.
    """
    return _drive(flow, do, flow.send, None)


def _drive(
    flow: Generator[S, Any, T], do: Callable[[S], Any], resume: Callable[[Any], S], value: Any
) -> T:
    try:
        while True:
            resume, value = _steps(flow, do, resume, value)
    except BaseException as error:
        value = None  # an error knows this frame: what it holds must not wait for the collector
        # Not over yet: this is an interrupt, which came to the driver itself.
        if flow.gi_frame is not None:  # type: ignore[attr-defined]
            return _drive(flow, do, flow.throw, error)
        if isinstance(error, StopIteration):
            return error.value  # type: ignore[no-any-return]
        raise


def _steps(
    flow: Generator[S, Any, Any], do: Callable[[S], Any], resume: Callable[[Any], S], value: Any
) -> tuple[Callable[[Any], S], BaseException]:
    """Take steps for as long as they succeed. Gives how the flow goes on then, and with what.

    Apart, so that whatever comes to these lines from outside is handled by the lines above: in one
    function, Python would leave the line of an inner ``try`` to nobody.
    """
    try:
        while True:
            value = do(resume(value))
            resume = flow.send
    except BaseException as error:
        value = None
        if flow.gi_frame is None:  # type: ignore[attr-defined]
            raise  # that is how the flow ended
        return flow.throw, error


async def adrive(flow: Generator[S, Any, T], do: Callable[[S], Awaitable[Any]]) -> T:
    """Run a flow in this task: await what ``do`` makes of each step. Gives what it returns."""
    resume: Callable[[Any], S] = flow.send
    value: Any = None
    while True:
        try:
            value = await do(resume(value))
            resume = flow.send
        except BaseException as error:
            value = None  # see above
            if flow.gi_frame is not None:  # type: ignore[attr-defined]
                resume, value = flow.throw, error
            elif isinstance(error, StopIteration):
                return error.value  # type: ignore[no-any-return]
            else:
                raise


class Op(NamedTuple):
    """Call a method of the store, or of ``on``."""

    method: str
    args: tuple[Any, ...]
    on: Any = None


class Pause(NamedTuple):
    """Sleep until ``key`` may have changed, at most ``seconds``."""

    key: Key
    seconds: float


Flow = Generator[Op | Pause, Any, T]


def run(flow: Flow[T], store: Store) -> T:
    """Run a flow on a sync store, in this thread."""
    if events._timers:
        store = cast("Store", Timed(store))

    def do(step: Op | Pause) -> Any:
        if isinstance(step, Op):
            return getattr(step.on or store, step.method)(*step.args)
        _must_not_stall()
        return store.wait(step.key, step.seconds)

    return _drive(flow, do, flow.send, None)


async def arun(flow: Flow[T], store: AsyncStore) -> T:
    """Run a flow on an async store, in this task."""
    if events._timers:
        store = cast("AsyncStore", Timed(store))

    def do(step: Op | Pause) -> Awaitable[Any]:
        if isinstance(step, Op):
            found: Awaitable[Any] = getattr(step.on or store, step.method)(*step.args)
            return found
        return store.wait(step.key, step.seconds)

    return await adrive(flow, do)


def is_async(handler: Callable[..., Any]) -> bool:
    """Whether calling ``handler`` gives something to await: also partials and objects."""
    target = handler
    while isinstance(target, functools.partial):
        target = target.func
    if asyncio.iscoroutinefunction(target):  # unlike the one of inspect, it knows all mocks
        return True
    return inspect.iscoroutinefunction(getattr(target, "__call__", None))  # noqa: B004


def _must_not_stall() -> None:
    """Refuse to sleep in an event loop's thread: whoever is waited for may be in that loop too."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise BackendMismatchError(
        "a synchronous guard has to wait for another call with its key, and would stall the event "
        "loop that runs in this thread: use AsyncOnce, call it with asyncio.to_thread(...), or "
        "pass wait=0"
    )
