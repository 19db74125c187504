"""What the adapters for task queues share. Imports none of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, NoReturn, TypeVar

from oncekey._core import drive
from oncekey._core.binding import KeySource
from oncekey.errors import (
    IdempotencyConflictError,
    IdempotencyInFlightError,
    IdempotencyRecursionError,
    InvalidKeyError,
    PolicyError,
)
from oncekey.guard import AsyncOnce, Once
from oncekey.policy import PolicyOptions, check_seconds

__all__ = ["InFlight", "guarded_task"]

F = TypeVar("F", bound=Callable[..., Any])
InFlight = Literal["retry", "drop"]
IN_FLIGHT: Final = ("retry", "drop")


def guarded_task(
    once: Once | AsyncOnce,
    key: KeySource,
    ignore: Iterable[str],
    in_flight: InFlight,
    retry_seconds: float,
    give_way: Callable[[IdempotencyInFlightError, float], NoReturn],
    transactional: bool,
    on: Any,
    options: PolicyOptions,
    name: str | None,
) -> Callable[[F], F]:
    """Decorate a task. ``give_way`` raises what a copy that finds another running ends with.

    It gets the error, and the seconds after which the copy is to come again.

    Raises:
        InvalidKeyError: There is no key.
        PolicyError: ``in_flight`` or an option has a value that can't work.
        TransactionRefusedError: ``transactional``, and the store has no transactions.
    """
    # Long: both forms of a task, which differ by what is awaited.
    _check(key, in_flight, retry_seconds)
    run = once.runner(transactional, on, options)
    # A worker that waits for another does nothing else meanwhile.
    options = {"wait": 0, **options}

    def give(error: IdempotencyInFlightError, work: _Work) -> NoReturn:
        if work.begun or isinstance(error, IdempotencyRecursionError):
            raise error  # of something that the task called; or it calls itself
        # The lease says how long a dead holder would be waited for; a live one may be done soon.
        give_way(error, min(error.retry_after or retry_seconds, retry_seconds))

    def decorate(function: F) -> Any:
        left_out = {ignore} if isinstance(ignore, str) else set(ignore)
        if callable(function) and "self" in inspect.signature(function).parameters:
            left_out.add("self")  # of a bound task, of which there is one
        binding = once.bind(function, key, left_out, options, name)

        @functools.wraps(function)
        async def asynchronous(*args: Any, **kwargs: Any) -> Any:
            work, job = _Work(function), binding.job(args, kwargs)
            try:
                return (await run(job, work, args, kwargs)).value
            except IdempotencyConflictError as error:
                await drive.arun(binding.explain(error, job), once.store)
                raise
            except IdempotencyInFlightError as error:
                give(error, work)

        @functools.wraps(function)
        def synchronous(*args: Any, **kwargs: Any) -> Any:
            work, job = _Work(function), binding.job(args, kwargs)
            try:
                return run(job, work, args, kwargs).value
            except IdempotencyConflictError as error:
                drive.run(binding.explain(error, job), once.store)
                raise
            except IdempotencyInFlightError as error:
                give(error, work)

        return asynchronous if isinstance(once, AsyncOnce) else synchronous

    return decorate


def _check(key: KeySource, in_flight: InFlight, retry_seconds: float) -> None:
    if not key:
        raise InvalidKeyError('say which argument is the key: idempotent(once, key="order_id")')
    if in_flight not in IN_FLIGHT:
        raise PolicyError(f"in_flight must be one of {', '.join(IN_FLIGHT)}, got {in_flight!r}")
    check_seconds(retry_seconds=retry_seconds)
    if not retry_seconds > 0:
        raise PolicyError(f"retry_seconds must be above 0, got {retry_seconds!r}")


class _Work:
    """A function to be called, that knows whether it was."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.begun = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.begun = True
        return self._function(*args, **kwargs)
