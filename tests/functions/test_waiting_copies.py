"""Copies of a slow call: few wait, the others are told at once, and nobody else is held up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import pytest
from mcp import Client
from mcp.server.lowlevel import Server
from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult, ListToolsResult, TextContent, Tool
from tests.http.doors import AsgiDoor, Calls, Door, WsgiDoor

from oncekey import (
    AsyncOnce,
    AsyncSQLiteStore,
    IdempotencyInFlightError,
    IdempotencyStore,
    MemoryBackend,
    MemoryStore,
    Once,
    PolicyError,
    SQLiteStore,
    ToolContext,
)
from oncekey._core import waiters
from oncekey.adapters import _threads
from oncekey.adapters.mcp_tools import once_tool
from oncekey.adcp.mcp import call_tool

COPIES = 100
PATIENCE = 60  # seconds; only a hang lasts as long


class Slow:
    """Work that goes on until it is told to end."""

    def __init__(self) -> None:
        self.runs = 0
        self.begun = threading.Event()
        self.may_end = threading.Event()

    def work(self) -> int:
        self.runs += 1
        self.begun.set()
        assert self.may_end.wait(PATIENCE)
        return self.runs


@pytest.fixture
def slow() -> Iterator[Slow]:
    found = Slow()
    yield found
    found.may_end.set()
    assert not waiters._waiting  # whoever came has left


def text(result: CallToolResult) -> str:
    return "".join(block.text for block in result.content if isinstance(block, TextContent))


async def crowd(
    slow: Slow, call: Callable[[], Awaitable[Any]], others: Callable[[], Awaitable[None]]
) -> tuple[list[Any], list[Any]]:
    """Make copies of a slow call. What was told at once, and what came when it ended."""
    copies = [asyncio.create_task(call()) for _ in range(COPIES)]
    async with asyncio.timeout(PATIENCE):
        while sum(copy.done() for copy in copies) < COPIES - 1 - _threads.WAITERS["tool"]:
            await asyncio.wait(
                [copy for copy in copies if not copy.done()], return_when=asyncio.FIRST_COMPLETED
            )
        at_once = [copy.result() for copy in copies if copy.done()]
        left = [copy for copy in copies if not copy.done()]
        assert slow.begun.is_set()
        # The threads of everybody else are free, as many as there are.
        names = await asyncio.gather(*(asyncio.to_thread(threading.get_ident) for _ in range(50)))
        assert names
        await others()
        slow.may_end.set()
        return at_once, [await copy for copy in left]


async def test_copies_of_a_slow_sync_tool_leave_threads_for_others(slow: Slow) -> None:
    """Other sync tools and ``asyncio.to_thread`` go on while a hundred copies come."""
    server = MCPServer("shop")

    @server.tool()
    @once_tool(Once(MemoryStore(), wait=PATIENCE), key="order", client=lambda context: "local")
    def refund(order: str) -> int:
        return slow.work()

    @server.tool()
    @once_tool(Once(MemoryStore()), key="order", client=lambda context: "local")
    def pay(order: str) -> str:
        return f"paid {order}"

    @server.tool()
    def ping() -> str:
        return "pong"

    async with Client(server) as client:

        async def others() -> None:
            assert text(await client.call_tool("ping", {})) == "pong"
            assert text(await client.call_tool("pay", {"order": "o-2"})) == "paid o-2"

        at_once, later = await crowd(
            slow, lambda: client.call_tool("refund", {"order": "o-1"}), others
        )
    assert all(answer.is_error and "IN_FLIGHT" in text(answer) for answer in at_once)
    assert [text(answer) for answer in later] == ["1"] * 9
    assert slow.runs == 1


async def test_copies_of_a_slow_sync_handler_leave_threads_for_others(slow: Slow) -> None:
    """The same for handlers of AdCP, which are run by the adapter for MCP's low-level server."""
    store = IdempotencyStore(MemoryStore(), profile="adcp-3.2", wait_seconds=PATIENCE)

    @store.wrap
    def create(params: dict[str, Any], caller: Any) -> dict[str, Any]:
        return {"run": slow.work()}

    def look(params: dict[str, Any], caller: Any) -> dict[str, Any]:
        return {"seen": True}

    alice = ToolContext(caller_identity="alice")
    handlers = {"create": create, "look": look}

    async def list_tools(context: Any, params: Any) -> ListToolsResult:
        return ListToolsResult(
            tools=[Tool(name=n, input_schema={"type": "object"}) for n in handlers]
        )

    server = Server(
        "shop",
        on_list_tools=list_tools,
        on_call_tool=call_tool(handlers, caller=lambda context: alice),
    )
    arguments = {"idempotency_key": str(uuid.uuid4())}
    async with Client(server) as client:

        async def others() -> None:
            found = (await client.call_tool("look", {})).structured_content
            assert found is not None
            assert found["seen"]

        at_once, later = await crowd(slow, lambda: client.call_tool("create", arguments), others)
    codes = {answer.structured_content["adcp_error"]["code"] for answer in at_once}
    assert codes == {"IDEMPOTENCY_IN_FLIGHT"}
    assert [answer.structured_content["run"] for answer in later] == [1] * 9
    assert slow.runs == 1


@pytest.mark.parametrize("stored", ["memory", "sqlite"])
@pytest.mark.parametrize("door", [AsgiDoor, WsgiDoor])
def test_copies_of_a_request_over_the_number_get_a_409(
    door: Any, stored: str, slow: Slow, tmp_path: Any
) -> None:
    """With ``wait`` and ``max_waiters=2`` one runs, two wait, and the others are told at once."""
    kinds: dict[tuple[str, Any], Callable[[], Any]] = {
        ("memory", AsgiDoor): MemoryBackend,
        ("memory", WsgiDoor): MemoryStore,
        ("sqlite", AsgiDoor): lambda: AsyncSQLiteStore(tmp_path / "keys.db"),
        ("sqlite", WsgiDoor): lambda: SQLiteStore(tmp_path / "keys.db"),
    }
    calls = Calls(lambda body: (201, [], b"%d" % slow.work()))
    site = Door(door(calls, kinds[stored, door](), wait=PATIENCE, max_waiters=2))
    with ThreadPoolExecutor(10) as pool:
        copies = [pool.submit(site.post) for _ in range(10)]
        told = itertools.islice(as_completed(copies, PATIENCE), 7)
        early = [copy.result().status for copy in told]
        slow.may_end.set()
        statuses = [copy.result().status for copy in copies]
    assert early == [409] * 7
    assert sorted(statuses) == [201] * 3 + [409] * 7
    assert calls.count == 1


def test_a_policy_may_bound_its_waiters(slow: Slow) -> None:
    """``max_waiters`` holds for a guard too; by default any number waits."""
    once = Once(MemoryStore(), scope="bounded", wait=PATIENCE, max_waiters=0)

    @once(key="order")
    def charge(order: str) -> int:
        return slow.work()

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(charge, "o-1")
        assert slow.begun.wait(PATIENCE)
        with pytest.raises(IdempotencyInFlightError):
            charge("o-1")
        slow.may_end.set()
        assert first.result() == 1
    assert charge("o-1") == 1
    with pytest.raises(PolicyError, match="max_waiters"):
        Once(MemoryStore(), scope="bounded", max_waiters=-1)


async def test_a_copy_that_is_cancelled_makes_room(slow: Slow) -> None:
    """Whoever gives up waiting leaves its place to another."""
    may_end = asyncio.Event()
    begun = asyncio.Event()
    once = AsyncOnce(MemoryBackend(), scope="room", wait=PATIENCE, max_waiters=1)

    @once(key="order")
    async def charge(order: str) -> str:
        begun.set()
        await may_end.wait()
        return "done"

    first = asyncio.create_task(charge("o-1"))
    await begun.wait()
    second = asyncio.create_task(charge("o-1"))
    while not waiters._waiting:
        await asyncio.sleep(0)
    with pytest.raises(IdempotencyInFlightError):
        await charge("o-1")
    second.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await second
    third = asyncio.create_task(charge("o-1"))
    while not waiters._waiting:
        await asyncio.sleep(0)
    may_end.set()
    assert [await first, await third] == ["done", "done"]
