"""Calls an app as its server would, or a server over HTTP. Each gives status, headers and body."""

from __future__ import annotations

import asyncio
import http.client
import io
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote_to_bytes, urlsplit

if TYPE_CHECKING:
    from oncekey.testing._samples import SignedDelivery

__all__ = ["call_asgi", "call_http", "call_wsgi"]

# status, headers, body, outcome, code, error: the first fields of an Answer
Raw = tuple[int, dict[str, str], bytes, str, str, str]

TIMEOUT: Final = 30.0
# Facts of one connection; the next one has its own.
_OF_THE_HOP: Final = frozenset({"host", "content-length", "connection", "transfer-encoding"})
_LOCAL: Final = ("127.0.0.1", 50_000)


def pairs(headers: Mapping[str, str] | list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Header fields one by one."""
    return headers if isinstance(headers, list) else list(headers.items())


def _raw(status: int, headers: Iterable[tuple[str, str]], body: bytes, error: str = "") -> Raw:
    return status, dict(headers), body, "", "", error


def call_http(delivery: SignedDelivery) -> Raw:
    """Send a request over a connection of its own."""
    parts = urlsplit(delivery.url)
    secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.putrequest(delivery.method, target, skip_accept_encoding=True)
        for name, value in pairs(delivery.headers):
            if name.lower() not in _OF_THE_HOP:
                connection.putheader(name, value)
        connection.putheader("Content-Length", str(len(delivery.body)))
        connection.putheader("Connection", "close")
        connection.endheaders(delivery.body)
        answer = connection.getresponse()
        return _raw(answer.status, answer.getheaders(), answer.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        return _raw(0, [], b"", f"{type(error).__name__}: {error}")
    finally:
        connection.close()


def call_wsgi(app: Callable[..., Any], delivery: SignedDelivery) -> Raw:
    """Call a WSGI app (PEP 3333)."""
    parts = urlsplit(delivery.url)
    environ: dict[str, Any] = {
        "REQUEST_METHOD": delivery.method,
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote_to_bytes(parts.path).decode("latin-1"),
        "RAW_URI": parts.path + (f"?{parts.query}" if parts.query else ""),
        "QUERY_STRING": parts.query,
        "SERVER_NAME": parts.hostname or "",
        "SERVER_PORT": str(_port(delivery.url)),
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": _LOCAL[0],
        "HTTP_HOST": parts.netloc,
        "CONTENT_LENGTH": str(len(delivery.body)),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": parts.scheme,
        "wsgi.input": io.BytesIO(delivery.body),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }
    for name, value in pairs(delivery.headers):
        if name.lower() in _OF_THE_HOP:
            continue
        key = name.upper().replace("-", "_")
        key = key if key == "CONTENT_TYPE" else f"HTTP_{key}"
        environ[key] = f"{environ[key]},{value}" if key in environ else value
    begun: list[Any] = []
    chunks: list[bytes] = []

    def start_response(
        status: str, headers: list[tuple[str, str]], exc_info: Any = None
    ) -> Callable[[bytes], None]:
        begun[:] = [int(status.split(" ", 1)[0]), headers]
        return chunks.append

    result = app(environ, start_response)
    try:
        chunks.extend(result)
    finally:
        close = getattr(result, "close", None)
        if close is not None:
            close()
    if not begun:
        return _raw(500, [], b"", "the app did not call start_response")
    return _raw(begun[0], begun[1], b"".join(chunks))


async def call_asgi(app: Callable[..., Awaitable[Any]], delivery: SignedDelivery) -> Raw:
    """Call an ASGI 3 app. Its lifespan is the caller's to run."""
    parts = urlsplit(delivery.url)
    headers = [
        (name.lower().encode("latin-1"), value.encode("latin-1", "replace"))
        for name, value in pairs(delivery.headers)
        if name.lower() not in _OF_THE_HOP
    ]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": delivery.method,
        "scheme": parts.scheme,
        "path": unquote_to_bytes(parts.path).decode("utf-8", "replace"),
        "raw_path": parts.path.encode("ascii", "replace"),
        "query_string": parts.query.encode("ascii", "replace"),
        "root_path": "",
        "headers": [
            (b"host", parts.netloc.encode("ascii", "replace")),
            (b"content-length", str(len(delivery.body)).encode()),
            *headers,
        ],
        "client": _LOCAL,
        "server": (parts.hostname or "", _port(delivery.url)),
    }
    waiting = [{"type": "http.request", "body": delivery.body, "more_body": False}]
    ended = asyncio.Event()
    status, fields, chunks = 0, list[tuple[str, str]](), list[bytes]()

    async def receive() -> dict[str, Any]:
        if waiting:
            return waiting.pop()
        await ended.wait()  # the client stays until it has its answer
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            fields.extend(
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in message.get("headers", ())
            )
        elif message["type"] == "http.response.body":
            chunks.append(message.get("body", b""))
            if not message.get("more_body", False):
                ended.set()

    error = ""
    try:
        await app(scope, receive, send)
    except Exception as raised:  # noqa: BLE001 - a server answers 500, unless it has answered
        error = f"{type(raised).__name__}: {raised}"
    if not status:
        return _raw(500, [], b"", error or "the app sent no answer")
    return _raw(status, fields, b"".join(chunks), error)


def _port(url: str) -> int:
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)
