"""A proxy before PostgreSQL that loses a COMMIT, or the reply to one."""

from __future__ import annotations

import asyncio
import struct

from tests.servers.wire import CANCEL_REQUEST, Hangup, Relay, read_message, read_startup

__all__ = ["CommitDropper"]


class CommitDropper(Relay):
    """Passes everything on, but hangs up at the next COMMIT when it is told to."""

    def __init__(self, url: str) -> None:
        self.dropped = 0
        self._drop = ""
        super().__init__(url)

    def drop_next(self, what: str) -> None:
        """Lose the next COMMIT: the ``request``, so that it does not happen, or the ``reply``."""

        def arm() -> None:
            self._drop = what

        self.call(arm)

    def _strikes(self, kind: bytes, data: bytes) -> str:
        text = data[5:].lstrip(b"\0").upper()  # a Query, or a Parse of a nameless statement
        if not self._drop or kind not in (b"Q", b"P") or not text.startswith(b"COMMIT"):
            return ""
        drop, self._drop = self._drop, ""
        self.dropped += 1
        return drop

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client and its connection to the server."""
        startup = await read_startup(reader, writer)
        if struct.unpack("!i", startup[4:8])[0] == CANCEL_REQUEST:
            await self._cancel(startup)
        server_reader, server_writer = await self.reach()
        server_writer.write(startup)
        silent = False

        async def back() -> None:
            while True:
                kind, data = await read_message(server_reader)
                if not silent:
                    writer.write(data)
                    await writer.drain()
                elif kind == b"Z":  # carried out: now the network fails
                    raise Hangup

        async def there() -> None:
            nonlocal silent
            while True:
                kind, data = await read_message(reader)
                drop = self._strikes(kind, data)
                if drop == "request":
                    raise Hangup
                silent = silent or bool(drop)
                server_writer.write(data)
                await server_writer.drain()

        both = [asyncio.ensure_future(back()), asyncio.ensure_future(there())]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            server_writer.close()
