"""One reader of bodies for every adapter: never more than is taken, and never half a body.

A body ends early if its client goes away, breaks off a chunk, or sends less than it declared.
Servers of ASGI say so; of WSGI they end the stream, or fail.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import aclosing
from typing import Any, Final

__all__ = [
    "ClientGoneError",
    "asgi_body",
    "declared_length",
    "read_chunks",
    "read_stream",
    "whole_body",
    "wsgi_body",
]

_PIECE: Final = 65_536
_LONGEST_NUMBER: Final = 20  # digits; int() of a longer one costs time


class ClientGoneError(Exception):
    """The client went away before its whole body was here: nothing is to be handled."""


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
    chunks: AsyncGenerator[bytes, None], most: int, declared: str | bytes | None = None
) -> bytes:
    """Read a body, but not on once it is longer than ``most``.

    Args:
        chunks: The body in pieces, as the server gives them. Not touched if ``declared`` is over.
        most: How long a body may be, in bytes.
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


async def asgi_body(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    most: int,
    declared: str | bytes | None = None,
) -> bytes:
    """``read_chunks`` for an ASGI request.

    Raises:
        ClientGoneError: The client hung up before the end of its body.
    """
    body = _Body(most, declared)
    more = not body.too_long
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGoneError
        more = body.add(message.get("body", b"")) and message.get("more_body", False)
    return body.value()


def wsgi_body(environ: Mapping[str, Any], most: int) -> bytes:
    """``read_chunks`` for a WSGI request.

    A body without a length is read only where the server ends it (``wsgi.input_terminated``).

    Raises:
        ClientGoneError: It can't be read, or there is less of it than its length says.
    """
    declared = environ.get("CONTENT_LENGTH") or ""
    if declared_length(declared) is None:
        if not environ.get("wsgi.input_terminated"):
            return b""
        declared = ""
    return whole_body(environ["wsgi.input"].read, most, declared)


def whole_body(read: Callable[[int], bytes], most: int, declared: str | bytes) -> bytes:
    """Read a body of ``declared`` bytes, or of any number if that is empty.

    Raises:
        ClientGoneError: It can't be read, or there is less of it.
    """
    try:
        body = read_stream(read, most, declared or None)
    except Exception as error:  # each server has an error of its own for a broken chunk
        raise ClientGoneError from error
    if len(body) <= most and len(body) < (declared_length(declared) or 0):
        raise ClientGoneError
    return body
