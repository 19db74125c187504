"""``HttpClient``: HTTP/1.1 to one target, on connections that stay open.

Small on purpose: it posts, follows no redirects, uses no proxy, keeps no cookies, decodes nothing
and sends nothing twice. Why it is ours: ``docs/adr/0046-own-http-client.md``.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Awaitable, Mapping
from typing import Final, TypeVar
from urllib.parse import quote, urlsplit

from oncekey.inbox.targets.dialing import Dialer
from oncekey.inbox.targets.replies import FRAMING, Reply, SendError
from oncekey.inbox.targets.wire import Connection

__all__ = ["HttpClient"]

T = TypeVar("T")

IDLE: Final = 15.0  # seconds that a connection is kept for the next request
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NAMES_KNOWN: Final = 1_000
_IN_A_PATH: Final = "/%:=&?~+!$,;'@()*[]"


class HttpClient:
    """A client for one URL. Connections are its own, so that nobody's rules are another's.

    A request is sent once. If its connection ends before the answer, on one that was kept open
    too, the target may have it: that is a failed attempt, for the caller to make again.

    Args:
        url: Where to, checked by whoever made the target.
        allow_private: Connect to any address, not only to those of the public internet.
        connections: The most at a time; more requests wait.
        tls: Whom to trust and what to present, in place of what the system trusts.
    """

    def __init__(
        self,
        url: str,
        *,
        allow_private: bool,
        connections: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(url)
        host = parts.hostname or ""
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        path = quote(parts.path or "/", safe=_IN_A_PATH)
        if parts.query:
            path += "?" + quote(parts.query, safe=_IN_A_PATH)
        named = f"[{host.partition('%')[0]}]" if ":" in host else host
        at = f":{parts.port}" if parts.port is not None else ""
        self._start = f"POST {path} HTTP/1.1\r\nhost: {named}{at}\r\n"
        self._dialer = Dialer(
            host, port, tls=(tls or True) if secure else False, allow_private=allow_private
        )
        self._slots = asyncio.Semaphore(connections)
        self._idle: list[Connection] = []  # the last one used is the first one used again
        self._busy: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._names: set[str] = set()
        self._closed = False

    async def post(self, headers: Mapping[str, str], body: bytes, seconds: float) -> Reply:
        """See ``Client``."""
        request = self._written(headers, body)
        loop = asyncio.get_running_loop()
        ends = loop.time() + seconds
        if self._slots.locked():
            await _in_time(self._slots.acquire(), seconds)
        else:
            await self._slots.acquire()
        try:
            connection = self._kept()
            if connection is None:
                dialing = self._dialer.open(self._made)
                connection = await _in_time(dialing, ends - loop.time())
            self._busy.add(connection)
            try:
                return await connection.ask(request, ends - loop.time())
            except asyncio.CancelledError:
                connection.close()
                raise
        finally:
            self._slots.release()

    def _written(self, headers: Mapping[str, str], body: bytes) -> bytes:
        """A request as it stands on the wire."""
        if not self._names.issuperset(headers):
            self._learn(headers)
        fields = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        lines = len(headers)
        if fields.count("\n") != lines or fields.count("\r") != lines or "\0" in fields:
            raise SendError("a header can't be sent")
        head = f"{self._start}{fields}content-length: {len(body)}\r\n\r\n"
        return head.encode("utf-8", "replace") + body

    def _learn(self, headers: Mapping[str, str]) -> None:
        for name in headers:
            if not _NAME.fullmatch(name) or name.lower() in FRAMING:
                raise SendError("a header can't be sent")
        if len(self._names) > _NAMES_KNOWN:
            self._names.clear()
        self._names.update(headers)

    # Connections

    def _kept(self) -> Connection | None:
        """A connection that is open and well, if one was kept."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.close()
        return None

    def _made(self, sock: socket.socket) -> Connection:
        return Connection(sock, self._done, self._lost)

    def _done(self, connection: Connection) -> None:
        self._busy.discard(connection)
        if self._closed:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(IDLE, self._sweep)

    def _lost(self, connection: Connection) -> None:
        self._busy.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _sweep(self) -> None:
        """Close what nobody used for a while."""
        self._sweeper = None
        loop = asyncio.get_running_loop()
        old = loop.time() - IDLE
        for connection in [one for one in self._idle if one.idle_since <= old]:
            self._idle.remove(connection)
            connection.close()
        if self._idle:
            wait = self._idle[0].idle_since - old
            self._sweeper = loop.call_later(max(wait, 0.1), self._sweep)

    async def aclose(self) -> None:
        """See ``Client``. A request after this has a connection of its own."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in [*self._idle, *self._busy]:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # transports end in the next turn of the loop


async def _in_time(awaited: Awaitable[T], seconds: float) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await awaited
    except TimeoutError:
        raise SendError("timeout") from None
