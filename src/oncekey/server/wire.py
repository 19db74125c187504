"""What a connection may cost before a request is whole: so many bytes, and so many seconds.

Uvicorn reads heads of any length for any time, and adds trailers to the headers of a request that
is already being served. Whoever reaches the port needs no signature and no login for that.
"""

from __future__ import annotations

from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["HEAD_SECONDS", "MOST_HEAD", "BoundedProtocol"]

MOST_HEAD: Final = 65_536
"""Bytes of a request's line and headers, of its trailers, or between two pieces of its body."""
HEAD_SECONDS: Final = 20.0
"""For a head to be whole; and for the rest of a request that was answered already."""
_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class BoundedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol, with bounds."""

    head_seconds = HEAD_SECONDS
    _unspent = 0  # bytes since the last of them that belonged to something
    _in_head = True
    _in_request = False
    _ends: Any = None

    def connection_made(self, transport: Any) -> None:
        """Somebody is there: a head is due."""
        super().connection_made(transport)
        self._hurry()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is."""
        self._rest()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what is no body, and hang up when that is too much."""
        self._unspent += len(data)
        super().data_received(data)
        if self._unspent > MOST_HEAD and not self.transport.is_closing():
            if self._in_head:
                self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._in_head = self._in_request = True
        if self._ends is None:
            self._hurry()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; trailers are left out."""
        if self._in_head:  # a trailer is nobody's header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._rest()
        self._in_head, self._unspent = False, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body, which is the app's to bound."""
        self._unspent = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._rest()
        self._unspent, self._in_request = 0, False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """It was answered, perhaps before it was whole."""
        super().on_response_complete()
        if self._in_request and not self._in_head:
            self._hurry()  # a sender that is still at it may read the answer, then it is cut

    def _hurry(self) -> None:
        self._rest()
        self._ends = self.loop.call_later(self.head_seconds, self.transport.close)

    def _rest(self) -> None:
        if self._ends is not None:
            self._ends.cancel()
            self._ends = None
