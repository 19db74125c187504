"""MCP tools under ``once_tool``: the SDK's own server and client, in memory and over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pydantic
import pytest
import uvicorn
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, InputRequiredResult, TextContent

from oncekey import (
    AsyncOnce,
    AsyncSQLiteStore,
    BackendMismatchError,
    IdempotencyConflictError,
    InvalidKeyError,
    MemoryBackend,
    MemoryStore,
    Once,
    StoreUnavailableError,
    current_claim,
    current_transaction,
)
from oncekey.adapters.mcp_tools import authenticated_client, once_tool
from oncekey.guard import PerCallKeyWarning


def local(context: Any) -> str:
    """Everybody is one client, as on stdio."""
    return "local"


@pytest.fixture
def server() -> MCPServer:
    return MCPServer("shop")


@pytest.fixture
def aonce() -> AsyncOnce:
    return AsyncOnce(MemoryBackend(), scope="tools")


def text(result: CallToolResult) -> str:
    """What a model reads."""
    return "".join(block.text for block in result.content if isinstance(block, TextContent))


async def test_all_arguments_are_the_key(server: MCPServer, aonce: AsyncOnce) -> None:
    """Equal arguments are one call, in any order and with defaults spelt out or not."""
    runs: list[Any] = []

    @server.tool()
    @once_tool(aonce, client=local)
    async def refund(order: dict[str, int], ctx: Context, note: str = "") -> dict[str, int]:
        """Give money back."""
        runs.append((order, note))
        await ctx.report_progress(1)
        return {"refunds": len(runs)}

    async with Client(server) as client:
        tools = (await client.list_tools()).tools
        assert tools[0].description == "Give money back."
        assert sorted(tools[0].input_schema["properties"]) == ["note", "order"]
        answers = [
            await client.call_tool("refund", arguments)
            for arguments in (
                {"order": {"id": 1, "cents": 5}},
                {"order": {"cents": 5, "id": 1}},
                {"note": "", "order": {"id": 1, "cents": 5}},
                {"order": {"id": 1, "cents": 6}},
                {"order": {"id": 1, "cents": 5}, "note": "x"},
            )
        ]
    assert [answer.structured_content for answer in answers] == [
        {"refunds": number} for number in (1, 1, 1, 2, 3)
    ]


async def test_chosen_arguments_are_the_key(server: MCPServer, aonce: AsyncOnce) -> None:
    """The others must not change: the model reads the code of the conflict and what to do."""

    @server.tool()
    @once_tool(aonce, key="order_id", ignore="trace", client=local)
    async def refund(order_id: str, cents: int, trace: str = "") -> str:
        return f"{order_id} {cents}"

    async with Client(server) as client:
        for trace in ("a", "b"):
            arguments = {"order_id": "o-1", "cents": 5, "trace": trace}
            assert text(await client.call_tool("refund", arguments)) == "o-1 5"
        refused = await client.call_tool("refund", {"order_id": "o-1", "cents": 6})
    assert refused.is_error
    assert "IDEMPOTENCY_CONFLICT" in text(refused)
    assert "fresh key" in text(refused)


async def test_tools_of_one_guard_are_told_apart(aonce: AsyncOnce) -> None:
    """Two tools with equal arguments are two calls, also where their guard has a scope."""

    @once_tool(aonce, client=local)
    async def pay(order: str) -> str:
        return "paid"

    @once_tool(aonce, client=local)
    async def refund(order: str) -> str:
        return "refunded"

    assert [await pay("o-1"), await refund("o-1")] == ["paid", "refunded"]


async def test_concurrent_calls_run_once(server: MCPServer, aonce: AsyncOnce) -> None:
    """Copies of a call that come while it runs wait for its answer."""
    runs = []
    go_on = asyncio.Event()

    @server.tool()
    @once_tool(aonce, client=local)
    async def slow(order_id: str) -> int:
        runs.append(order_id)
        await go_on.wait()
        return len(runs)

    async with Client(server) as client:
        calls = [asyncio.create_task(client.call_tool("slow", {"order_id": "o"})) for _ in range(5)]
        while not runs:
            await asyncio.sleep(0)
        go_on.set()
        assert {text(await call) for call in calls} == {"1"}
    assert runs == ["o"]


async def test_a_call_in_flight_past_the_wait_is_told(server: MCPServer, aonce: AsyncOnce) -> None:
    """With ``wait=0`` the model is told to come again."""

    @server.tool()
    @once_tool(aonce, client=local, wait=0)
    async def reenter(order_id: str, ctx: Context) -> str:
        again = ctx.mcp_server.call_tool("reenter", {"order_id": order_id}, ctx)
        elsewhere = contextvars.Context()  # as if it came in another request
        return str(await asyncio.create_task(again, context=elsewhere))

    async with Client(server) as client:
        refused = await client.call_tool("reenter", {"order_id": "o-1"})
    assert refused.is_error
    assert "IDEMPOTENCY_IN_FLIGHT" in text(refused)
    assert "Retry" in text(refused)


async def test_sync_tools_run_once(server: MCPServer) -> None:
    """A plain function takes a ``Once``; the SDK runs it in a thread."""
    once = Once(MemoryStore(), scope="tools")
    runs = []

    @server.tool()
    @once_tool(once, key=["year", "month"], client=local)
    def close(year: int, month: int, ctx: Context) -> int:
        runs.append(month)
        return len(runs)

    async with Client(server) as client:
        months = [{"year": 2026, "month": month} for month in (1, 1, 2)]
        assert [text(await client.call_tool("close", one)) for one in months] == ["1", "1", "2"]


class Receipt(pydantic.BaseModel):
    order: str
    attempts: int


async def test_models_come_back_as_they_were(server: MCPServer, aonce: AsyncOnce) -> None:
    """A replay has the same structured content and text as the first answer."""

    @server.tool()
    @once_tool(aonce, client=local)
    async def receipt(order: str) -> Receipt:
        return Receipt(order=order, attempts=current_claim().attempts)

    @server.tool()
    @once_tool(aonce, client=local)
    async def raw(order: str) -> CallToolResult:
        return CallToolResult(content=[TextContent(text=f"raw {current_claim().attempts}")])

    async with Client(server) as client:
        for name in ("receipt", "raw"):
            first, again = [await client.call_tool(name, {"order": "o-1"}) for _ in range(2)]
            assert first == again
            assert not first.is_error


async def test_errors_and_questions_free_the_key(server: MCPServer, aonce: AsyncOnce) -> None:
    """What a tool raises, an error that it returns, and a question are no outcomes."""
    answers: list[Any] = [
        ToolError("declined"),
        CallToolResult(content=[TextContent(text="declined")], is_error=True),
        RuntimeError("bug"),
        CallToolResult(content=[TextContent(text="paid")]),
    ]
    runs = []

    @server.tool()
    @once_tool(aonce, client=local)
    async def pay(order: str) -> CallToolResult:
        runs.append(order)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        result: CallToolResult = answer
        return result

    async with Client(server) as client:
        results = [await client.call_tool("pay", {"order": "o-1"}) for _ in range(5)]
    assert [result.is_error for result in results] == [True, True, True, False, False]
    assert len(runs) == 4
    assert "bug" not in text(results[2])

    @once_tool(aonce, client=local)
    async def ask(order: str) -> Any:
        runs.append("asked")
        return InputRequiredResult(request_state="s")

    for _ in range(2):
        assert isinstance(await ask("o-1"), InputRequiredResult)
    assert runs.count("asked") == 2


async def test_a_tool_in_a_transaction(server: MCPServer, tmp_path: Any) -> None:
    """``transactional=True`` commits the effect and the answer together."""
    store = AsyncSQLiteStore(tmp_path / "x.db")
    once = AsyncOnce(store, scope="tools")

    @server.tool()
    @once_tool(once, client=local, transactional=True)
    async def pay(order: str) -> str:
        connection = current_transaction().connection
        await connection.execute("CREATE TABLE IF NOT EXISTS paid (name text)")
        await connection.execute("INSERT INTO paid VALUES (?)", (order,))
        rows = await (await connection.execute("SELECT count(*) FROM paid")).fetchone()
        return f"{rows[0]} paid"

    async with Client(server) as client:
        results = [await client.call_tool("pay", {"order": "o-1"}) for _ in range(2)]
    assert [text(result) for result in results] == ["1 paid", "1 paid"]
    await store.aclose()


async def test_troubles_of_the_store_stay_in_the_server(server: MCPServer) -> None:
    """The client is not told what is wrong with a database, and the tool does not run."""

    class Down(MemoryBackend):
        async def claim(self, *args: Any) -> Any:
            raise StoreUnavailableError("db-7.internal is down")

    @server.tool()
    @once_tool(AsyncOnce(Down()), client=local)
    async def pay(order: str) -> str:
        raise AssertionError("ran")

    async with Client(server) as client:
        result = await client.call_tool("pay", {"order": "o-1"})
    assert result.is_error
    assert "internal" not in text(result)


# Who calls


class Tokens:
    """Tokens that name their client and subject: ``client/subject``."""

    async def verify_token(self, token: str) -> AccessToken | None:
        client, _, subject = token.partition("/")
        return AccessToken(token=token, client_id=client, scopes=[], subject=subject or None)


@contextlib.asynccontextmanager
async def serving(server: MCPServer) -> AsyncIterator[str]:
    """The server behind uvicorn; gives its address."""
    config = uvicorn.Config(server.streamable_http_app(), port=0, log_level="warning")
    http = uvicorn.Server(config)
    task = asyncio.create_task(http.serve())
    while not http.started:
        await asyncio.sleep(0.01)
    port = http.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        http.should_exit = True
        await task


async def test_each_authenticated_client_has_its_own_keys() -> None:
    """Over HTTP: the verified token is the scope; new requests and sessions of it are the same."""
    server = MCPServer(
        "shop",
        token_verifier=Tokens(),
        auth=AuthSettings(
            issuer_url=pydantic.AnyHttpUrl("https://auth.example"),
            resource_server_url=pydantic.AnyHttpUrl("https://shop.example/mcp"),
            validate_token_resource=False,
        ),
    )
    runs: list[str] = []
    clients: list[str | None] = []

    @server.tool()
    @once_tool(AsyncOnce(MemoryBackend(), scope="tools"))
    async def refund(order_id: str, ctx: Context) -> str:
        runs.append(ctx.request_id)
        clients.append(authenticated_client(ctx))
        return f"run {len(runs)}"

    async def call(url: str, token: str) -> str:
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx2.AsyncClient(headers=headers) as http:
            transport = streamable_http_client(url, http_client=http)
            async with Client(transport) as client:
                results = [await client.call_tool("refund", {"order_id": "o-1"}) for _ in range(2)]
        (answer,) = {text(result) for result in results}
        return answer

    async with serving(server) as url:
        answers = [
            await call(url, token) for token in ("acme/ann", "acme/bob", "acme/ann", "other/ann")
        ]
    assert answers == ["run 1", "run 2", "run 1", "run 3"]
    assert len(set(clients)) == 3


async def test_without_a_client_nothing_runs(server: MCPServer, aonce: AsyncOnce) -> None:
    """No token, no shared namespace: the call is refused, with what to set."""

    @server.tool()
    @once_tool(aonce)
    async def refund(order_id: str) -> str:
        raise AssertionError("ran")

    async with Client(server) as client:
        result = await client.call_tool("refund", {"order_id": "o-1"})
    assert result.is_error
    assert "client=" in text(result)


async def test_the_client_function_gets_the_context(aonce: AsyncOnce) -> None:
    """A function of yours may look at the ``Context``; without one in the tool it gets ``None``."""
    seen = []

    def who(context: Any) -> str:
        seen.append(context)
        return "acme" if context is None else str(context.headers)

    @once_tool(aonce, client=who)
    async def with_context(order_id: str, ctx: Context) -> str:
        return "a"

    @once_tool(aonce, client=who)
    async def without(order_id: str) -> str:
        return "b"

    server = MCPServer("shop")
    server.tool()(with_context)
    server.tool()(without)
    async with Client(server) as client:
        for name in ("with_context", "without"):
            await client.call_tool(name, {"order_id": name})
    assert isinstance(seen[0], Context)
    assert seen[1] is None


# Misuse


def test_misuse_names_the_fix(aonce: AsyncOnce, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool without arguments, a wrong form and a missing SDK are found at once."""

    async def nothing(ctx: Context) -> None: ...

    with pytest.raises(InvalidKeyError, match="no arguments"):
        once_tool(aonce)(nothing)
    with pytest.raises(InvalidKeyError, match="no argument 'order'"):
        once_tool(aonce, key="order")(nothing)
    with pytest.raises(BackendMismatchError, match="AsyncOnce"):
        once_tool(Once("memory://"), ignore="ctx", key="ctx.x")(nothing)
    monkeypatch.delitem(sys.modules, "oncekey.adapters.mcp_tools")
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver.exceptions", None)
    with pytest.raises(ImportError, match=r"oncekey\[mcp\]"):
        importlib.import_module("oncekey.adapters.mcp_tools")


@pytest.mark.parametrize("key", [None, "request_id", ["order", "tool_call_id"]])
def test_an_id_of_the_call_is_told(aonce: AsyncOnce, key: Any) -> None:
    """A tool that is keyed by an id of each call warns, also where all arguments are the key."""

    async def refund(order: str, request_id: str, tool_call_id: str) -> None: ...

    with pytest.warns(PerCallKeyWarning, match=r"request_id|tool_call_id") as told:
        once_tool(aonce, key=key)(refund)
    assert [one.filename for one in told] == [__file__]


async def test_a_direct_call_raises_the_error_with_its_cause(aonce: AsyncOnce) -> None:
    """Tests of a tool's function see our own error behind the SDK's."""

    @once_tool(aonce, key="order", client=local)
    async def refund(order: str, cents: int) -> None: ...

    await refund("o-1", 1)
    with pytest.raises(ToolError, match="IDEMPOTENCY_CONFLICT") as refused:
        await refund("o-1", 2)
    assert isinstance(refused.value.__cause__, IdempotencyConflictError)


@pytest.mark.parametrize("on_cancel", ["finish", "lease", "release"])
async def test_a_tool_whose_client_hangs_up(server: MCPServer, on_cancel: Any) -> None:
    """It goes on and the next call gets its answer; or it is cancelled, as was said."""
    once = AsyncOnce(MemoryBackend(), wait=0)
    inside, gate, gone = asyncio.Event(), asyncio.Event(), asyncio.Event()
    runs: list[str] = []

    @once_tool(once, key="order", client=local, on_cancel=on_cancel)
    async def refund(order: str) -> dict[str, int]:
        runs.append(order)
        inside.set()
        await gate.wait()
        return {"refunds": len(runs)}

    async def watched(order: str) -> dict[str, int]:
        try:
            return await refund(order)
        except asyncio.CancelledError:
            gone.set()
            raise

    server.tool("refund")(watched)
    async with Client(server) as client:
        call = asyncio.create_task(client.call_tool("refund", {"order": "o-1"}))
        await inside.wait()
        call.cancel()
        await gone.wait()
        gate.set()
        again = await client.call_tool("refund", {"order": "o-1"})
        while on_cancel == "finish" and again.is_error:
            again = await client.call_tool("refund", {"order": "o-1"})
    if on_cancel == "lease":
        assert "IDEMPOTENCY_IN_FLIGHT" in text(again)
    else:
        assert again.structured_content == {"refunds": 1 if on_cancel == "finish" else 2}
