"""Every ASGI framework and aiohttp, each behind its real server, with the same hooks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import uvicorn
from aiohttp import web
from fastapi import Depends, FastAPI
from fastapi import Response as FastAPIResponse
from litestar import Litestar, Request
from litestar.config.csrf import CSRFConfig
from litestar.exceptions import InternalServerException
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Mount
from tests.adapters.hooks import CONTEXT, PATIENCE, Hook

from oncekey.adapters import aiohttp as aiohttp_adapter
from oncekey.adapters import fastapi as fastapi_adapter
from oncekey.adapters import litestar as litestar_adapter
from oncekey.adapters import starlette as starlette_adapter
from oncekey.adapters.asgi import WebhookApp
from oncekey.receiver import WebhookResponse

Hooks = list[Hook]
App = Callable[..., Any]


def closing(hooks: Hooks) -> Any:
    """The lifespan that closes what the hooks use."""
    return starlette_adapter.webhook_lifespan(*(hook.receiver for hook in hooks))


# Apps


def asgi(hooks: Hooks) -> App:
    """Receivers as apps of their own, and the least that can tell them apart."""
    apps = {hook.name: WebhookApp(hook.receiver) for hook in hooks}
    alone = Starlette(lifespan=closing(hooks))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            inner = apps[scope["path"].removeprefix(scope["root_path"]).split("/")[1]]
            await inner(scope, receive, send)
        else:
            await alone(scope, receive, send)

    return app


def starlette(hooks: Hooks) -> App:
    return Starlette(
        routes=[starlette_adapter.webhook_route(hook.path, hook.receiver) for hook in hooks],
        lifespan=closing(hooks),
    )


def starlette_mount(hooks: Hooks) -> App:
    return Starlette(
        routes=[Mount(f"/{hook.name}", WebhookApp(hook.receiver)) for hook in hooks],
        lifespan=closing(hooks),
    )


async def _read_first(request: Any, call_next: Any) -> Any:
    with contextlib.suppress(ClientDisconnect):  # the app finds out too
        await request.body()
    return await call_next(request)


def starlette_middleware(hooks: Hooks) -> App:
    """A ``BaseHTTPMiddleware`` in front, which runs the app in another task and reads the body."""
    return Starlette(
        routes=[starlette_adapter.webhook_route(hook.path, hook.receiver) for hook in hooks],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=_read_first)],
        lifespan=closing(hooks),
    )


async def _pass_on(request: Any, call_next: Any) -> Any:
    return await call_next(request)


def fastapi(hooks: Hooks) -> App:
    app = FastAPI(lifespan=closing(hooks))
    app.middleware("http")(_pass_on)
    for hook in hooks:
        app.include_router(fastapi_adapter.webhook_router(hook.receiver, hook.path))
    return app


def fastapi_dependency(hooks: Hooks) -> App:
    """Endpoints of the user's own."""
    app = FastAPI(lifespan=closing(hooks))

    def add(hook: Hook) -> None:
        receive = Depends(fastapi_adapter.received(hook.receiver, raises=False))

        @app.post(hook.path)
        async def endpoint(result: WebhookResponse = receive) -> FastAPIResponse:
            return fastapi_adapter.as_response(result)

    for hook in hooks:
        add(hook)
    return app


def litestar(hooks: Hooks) -> App:
    """With CSRF checks, which would parse forms and refuse every delivery."""
    handlers = [litestar_adapter.webhook_handler(hook.receiver, hook.path) for hook in hooks]
    return Litestar(
        handlers,
        csrf_config=CSRFConfig(secret="csrf"),
        request_max_body_size=10,
        lifespan=[closing(hooks)],
    )


def _litestar_read_first(app: App) -> App:
    async def middleware(scope: Any, receive: Any, send: Any) -> None:
        with contextlib.suppress(InternalServerException):  # the handler finds out too
            await Request(scope, receive, send).body()
        await app(scope, receive, send)

    return middleware


def litestar_middleware(hooks: Hooks) -> App:
    handlers = [litestar_adapter.webhook_handler(hook.receiver, hook.path) for hook in hooks]
    return Litestar(handlers, middleware=[_litestar_read_first], lifespan=[closing(hooks)])


def _aiohttp(hooks: Hooks, *middlewares: Any, **options: Any) -> web.Application:
    app = web.Application(middlewares=middlewares, **options)
    app.cleanup_ctx.append(aiohttp_adapter.webhook_lifespan(*(hook.receiver for hook in hooks)))
    for hook in hooks:
        path = hook.path.replace("{rest:path}", "{rest:.*}")
        app.router.add_post(path, aiohttp_adapter.webhook_handler(hook.receiver))
    return app


def aiohttp(hooks: Hooks, watch: Any) -> web.Application:
    """With a limit on bodies that would refuse every delivery."""
    return _aiohttp(hooks, watch, client_max_size=10)


@web.middleware
async def _aiohttp_read_first(request: web.Request, handler: Any) -> Any:
    with contextlib.suppress(OSError):  # the handler finds out too
        await request.read()
    return await handler(request)


def aiohttp_middleware(hooks: Hooks, watch: Any) -> web.Application:
    return _aiohttp(hooks, watch, _aiohttp_read_first)


ASGI: dict[str, Callable[[Hooks], App]] = {
    "asgi": asgi,
    "starlette": starlette,
    "starlette-mount": starlette_mount,
    "starlette-middleware": starlette_middleware,
    "fastapi": fastapi,
    "fastapi-dependency": fastapi_dependency,
    "litestar": litestar,
    "litestar-middleware": litestar_middleware,
}
AIOHTTP: dict[str, Callable[[Hooks, Any], web.Application]] = {
    "aiohttp": aiohttp,
    "aiohttp-middleware": aiohttp_middleware,
}
ALL = [*ASGI, *AIOHTTP]
READ_AHEAD = {"starlette-middleware", "litestar-middleware", "aiohttp-middleware"}
"""Where something in front reads the whole body, whatever its length."""


# What is in front of an app, to tell the tests what the server sees

Seen = SimpleQueue[tuple[str, str]]


def watched(app: App, seen: Seen) -> App:
    """Tell of requests with an ``X-Watch`` field: when the client is ``gone``, when it ``ended``.

    With ``X-Cancel`` the request is cancelled when its client goes away, as some servers do.
    """

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        CONTEXT.set(headers.get(b"x-context", b"").decode())
        tag = headers.get(b"x-watch", b"").decode()
        if not tag:
            await app(scope, receive, send)
            return
        watchers: list[asyncio.Task[None]] = []

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            seen.put((tag, "gone"))
            if b"x-cancel" in headers:
                task.cancel()

        async def watched_receive() -> Any:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body"):
                watchers.append(asyncio.create_task(watch()))
            return message

        task = asyncio.create_task(app(scope, watched_receive, send))
        await asyncio.wait([task])
        seen.put((tag, "ended"))
        if not task.cancelled():
            task.result()
        await asyncio.gather(*watchers)

    return outer


def watching(seen: Seen) -> Any:
    """The same for aiohttp, which cancels requests by itself if it is told to."""

    @web.middleware
    async def middleware(request: web.Request, handler: Any) -> Any:
        CONTEXT.set(request.headers.get("x-context", ""))
        tag = request.headers.get("x-watch", "")
        if not tag:
            return await handler(request)

        async def watch() -> None:
            while request.transport is not None and not request.transport.is_closing():
                await asyncio.sleep(0.001)
            seen.put((tag, "gone"))

        watcher = asyncio.create_task(watch())
        try:
            return await handler(request)
        finally:
            await asyncio.wait([watcher])
            seen.put((tag, "ended"))

    return middleware


# Servers


class Site:
    """A running server: where it is, what hooks it has, and what it sees."""

    def __init__(self, name: str, port: int, hooks: dict[str, Hook], seen: Seen) -> None:
        self.name = name
        self.port = port
        self.hooks = hooks
        self.base = f"http://127.0.0.1:{port}"
        self.seen = seen

    def saw(self, tag: str, what: str) -> None:
        """Wait until the server has seen that, and nothing else first."""
        assert self.seen.get(timeout=PATIENCE) == (tag, what)


class _Errors(logging.Handler):
    """Collects what is logged as an error: a test of an adapter makes none."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.name}: {self.format(record)}")


@contextlib.contextmanager
def no_errors() -> Iterator[None]:
    """Fail if anything is logged as an error."""
    errors = _Errors()
    logging.getLogger().addHandler(errors)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(errors)
    if errors.texts:
        raise AssertionError("\n".join(errors.texts))


def listening() -> socket.socket:
    """A socket on a free port: clients may connect before the server accepts."""
    found = socket.socket()
    found.bind(("127.0.0.1", 0))
    found.listen(128)
    return found


@contextlib.contextmanager
def serve_asgi(app: App, sock: socket.socket, **options: Any) -> Iterator[None]:
    """Run an ASGI app under uvicorn, in a thread with a loop of its own."""
    config = uvicorn.Config(app, log_config=None, lifespan="on", ws="none", **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([sock],))
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def serve_aiohttp(app: web.Application, sock: socket.socket, **options: Any) -> Iterator[None]:
    """Run an aiohttp app under its own server, in a thread with a loop of its own."""
    loop = asyncio.new_event_loop()
    stopping = asyncio.Event()

    async def main() -> None:
        runner = web.AppRunner(app, access_log=None, **options)
        await runner.setup()
        await web.SockSite(runner, sock).start()
        await stopping.wait()
        await runner.cleanup()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()


@contextlib.contextmanager
def site(name: str, hooks: dict[str, Hook], **options: Any) -> Iterator[Site]:
    """Run one of ``ALL`` with these hooks."""
    seen: Seen = SimpleQueue()
    with no_errors(), listening() as sock:
        found = Site(name, sock.getsockname()[1], hooks, seen)
        if name in ASGI:
            app = watched(ASGI[name](list(hooks.values())), seen)
            server = serve_asgi(app, sock, **options)
        else:
            # One of the two is cancelled when its client goes away.
            options["handler_cancellation"] = name == "aiohttp"
            server = serve_aiohttp(
                AIOHTTP[name](list(hooks.values()), watching(seen)), sock, **options
            )
        with server:
            yield found
