"""Guards that stand at a route and do not cover it: said at the start, or by the log."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient as AioClient
from aiohttp.test_utils import TestServer as AioServer
from fastapi import APIRouter, FastAPI
from flask import Flask
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from oncekey.adapters import aiohttp as for_aiohttp
from oncekey.adapters import fastapi as for_fastapi
from oncekey.adapters import flask as for_flask
from oncekey.adapters import starlette as for_starlette
from oncekey.errors import PolicyError
from oncekey.guard import UnguardedWarning

KEYED = {"Idempotency-Key": "k-1", "Authorization": "me"}


async def send(app: Any, method: str, path: str, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        return await client.request(method, path, headers=headers)


def pay() -> dict[str, bool]:
    return {"paid": True}


def router_with(*methods: str, **options: Any) -> APIRouter:
    router = APIRouter(**options)
    for method in methods:
        router.add_api_route(f"/{method.lower()}", pay, methods=[method])
    return router


def test_routes_of_an_included_router_are_named() -> None:
    """A route keeps the class of its own router: a guarded one that takes it in says so."""
    outer = APIRouter(route_class=for_fastapi.idempotent("memory://", required=True))
    middle = APIRouter()
    middle.include_router(router_with("POST", "GET"))
    with pytest.warns(UnguardedWarning, match=r"^POST /post: not guarded.*route_class=") as told:
        outer.include_router(middle)
    assert [one.filename for one in told] == [__file__]
    app = FastAPI()
    app.router.route_class = for_fastapi.idempotent("memory://", required=True)
    with pytest.warns(UnguardedWarning, match="POST /post"):
        app.include_router(router_with("POST"))


@pytest.mark.filterwarnings("error")
async def test_an_included_router_of_the_same_class_is_guarded() -> None:
    """The fix that the warning names; and routers that hold nothing to guard are taken silently."""
    keyed = for_fastapi.idempotent("memory://", required=True)
    outer, app = APIRouter(route_class=keyed), FastAPI()
    outer.include_router(router_with("POST", route_class=keyed))
    outer.include_router(router_with("GET", "PUT"), prefix="/plain")
    app.include_router(outer)
    app.include_router(router_with("POST"), prefix="/other")  # into one that has no guard
    assert (await send(app, "POST", "/post", Authorization="me")).status_code == 400
    assert (await send(app, "POST", "/post", **KEYED)).status_code == 200
    assert "idempotent-replayed" in (await send(app, "POST", "/post", **KEYED)).headers


def test_a_route_of_another_method_is_told_at_the_start() -> None:
    """A PUT or DELETE of a guarded router is named once; not where the methods were named."""
    with pytest.warns(UnguardedWarning, match=r"^PUT /put is not guarded.*methods=") as told:
        router = router_with("PUT", "GET", "POST", route_class=for_fastapi.idempotent("memory://"))
        outer, app = APIRouter(), FastAPI()
        outer.include_router(router)
        app.include_router(outer)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for methods in (["POST", "PATCH"], ("POST", "PATCH"), {"PUT"}):
            guard = for_fastapi.idempotent("memory://", methods=methods)
            router_with("PUT", "DELETE", route_class=guard)


async def by_starlette(**options: Any) -> Callable[[str], Any]:
    async def view(request: Request) -> JSONResponse:
        return JSONResponse({})

    guarded = for_starlette.idempotent("memory://", **options)(view)
    app = Starlette(routes=[Route("/x", guarded, methods=["GET", "PUT", "POST"])])
    return lambda method: send(app, method, "/x", **KEYED)


async def by_flask(**options: Any) -> Callable[[str], Any]:
    app = Flask("shop")

    def view() -> dict[str, bool]:
        return {}

    guarded = for_flask.idempotent("memory://", **options)(view)
    app.add_url_rule("/x", "x", guarded, methods=["GET", "PUT", "POST"])

    async def ask(method: str) -> None:
        app.test_client().open("/x", method=method, headers=KEYED)

    return ask


async def by_aiohttp(**options: Any) -> Callable[[str], Any]:
    @for_aiohttp.idempotent("memory://", **options)
    async def view(request: web.Request) -> web.StreamResponse:
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/x", view)

    async def ask(method: str) -> None:
        async with AioClient(AioServer(app)) as client:
            await client.request(method, "/x", headers=KEYED)

    return ask


SITES = [by_starlette, by_flask, by_aiohttp]


@pytest.mark.parametrize("site", SITES)
async def test_the_first_request_that_passes_a_route_guard_is_logged(
    site: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the methods are not known before: once for a guard, and not if methods were named."""
    with caplog.at_level(logging.WARNING, logger="oncekey"):
        ask = await site()
        await ask("POST")
        assert not caplog.records
        for method in ("PUT", "GET", "PUT"):
            await ask(method)
        (told,) = caplog.records
        assert "PUT '/x' ran unguarded" in told.getMessage()
        assert "methods=['PUT']" in told.getMessage()
        caplog.clear()
        ask = await site(methods=["POST", "PATCH"])
        await ask("PUT")
        assert not caplog.records


async def test_a_keyed_get_is_logged_and_another_is_not(caplog: pytest.LogCaptureFixture) -> None:
    """A client that sends a key takes the route for guarded; one that reads does not."""

    async def view(request: Request) -> JSONResponse:
        return JSONResponse({})

    app = Starlette(routes=[Route("/x", for_starlette.idempotent("memory://")(view))])
    with caplog.at_level(logging.WARNING, logger="oncekey"):
        await send(app, "GET", "/x")
        assert not caplog.records
        await send(app, "GET", "/x", **KEYED)
    assert "GET '/x' ran unguarded" in caplog.text


async def test_a_middleware_of_an_app_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """In front of a whole app other methods pass, and that is meant."""

    async def view(request: Request) -> JSONResponse:
        return JSONResponse({})

    keys: Middleware = for_starlette.idempotency("memory://")
    app = Starlette(routes=[Route("/x", view, methods=["PUT"])], middleware=[keys])
    with caplog.at_level(logging.WARNING, logger="oncekey"):
        await send(app, "PUT", "/x", **KEYED)
    assert not caplog.records


async def test_starlettes_guard_on_an_endpoint_of_fastapi_names_fastapis() -> None:
    """When it is decorated, or at its first request where the signature does not tell."""

    async def two(amount: int, name: str) -> None: ...

    async def one(amount: int) -> None: ...

    async def of_request(request: Request) -> None: ...

    with pytest.raises(PolicyError, match=r"two\(amount.*oncekey.adapters.fastapi"):
        for_starlette.idempotent("memory://")(two)
    app = FastAPI()
    app.post("/one")(for_starlette.idempotent("memory://")(one))
    app.post("/request")(for_starlette.idempotent("memory://")(of_request))
    for path in ("/one?amount=5", "/request"):
        with pytest.raises(PolicyError, match=r"route_class=idempotent"):
            await send(app, "POST", path, **KEYED)


async def test_a_name_that_is_not_in_the_state_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Refused requests alone would not tell a misspelt name from callers who are nobody."""
    scope = for_starlette.by_state("user")
    with caplog.at_level(logging.WARNING, logger="oncekey"):
        for _ in range(2):
            assert scope({"state": {"user_id": "s3cret", "tenant": 1}}) is None
        assert scope({"state": {"user": "ann"}}) == "ann"
        assert await asyncio.to_thread(for_starlette.by_state("user"), {}) is None
    first, second = (one.getMessage() for one in caplog.records)
    assert "by_state('user') found nobody: request.state has 'tenant', 'user_id' there" in first
    assert "has nothing there" in second
    assert "s3cret" not in caplog.text
