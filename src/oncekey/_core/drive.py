"""Two drivers for one protocol: ``run`` for sync stores, ``arun`` for async ones.

A flow is a generator. It yields what it wants done and gets the result sent back, so that the
protocol is written once and neither form hides a loop or a thread.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

from oncekey.abc import AsyncStore, Store
from oncekey.errors import BackendMismatchError
from oncekey.models import Key

__all__ = ["Flow", "Op", "Pause", "arun", "run"]

T = TypeVar("T")


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
    """Run a flow on a sync store, in this thread. An interrupt between two steps is the flow's."""
    return _resume(flow, store, flow.send, None)


def _resume(flow: Flow[T], store: Store, resume: Callable[[Any], Any], value: Any) -> T:
    try:
        while True:
            resume, value = _take(resume(value), store, flow)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    except BaseException as error:
        value = (
            None  # an error that knows this frame: what it holds must not wait for the collector
        )
        if inspect.getgeneratorstate(flow) == inspect.GEN_CLOSED:
            raise  # that is how the flow ended
        return _resume(flow, store, flow.throw, error)


def _take(step: Op | Pause, store: Store, flow: Flow[Any]) -> tuple[Callable[[Any], Any], Any]:
    """Take one step. Gives how the flow goes on, and with what."""
    try:
        if isinstance(step, Op):
            return flow.send, getattr(step.on or store, step.method)(*step.args)
        _must_not_stall()
        store.wait(step.key, step.seconds)
        return flow.send, None
    except BaseException as error:  # noqa: BLE001 - the flow decides what it means
        return flow.throw, error


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


async def arun(flow: Flow[T], store: AsyncStore) -> T:
    """Run a flow on an async store, in this task."""
    try:
        step = next(flow)
        while True:
            try:
                result = None
                if isinstance(step, Op):
                    result = await getattr(step.on or store, step.method)(*step.args)
                else:
                    await store.wait(step.key, step.seconds)
            except BaseException as error:  # noqa: BLE001 - the flow decides what it means
                step = flow.throw(error)
            else:
                step = flow.send(result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
