"""One way to call a guarded application, whether it is ASGI or WSGI."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from oncekey import MemoryBackend, MemoryStore
from oncekey.http.asgi import IdempotencyMiddleware as AsgiMiddleware
from oncekey.http.wsgi import IdempotencyMiddleware as WsgiMiddleware

Handled = tuple[int, list[tuple[str, str]], bytes]
JSON = ("content-type", "application/json")


@dataclass
class Reply:
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    @property
    def problem(self) -> str:
        return str(json.loads(self.body)["type"]).rpartition(":")[2]

    @property
    def replayed(self) -> bool:
        return self.header("idempotent-replayed") == "true"


@dataclass
class Calls:
    """A handler that counts its calls."""

    answer: Callable[[bytes], Handled] = lambda body: (201, [JSON], b'{"made":true}')
    bodies: list[bytes] = field(default_factory=list)

    def __call__(self, body: bytes) -> Handled:
        self.bodies.append(body)
        return self.answer(body)

    @property
    def count(self) -> int:
        return len(self.bodies)


def shared(options: dict[str, Any]) -> dict[str, Any]:
    """Most tests are of one caller, without a login."""
    return {"anonymous": "shared", **options} if "settings" not in options else options


class AsgiDoor:
    """An ASGI application behind its middleware."""

    def __init__(self, handler: Callable[[bytes], Handled], store: Any, **options: Any) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            parts = []
            more = True
            while more:
                message = await receive()
                parts.append(message.get("body", b""))
                more = message.get("more_body", False)
            status, headers, body = await asyncio.to_thread(handler, b"".join(parts))
            raw = [(name.encode(), value.encode()) for name, value in headers]
            await send({"type": "http.response.start", "status": status, "headers": raw})
            await send({"type": "http.response.body", "body": body})

        self.app = AsgiMiddleware(app, store or MemoryBackend(), **shared(options))

    def call(
        self, method: str, path: str, query: str, headers: Iterable[tuple[str, str]], body: bytes
    ) -> Reply:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(n.lower().encode(), v.encode("latin-1")) for n, v in headers],
        }
        asyncio.run(self.app(scope, receive, send))
        start, *rest = sent
        found = [(n.decode(), v.decode()) for n, v in start["headers"]]
        return Reply(start["status"], found, b"".join(part.get("body", b"") for part in rest))


class WsgiDoor:
    """A WSGI application behind its middleware."""

    def __init__(self, handler: Callable[[bytes], Handled], store: Any, **options: Any) -> None:
        def app(environ: Any, start_response: Any) -> list[bytes]:
            status, headers, body = handler(environ["wsgi.input"].read())
            start_response(f"{status} Said", headers)
            return [body]

        self.app = WsgiMiddleware(app, store or MemoryStore(), **shared(options))

    def call(
        self, method: str, path: str, query: str, headers: Iterable[tuple[str, str]], body: bytes
    ) -> Reply:
        environ: dict[str, Any] = {
            "REQUEST_METHOD": method,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "CONTENT_LENGTH": str(len(body)),
            "wsgi.input": io.BytesIO(body),
        }
        for name, value in headers:
            key = name.upper().replace("-", "_")
            key = key if key in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{key}"
            # Servers join a header that came twice.
            environ[key] = (
                f"{environ[key]},{value}" if key.startswith("HTTP_") and key in environ else value
            )
        started: list[Any] = []

        def start_response(status: str, fields: Any, exc_info: Any = None) -> Any:
            started[:] = [status, fields]
            return lambda part: pytest_fail()

        answer = self.app(environ, start_response)
        try:
            content = b"".join(answer)
        finally:
            close = getattr(answer, "close", None)
            if close is not None:
                close()
        return Reply(int(started[0][:3]), started[1], content)


def pytest_fail() -> None:
    raise AssertionError("write() was called")


class Door:
    """Calls an application with sensible defaults."""

    def __init__(self, real: AsgiDoor | WsgiDoor) -> None:
        self.real = real

    def post(
        self,
        key: str | None = "key-1",
        body: bytes = b'{"amount": 1}',
        *,
        method: str = "POST",
        path: str = "/pay",
        query: str = "",
        headers: Iterable[tuple[str, str]] = (),
        json: bool = True,
    ) -> Reply:
        fields = [*headers]
        if key is not None:
            fields.append(("Idempotency-Key", key))
        if json:
            fields.append(JSON)
        return self.real.call(method, path, query, fields, body)

    def together(self, count: int, **request: Any) -> list[Reply]:
        """That many copies at once."""
        barrier = threading.Barrier(count)
        replies: list[Reply] = []

        def one() -> None:
            barrier.wait()
            replies.append(self.post(**request))

        threads = [threading.Thread(target=one) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return replies
