"""The doors: ``/hooks`` for providers, ``/_oncekey`` for people, ``/healthz`` for machines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from oncekey.errors import StoreError
from oncekey.server.api import CHALLENGE, api_routes, caller, problem
from oncekey.server.auth import COOKIE
from oncekey.server.endpoints import ApiError
from oncekey.server.gateway import Gateway
from oncekey.server.metrics import CONTENT_TYPE, exposition
from oncekey.server.pages import event, events, issues, lists, login, now, places, saved
from oncekey.server.pages.desk import HOME, error_page, static_file
from oncekey.server.security import HEADERS, is_from_elsewhere

__all__ = ["make_app"]

_STATIC: Final = {
    "oncekey.css": "text/css; charset=utf-8",
    "oncekey.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_HEADERS: Final = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
MCP: Final = f"{HOME}/mcp"
_CACHED: Final = b"public, max-age=3600"


def make_app(gateway: Gateway) -> Callable[..., Any]:
    """An ASGI app of all of it. Starting and stopping the gateway is its owner's.

    WebSockets never get here: the server hands them to a tunnel, see ``serving``.
    """
    inner = Starlette(routes=_routes(gateway), exception_handlers={500: _broken})
    intake, proxies, tools = gateway.intake, gateway.proxies, _tools(gateway)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"].startswith("/hooks/"):
            await intake(scope, receive, send)
        elif scope["path"] == MCP:
            await tools(scope, receive, _secured(send))
        elif (found := proxies.find(scope)) is None:
            await inner(scope, receive, _secured(send))
        else:
            await proxies.serve(found, receive, send)

    return app


def _tools(gateway: Gateway) -> Callable[..., Any]:
    """The door for agents: by bearer token alone, so that no site can send a browser there."""

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        person = gateway.doorman.by_token(token.strip()) if kind.lower() == "bearer" else None
        if is_from_elsewhere(request.headers, gateway.settings.public_url):
            instead = problem(403, "another site sent this", "its Origin is not this gateway's")
        elif person is None:
            instead = problem(401, "who are you", "send Authorization: Bearer TOKEN", **CHALLENGE)
        elif request.method != "POST":
            instead = problem(405, "send by POST", "there are no streams here", Allow="POST")
        else:
            try:  # in a thread: it takes a second, once
                module = await asyncio.to_thread(import_module, "oncekey.server.mcp")
            except ImportError as error:
                instead = problem(501, "the tools are not installed", str(error))
            else:
                known = {**scope, module.PERSON: person}
                await module.serve_mcp(gateway, known, receive, send)
                return
        await instead(scope, receive, send)

    return serve


def _secured(send: Any) -> Any:
    """Every answer of the dashboard and the API carries the headers of ``security``."""

    async def secured(message: Any) -> None:
        if message["type"] == "http.response.start":
            given = {name for name, _ in message["headers"]}
            extra = [pair for pair in _HEADERS if pair[0] not in given]
            message = {**message, "headers": [*message["headers"], *extra]}
        await send(message)

    return secured


async def _broken(request: Request, error: Exception) -> Response:
    if request.url.path.startswith(f"{HOME}/api/"):
        return problem(500, "that is a fault of the gateway", "its log has more")
    return error_page(500, "That is a fault of the gateway; its log has more.", request)


def _routes(gateway: Gateway) -> list[Route]:
    pages = [one for module in (login, now, events, saved, event, issues, lists, places)
             for one in module.routes(gateway)]  # fmt: skip

    async def front(request: Request) -> Response:
        return RedirectResponse(HOME, 307)

    return [
        Route("/", front, methods=["GET"]),
        *_for_machines(gateway),
        *api_routes(gateway),
        Route(f"{HOME}/live", _live(gateway), methods=["GET"]),
        Route(f"{HOME}/static/{{name}}", _static, methods=["GET"]),
        *_in_order(pages),
    ]


def _in_order(pages: list[Route]) -> list[Route]:
    """Paths without a placeholder first: ``/events/replay`` is no event."""
    return sorted(pages, key=lambda one: "{" in one.path)


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _STATIC:
        return PlainTextResponse("no such file\n", 404)
    headers = {"Cache-Control": _CACHED.decode()}
    return Response(static_file(name), 200, headers, _STATIC[name])


def _live(gateway: Gateway) -> Any:
    async def live(request: Request) -> Response:
        if is_from_elsewhere(request.headers, gateway.settings.public_url):
            return problem(403, "another site sent this", "its page has no part in this one")
        session = await gateway.doorman.session(request.cookies.get(COOKIE, ""))
        if session is None:
            return problem(401, "who are you", "sign in first")
        if gateway.live.is_full(session.person.name):
            return problem(503, "too many look on", **{"Retry-After": "30"})

        async def allowed() -> bool:
            """The same person with the same role: a page that shows more or less is loaded anew."""
            try:
                now = await gateway.doorman.session(session.token)
            except StoreError:
                return True  # nobody is told anything then but that the inbox is away
            return now is not None and now.person == session.person

        return StreamingResponse(
            gateway.live.stream(session.person.name, allowed),
            headers={"X-Accel-Buffering": "no", "Cache-Control": "no-store"},
            media_type="text/event-stream",
        )

    return live


def _for_machines(gateway: Gateway) -> list[Route]:
    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        why = await gateway.ready()
        return PlainTextResponse(f"not ready: {why}\n" if why else "ok\n", 503 if why else 200)

    async def metrics(request: Request) -> Response:
        if not gateway.settings.metrics_public:
            try:
                person = await caller(gateway, request)
            except ApiError as error:
                return problem(error.status, error.title, error.detail)
            if person is None:
                return problem(401, "who are you", "send Authorization: Bearer TOKEN")
        return Response(await exposition(gateway), 200, {}, CONTENT_TYPE)

    return [
        Route("/healthz", healthz, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
