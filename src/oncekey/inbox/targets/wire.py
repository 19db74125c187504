"""One HTTP/1.1 connection to a target: a request, its answer, then perhaps the next.

httptools reads the answer, as strictly as it can. What an answer may cost is bounded here, and a
connection on which anything was odd is never used again.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final, cast

import httptools

from oncekey.inbox.targets.replies import Reply, SendError

__all__ = ["Connection"]

BODY_READ: Final = 16_384  # bytes of an answer that are read; then the connection is closed
HEAD_READ: Final = 32_768  # bytes of names and values of headers; more is no answer
MOST_INTERIM: Final = 8  # answers of 1xx before the one that counts
# Bytes on the wire for one answer: chunks of one byte and their extensions count too.
WIRE_READ: Final = 262_144
_PEEK: Final = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_VERSIONS: Final = ("1.1", "1.0")


class _OddError(Exception):
    """Raised inside the parser to stop it."""


class Connection(asyncio.Protocol):
    """One connection. Whoever made it asks only while nothing else is under way.

    Args:
        sock: The connected socket below the transport, to look whether it is still well.
        done: Called when an answer is whole and the connection may be used again.
        lost: Called once, when the connection is over.
    """

    def __init__(
        self,
        sock: socket.socket,
        done: Callable[[Connection], None],
        lost: Callable[[Connection], None],
    ) -> None:
        self.idle_since = 0.0
        self._sock = sock
        self._on_done = done
        self._on_lost = lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[Reply] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._begin()

    def _begin(self) -> None:
        """Nothing of the next answer is known yet."""
        self._why = ""
        self._received = 0
        self._head_size = 0
        self._interim = 0
        self._status = 0  # of the answer that counts, once its head is whole
        self._framed = False  # it says where it ends
        self._coded = False  # by chunks
        self._retry_after: bytes | None = None
        self._body: list[bytes] = []
        self._body_size = 0
        self._whole = False
        self._stays = False  # the connection, after it
        self._extra = False

    # Asking

    @property
    def is_usable(self) -> bool:
        """Whether a request may be sent: the peer has not closed, and said nothing unasked.

        What it did a moment ago may not have reached the loop yet: the socket is asked itself.
        """
        transport = self._transport
        if transport is None or transport.is_closing() or self._waiter is not None:
            return False
        try:
            self._sock.recv(1, _PEEK)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        return False  # an end, or something unasked; of TLS mostly the notice that it is closed

    def ask(self, request: bytes, seconds: float) -> asyncio.Future[Reply]:
        """Send a request; its answer, or a ``SendError`` when the seconds are over."""
        assert self._transport is not None  # noqa: S101 - connected before it is given away
        self._begin()
        self._waiter = waiter = self._loop.create_future()
        self._timer = self._loop.call_later(seconds, self._late)
        self._transport.write(request)
        return waiter

    def close(self) -> None:
        """Hang up at once; whoever waits is told."""
        self._fail("connection closed")

    def _late(self) -> None:
        self._fail("timeout")

    def _fail(self, cause: str) -> None:
        self._settle(SendError(cause))
        self._abort()

    def _settle(self, outcome: Reply | SendError) -> None:
        waiter, self._waiter = self._waiter, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if waiter is not None and not waiter.done():
            if isinstance(outcome, Reply):
                waiter.set_result(outcome)
            else:
                waiter.set_exception(outcome)

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _reply(self) -> Reply:
        after = None if self._retry_after is None else self._retry_after.decode("latin-1")
        return Reply(self._status, after, b"".join(self._body)[:BODY_READ])

    # The transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Read on, to the bounds."""
        if self._waiter is None:  # nobody asked
            self._abort()
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # an upgrade, too
            if not self._whole:
                self._fail(self._why or "bad answer")
                return
            self._extra = True  # the answer is whole; what came after it is not one
        if self._whole:
            self._answered()
        elif self._body_size > BODY_READ or self._received > WIRE_READ:
            if self._status:
                self._settle(self._reply())  # no more of it is read, however much there is
                self._abort()
            else:
                self._fail("answer too large")

    def _answered(self) -> None:
        transport = self._transport
        again = (
            not self._extra
            and self._stays
            and transport is not None
            # An answer that came before the request was out: the rest would be read as the next.
            and not transport.get_write_buffer_size()
        )
        self._settle(self._reply())
        if again:
            self._on_done(self)
        else:
            self._abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits."""
        self._transport = None
        if self._waiter is not None:
            if self._status and not self._framed and exc is None:
                self._settle(self._reply())  # its end is the end of the connection
            elif self._status:
                self._fail("answer cut off")
            else:
                self._fail("connection closed" if exc is None else "connection lost")
        self._parser = None  # it holds this object
        self._on_lost(self)

    # The parser calls

    def on_message_begin(self) -> None:
        """Nothing may come after an answer that is whole."""
        if self._whole:
            self._odd("bad answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note what says how long the answer is, or when to come again."""
        self._head_size += len(name) + len(value) + 4
        if self._head_size > HEAD_READ:
            self._odd("answer too large")
        if self._status:
            return  # a trailer
        name = name.lower()
        if name == b"content-length":
            self._framed = True
        elif name == b"transfer-encoding":
            if self._coded or value.lower() != b"chunked":
                self._odd("bad answer")
            self._framed = self._coded = True
        elif name == b"retry-after" and self._retry_after is None:
            self._retry_after = value

    def on_headers_complete(self) -> None:
        """Judge the status line."""
        status = self._parser.get_status_code()
        version = self._parser.get_http_version()
        if (
            version not in _VERSIONS
            or not 100 <= status < 600
            or status == 101
            or (self._coded and version == "1.0")
        ):
            self._odd("bad answer")
        if status >= 200:
            self._status = status

    def on_body(self, piece: bytes) -> None:
        """Keep the beginning."""
        if self._body_size <= BODY_READ:
            self._body.append(piece)
        self._body_size += len(piece)

    def on_message_complete(self) -> None:
        """An answer is whole, or it was one of 1xx."""
        if self._status:
            self._whole = True
            self._stays = self._parser.should_keep_alive()  # it knows here only
            return
        self._interim += 1
        if self._interim > MOST_INTERIM:
            self._odd("too many interim answers")
        self._framed = self._coded = False
        self._retry_after = None

    def _odd(self, why: str) -> None:
        self._why = why
        raise _OddError(why)
