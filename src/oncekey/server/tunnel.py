"""WebSockets through the proxy: once the upstream has said 101, bytes pass untouched."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Final

from oncekey.http.answer import Answer
from oncekey.server.forwarding import Field, FindWay, Way, answer_fields, problem

__all__ = ["tunnel_to"]

logger = logging.getLogger("oncekey")

HEAD_MOST: Final = 262_144
PIECE: Final = 65_536
_BAD: Final = problem(400, "bad-upgrade", "Bad request", "This is no WebSocket handshake.")
_NOWHERE: Final = problem(404, "no-such-path", "Not found", "No WebSocket is served here.")
_GONE: Final = problem(
    502, "upstream-unreachable", "Bad gateway", "The upstream can't be reached. Try again later."
)


class _RefusedError(Exception):
    """There will be no tunnel; the answer says why."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


def tunnel_to(find: FindWay) -> type[asyncio.Protocol]:
    """What uvicorn hands a connection to that asks for a WebSocket.

    Args:
        find: Where one leads to, and how long the upstream may take to connect and to answer.
    """

    class Tunnel(asyncio.StreamReaderProtocol):
        def __init__(self, config: Any, server_state: Any, app_state: Any) -> None:
            reader = asyncio.StreamReader(limit=HEAD_MOST)
            super().__init__(reader, self._begin)
            self._state = server_state

        def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._work = asyncio.get_running_loop().create_task(_serve(find, reader, writer))
            self._state.connections.add(self)
            self._state.tasks.add(self._work)
            self._work.add_done_callback(self._ended)

        def _ended(self, work: asyncio.Task[None]) -> None:
            self._state.tasks.discard(work)
            self._state.connections.discard(self)

        def shutdown(self) -> None:
            """Uvicorn stops. A WebSocket has no end to wait for."""
            self._work.cancel()

    return Tunnel


async def _serve(find: FindWay, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    there: asyncio.StreamWriter | None = None
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        line, fields = _parsed(head)
        way = _way(find, line, fields)
        upstream = way.rules.upstream
        client = (writer.get_extra_info("peername") or ("-",))[0]
        try:
            async with asyncio.timeout(way.rules.connect_seconds):
                back, there = await asyncio.open_connection(
                    upstream.host,
                    upstream.port,
                    ssl=True if upstream.scheme == "https" else None,
                    limit=HEAD_MOST,
                )
                there.write(_request(way, fields, client))
                answer = await back.readuntil(b"\r\n\r\n")
                await _agreed(answer, back)
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            logger.warning("a WebSocket found no upstream: %s", type(error).__name__)
            raise _RefusedError(_GONE) from None
        writer.write(answer)
        await _both_ways(reader, writer, back, there)
    except _RefusedError as no:
        writer.write(_raw(no.answer))
    except (OSError, EOFError, asyncio.LimitOverrunError):
        pass  # a side went away, which ends the other
    finally:
        for one in (writer, there):
            if one is not None:
                one.close()  # what was written before still leaves


def _way(find: FindWay, line: bytes, fields: list[Field]) -> Way:
    """Where a handshake leads.

    Raises:
        _RefusedError: Nowhere; or it has a body, or no path.
    """
    method, target, _ = line.split(b" ", 2)
    bodied = any(name in (b"content-length", b"transfer-encoding") for name, _ in fields)
    if method != b"GET" or not target.startswith(b"/") or bodied:
        raise _RefusedError(_BAD)
    way = find(target)
    if way is None or way.rules.refuses(way.target):
        raise _RefusedError(_NOWHERE)
    return way


def _request(way: Way, fields: list[Field], client: str) -> bytes:
    """The handshake as the upstream gets it."""
    to = way.rules.upstream
    kept = way.rules.request_fields(fields, client, "http")
    kept += [(b"connection", b"Upgrade"), (b"upgrade", b"websocket")]
    return b"GET " + to.path.encode() + way.target + b" HTTP/1.1\r\n" + _lines(kept)


async def _agreed(head: bytes, back: asyncio.StreamReader) -> None:
    """See that the upstream has agreed.

    Else what follows would be requests that nobody looked at, sent past all rules.

    Raises:
        _RefusedError: It has not; with its answer.
    """
    line, fields = _parsed(head)
    code = line.split(b" ", 2)[1:2]
    status = _number(code[0], 599) if code and code[0].isdigit() else 502
    if status == 101:
        return
    length = dict(fields).get(b"content-length", b"0")
    body = await back.readexactly(_number(length, HEAD_MOST)) if length.isdigit() else b""
    raise _RefusedError(Answer(status, tuple(answer_fields(status, fields)), body))


def _number(digits: bytes, most: int) -> int:
    """A number that a peer wrote, however long, or ``most`` if that is less."""
    return min(int(digits.lstrip(b"0")[:20] or b"0"), most)


def _parsed(head: bytes) -> tuple[bytes, list[Field]]:
    line, *others = head[:-4].split(b"\r\n")
    pairs = (one.partition(b":") for one in others)
    return line, [(name.strip().lower(), value.strip()) for name, _, value in pairs]


def _lines(fields: list[Field]) -> bytes:
    return b"".join(b"%b: %b\r\n" % one for one in fields) + b"\r\n"


def _raw(answer: Answer) -> bytes:
    """An answer as it is sent: the last of its connection."""
    body = answer.body or b""
    fields = [one for one in answer.headers if one[0] != b"content-length"]
    fields += [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    return b"HTTP/1.1 %d \r\n" % answer.status + _lines(fields) + body


async def _both_ways(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    back: asyncio.StreamReader,
    there: asyncio.StreamWriter,
) -> None:
    """Copy until one side ends."""
    copies = [
        asyncio.ensure_future(_copy(reader, there)),
        asyncio.ensure_future(_copy(back, writer)),
    ]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in copies:
            one.cancel()
        await asyncio.gather(*copies, return_exceptions=True)


async def _copy(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(PIECE):
            to.write(data)
            await to.drain()
