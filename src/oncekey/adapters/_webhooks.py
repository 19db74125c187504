"""What the webhook adapters share. Imports no framework.

In every framework ``webhooks(receiver, path, ...)`` makes what that framework puts at a path. An
adapter reads the body with what ``oncekey.http.body`` has, which stops where the receiver's limit
is passed; calls the receiver, in an event loop with ``deliver``; and sends what it answers.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

from oncekey.adapters._threads import in_thread
from oncekey.errors import BackendMismatchError
from oncekey.http.answer import Answer, fields_of
from oncekey.http.body import ClientGoneError, SlowBodyError, read_chunks
from oncekey.receiver import AsyncWebhookReceiver, WebhookReceiver, WebhookResponse
from oncekey.signatures.delivery import RawHeaders

__all__ = [
    "NOT_ALLOWED",
    "AnyReceiver",
    "ClientGoneError",
    "answer_of",
    "check_sync",
    "close_receiver",
    "cut_short",
    "deliver",
    "methods_of",
    "missing",
    "receive",
    "settle",
    "webhook_lifespan",
]

AnyReceiver = WebhookReceiver | AsyncWebhookReceiver


def _refused(status: int, error: str, message: str, **headers: str) -> WebhookResponse:
    body = f'{{"error": "{error}", "message": "{message}"}}'.encode()
    return WebhookResponse(
        status, {**headers, "Content-Type": "application/json"}, body, "rejected", error
    )


NOT_ALLOWED: Final = _refused(405, "method_not_allowed", "send deliveries by POST", Allow="POST")
CUT_SHORT: Final = _refused(400, "body_incomplete", "the body ended too early")
TOO_SLOW: Final = _refused(408, "body_timeout", "the body took too long: send it again")

# Also keeps the tasks alive: a loop holds them weakly.
_running: dict[asyncio.Task[WebhookResponse], AnyReceiver] = {}


def missing(package: str, extra: str) -> ImportError:
    """What to raise where a framework can't be imported."""
    return ImportError(f"this adapter needs {package}: run pip install 'oncekey[{extra}]'")


def methods_of(receiver: AnyReceiver) -> list[str]:
    """POST; and GET, where the provider checks an endpoint by it."""
    facts = getattr(receiver.provider, "facts", None)
    return ["POST", "GET"] if getattr(facts, "greeting", None) else ["POST"]


def cut_short(error: Exception) -> WebhookResponse:
    """The answer to a body that is not whole: its client went away, or is too slow."""
    return TOO_SLOW if isinstance(error, SlowBodyError) else CUT_SHORT


def answer_of(received: WebhookResponse) -> Answer:
    """What a receiver answers, as servers are given it."""
    return Answer(received.status, fields_of(received.headers.items()), received.body)


def check_sync(receiver: Any, where: str) -> WebhookReceiver:
    """Return a receiver that can be called without an event loop.

    Raises:
        BackendMismatchError: This is none.
    """
    if not isinstance(receiver, WebhookReceiver):
        raise BackendMismatchError(
            f"{where} needs a WebhookReceiver with a sync store, got {type(receiver).__name__}"
        )
    return receiver


# Receivers in an event loop


async def receive(
    receiver: AnyReceiver,
    method: str,
    url: str,
    headers: RawHeaders,
    chunks: AsyncGenerator[bytes, None],
    declared: str | None,
    keep: Callable[[bytes], object],
) -> WebhookResponse:
    """Read the body of a delivery, and ``deliver`` it.

    Args:
        receiver: The receiver.
        method: Of the request.
        url: As its sender wrote it.
        headers: All fields.
        chunks: The body. Raises a ``ClientGoneError`` if it ends early.
        declared: The ``Content-Length`` field, if there is one.
        keep: Called with a body that is not too long, for whoever reads it afterwards.
    """
    settings = receiver.settings
    try:
        body = await read_chunks(chunks, settings.max_body_bytes, declared, settings.body_seconds)
    except ClientGoneError as error:
        return cut_short(error)
    if len(body) <= settings.max_body_bytes:
        keep(body)
    return await deliver(receiver, method, url, headers, body)


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
