"""How long stores and handlers take, and which handlers run: told to those who want timings.

Callers look at ``events._timers`` first, so that all of it is free when nobody does.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from oncekey.instrument.events import EventKind, emit

__all__ = ["Running", "Timed", "called", "ended", "oldest", "running", "started", "store_kind"]

CALLS: Final = frozenset(
    ("claim", "complete", "renew", "release", "first_seen", "read", "write", "peek", "sweep")
)


class Running(NamedTuple):
    """A handler that runs.

    Attributes:
        since: Seconds since 1970.
        begun: The same on the clock that no change of time moves.
        outer: What was being handled as an error when it began.
    """

    since: float
    begun: float
    outer: BaseException | None


running: dict[str, dict[int, Running]] = {}
"""By operation, the handlers that run in this process, the oldest first, while anybody asks."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=running.clear)


def started(claim: Any) -> None:
    """The handler of a claim begins: told in the context that it runs in."""
    outer = sys.exc_info()[1]
    here = running.setdefault(claim.operation, {})
    here[id(claim)] = Running(time.time(), time.perf_counter(), outer)
    emit(
        EventKind.STARTED,
        claim.key,
        claim.operation,
        fence=claim.fence,
        attempts=claim.attempts,
    )


def ended(claim: Any, error: BaseException | None = None) -> None:
    """The handler of a claim has ended, with an error or not. Only the first call tells."""
    found = running.get(claim.operation, {}).pop(id(claim), None)
    if found is None:  # it began before anybody listened
        return
    if error is None and (raised := sys.exc_info()[1]) is not found.outer:
        error = raised
    emit(
        EventKind.ENDED,
        claim.key,
        claim.operation,
        duration=time.perf_counter() - found.begun,
        fence=claim.fence,
        attempts=claim.attempts,
        error=type(error).__name__ if error is not None else "",
    )


def oldest(operation: str) -> Running | None:
    """The handler of ``operation`` that has run for longest in this process."""
    while True:
        try:
            return next(iter(running.get(operation, {}).values()), None)
        except RuntimeError:  # another thread came between
            continue


def store_kind(store: Any) -> str:
    """A store's name for labels: ``postgres`` of ``AsyncPostgresStore``."""
    return type(store).__name__.removeprefix("Async").removesuffix("Store").lower()


class Timed:
    """A store, or what stands for one, that tells how long its calls take."""

    __slots__ = ("_store",)

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return _timed(found, name, store_kind(self._store)) if name in CALLS else found


def _timed(call: Callable[..., Any], method: str, store: str) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        begun = time.perf_counter()
        try:
            value = call(*args)
        except BaseException as error:
            called(method, store, begun, error)
            raise
        if inspect.isawaitable(value):
            return _awaited(value, method, store, begun)
        called(method, store, begun)
        return value

    return timed


async def _awaited(value: Awaitable[Any], method: str, store: str, begun: float) -> Any:
    try:
        found = await value
    except BaseException as error:
        called(method, store, begun, error)
        raise
    called(method, store, begun)
    return found


def called(method: str, store: str, begun: float, error: BaseException | None = None) -> None:
    """A call of a store came back that had ``begun`` then, by ``time.perf_counter()``."""
    emit(
        EventKind.STORE_CALL,
        operation=method,
        duration=time.perf_counter() - begun,
        error=type(error).__name__ if error is not None else "",
        store=store,
    )
