"""Dramatiq actors that take effect once for each key, however often their messages come.

    import dramatiq
    from oncekey import Once
    from oncekey.adapters.dramatiq import idempotent

    once = Once("postgresql://localhost/shop")

    @dramatiq.actor
    @idempotent(once, key="order_id")
    def charge(order_id: str, cents: int) -> None:
        ...

A copy of a message that is done gets its answer, as its own result. A copy that finds another
running gives its worker back at once and comes again later (``in_flight="retry"``), or is skipped.
An error frees the key, and Dramatiq's retry runs.

Never take the message's id for the key. A redelivery has the same one, but a message that was sent
again, because its sender was not sure, has another.

Coming again counts as a retry of the message, unless the broker has the ``CurrentMessage``
middleware: add it, or a copy of a long task may run out of retries while that runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar, Unpack

from oncekey._core.binding import KeySource
from oncekey.adapters._tasks import InFlight, guarded_task
from oncekey.adapters._webhooks import missing
from oncekey.errors import IdempotencyInFlightError
from oncekey.guard import AsyncOnce, Once
from oncekey.policy import PolicyOptions

try:
    from dramatiq.errors import Retry
    from dramatiq.middleware import CurrentMessage, SkipMessage
except ImportError as error:
    raise missing("Dramatiq", "dramatiq") from error

__all__ = ["idempotent", "once_actor"]

F = TypeVar("F", bound=Callable[..., Any])


def idempotent(
    once: Once | AsyncOnce,
    *,
    key: KeySource = "",
    name: str | None = "",
    ignore: Iterable[str] = (),
    in_flight: InFlight = "retry",
    retry_seconds: float = 5,
    transactional: bool = False,
    on: Any = None,
    **options: Unpack[PolicyOptions],
) -> Callable[[F], F]:
    """Decorate the function of an actor, under ``@dramatiq.actor``.

    Args:
        once: The guard: ``AsyncOnce`` for an actor that is a coroutine function.
        key: Which argument is the key. See ``Once``; never the id of the message.
        name: What keeps its keys apart from other functions'. See ``Once``.
        ignore: Arguments that are not compared.
        in_flight: What a copy does that finds another running. ``retry``: it comes again later.
            ``drop``: it is skipped, and has no result. A worker that died seems to be running until
            its lease ends, so that dropping can lose its message: only for work that may be lost.
        retry_seconds: After how many seconds such a copy comes again, at most.
        transactional: Run the actor in a transaction of the store's database. See ``Once``.
        on: Where that transaction is, if not on the store's own connections.
        **options: Options of ``Policy``. ``wait`` is 0 here, unless it is given.

    Raises:
        PolicyError: An option can't work.
        BackendMismatchError: A coroutine function with ``Once``, or another one with ``AsyncOnce``.
    """
    give_way = functools.partial(_give_way, in_flight)
    return guarded_task(
        once, key, ignore, in_flight, retry_seconds, give_way, transactional, on, options, name
    )


once_actor = idempotent  # as it was called before


def _give_way(in_flight: InFlight, error: IdempotencyInFlightError, seconds: float) -> NoReturn:
    """End a message whose work another one is doing."""
    if in_flight == "drop":
        raise SkipMessage(str(error)) from error
    message = CurrentMessage.get_current_message()
    if message is not None:
        # The middleware for retries is about to count this one, though nothing has failed.
        message.options["retries"] = message.options.get("retries", 0) - 1
    raise Retry(str(error), delay=max(1, round(seconds * 1000))) from error
