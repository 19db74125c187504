"""What the webhook adapters share. Imports no framework.

An adapter reads the body with what ``oncekey.http.body`` has, which stops where the receiver's
limit is passed; calls the receiver, in an event loop with ``deliver``; and sends what it answers.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

from oncekey.adapters._threads import in_thread
from oncekey.http.body import ClientGoneError, SlowBodyError, read_chunks
from oncekey.receiver import AsyncWebhookReceiver, WebhookReceiver, WebhookResponse
from oncekey.signatures.delivery import RawHeaders

__all__ = [
    "NOT_ALLOWED",
    "AnyReceiver",
    "ClientGoneError",
    "close_receiver",
    "cut_short",
    "deliver",
    "missing",
    "read_chunks",
    "settle",
    "webhook_lifespan",
]

AnyReceiver = WebhookReceiver | AsyncWebhookReceiver

NOT_ALLOWED: Final = WebhookResponse(
    405,
    {"Allow": "POST", "Content-Type": "application/json"},
    b'{"error": "method_not_allowed", "message": "send deliveries by POST"}',
    "rejected",
    "method_not_allowed",
)
CUT_SHORT: Final = WebhookResponse(
    400,
    {"Content-Type": "application/json"},
    b'{"error": "body_incomplete", "message": "the body ended too early"}',
    "rejected",
    "body_incomplete",
)
TOO_SLOW: Final = WebhookResponse(
    408,
    {"Content-Type": "application/json"},
    b'{"error": "body_timeout", "message": "the body took too long: send it again"}',
    "rejected",
    "body_timeout",
)

# Also keeps the tasks alive: a loop holds them weakly.
_running: dict[asyncio.Task[WebhookResponse], AnyReceiver] = {}


def missing(package: str, extra: str) -> ImportError:
    """What to raise where a framework can't be imported."""
    return ImportError(f"this adapter needs {package}: run pip install 'oncekey[{extra}]'")


def cut_short(error: Exception) -> WebhookResponse:
    """The answer to a body that is not whole: its client went away, or is too slow."""
    return TOO_SLOW if isinstance(error, SlowBodyError) else CUT_SHORT


# Receivers in an event loop


async def deliver(
    receiver: AnyReceiver, method: str, url: str, headers: RawHeaders, body: bytes
) -> WebhookResponse:
    """Give a receiver one delivery: an async one in this loop, a sync one in a thread.

    A caller that is cancelled, as some servers do when the client goes away, leaves it running:
    the handler ends and its outcome is recorded, so that the sender's retry is a duplicate.
    """
    if isinstance(receiver, AsyncWebhookReceiver):
        work = receiver.receive(method, url, headers, body)
    else:
        work = in_thread("webhook", receiver.receive, method, url, headers, body)
    task = _started(work)
    if task.done():
        return task.result()
    _running[task] = receiver
    task.add_done_callback(_ended)
    return await asyncio.shield(task)


if sys.version_info >= (3, 12):

    def _started(
        work: Coroutine[Any, Any, WebhookResponse],
    ) -> asyncio.Task[WebhookResponse]:
        """A task that has begun already: most duplicates are answered before anybody waits."""
        return asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)

else:

    def _started(
        work: Coroutine[Any, Any, WebhookResponse],
    ) -> asyncio.Task[WebhookResponse]:
        return asyncio.get_running_loop().create_task(work)


def _ended(task: asyncio.Task[WebhookResponse]) -> None:
    del _running[task]


def webhook_lifespan(*receivers: AnyReceiver) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """A lifespan for an app: when it shuts down, wait for deliveries under way, close the stores.

    Args:
        receivers: Whose stores are closed, also those that they did not open themselves.

    Example:
        >>> app = FastAPI(lifespan=webhook_lifespan(receiver))  # doctest: +SKIP
    """

    @asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        try:
            yield
        finally:
            for receiver in receivers:
                await close_receiver(receiver)

    return lifespan


async def close_receiver(receiver: AnyReceiver) -> None:
    """Wait for a receiver's deliveries in this loop, then close its store."""
    await settle(receiver)
    if isinstance(receiver, AsyncWebhookReceiver):
        await receiver.aclose()
    else:
        await asyncio.to_thread(receiver.close)


async def settle(receiver: AnyReceiver) -> None:
    """Wait for a receiver's deliveries in this loop, also those whose caller was cancelled."""
    loop = asyncio.get_running_loop()
    tasks = [
        task
        for task, whose in list(_running.items())
        if whose is receiver and task.get_loop() is loop
    ]
    if tasks:
        await asyncio.wait(tasks)
