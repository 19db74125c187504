"""The tools for agents, through the SDK's own client over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from tests.server.kit import CONFIG, ENVIRON, HOST, TOKENS, bearer, deliver

from oncekey.inbox.models import Outcome, Result
from oncekey.server import previews
from oncekey.server.app import make_app
from oncekey.server.config import settings_from
from oncekey.server.gateway import Gateway
from oncekey.testing import SignedDelivery

Signed = Callable[..., SignedDelivery]
PATH = "/_oncekey/mcp"


@contextlib.asynccontextmanager
async def agent(
    gateway: Gateway, role: str, mode: Any = "auto", headers: dict[str, str] | None = None
) -> AsyncIterator[Client]:
    """A client of the SDK's with somebody's token; what it sends goes through the app."""
    transport = httpx2.ASGITransport(app=make_app(gateway))
    async with (
        httpx2.AsyncClient(transport=transport, headers=headers or bearer(role)) as http,
        Client(streamable_http_client(f"{HOST}{PATH}", http_client=http), mode=mode) as client,
    ):
        yield client


async def called(client: Client, name: str, **arguments: Any) -> dict[str, Any]:
    """What a tool answers; an error is a failure of the test."""
    result = await client.call_tool(name, arguments)
    assert not result.is_error, result.content
    told: dict[str, Any] = result.structured_content
    return told


async def refused(client: Client, name: str, **arguments: Any) -> str:
    """Why a tool does not do something."""
    result = await client.call_tool(name, arguments)
    assert result.is_error
    return str(result.structured_content)


async def kept(http: httpx.AsyncClient, signed: Signed, name: str = "evt_1") -> str:
    answer = await deliver(http, signed("shop", id=name))
    return answer.headers["oncekey-event"]


async def buried(gateway: Gateway) -> None:
    """Everything that waits is given up."""
    found = await gateway.inbox.fetch({"app": 100}, 60_000)
    await gateway.inbox.finish(
        [Result(one, Outcome.DEAD, status=500, error="HTTP 500") for one in found]
    )


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_an_agent_looks_around(
    gateway: Gateway, http: httpx.AsyncClient, signed: Signed, mode: str
) -> None:
    """Old and new clients see the tools of their role, and what the API would tell."""
    event = await kept(http, signed)
    await buried(gateway)
    async with agent(gateway, "read", mode) as client:
        tools = {one.name: one for one in (await client.list_tools()).tools}
        assert set(tools) == {"search", "event", "issues"}
        found = await called(client, "search", q="source:shop", limit=5)
        assert [one["id"] for one in found["items"]] == [event]
        assert (await called(client, "event", id=event))["deliveries"][0]["state"] == "dead"
        assert (await called(client, "issues"))["items"][0]["dead"] == 1
        assert "limit does not fit" in await refused(client, "search", limit=0)
        assert "no event id" in await refused(client, "event", id="x")
        assert "role operate" in await refused(client, "replay", id=event)
        assert "no such tool" in await refused(client, "drop_all")
    async with agent(gateway, "operate", mode) as client:
        assert "replay" in {one.name for one in (await client.list_tools()).tools}


async def test_a_replay_needs_a_preview(
    gateway: Gateway, http: httpx.AsyncClient, signed: Signed
) -> None:
    """The first call shows and changes nothing; the second does it, once; both are audited."""
    event = await kept(http, signed)
    await buried(gateway)
    async with agent(gateway, "operate") as client:
        shown = await called(client, "replay", id=event)
        assert shown["would"]["targets"] == {"app": "dead"}
        assert await gateway.inbox.fetch({"app": 9}, 60_000) == []
        made = shown["preview"]
        answers = await asyncio.gather(
            *(client.call_tool("replay", {"preview": made}) for _ in range(4))
        )
        told = sorted(str(one.structured_content)[:26] for one in answers)
        # Not because it is done by now: the id itself is worth nothing any more.
        assert told == [*["{'error': 'no such preview'"[:26]] * 3, "{'queued': 1, 'left_out': "]
        assert len(await gateway.inbox.fetch({"app": 9}, 60_000)) == 1
    done = [(one.action, one.actor) for one in (await gateway.inbox.audit()).items]
    assert done == [("replay", "operator (mcp)"), ("preview", "operator (mcp)")]


async def test_a_preview_is_for_one_token_and_what_it_showed(
    gateway: Gateway, http: httpx.AsyncClient, signed: Signed
) -> None:
    """Another's id, an invented one, or a world that has changed: nothing is done."""
    event = await kept(http, signed)
    await buried(gateway)
    async with agent(gateway, "operate") as client, agent(gateway, "admin") as other:
        made = (await called(client, "replay", id=event))["preview"]
        assert "no such preview" in await refused(other, "replay", preview=made)
        assert "no such preview" in await refused(client, "replay", preview=made)  # it is used up
        assert "no such preview" in await refused(client, "replay", preview="pre_x")
        made = (await called(client, "replay", id=event))["preview"]
        await gateway.inbox.replay(event, actor="somebody else")
        assert "no longer what was shown" in await refused(client, "replay", preview=made)
        made = (await called(client, "replay", id=event))["preview"]
        rotated = {**ENVIRON, "TOKEN_OPERATE": "another-token-of-the-operator"}
        text = CONFIG.format(store=gateway.settings.store)
        await gateway.use(settings_from(text, "gateway.toml", rotated))
    changed = {"Authorization": "Bearer another-token-of-the-operator"}
    transport = httpx2.ASGITransport(app=make_app(gateway))
    async with (
        httpx2.AsyncClient(transport=transport, headers=changed) as raw,
        Client(streamable_http_client(f"{HOST}{PATH}", http_client=raw)) as client,
    ):
        assert "no such preview" in await refused(client, "replay", preview=made)


async def test_a_preview_ends(
    gateway: Gateway, http: httpx.AsyncClient, signed: Signed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its time an id is worth nothing."""
    monkeypatch.setattr(previews, "SECONDS", 0)
    event = await kept(http, signed)
    async with agent(gateway, "operate") as client:
        made = (await called(client, "replay", id=event))["preview"]
        assert "no such preview" in await refused(client, "replay", preview=made)


async def test_dead_letters_by_a_search(
    gateway: Gateway, http: httpx.AsyncClient, signed: Signed
) -> None:
    """All that match are counted first; if they are more by then, none is replayed."""
    await kept(http, signed)
    await kept(http, signed, "evt_2")
    await buried(gateway)
    async with agent(gateway, "operate") as client:
        first = await called(client, "replay", q="target:app", rate=50)
        assert first["would"]["replays"] == 2
        await kept(http, signed, "evt_3")
        await buried(gateway)
        assert "no longer" in await refused(client, "replay", preview=first["preview"])
        second = await called(client, "replay", q="target:app", rate=50)
        begun = await called(client, "replay", preview=second["preview"])
        assert (begun["total"], begun["rate"]) == (3, 50)
        for wrong in ({}, {"id": "msg_0", "q": ""}, {"q": "", "targets": ["app"]}):
            await refused(client, "replay", **wrong)
        assert "alone" in await refused(client, "replay", preview="pre_x", q="")


@pytest.mark.parametrize(
    "method, headers, status",
    [
        ("POST", {}, 401),
        ("POST", {"Authorization": "Bearer wrong"}, 401),
        ("POST", {"Authorization": f"Basic {TOKENS['admin']}"}, 401),
        ("GET", bearer("admin"), 405),
        ("DELETE", bearer("admin"), 405),
        ("POST", {**bearer("admin"), "Origin": "https://evil.example"}, 403),
        ("POST", {**bearer("admin"), "Content-Type": "application/json"}, 413),
    ],
)
async def test_who_is_not_let_in(
    http: httpx.AsyncClient, method: str, headers: dict[str, str], status: int
) -> None:
    """Only a bearer token by POST, from no other site, and no body without bounds."""
    body = b"x" * 70_000 if status == 413 else b"{}"
    answer = await http.request(method, PATH, headers=headers, content=body)
    assert answer.status_code == status
