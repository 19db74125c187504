"""A replay passes the same authentication and permissions as a first call, in every framework."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from aiohttp.test_utils import TestServer
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel
from tests.adapters import door_sites
from tests.adapters.webhook_sites import ROOT

from oncekey import MemoryBackend, MemoryStore, PolicyError
from oncekey.adapters.fastapi import idempotent_route

Pay = Callable[[str | None], Any]


@pytest.fixture(autouse=True)
def nobody_banned() -> Iterator[None]:
    yield
    door_sites.BANNED.clear()


def told(reply: httpx.Response) -> str:
    replayed = " replayed" if reply.headers.get("idempotent-replayed") == "true" else ""
    return f"{reply.status_code}{replayed}"


def headers(user: str | None) -> dict[str, str]:
    return {"Idempotency-Key": "k"} | ({} if user is None else {"X-Login": user})


@asynccontextmanager
async def served(kind: str, calls: list[str]) -> AsyncIterator[httpx.AsyncClient]:
    def charge() -> dict[str, Any]:
        calls.append(kind)
        return {"charge": len(calls)}

    made = getattr(door_sites, f"{kind}_app")
    if kind == "aiohttp":
        async with (
            TestServer(made(MemoryBackend(), charge)) as server,
            httpx.AsyncClient(base_url=str(server.make_url("/")), verify=False) as client,
        ):
            yield client
        return
    transport = httpx.ASGITransport(made(MemoryBackend(), charge))
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        yield client


async def scenario(pay: Pay) -> list[str]:
    seen = [told(await pay(user)) for user in ("ann", "ann", None, "bob")]
    door_sites.BANNED.add("ann")
    seen.append(told(await pay("ann")))
    door_sites.BANNED.clear()
    return [*seen, told(await pay("ann"))]


EXPECTED = ["201", "201 replayed", "401", "201", "403", "201 replayed"]


@pytest.mark.parametrize("kind", ["fastapi", "litestar", "aiohttp"])
async def test_a_replay_passes_the_frameworks_own_door(kind: str) -> None:
    """Signed out: the framework's 401. Banned since: its 403. Another user: a charge of its own."""
    calls: list[str] = []
    async with served(kind, calls) as client:

        async def pay(user: str | None) -> httpx.Response:
            reply = await client.post("/charges", headers=headers(user))
            if reply.status_code in (401, 403):
                assert "urn:oncekey" not in reply.text
            return reply

        assert await scenario(pay) == EXPECTED
    assert len(calls) == 2


async def test_a_request_that_was_turned_away_leaves_nothing_behind() -> None:
    """After a 401 with a key, a request without one is just run, in the same task too."""
    calls: list[str] = []
    async with served("fastapi", calls) as client:
        assert (await client.post("/charges", headers=headers(None))).status_code == 401
        for number in (1, 2):
            reply = await client.post("/charges", headers={"X-Login": "ann"})
            assert (reply.status_code, reply.json()) == (201, {"charge": number})
            assert "idempotent-replayed" not in reply.headers


class Order(BaseModel):
    amount: int


async def test_who_may_not_is_told_that_before_its_key_is_missed() -> None:
    """A required key is asked for when the dependencies have let the request through."""
    ran: list[int] = []

    def login(request: Request) -> None:
        if "authorization" not in request.headers:
            raise HTTPException(401)

    router = APIRouter(
        route_class=idempotent_route("memory://", required=True), dependencies=[Depends(login)]
    )

    @router.post("/charges", status_code=201)
    def charge(order: Order) -> Order:
        ran.append(order.amount)
        return order

    app = FastAPI()
    app.include_router(router)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://shop"
    ) as client:
        for headers, status in (({}, 401), ({"Authorization": "me"}, 400)):
            reply = await client.post("/charges", json={"amount": 5}, headers=headers)
            assert reply.status_code == status
        assert reply.json()["type"].endswith("key-missing")
        keyed = {"Authorization": "me", "Idempotency-Key": "k"}
        assert (await client.post("/charges", json={"amount": 5}, headers=keyed)).is_success
    assert ran == [5]
    with pytest.raises(PolicyError, match=r"no decorator: write APIRouter\(route_class="):
        idempotent_route("memory://")(charge)  # type: ignore[call-arg, arg-type]


async def test_a_guarded_endpoint_of_fastapi_keeps_its_signature() -> None:
    """Annotations that are strings, a model, a background task, a router in a router, OpenAPI."""
    done: list[int] = []
    router = APIRouter(route_class=idempotent_route(MemoryBackend()))

    @router.post("/charges", status_code=201)
    def charge(order: Order, tasks: BackgroundTasks) -> Order:
        """Charges once."""
        tasks.add_task(done.append, order.amount)
        return order

    outer, app = APIRouter(prefix="/v1"), FastAPI()
    outer.include_router(router)
    app.include_router(outer)
    sent = {"Idempotency-Key": "k", "Authorization": "me"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        for expected in ("201", "201 replayed"):
            reply = await client.post("/v1/charges", json={"amount": 5}, headers=sent)
            assert (told(reply), reply.json()) == (expected, {"amount": 5})
        other = await client.post("/v1/charges", json={"amount": "x"}, headers=sent)
        assert other.status_code == 422
    assert done == [5]
    described = app.openapi()["paths"]["/v1/charges"]["post"]
    assert described["description"] == "Charges once."
    assert [one["name"] for one in described["parameters"]] == ["Idempotency-Key"]
    assert "Order" in json.dumps(described["requestBody"])
    with pytest.raises(PolicyError, match="yields"):

        @router.post("/stream")
        async def stream() -> Any:
            yield b"part"


async def test_starlette_endpoints_are_decorated_inside_requires() -> None:
    """``@requires`` above ``@idempotent`` holds for replays: 403, which is its way to say no."""
    calls: list[str] = []
    async with served("starlette", calls) as client:
        pay: Pay = lambda user: client.post("/charges", headers=headers(user))  # noqa: E731
        assert await scenario(pay) == [*EXPECTED[:2], "403", *EXPECTED[3:]]
    assert len(calls) == 2


async def test_starlette_middleware_of_a_route_is_inside_authentication() -> None:
    """It knows the user, and refuses nobody's keys; what decorators say, a replay does not see."""
    calls: list[str] = []

    def charge() -> dict[str, Any]:
        calls.append("one")
        return {}

    app = door_sites.starlette_app(MemoryBackend(), charge, decorated=False)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://shop"
    ) as client:
        pay: Pay = lambda user: client.post("/charges", headers=headers(user))  # noqa: E731
        assert await scenario(pay) == [*EXPECTED[:4], "201 replayed", "201 replayed"]
        nobody = await pay(None)
        assert nobody.json()["type"] == "urn:oncekey:problem:caller-unknown"
    assert len(calls) == 2


async def test_flask_views_are_decorated_inside_their_login() -> None:
    """``@login_required`` above ``@idempotent`` holds for replays, and the session names users."""
    calls: list[str] = []

    def charge() -> dict[str, Any]:
        calls.append("one")
        return {}

    app = door_sites.flask_app(MemoryStore(), charge)

    async def pay(user: str | None) -> httpx.Response:
        with httpx.Client(transport=httpx.WSGITransport(app), base_url="http://shop") as client:
            return client.post("/charges", headers=headers(user))

    assert await scenario(pay) == EXPECTED
    assert len(calls) == 2


@pytest.fixture(scope="module")
def django(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each kind of view answered, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.adapters.door_django", str(tmp_path_factory.mktemp("shop"))],
        cwd=ROOT,
        env=os.environ.copy(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


KINDS = ("function", "class", "rest", "rest-function", "async", "async-class")


def test_django_views_are_guarded_inside_their_permissions(django: dict[str, Any]) -> None:
    """Functions, classes, REST framework, sync and async: its 403 to nobody and to who lost it."""
    expected = ["201", "201 replayed", "403", "201", "403", "201 replayed"]
    assert {kind: django[kind] for kind in KINDS} == dict.fromkeys(KINDS, expected)
    assert sorted(django["calls"]) == sorted(KINDS * 2)


def test_django_refuses_a_guard_in_front_of_a_login(django: dict[str, Any]) -> None:
    """Around ``as_view()``, ``@api_view`` or ``@login_required``: an error that says where to."""
    refused = django["refused"]
    assert ["dispatch" in text for text in refused] == [True, True, True, False]
    assert "below" in refused[3]


def test_django_opens_a_store_once_for_a_class(django: dict[str, Any]) -> None:
    """``method_decorator`` decorates anew for every request; the store stays."""
    assert django["opened"] == 1
