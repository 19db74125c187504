"""Deliver once, twice or many times at once, and see what became of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from oncekey.errors import PolicyError
from oncekey.testing._report import Report
from oncekey.testing._run import Count, Effects, Flow, Planned, Send, arun, run
from oncekey.testing._samples import SignedDelivery
from oncekey.testing._targets import Answer

if TYPE_CHECKING:
    from oncekey.testing._advice import Kind

__all__ = [
    "adeliver",
    "adeliver_concurrently",
    "adeliver_twice",
    "deliver",
    "deliver_concurrently",
    "deliver_twice",
]


def deliver(target: object, delivery: SignedDelivery) -> Answer:
    """Make one delivery.

    Args:
        target: A ``WebhookReceiver`` or ``AsyncWebhookReceiver``, an ASGI or WSGI app, a URL such
            as ``http://localhost:8000/hooks``, or a function of method, url, headers and body
            that gives a status. An async one gets an event loop for the time of the call.
        delivery: From ``sample`` or ``signed``.

    Returns:
        The answer. An app that raises is answered for with 500, as a server does.

    Raises:
        PolicyError: The target is nothing to deliver to.
    """
    return run(_once(delivery), target)


async def adeliver(target: object, delivery: SignedDelivery) -> Answer:
    """``deliver`` in the running event loop. A target that is not async runs in a thread."""
    return await arun(_once(delivery), target)


def deliver_twice(
    target: object, delivery: SignedDelivery, *, effects: Effects | None = None
) -> Report:
    """Make a delivery, and when it is answered the same again, signed anew as a retry is.

    Args:
        target: As for ``deliver``.
        delivery: From ``sample`` or ``signed``.
        effects: Counts effects: a function that gives a number or a collection, or a list that
            grows. It is asked before and after.

    Returns:
        What was found, for ``assert_handled_once``.
    """
    return run(_several("twice", delivery, 2, effects), target)


async def adeliver_twice(
    target: object, delivery: SignedDelivery, *, effects: Effects | None = None
) -> Report:
    """``deliver_twice`` in the running event loop."""
    return await arun(_several("twice", delivery, 2, effects), target)


def deliver_concurrently(
    target: object, delivery: SignedDelivery, n: int = 8, *, effects: Effects | None = None
) -> Report:
    """Make ``n`` copies of a delivery at the same time.

    Copies may be told to retry while the first is being handled. If all of them are, the kit does
    so once, as the sender would.

    Args:
        target: As for ``deliver``. One that is not async is called from ``n`` threads, which take
            turns at every call of a function: a check and a mark that are two steps are seldom
            missed, also where no database is between them.
        delivery: From ``sample`` or ``signed``.
        n: How many copies.
        effects: As for ``deliver_twice``.

    Returns:
        What was found, for ``assert_handled_once``.
    """
    return run(_several("at once", delivery, n, effects), target)


async def adeliver_concurrently(
    target: object, delivery: SignedDelivery, n: int = 8, *, effects: Effects | None = None
) -> Report:
    """``deliver_concurrently`` in the running event loop."""
    return await arun(_several("at once", delivery, n, effects), target)


def _once(delivery: SignedDelivery) -> Flow[Answer]:
    [answer] = yield Send([Planned(lambda: delivery)])
    return answer  # type: ignore[no-any-return]


def _several(kind: Kind, delivery: SignedDelivery, n: int, effects: Effects | None) -> Flow[Report]:
    if n < 2:
        raise PolicyError(f"n must be 2 or more, got {n}: one copy is no duplicate")
    begun = time.perf_counter()
    before = 0 if effects is None else (yield Count(effects))
    jobs = [Planned(lambda: delivery), *[Planned(delivery.again)] * (n - 1)]
    at_once = kind == "at once"
    answers: list[Any] = yield Send(jobs, n if at_once else 1, shaken=at_once)
    if at_once and all(one.retryable for one in answers):
        answers += yield Send(jobs[-1:])
    after = None if effects is None else (yield Count(effects)) - before
    return Report(kind, answers, 1, after, time.perf_counter() - begun)
