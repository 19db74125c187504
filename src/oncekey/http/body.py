"""One reader of bodies for every adapter: never more than is taken, and never half a body.

A body ends early if its client goes away, breaks off a chunk, or sends less than it declared.
Servers of ASGI say so; of WSGI they end the stream, or fail. One that comes too slowly is given up.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Mapping,
    MutableMapping,
)
from contextlib import (
    AbstractAsyncContextManager,
    aclosing,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from typing import Any, Final

__all__ = [
    "ClientGoneError",
    "Deadline",
    "SlowBodyError",
    "asgi_begun",
    "asgi_body",
    "asgi_rest",
    "declared_length",
    "read_chunks",
    "read_stream",
    "whole_body",
    "wsgi_body",
]

_PIECE: Final = 65_536
_LONGEST_NUMBER: Final = 20  # digits; int() of a longer one costs time
Begun = tuple[Any, Awaitable[Any] | None]  # the first message, or what it will be


class ClientGoneError(Exception):
    """The client went away before its whole body was here: nothing is to be handled."""


class SlowBodyError(ClientGoneError):
    """The body was not here in the time that it is given."""


class Deadline:
    """Until when a body must be here; to be entered around the reading.

    A read of WSGI ends when all that it asked for is here, so a client that sends a byte now and
    then could hold a thread for hours. When the time is over the connection is shut for reading,
    where the server shows it (Gunicorn, werkzeug); elsewhere the clock is looked at between reads.

    Args:
        seconds: How long. ``None``: as long as the server lets it.
        environ: Of a WSGI request.
    """

    def __init__(self, seconds: float | None, environ: Mapping[str, Any]) -> None:
        self._ends = None if seconds is None else time.monotonic() + seconds
        self._connection = environ.get("gunicorn.socket") or environ.get("werkzeug.socket")
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        if seconds is not None and self._connection is not None:
            self._timer = threading.Timer(seconds, self._shut)
            self._timer.daemon = True

    def __enter__(self) -> Deadline:
        if self._timer is not None:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            with self._lock:  # not while it is being shut: its number may soon be another's
                self._connection = None

    @property
    def is_over(self) -> bool:
        """Whether it is past."""
        return self._ends is not None and time.monotonic() >= self._ends

    def _shut(self) -> None:
        with self._lock, suppress(OSError, ValueError):
            if self._connection is not None:
                # A copy: to shut a TLS socket itself would make it send the answer in the clear.
                with socket.socket(fileno=os.dup(self._connection.fileno())) as same:
                    same.shutdown(socket.SHUT_RD)


def declared_length(raw: str | bytes | None) -> int | None:
    """The declared length of a body; ``None`` where none, or none that can be read, is."""
    if raw is None or not raw.isascii() or not raw.isdigit():
        return None
    return int(raw[:_LONGEST_NUMBER])  # of a longer one the beginning is too much already


class _Body:
    """Collects a body until it is longer than is taken.

    Of one that is too long, a stand-in of one byte over the limit is given: whoever takes it looks
    at nothing but its length, and answers 413.
    """

    def __init__(self, most: int, declared: str | bytes | None) -> None:
        self._most = most
        self._bytes = bytearray()  # a list of pieces of one byte each would take fifty times that
        self.declared = declared_length(declared)
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
    chunks: AsyncGenerator[bytes, None],
    most: int,
    declared: str | bytes | None = None,
    seconds: float | None = None,
) -> bytes:
    """Read a body, but not on once it is longer than ``most``.

    Args:
        chunks: The body in pieces, as the server gives them. Not touched if ``declared`` is over.
        most: How long a body may be, in bytes.
        declared: The ``Content-Length`` field, if there is one.
        seconds: How long it may take. ``None``: as long as the server lets it.

    Returns:
        The body; for one that is too long, other bytes that are too long.

    Raises:
        SlowBodyError: It took longer.
    """
    body = _Body(most, declared)
    async with _in_time(seconds), aclosing(chunks):
        if not body.too_long:
            async for chunk in chunks:
                if not body.add(chunk):
                    break
    return body.value()


def _in_time(seconds: float | None) -> AbstractAsyncContextManager[None]:
    return nullcontext() if seconds is None else _within(seconds)


@asynccontextmanager
async def _within(seconds: float) -> AsyncIterator[None]:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise SlowBodyError from None


def read_stream(
    read: Callable[[int], bytes],
    most: int,
    declared: str | bytes | None = None,
    deadline: Deadline | None = None,
) -> bytes:
    """``read_chunks`` for a file: ``read(n)`` gives ``n`` bytes at most, and none at its end.

    Never asks for more than ``declared``, since a WSGI server may wait for what does not come.
    """
    body = _Body(most, declared)
    while not body.too_long and body.room > 0:
        if deadline is not None and deadline.is_over:
            raise SlowBodyError
        chunk = read(body.room)
        if not chunk:
            break
        body.add(chunk)
    return body.value()


async def asgi_body(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    most: int,
    declared: str | bytes | None = None,
    seconds: float | None = None,
) -> bytes:
    """``read_chunks`` for an ASGI request.

    Raises:
        ClientGoneError: The client hung up before the end of its body.
        SlowBodyError: It took longer than ``seconds``.
    """
    if declared is not None and (declared_length(declared) or 0) > most:
        return bytes(most + 1)
    begun = asgi_begun(receive, most)
    return begun if isinstance(begun, bytes) else await asgi_rest(receive, most, seconds, begun)


def asgi_begun(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]], most: int
) -> bytes | Begun:
    """The body, if all of it is here already; else what ``asgi_rest`` goes on with.

    Of one that is too long, a stand-in of one byte over the limit is given.
    """
    steps: Any = receive().__await__()
    try:
        waits_for = next(steps)
    except StopIteration as end:
        message = end.value  # here already, as nearly always
        if message["type"] == "http.request" and not message.get("more_body", False):
            whole: bytes = message.get("body", b"")
            return whole if len(whole) <= most else bytes(most + 1)
        return message, None
    return None, _Rest(steps, waits_for)


async def asgi_rest(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    most: int,
    seconds: float | None,
    begun: Begun,
) -> bytes:
    """The body of which ``asgi_begun`` gave the beginning.

    Raises:
        ClientGoneError: The client hung up before the end of its body.
        SlowBodyError: It took longer than ``seconds``.
    """
    message, rest = begun
    body = _Body(most, None)
    async with _in_time(seconds):  # no clock is needed before something is waited for
        if rest is not None:
            message = await rest
        while True:
            if message["type"] != "http.request":
                raise ClientGoneError
            if not body.add(message.get("body", b"")) or not message.get("more_body", False):
                return body.value()
            message = await receive()


class _Rest:
    """What is left of something to await, after its first step."""

    __slots__ = ("_steps", "_waits_for")

    def __init__(self, steps: Any, waits_for: Any) -> None:
        self._steps = steps
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, Any]:
        """Go on, as ``yield from`` would."""
        try:
            while True:
                try:
                    yield self._waits_for  # event loops send nothing back
                except BaseException as error:
                    if not hasattr(self._steps, "throw"):
                        raise
                    self._waits_for = self._steps.throw(error)
                else:
                    self._waits_for = next(self._steps)
        except StopIteration as end:
            return end.value


def wsgi_body(environ: Mapping[str, Any], most: int, seconds: float | None = None) -> bytes:
    """``read_chunks`` for a WSGI request.

    A body without a length is read only where the server ends it (``wsgi.input_terminated``).

    Raises:
        ClientGoneError: It can't be read, or there is less of it than its length says.
        SlowBodyError: It took longer than ``seconds``.
    """
    declared = environ.get("CONTENT_LENGTH") or ""
    if declared_length(declared) is None:
        if not environ.get("wsgi.input_terminated"):
            return b""
        declared = ""
    stream = environ["wsgi.input"]
    # Where there is one, read1 gives what is here, so that the clock can be looked at in between.
    read = stream.read if seconds is None else getattr(stream, "read1", stream.read)
    return whole_body(read, most, declared, Deadline(seconds, environ))


def whole_body(
    read: Callable[[int], bytes],
    most: int,
    declared: str | bytes,
    deadline: Deadline | None = None,
) -> bytes:
    """Read a body of ``declared`` bytes, or of any number if that is empty.

    Raises:
        ClientGoneError: It can't be read, or there is less of it.
        SlowBodyError: The deadline is over.
    """
    deadline = deadline or Deadline(None, {})
    try:
        with deadline:
            body = read_stream(read, most, declared or None, deadline)
    except Exception as error:  # each server has an error of its own for a broken chunk
        raise _why(deadline) from error
    if len(body) <= most and len(body) < (declared_length(declared) or 0):
        raise _why(deadline)
    return body


def _why(deadline: Deadline) -> ClientGoneError:
    return SlowBodyError() if deadline.is_over else ClientGoneError()
