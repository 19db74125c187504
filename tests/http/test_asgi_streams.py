"""Answers in parts, clients that hang up, background work: the key is never freed by them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from oncekey import BackendMismatchError, MemoryBackend, MemoryStore
from oncekey.http.asgi import IdempotencyMiddleware
from oncekey.testing import ManualClock

App = Callable[[Any, Any, Any], Awaitable[None]]


class Client:
    """Calls an ASGI application, and may hang up."""

    def __init__(self, app: App, *, extensions: Any = None, spec: str = "2.3") -> None:
        self.app = app
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.breaks = False  # whether sending fails once the client is gone, as newer servers do
        self.extensions = extensions or {}
        self.spec = spec

    def scope(self, key: str) -> dict[str, Any]:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": self.spec},
            "method": "POST",
            "path": "/",
            "raw_path": b"/",
            "query_string": b"",
            "headers": [(b"idempotency-key", key.encode()), (b"authorization", b"me")],
            "extensions": self.extensions,
        }

    async def receive(self) -> dict[str, Any]:
        if not self.given:
            self.given = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if self.gone.is_set() and self.breaks:
            raise OSError("the client is gone")
        self.sent.append(message)

    async def post(self, key: str = "k") -> tuple[int, bytes, bool]:
        self.given = False
        self.sent = []
        await self.app(self.scope(key), self.receive, self.send)
        return self.answer

    @property
    def answer(self) -> tuple[int, bytes, bool]:
        start, *rest = self.sent
        replayed = (b"idempotent-replayed", b"true") in start["headers"]
        return start["status"], b"".join(part.get("body", b"") for part in rest), replayed


def streaming(parts: list[bytes], status: int = 200, **headers: str) -> tuple[App, list[int]]:
    """An application that answers in parts, and the count of its calls."""
    calls: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        calls.append(1)
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app, calls


async def test_streamed_answers_are_kept_whole() -> None:
    """An answer in parts is passed on as it comes, and replayed whole."""
    app, calls = streaming([b"one,", b"two,", b"three"])
    client = Client(IdempotencyMiddleware(app, MemoryBackend()))
    assert await client.post() == (200, b"one,two,three", False)
    assert len(client.sent) == 5
    assert await client.post() == (200, b"one,two,three", True)
    assert calls == [1]


async def test_streams_over_the_cap_are_done_without_a_body() -> None:
    """A long stream is passed on whole, and its retry is told that it was done."""
    app, calls = streaming([b"x" * 60] * 3, location="/made/1")
    client = Client(IdempotencyMiddleware(app, MemoryBackend(), max_answer_bytes=100))
    assert await client.post() == (200, b"x" * 180, False)
    status, body, replayed = await client.post()
    assert (status, replayed, calls) == (200, True, [1])
    assert b"body-unavailable" in body


async def test_the_outcome_is_recorded_before_the_last_byte() -> None:
    """When the last part leaves, a retry already finds the answer."""
    store = MemoryBackend()
    app, calls = streaming([b"part"])
    guarded = IdempotencyMiddleware(app, store)
    found: list[tuple[int, bytes, bool]] = []

    class Watching(Client):
        async def send(self, message: dict[str, Any]) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body")
            if last and not found:
                found.append(await Client(guarded).post())
            await super().send(message)

    await Watching(guarded).post()
    assert found == [(200, b"part", True)]
    assert calls == [1]


async def test_a_background_task_that_raises_does_not_free_the_key() -> None:
    """The answer was given and recorded: what goes wrong afterwards runs nothing again."""
    calls = []

    def broken() -> None:
        raise ZeroDivisionError

    async def pay(request: Request) -> Response:
        calls.append(1)
        return JSONResponse({"paid": 1}, background=BackgroundTask(broken))

    app = Starlette(routes=[Route("/", pay, methods=["POST"])])
    client = Client(IdempotencyMiddleware(app, MemoryBackend()))
    with pytest.raises(ZeroDivisionError):
        await client.post()
    assert client.answer == (200, b'{"paid":1}', False)
    assert await client.post() == (200, b'{"paid":1}', True)
    assert calls == [1]


async def test_a_long_background_task_is_left_alone() -> None:
    """A background task may outlive the lease: its claim is settled, nobody interrupts it."""
    done = asyncio.Event()

    async def slowly() -> None:
        for _ in range(8):
            await asyncio.sleep(0.01)
        done.set()

    async def pay(request: Request) -> Response:
        return JSONResponse({}, background=BackgroundTask(slowly))

    app = Starlette(routes=[Route("/", pay, methods=["POST"])])
    await Client(IdempotencyMiddleware(app, MemoryBackend(), lease=0.03)).post()
    assert done.is_set()


@pytest.mark.parametrize("where", ["inside", "outside"])
async def test_a_framework_middleware_on_either_side(where: str) -> None:
    """Starlette's BaseHTTPMiddleware streams what it passes on: answers are kept all the same."""
    calls = []

    class Plain(BaseHTTPMiddleware):
        async def dispatch(self, request: Request, call_next: Any) -> Response:
            response: Response = await call_next(request)
            response.headers["x-seen"] = "1"
            return response

    async def pay(request: Request) -> Response:
        calls.append(await request.body())
        return JSONResponse({"paid": len(calls)}, status_code=201)

    store = MemoryBackend()
    routes = [Route("/", pay, methods=["POST"])]
    ours = Middleware(IdempotencyMiddleware, store=store)  # type: ignore[arg-type]
    order = [ours, Middleware(Plain)] if where == "inside" else [Middleware(Plain), ours]
    client = Client(Starlette(routes=routes, middleware=order))
    assert await client.post() == (201, b'{"paid":1}', False)
    assert await client.post() == (201, b'{"paid":1}', True)
    assert calls == [b""]


@pytest.mark.parametrize("spec", ["2.3", "2.4"])
async def test_a_client_that_hangs_up_does_not_stop_the_answer(spec: str) -> None:
    """The handler's stream is finished for the retry, which gets it whole."""
    effects = []
    hung_up = asyncio.Event()

    async def parts() -> Any:
        effects.append("begun")
        yield b"one,"
        hung_up.set()
        client.gone.set()
        for _ in range(5):
            await asyncio.sleep(0)
        effects.append("done")
        yield b"two"

    async def pay(request: Request) -> Response:
        return StreamingResponse(parts(), media_type="text/plain")

    app = Starlette(routes=[Route("/", pay, methods=["POST"])])
    client = Client(IdempotencyMiddleware(app, MemoryBackend()), spec=spec)
    client.breaks = spec == "2.4"
    with contextlib.suppress(ClientDisconnect):
        await client.post()
    assert effects == ["begun", "done"]
    retry = Client(client.app)
    assert await retry.post() == (200, b"one,two", True)
    assert effects == ["begun", "done"]


async def test_an_endless_stream_ends_with_its_client() -> None:
    """Server-sent events have no end to wait for: the client's leaving ends them, as done."""
    calls = []

    async def events() -> Any:
        calls.append(1)
        while True:
            yield b"data: tick\n\n"
            client.gone.set()
            await asyncio.sleep(0)

    async def watch(request: Request) -> Response:
        return StreamingResponse(events(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/", watch, methods=["POST"])])
    client = Client(IdempotencyMiddleware(app, MemoryBackend()))
    await client.post()
    status, body, replayed = await Client(client.app).post()
    assert (status, replayed, calls) == (200, True, [1])
    assert b"body-unavailable" in body


async def test_a_client_that_hangs_up_in_its_body_claims_nothing() -> None:
    """Half a request is none: the key is untouched, and the application never called."""
    store = MemoryBackend()
    app, calls = streaming([b"x"])
    guarded = IdempotencyMiddleware(app, store)
    client = Client(guarded)
    messages = iter(
        [
            {"type": "http.request", "body": b"ha", "more_body": True},
            {"type": "http.disconnect"},
        ]
    )

    async def receive() -> Any:
        return next(messages)

    await guarded(client.scope("k"), receive, client.send)
    assert (client.sent, calls) == ([], [])
    assert (await client.post())[2] is False


async def test_bodies_in_parts_are_bounded() -> None:
    """A body without a declared length is read up to the limit, and no further."""
    app, calls = streaming([b"x"])
    guarded = IdempotencyMiddleware(app, MemoryBackend(), max_body_bytes=100)
    client = Client(guarded)
    reads = []

    async def receive() -> Any:
        reads.append(1)
        return {"type": "http.request", "body": b"x" * 60, "more_body": True}

    await guarded(client.scope("k"), receive, client.send)
    assert (client.answer[0], calls, len(reads)) == (413, [], 2)


async def test_cancelled_midway_the_key_waits_for_the_lease(clock: ManualClock) -> None:
    """A handler that was cancelled may have done its work: held for the lease, not for the TTL."""
    entered = asyncio.Event()
    calls = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            entered.set()
            await asyncio.Event().wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    guarded = IdempotencyMiddleware(app, MemoryBackend(clock=clock), lease=30)
    task = asyncio.create_task(Client(guarded).post())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await Client(guarded).post())[0] == 409
    clock.advance(31)
    assert await Client(guarded).post() == (200, b"ok", False)


async def test_cancelled_after_the_status_was_sent_counts_as_done() -> None:
    """The client has seen a 2xx: the retry runs nothing."""
    begun = asyncio.Event()
    calls = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        calls.append(1)
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
        begun.set()
        await asyncio.Event().wait()

    guarded = IdempotencyMiddleware(app, MemoryBackend())
    task = asyncio.create_task(Client(guarded).post())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    status, body, replayed = await Client(guarded).post()
    assert (status, replayed, calls) == (201, True, [1])
    assert b"body-unavailable" in body


async def test_a_handler_whose_key_was_taken_over_is_stopped() -> None:
    """Fenced off in mid-run, with nothing sent: it is told to come back for the real answer."""

    class Lost(MemoryBackend):
        async def renew(self, *args: Any) -> bool:
            return False

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    status, body, _ = await Client(IdempotencyMiddleware(app, Lost(), lease=0.03)).post()
    assert status == 409
    assert b"taken this request over" in body


async def test_a_stream_whose_key_was_taken_over_ends() -> None:
    """With part of the answer sent there is nothing to add: no second status follows."""

    class Lost(MemoryBackend):
        async def renew(self, *args: Any) -> bool:
            return False

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
        await asyncio.Event().wait()

    client = Client(IdempotencyMiddleware(app, Lost(), lease=0.03))
    await client.post()
    assert [message["type"] for message in client.sent] == [
        "http.response.start",
        "http.response.body",
    ]


async def test_files_can_not_be_sent_past_the_record() -> None:
    """The application is not told of ways to answer that could not be recorded."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["extensions"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    extensions = {"http.response.pathsend": {}, "tls": {}}
    await Client(IdempotencyMiddleware(app, MemoryBackend()), extensions=extensions).post()
    assert seen == [{"tls": {}}]


async def test_other_protocols_pass() -> None:
    """Lifespan and websockets are none of its business."""
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    guarded = IdempotencyMiddleware(app, MemoryBackend())
    for kind in ("lifespan", "websocket"):
        await guarded({"type": kind}, None, None)  # type: ignore[arg-type]
    assert seen == ["lifespan", "websocket"]


def test_a_sync_store_is_refused() -> None:
    """It would block the loop: the error names what to pass."""
    with pytest.raises(
        BackendMismatchError, match=r"got MemoryStore: pass a URL, AsyncMemoryStore\(\.\.\.\)"
    ):
        IdempotencyMiddleware(lambda *a: None, MemoryStore())  # type: ignore[arg-type,return-value]
