"""What stands in front of a guard and has read, changed or set something before it."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import subprocess
import sys
from typing import Any

import httpx
import pytest
from tests.adapters.webhook_sites import ROOT

from oncekey.errors import OncekeyError, PolicyError

KEY = {"Idempotency-Key": "k", "Authorization": "ann"}


@pytest.fixture(scope="module")
def django(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What Django's views answered, in a process of its own."""
    folder = str(tmp_path_factory.mktemp("shop"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.adapters.parsed_django", folder],
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


@pytest.mark.parametrize("view", ["upload", "aupload"])
def test_django_tells_forms_apart_that_its_csrf_check_has_parsed(
    django: dict[str, Any], view: str
) -> None:
    """Another file or field with the same key is a 422, also where the bytes are gone."""
    assert django["forms"][view] == ["201", "201 replayed", "422", "422"]


def test_django_users_of_several_models_are_several_callers(django: dict[str, Any]) -> None:
    """A user and a machine of one primary key don't get each other's answers."""
    assert django["users"]["classes"] == ['201 "User"', '201 "Machine"', '201 replayed "User"']
    assert django["users"]["names"] == ["auth.User/int:1", "auth.User/int:2", "Machine/int:1"]


def test_django_async_views_take_the_user_of_the_request(django: dict[str, Any]) -> None:
    """Who a middleware has put into ``request.user`` is the caller, not who has the session."""
    assert django["users"]["session"] == ["201", "201", "201 replayed"]


def test_django_knows_hosts_as_its_settings_for_proxies_say(django: dict[str, Any]) -> None:
    """With ``per_host`` and a trusted ``X-Forwarded-Host``, keys of one host are not another's."""
    assert django["hosts"] == ["201", "201", "201 replayed"]


def test_django_streams_of_events_are_not_read_ahead(django: dict[str, Any]) -> None:
    """The first event leaves at once, and a retry is told that the body was not kept."""
    assert django["stream"] == ["data: 0\n\n", "200 replayed"]


def flask_app(before: Any) -> Any:
    from flask import Flask, Response, request

    from oncekey.adapters.flask import idempotent

    app = Flask("shop")
    app.config["PROPAGATE_EXCEPTIONS"] = True

    @app.before_request
    def check() -> None:
        before(request)

    @app.post("/upload")
    @idempotent("memory://")
    def upload() -> Any:
        files = {name: file.read().decode() for name, file in request.files.items()}
        return {"form": request.form, "files": files}, 201

    @app.post("/events")
    @idempotent("memory://")
    def events() -> Any:
        def parts() -> Any:
            yield b"data: 0\n\n"
            raise AssertionError("a stream of events was read ahead")

        return Response(parts(), mimetype="text/event-stream")

    return app


def test_flask_tells_forms_apart_that_were_parsed_before() -> None:
    """A check of tokens parses forms: another field or file with the same key is a 422."""
    client = flask_app(lambda request: request.form).test_client()

    def send(form: Any, key: str) -> Any:
        return client.post("/upload", data=form, headers={**KEY, "Idempotency-Key": key})

    replies = [send({"a": value}, "form") for value in "112"]
    assert [reply.status_code for reply in replies] == [201, 201, 422]
    assert replies[1].json == {"form": {"a": "1"}, "files": {}}
    replies = [send({"f": (io.BytesIO(content), "f")}, "file") for content in (b"1", b"1", b"2")]
    assert [reply.status_code for reply in replies] == [201, 201, 422]
    assert replies[0].json == {"form": {}, "files": {"f": "1"}}


def test_flask_says_where_a_body_is_lost() -> None:
    """A body that other code has read as a stream can't be compared: an error, never a guess."""
    client = flask_app(lambda request: request.stream.read()).test_client()
    with pytest.raises(OncekeyError, match=r"request\.get_data"):
        client.post("/upload", data=b"one", headers=KEY)


def test_flask_streams_of_events_are_not_read_ahead() -> None:
    """The first event leaves at once, and a retry is told that the body was not kept."""
    client = flask_app(lambda request: None).test_client()
    first = client.post("/events", headers=KEY)
    assert next(iter(first.response)) == b"data: 0\n\n"
    again = client.post("/events", headers=KEY)
    assert again.json["type"].endswith("body-unavailable")
    assert again.headers["Idempotent-Replayed"] == "true"


def test_aiohttp_tells_forms_apart_that_were_parsed_before() -> None:
    """A middleware that parses a form leaves no bytes: another file is a 422 all the same."""
    from aiohttp import FormData, web
    from aiohttp.test_utils import TestClient, TestServer

    from oncekey.adapters.aiohttp import idempotency

    @web.middleware
    async def check(request: web.Request, handler: Any) -> Any:
        await request.post()
        return await handler(request)

    async def upload(request: web.Request) -> web.Response:
        file: Any = (await request.post())["file"]
        return web.Response(body=file.file.read(), status=201)

    async def scenario() -> list[tuple[int, bytes]]:
        app = web.Application(middlewares=[check, idempotency("memory://")])
        app.router.add_post("/upload", upload)
        seen = []
        async with TestClient(TestServer(app)) as client:
            for content in (b"1", b"1", b"2"):
                form = FormData()
                form.add_field("note", "a")
                form.add_field("file", content, filename="f")
                reply = await client.post("/upload", data=form, headers=KEY)
                seen.append((reply.status, await reply.read()))
        return seen

    first, again, other = asyncio.run(scenario())
    assert (first, again) == ((201, b"1"), (201, b"1"))
    assert other[0] == 422


def test_aiohttp_hosts_are_those_that_a_middleware_for_proxies_set() -> None:
    """With ``per_host``, ``request.clone(host=...)`` names the host as it does for the handler."""
    from aiohttp import web
    from aiohttp.test_utils import TestClient, TestServer

    from oncekey.adapters.aiohttp import idempotency

    @web.middleware
    async def proxies(request: web.Request, handler: Any) -> Any:
        return await handler(request.clone(host=request.headers["X-Forwarded-Host"]))

    async def charge(request: web.Request) -> web.Response:
        return web.Response(text=request.host, status=201)

    async def scenario() -> list[str]:
        app = web.Application(middlewares=[proxies, idempotency("memory://", per_host=True)])
        app.router.add_post("/charge", charge)
        async with TestClient(TestServer(app)) as client:
            seen = []
            for host in ("a.example", "b.example", "a.example"):
                headers = {**KEY, "X-Forwarded-Host": host}
                reply = await client.post("/charge", headers=headers)
                seen.append(await reply.text() + reply.headers.get("Idempotent-Replayed", ""))
        return seen

    assert asyncio.run(scenario()) == ["a.example", "b.example", "a.exampletrue"]


def starlette_app(read: Any) -> Any:
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    from oncekey.adapters.starlette import idempotent

    @idempotent("memory://")
    async def charge(request: Any) -> Any:
        return Response(await request.body(), 201)

    async def outside(request: Any) -> Any:
        await read(request)
        return await charge(request)

    return Starlette(routes=[Route("/charge", outside, methods=["POST"])])


async def post(app: Any, *bodies: Any) -> list[httpx.Response]:
    transport = httpx.ASGITransport(app)
    async with (
        asyncio.timeout(30),
        httpx.AsyncClient(transport=transport, base_url="http://shop") as client,
    ):
        return [await client.post("/charge", data=body, headers=KEY) for body in bodies]


def test_starlette_takes_a_body_that_a_decorator_has_read() -> None:
    """It did not wait for ever for a body that is here already."""

    async def read(request: Any) -> None:
        await request.body()

    replies = asyncio.run(post(starlette_app(read), {"a": "1"}, {"a": "1"}, {"a": "2"}))
    assert [reply.status_code for reply in replies] == [201, 201, 422]
    assert replies[1].content == b"a=1"


def test_starlette_says_where_a_body_is_lost() -> None:
    """A form that a decorator has parsed is an error that says what to do, not a hang."""

    async def read(request: Any) -> None:
        await request.form()

    with pytest.raises(PolicyError, match=r"request\.body"):
        asyncio.run(post(starlette_app(read), {"a": "1"}))


@pytest.mark.parametrize("inner", [None, "inner"])
def test_fastapi_calls_of_its_own_app_leave_the_key_alone(inner: str | None) -> None:
    """A dependency that asks another route in process does not use up the key of its request."""
    from fastapi import APIRouter, Depends, FastAPI

    from oncekey.adapters.fastapi import idempotent_route

    app = FastAPI()
    router = APIRouter(route_class=idempotent_route("memory://"))
    numbers = itertools.count(1)

    @router.post("/me")
    async def me() -> str:
        return "ann"

    async def who() -> Any:
        headers = {"Authorization": "gate"} | ({"Idempotency-Key": inner} if inner else {})
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return (await client.post("/me", headers=headers)).json()

    @router.post("/charge", status_code=201)
    async def charge(caller: str = Depends(who)) -> dict[str, Any]:
        return {"caller": caller, "number": next(numbers)}

    app.include_router(router)
    replies = asyncio.run(post(app, None, None, None))
    assert [reply.json() for reply in replies] == [{"caller": "ann", "number": 1}] * 3
    assert [reply.headers.get("idempotent-replayed") for reply in replies] == [None, "true", "true"]


def test_starlette_users_of_several_classes_are_several_callers() -> None:
    """A person and a machine of one identity, and ``1`` and ``"1"``, are told apart."""
    from starlette.authentication import BaseUser, SimpleUser, UnauthenticatedUser

    from oncekey.adapters.starlette import by_user

    class Machine(BaseUser):
        is_authenticated = True

        def __init__(self, identity: Any) -> None:
            self.who = identity

        @property
        def identity(self) -> Any:
            return self.who

    users = [SimpleUser("1"), Machine("1"), Machine(1)]
    assert len({by_user({"user": user}) for user in users}) == 3
    assert by_user({"user": UnauthenticatedUser()}) is None
    assert by_user({"user": Machine("")}) == ""  # which the guard refuses, with an error in the log
