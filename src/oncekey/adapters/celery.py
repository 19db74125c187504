"""Celery tasks that take effect once for each key, however often their messages come.

    from celery import Celery
    from oncekey import Once
    from oncekey.adapters.celery import idempotent

    app = Celery("shop", broker="redis://localhost:6379/0")
    once = Once("postgresql://localhost/shop")

    @app.task(acks_late=True)
    @idempotent(once, key="order_id")
    def charge(order_id: str, cents: int) -> dict:
        return {"order": order_id, "charged": cents}

A copy of a task that is done gets its answer, as its own result. A copy that finds another running
gives its worker back at once and comes again later (``in_flight="retry"``), or is forgotten. An
error frees the key, and so do ``self.retry(...)`` and ``autoretry_for``: the retry runs.

Never take the task's id for the key. A redelivery has the same one, but a task that was sent again,
because its sender was not sure, has another.

``@once(key=...)`` of plain ``Once`` works too; a copy that finds another running then waits for it,
in the worker.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar, Unpack

from oncekey._core.binding import KeySource
from oncekey.adapters._tasks import InFlight, guarded_task
from oncekey.adapters._webhooks import missing
from oncekey.errors import BackendMismatchError, IdempotencyInFlightError
from oncekey.guard import Once
from oncekey.policy import PolicyOptions

try:
    from celery import current_task  # type: ignore[import-untyped]
    from celery.exceptions import Ignore, Reject, Retry  # type: ignore[import-untyped]
except ImportError as error:
    raise missing("Celery", "celery") from error

__all__ = ["idempotent", "once_task"]

F = TypeVar("F", bound=Callable[..., Any])


def idempotent(
    once: Once,
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
    """Decorate the function of a task, under ``@app.task(...)``; also with ``bind=True``.

    Args:
        once: The guard.
        key: Which argument is the key. See ``Once``; never the id of the task.
        name: What keeps its keys apart from other functions'. See ``Once``.
        ignore: Arguments that are not compared. ``self`` of a bound task never is.
        in_flight: What a copy does that finds another running. ``retry``: it is sent again,
            for later; that does not count as one of its retries.
            ``drop``: it is ignored, and has no result. A worker that died seems to be running
            until its lease ends, so that dropping can lose its task: only for work that may be
            lost.
        retry_seconds: After how many seconds such a copy comes again, at most.
        transactional: Run the task in a transaction of the store's database. See ``Once``.
        on: Where that transaction is, if not on the store's own connections.
        **options: Options of ``Policy``. ``wait`` is 0 here, unless it is given.

    Raises:
        PolicyError: An option can't work.
        BackendMismatchError: ``once`` is an ``AsyncOnce``.
    """
    if not isinstance(once, Once):
        raise BackendMismatchError(
            f"Celery runs synchronous tasks: pass a Once, got {type(once).__name__}"
        )

    give_way = functools.partial(_give_way, in_flight)
    return guarded_task(
        once, key, ignore, in_flight, retry_seconds, give_way, transactional, on, options, name
    )


once_task = idempotent  # as it was called before


def _give_way(in_flight: InFlight, error: IdempotencyInFlightError, seconds: float) -> NoReturn:
    """End a task whose work another one is doing."""
    task: Any = current_task
    request = task.request if task else None
    if request is None or request.called_directly or request.is_eager:
        raise error  # there is no message that could come again
    if in_flight == "drop":
        raise Ignore from error
    # As task.retry() does it, but for the count: the task did not fail.
    again = task.signature_from_request(request, countdown=seconds, retries=request.retries)
    try:
        again.apply_async()
    except Exception as failed:  # noqa: BLE001 - the broker's; its message comes again
        raise Reject(failed, requeue=True) from error
    raise Retry(exc=error, when=seconds, sig=again) from error
