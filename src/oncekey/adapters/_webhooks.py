"""What the webhook adapters share. Imports no framework.

An adapter reads the body with ``read_chunks`` or ``read_stream``, which stop where the receiver's
limit is passed; calls the receiver, in an event loop with ``deliver``; and sends what it answers.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import sys
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any, Final

from oncekey.receiver import AsyncWebhookReceiver, WebhookReceiver, WebhookResponse
from oncekey.signatures.delivery import RawHeaders

__all__ = [
    "CUT_SHORT",
    "NOT_ALLOWED",
    "AnyReceiver",
    "ClientGoneError",
    "close_receiver",
    "deliver",
    "missing",
    "read_chunks",
    "read_stream",
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

THREADS: Final = 32  # of sync receivers, in one event loop; more deliveries wait for their turn
_PIECE: Final = 65_536
_LONGEST_NUMBER: Final = 20  # digits; int() of a longer one costs time

# A copy that waits for another holds a thread, so these are not the loop's own, which resolve
# names. A pool lives as long as its loop, and so does not outlive a fork.
_pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, ThreadPoolExecutor] = (
    weakref.WeakKeyDictionary()
)
# Also keeps the tasks alive: a loop holds them weakly.
_running: dict[asyncio.Task[WebhookResponse], AnyReceiver] = {}


class ClientGoneError(Exception):
    """The client went away before its whole body was here: nothing is to be handled."""


def missing(package: str, extra: str) -> ImportError:
    """What to raise where a framework can't be imported."""
    return ImportError(f"this adapter needs {package}: run pip install 'oncekey[{extra}]'")


# Bodies


class _Body:
    """Collects a body until it is longer than is taken.

    Of one that is too long, a stand-in of one byte over the limit is given: a receiver looks at
    nothing but its length, and answers 413 and tells its audit sink as for any other refusal.
    """

    def __init__(self, most: int, declared: str | bytes | None) -> None:
        self._most = most
        self._bytes = bytearray()  # a list of pieces of one byte each would take fifty times that
        self.declared: int | None = None
        if declared is not None and declared.isascii() and declared.isdigit():
            self.declared = int(declared) if len(declared) <= _LONGEST_NUMBER else most + 1
        self.too_long = self.declared is not None and self.declared > most

    def add(self, chunk: bytes) -> bool:
        """Take a piece. ``False``: it is too long now, and no more is to be read."""
        self.too_long = len(self._bytes) + len(chunk) > self._most
        if self.too_long:
            self._bytes.clear()
        else:
            self._bytes += chunk
        return not self.too_long

    @property
    def room(self) -> int:
        """How much to ask for next: never more than shows that it is too long."""
        end = self._most + 1 if self.declared is None else self.declared
        return min(end - len(self._bytes), _PIECE)

    def value(self) -> bytes:
        """The body, or the stand-in."""
        return bytes(self._most + 1 if self.too_long else self._bytes)


async def read_chunks(
    chunks: AsyncGenerator[bytes, None], most: int, declared: str | bytes | None = None
) -> bytes:
    """Read a body, but not on once it is longer than ``most``.

    Args:
        chunks: The body in pieces, as the server gives them. Not touched if ``declared`` is over.
        most: The receiver's ``settings.max_body_bytes``.
        declared: The ``Content-Length`` field, if there is one.

    Returns:
        The body; for one that is too long, other bytes that are too long.
    """
    body = _Body(most, declared)
    async with aclosing(chunks):
        if not body.too_long:
            async for chunk in chunks:
                if not body.add(chunk):
                    break
    return body.value()


def read_stream(
    read: Callable[[int], bytes], most: int, declared: str | bytes | None = None
) -> bytes:
    """``read_chunks`` for a file: ``read(n)`` gives ``n`` bytes at most, and none at its end.

    Never asks for more than ``declared``, since a WSGI server may wait for what does not come.
    """
    body = _Body(most, declared)
    while not body.too_long and body.room > 0:
        chunk = read(body.room)
        if not chunk:
            break
        body.add(chunk)
    return body.value()


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
        work = _in_thread(functools.partial(receiver.receive, method, url, headers, body))
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


async def _in_thread(function: Callable[[], WebhookResponse]) -> WebhookResponse:
    loop = asyncio.get_running_loop()
    pool = _pools.get(loop)
    if pool is None:
        pool = _pools[loop] = ThreadPoolExecutor(THREADS, thread_name_prefix="oncekey-webhook")
    return await loop.run_in_executor(pool, contextvars.copy_context().run, function)


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
