"""AdCP handlers and errors over MCP: servers and clients of the ``mcp`` SDK, over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.lowlevel import Server
from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult, ListToolsResult, Tool
from tests.interop.serving import PATIENCE, serving
from tests.interop.shop import ALICE, CONTEXT, Shop, import_without, request

from oncekey import IdempotencyStore, MemoryBackend, ToolContext
from oncekey.adcp.mcp import authenticated_caller, call_tool, error_result, tool_errors
from oncekey.errors import IdempotencyConflictError


def server_of(shop: Shop, **options: Any) -> Server[Any]:
    async def list_tools(context: Any, params: Any) -> ListToolsResult:
        tools = [Tool(name=name, input_schema={"type": "object"}) for name in shop.handlers]
        return ListToolsResult(tools=tools)

    options.setdefault("caller", lambda context: ALICE)
    return Server(
        "shop", on_list_tools=list_tools, on_call_tool=call_tool(shop.handlers, **options)
    )


# How the server speaks HTTP, and which protocol the client asks for.
WIRES: dict[str, tuple[dict[str, Any], Any]] = {
    "stateless": ({"stateless_http": True, "json_response": True}, "auto"),
    "sessions": ({"stateless_http": False, "json_response": False}, "legacy"),
}


@pytest.fixture
def shop() -> Shop:
    return Shop()


class Caller:
    """Calls tools, each over a connection of its own."""

    def __init__(self, url: str, mode: Any) -> None:
        self.url, self.mode = url, mode

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        async with Client(self.url, mode=self.mode) as client:
            try:
                return await client.call_tool(name, arguments)
            except MCPError as error:
                refused = error  # raised outside, where no task group wraps it
        raise refused


@pytest.fixture(params=WIRES)
def client(request: pytest.FixtureRequest, shop: Shop) -> Iterator[Caller]:
    """The SDK's client: without sessions and with the protocol of 2026, and as it was before."""
    options, mode = WIRES[request.param]
    with serving(server_of(shop).streamable_http_app(**options)) as base:
        yield Caller(f"{base}/mcp", mode)


def error_of(result: Any) -> dict[str, Any]:
    """The error of a result, which is the same in all the places where it is looked for."""
    assert isinstance(result, CallToolResult)
    assert result.is_error
    structured = result.structured_content
    told = json.loads(result.content[0].text)  # type: ignore[union-attr]
    assert structured is not None
    assert structured["context"] == told["context"] == CONTEXT
    assert structured["status"] == "failed"
    assert structured["errors"] == told["errors"] == [told["adcp_error"]]
    assert structured["adcp_error"].items() <= told["adcp_error"].items()
    error: dict[str, Any] = structured["errors"][0]
    return error


async def test_answers_and_replays_reach_the_client(client: Caller, shop: Shop) -> None:
    """The answer is structured content and text; a replay is marked, with the new context."""
    first = await client.call_tool("create_media_buy", request(budget=5))
    assert not first.is_error
    assert first.structured_content == {"media_buy_id": "mb-1", "budget": 5, "context": CONTEXT}
    assert json.loads(first.content[0].text) == first.structured_content  # type: ignore[union-attr]
    again = await client.call_tool("create_media_buy", request(budget=5, context={"c": 2}))
    assert again.structured_content == {
        **first.structured_content,
        "context": {"c": 2},
        "replayed": True,
    }
    assert shop.runs == ["create_media_buy"]


async def test_a_conflict_says_its_code_and_no_more(client: Caller) -> None:
    """The structured error of a conflict is a code and a message; nothing of the first is told."""
    await client.call_tool("create_media_buy", request(budget=111_222_333))
    result = await client.call_tool("create_media_buy", request(budget=6))
    assert error_of(result) == {
        "code": "IDEMPOTENCY_CONFLICT",
        "message": "idempotency_key reused with a different payload",
        "recovery": "correctable",
    }
    assert result.structured_content is not None
    assert set(result.structured_content) == {"status", "adcp_error", "errors", "context"}
    assert set(result.structured_content["adcp_error"]) == {"code", "message"}
    assert "111222333" not in result.model_dump_json()
    assert "mb-1" not in result.model_dump_json()
    other_tool = await client.call_tool("update_media_buy", request(budget=111_222_333))
    assert error_of(other_tool)["code"] == "IDEMPOTENCY_CONFLICT"


async def test_a_missing_key_is_an_invalid_request(client: Caller, shop: Shop) -> None:
    """No key, or a bad one, is refused with its field, and nothing runs."""
    for key in (None, "short"):
        arguments = {"context": CONTEXT, **({} if key is None else {"idempotency_key": key})}
        error = error_of(await client.call_tool("create_media_buy", arguments))
        assert (error["code"], error["field"]) == ("INVALID_REQUEST", "idempotency_key")
        assert error["recovery"] == "correctable"
    assert shop.runs == []


async def test_a_client_that_hangs_up_gets_its_answer_later(shop: Shop) -> None:
    """The server cancels the request; its handler finishes, and the retry is a replay."""
    wrapped, gone = shop.handlers["slow"], threading.Event()

    async def watched(params: Any, context: Any) -> Any:
        try:
            return await wrapped(params, context)
        except asyncio.CancelledError:
            gone.set()
            raise

    shop.handlers["slow"] = watched
    with serving(server_of(shop).streamable_http_app(stateless_http=True)) as base:
        client = Caller(f"{base}/mcp", "auto")
        first = asyncio.create_task(client.call_tool("slow", request()))
        assert await asyncio.to_thread(shop.inside.wait, PATIENCE)
        first.cancel()
        assert await asyncio.to_thread(gone.wait, PATIENCE), "the server did not cancel it"
        shop.gate.set()
        while (again := await client.call_tool("slow", request())).is_error:
            assert error_of(again)["code"] == "IDEMPOTENCY_IN_FLIGHT"
    assert again.structured_content == {"done": True, "replayed": True, "context": CONTEXT}
    assert shop.runs == ["slow"]


async def test_in_flight_says_when_to_come_back(client: Caller, shop: Shop) -> None:
    """A copy of a running call gets IN_FLIGHT with whole seconds; later the answer."""
    first = asyncio.create_task(client.call_tool("slow", request()))
    assert await asyncio.to_thread(shop.inside.wait, PATIENCE)
    error = error_of(await client.call_tool("slow", request()))
    assert error["code"] == "IDEMPOTENCY_IN_FLIGHT"
    assert error["recovery"] == "transient"
    assert 1 <= error["retry_after"] <= 30
    shop.gate.set()
    assert not (await first).is_error
    again = await client.call_tool("slow", request())
    assert again.structured_content == {"done": True, "context": CONTEXT, "replayed": True}


async def test_errors_that_a_handler_returns_are_tool_errors(client: Caller, shop: Shop) -> None:
    """An answer with ``errors`` is told in both places, and runs again."""
    for _ in range(2):
        error = error_of(await client.call_tool("refuse", request()))
        assert error == {"code": "BUDGET_TOO_LOW", "message": "at least 500"}
    assert shop.runs == ["refuse"] * 2


@pytest.mark.parametrize("tool", ["crash", "unreachable"])
async def test_other_errors_tell_nothing(
    client: Caller, tool: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The client learns that a retry is safe; what went wrong is in the server's log."""
    with caplog.at_level(logging.ERROR, logger="oncekey"):
        result = await client.call_tool(tool, request())
    error = error_of(result)
    assert (error["code"], error["recovery"]) == ("SERVICE_UNAVAILABLE", "transient")
    assert "s3cret" not in result.model_dump_json()
    assert "s3cret" in caplog.text
    assert tool in caplog.text


async def test_models_sync_handlers_and_reads_work(client: Caller, shop: Shop) -> None:
    """A model goes out without its empty fields; sync handlers run; reads get the context too."""
    for marks in ({}, {"replayed": True}):
        result = await client.call_tool("update_media_buy", request(idempotency_key="k" * 16))
        assert result.structured_content == {"media_buy_id": "mb-9", "context": CONTEXT, **marks}
        result = await client.call_tool("sync_creatives", request())
        assert result.structured_content == {"creatives": 2, "context": CONTEXT, **marks}
    result = await client.call_tool("get_products", {"context": CONTEXT})
    assert result.structured_content == {"products": [], "context": CONTEXT}
    result = await client.call_tool("text", {})
    assert result.structured_content == {"result": "hello"}
    assert shop.runs == ["update_media_buy", "sync_creatives"]


async def test_an_unknown_tool_is_a_protocol_error(client: Caller) -> None:
    """What is not there is the SDK's own error."""
    with pytest.raises(MCPError, match="Unknown tool: nothing"):
        await client.call_tool("nothing", {})


async def test_parallel_copies_run_once(client: Caller, shop: Shop) -> None:
    """Copies over connections of their own get one answer."""
    results = await asyncio.gather(
        *(client.call_tool("create_media_buy", request()) for _ in range(16))
    )
    answers = [result.structured_content or {} for result in results]
    assert {answer["media_buy_id"] for answer in answers} == {"mb-1"}
    assert sum("replayed" in answer for answer in answers) == 15
    assert shop.runs == ["create_media_buy"]


class Verifier:
    """Knows two tokens."""

    async def verify_token(self, token: str) -> AccessToken | None:
        if not token.startswith("token-of-"):
            return None
        return AccessToken(token=token, client_id=token.removeprefix("token-of-"), scopes=[])


async def test_the_sdks_own_authentication_names_the_caller(shop: Shop) -> None:
    """Without a ``caller`` the principal is the SDK's; without authentication there is none."""
    server = server_of(shop, caller=authenticated_caller)
    auth = AuthSettings(
        issuer_url="https://auth.example",  # type: ignore[arg-type]
        resource_server_url="https://shop.example",  # type: ignore[arg-type]
        required_scopes=[],
        validate_token_resource=False,
    )
    app = server.streamable_http_app(
        stateless_http=True, json_response=True, auth=auth, token_verifier=Verifier()
    )
    with serving(app) as base:
        made = []
        for who in ("alice", "bob", "alice"):
            headers = {"authorization": f"Bearer token-of-{who}"}
            async with httpx2.AsyncClient(headers=headers) as http:
                transport = streamable_http_client(f"{base}/mcp", http_client=http)
                async with Client(transport) as connected:
                    result = await connected.call_tool("create_media_buy", request())
                    made.append((result.structured_content or {})["media_buy_id"])
    assert made == ["mb-1", "mb-2", "mb-1"]
    async with Client(server_of(shop, caller=authenticated_caller)) as connected:
        result = await connected.call_tool("create_media_buy", request())
    assert error_of(result)["code"] == "INVALID_REQUEST"


async def test_a_caller_may_be_looked_up_asynchronously(shop: Shop) -> None:
    """``caller`` is awaited where it is a coroutine, and its errors are not the client's."""

    async def looked_up(context: Any) -> ToolContext:
        return ALICE

    async with Client(server_of(shop, caller=looked_up)) as connected:
        assert not (await connected.call_tool("create_media_buy", request())).is_error

    def broken(context: Any) -> ToolContext:
        raise KeyError("s3cret")

    async with Client(server_of(shop, caller=broken)) as connected:
        result = await connected.call_tool("create_media_buy", request())
    assert error_of(result)["code"] == "SERVICE_UNAVAILABLE"
    assert "s3cret" not in result.model_dump_json()


@pytest.mark.parametrize("gives, told", [(None, "gave None"), ("s3cret", "gave a str")])
async def test_a_caller_that_names_nobody_is_in_the_log(
    shop: Shop, caplog: pytest.LogCaptureFixture, gives: Any, told: str
) -> None:
    """The client learns only that it was refused; the server's log says what to give."""
    with caplog.at_level(logging.WARNING, logger="oncekey"):
        async with Client(server_of(shop, caller=lambda context: gives)) as connected:
            result = await connected.call_tool("create_media_buy", request())
    assert error_of(result)["code"] == "INVALID_REQUEST"
    assert f"create_media_buy was refused: caller= {told}, which names nobody" in caplog.text
    assert "ToolContext(caller_identity=...)" in caplog.text
    assert "s3cret" not in caplog.text


async def test_tools_of_mcpserver_get_the_same_errors() -> None:
    """The decorator turns our errors into results, for async and sync tools with their schemas."""
    store = IdempotencyStore(MemoryBackend(), profile="adcp-3.2")
    server = MCPServer("shop", log_level="WARNING")

    @store.wrap
    async def create(params: dict[str, Any], context: Any = None) -> dict[str, Any]:
        return {"media_buy_id": "mb-1"}

    @server.tool()
    @tool_errors
    async def create_media_buy(
        budget: int, idempotency_key: str | None = None, context: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Book a media buy."""
        params = {"budget": budget, "idempotency_key": idempotency_key, "context": context}
        answer: dict[str, Any] = await create(params, ALICE)
        return answer

    @server.tool()
    @tool_errors
    def conflict(context: dict[str, Any]) -> dict[str, Any]:
        raise IdempotencyConflictError("conflict")

    @server.tool()
    @tool_errors
    def fine() -> dict[str, Any]:
        return {"fine": True}

    with serving(server.streamable_http_app(stateless_http=True, json_response=True)) as base:
        async with Client(f"{base}/mcp") as connected:
            listed = {tool.name: tool for tool in (await connected.list_tools()).tools}
            assert listed["create_media_buy"].description == "Book a media buy."
            assert listed["create_media_buy"].input_schema["required"] == ["budget"]
            first = await connected.call_tool("create_media_buy", request(budget=1))
            assert first.structured_content == {"media_buy_id": "mb-1", "context": CONTEXT}
            again = await connected.call_tool("create_media_buy", request(budget=2))
            assert error_of(again)["code"] == "IDEMPOTENCY_CONFLICT"
            missing = await connected.call_tool(
                "create_media_buy", {"budget": 1, "context": CONTEXT}
            )
            assert error_of(missing)["field"] == "idempotency_key"
            raised = await connected.call_tool("conflict", {"context": CONTEXT})
            assert error_of(raised)["code"] == "IDEMPOTENCY_CONFLICT"
            assert (await connected.call_tool("fine", {})).structured_content == {"fine": True}


def test_an_error_result_takes_the_context_of_its_error() -> None:
    """Without a context of its own, the one that came with the error is given back."""
    error = IdempotencyConflictError("op")
    error.context = CONTEXT
    assert error_of(error_result(error))["recovery"] == "correctable"


def test_without_the_sdk_the_extra_is_named() -> None:
    """The error says what to install."""
    assert "pip install 'oncekey[mcp]'" in import_without("mcp", "mcp")
