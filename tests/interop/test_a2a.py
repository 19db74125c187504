"""AdCP handlers and errors over A2A: servers and clients of ``a2a-sdk``, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from a2a.client import ClientConfig, create_client
from a2a.helpers import new_message
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore
from a2a.types import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    CancelTaskRequest,
    GetTaskRequest,
    Part,
    Role,
    SendMessageRequest,
    Task,
    TaskState,
)
from a2a.utils.errors import TaskNotCancelableError, UnsupportedOperationError
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.struct_pb2 import Value
from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, AuthenticationBackend, SimpleUser
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from tests.interop.serving import PATIENCE, serving
from tests.interop.shop import ALICE, CONTEXT, Shop, import_without, request

from oncekey.adcp.a2a import SkillExecutor, fail_task
from oncekey.errors import IdempotencyConflictError

RPC = "/a2a"


class Names(AuthenticationBackend):
    """Takes a header for the name of who is calling."""

    async def authenticate(self, conn: Any) -> Any:
        name = conn.headers.get("x-buyer")
        return (AuthCredentials(), SimpleUser(name)) if name else None


def app_of(executor: AgentExecutor, card: AgentCard) -> Starlette:
    handler = DefaultRequestHandler(executor, InMemoryTaskStore(), card)
    routes = [*create_agent_card_routes(card), *create_jsonrpc_routes(handler, RPC)]
    return Starlette(
        routes=routes, middleware=[Middleware(AuthenticationMiddleware, backend=Names())]
    )


class Agent:
    """An A2A agent that is being served, seen from its client."""

    def __init__(self, base: str, card: AgentCard) -> None:
        self.base, self.card = base, card
        card.supported_interfaces[0].url = base + RPC

    @contextlib.asynccontextmanager
    async def client(self, buyer: str = "") -> AsyncIterator[Any]:
        headers = {"x-buyer": buyer} if buyer else {}
        async with httpx.AsyncClient(headers=headers, timeout=PATIENCE) as http:
            config = ClientConfig(httpx_client=http, streaming=False)
            async with await create_client(self.card, config) as client:
                yield client

    async def send(self, *parts: Any, buyer: str = "") -> Task:
        """Send a message with these data parts; gives the task."""
        message = new_message(
            [Part(data=ParseDict(part, Value())) for part in parts], Role.ROLE_USER
        )
        async with self.client(buyer) as client:
            replies = client.send_message(SendMessageRequest(message=message))
            found = [reply async for reply in replies]
        return found[-1].task  # type: ignore[no-any-return]

    async def call(self, skill: str, parameters: dict[str, Any], buyer: str = "") -> Task:
        return await self.send({"skill": skill, "parameters": parameters}, buyer=buyer)


@contextlib.contextmanager
def agent_of(executor: AgentExecutor) -> Iterator[Agent]:
    card = AgentCard(
        name="shop",
        description="sells",
        version="1",
        capabilities=AgentCapabilities(streaming=False),
        supported_interfaces=[AgentInterface(url="", protocol_binding="JSONRPC")],
    )
    card.supported_interfaces[0].protocol_version = "1.0"
    with serving(app_of(executor, card)) as base:
        yield Agent(base, card)


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
def agent(shop: Shop) -> Iterator[Agent]:
    with agent_of(SkillExecutor(shop.handlers, caller=lambda request: ALICE)) as served:
        yield served


def data_of(task: Task) -> dict[str, Any]:
    """The data part of a task's one artifact."""
    [artifact] = task.artifacts
    data: dict[str, Any] = MessageToDict(artifact.parts[0].data)
    return data


def error_of(task: Task) -> dict[str, Any]:
    assert task.status.state == TaskState.TASK_STATE_FAILED
    data = data_of(task)
    assert data["context"] == CONTEXT
    assert data["status"] == "failed"
    assert data["errors"] == [data["adcp_error"]]
    error: dict[str, Any] = data["adcp_error"]
    assert task.artifacts[0].parts[1].text == f"{error['code']}: {error['message']}"
    return error


async def test_answers_and_replays_reach_the_client(agent: Agent, shop: Shop) -> None:
    """A completed task carries the answer; a replay is marked, with the new context."""
    first = await agent.call("create_media_buy", request(budget=5))
    assert first.status.state == TaskState.TASK_STATE_COMPLETED
    assert data_of(first) == {"media_buy_id": "mb-1", "budget": 5, "context": CONTEXT}
    again = await agent.call("create_media_buy", request(budget=5, context={"c": 2}))
    assert data_of(again) == {**data_of(first), "context": {"c": 2}, "replayed": True}
    assert shop.runs == ["create_media_buy"]


async def test_a_conflict_is_a_failed_task(agent: Agent) -> None:
    """The data part of a conflict is a code, a message and the recovery class."""
    await agent.call("create_media_buy", request(budget=111_222_333))
    task = await agent.call("create_media_buy", request(budget=6))
    assert error_of(task) == {
        "code": "IDEMPOTENCY_CONFLICT",
        "message": "idempotency_key reused with a different payload",
        "recovery": "correctable",
    }
    assert "111222333" not in str(task)
    assert "mb-1" not in str(task)


async def test_a_missing_key_is_an_invalid_request(agent: Agent, shop: Shop) -> None:
    """No key is refused with its field, and nothing runs."""
    error = error_of(await agent.call("create_media_buy", {"context": CONTEXT}))
    assert (error["code"], error["field"]) == ("INVALID_REQUEST", "idempotency_key")
    assert shop.runs == []


async def test_in_flight_says_when_to_come_back(agent: Agent, shop: Shop) -> None:
    """A copy of a running call gets IN_FLIGHT with whole seconds; later the answer."""
    first = asyncio.create_task(agent.call("slow", request()))
    assert await asyncio.to_thread(shop.inside.wait, PATIENCE)
    error = error_of(await agent.call("slow", request()))
    assert (error["code"], error["recovery"]) == ("IDEMPOTENCY_IN_FLIGHT", "transient")
    assert error["retry_after"] in range(1, 31)
    shop.gate.set()
    assert data_of(await first) == {"done": True, "context": CONTEXT}
    again = await agent.call("slow", request())
    assert data_of(again) == {"done": True, "context": CONTEXT, "replayed": True}


async def test_errors_that_a_handler_returns_are_failed_tasks(agent: Agent, shop: Shop) -> None:
    """An answer with ``errors`` is told in both places, and runs again."""
    for _ in range(2):
        error = error_of(await agent.call("refuse", request()))
        assert error == {"code": "BUDGET_TOO_LOW", "message": "at least 500"}
    assert shop.runs == ["refuse"] * 2


@pytest.mark.parametrize("skill", ["crash", "unreachable"])
async def test_other_errors_tell_nothing(
    agent: Agent, skill: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The client learns that a retry is safe; what went wrong stays on the server."""
    with caplog.at_level(logging.ERROR, logger="oncekey"):
        task = await agent.call(skill, request())
    assert error_of(task)["code"] == "SERVICE_UNAVAILABLE"
    assert "s3cret" not in str(task)


async def test_numbers_are_the_same_payload_as_over_mcp(agent: Agent, shop: Shop) -> None:
    """A data part holds doubles; whole ones reach the handler as the integers that were sent."""
    assert isinstance(
        data_of(await agent.call("create_media_buy", request(budget=5)))["budget"], float
    )
    replay = await shop.handlers["create_media_buy"](request(budget=5), ALICE)
    assert replay == {"media_buy_id": "mb-1", "budget": 5, "context": CONTEXT, "replayed": True}
    assert type(replay["budget"]) is int


@pytest.mark.parametrize(
    "parts",
    [
        [{"skill": "nothing", "parameters": {"context": CONTEXT}}],
        [{"no": "skill"}],
        [{"skill": "get_products"}, {"skill": "create_media_buy", "parameters": request()}],
    ],
    ids=["unknown", "none", "two"],
)
async def test_a_message_asks_for_one_known_skill(
    agent: Agent, shop: Shop, parts: list[Any]
) -> None:
    """Anything else is refused, and nothing runs."""
    task = await agent.send(*parts)
    assert task.status.state == TaskState.TASK_STATE_FAILED
    error = data_of(task)["adcp_error"]
    assert error["code"] == "INVALID_REQUEST"
    assert "create_media_buy" in error["message"]
    assert shop.runs == []


async def test_the_sdks_own_authentication_names_the_caller(shop: Shop) -> None:
    """Without a ``caller`` the principal is the SDK's user; without one, keys are refused."""
    with agent_of(SkillExecutor(shop.handlers)) as served:
        made = [
            data_of(await served.call("create_media_buy", request(), buyer=who))["media_buy_id"]
            for who in ("alice", "bob", "alice")
        ]
        assert made == ["mb-1", "mb-2", "mb-1"]
        nobody = await served.call("create_media_buy", request())
        assert error_of(nobody)["code"] == "INVALID_REQUEST"


async def test_a_task_is_over_when_it_is_heard_of(agent: Agent, shop: Shop) -> None:
    """So there is nothing to cancel, and its answer can be fetched again."""
    task = await agent.call("create_media_buy", request())
    async with agent.client() as client:
        assert data_of(await client.get_task(GetTaskRequest(id=task.id))) == data_of(task)
        with pytest.raises(TaskNotCancelableError):
            await client.cancel_task(CancelTaskRequest(id=task.id))
    with pytest.raises(UnsupportedOperationError):
        await SkillExecutor({}).cancel(None, None)  # type: ignore[arg-type]


class Own(AgentExecutor):
    """An executor that somebody wrote for themselves."""

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        await fail_task(IdempotencyConflictError("own"), context, event_queue, CONTEXT)

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None: ...


async def test_an_executor_of_ones_own_can_fail_the_same_way() -> None:
    """``fail_task`` publishes what ``SkillExecutor`` would."""
    with agent_of(Own()) as served:
        error = error_of(await served.send({"anything": True}))
    assert error["code"] == "IDEMPOTENCY_CONFLICT"


def test_without_the_sdk_the_extra_is_named() -> None:
    """The error says what to install."""
    assert "pip install 'oncekey[a2a]'" in import_without("a2a", "a2a")
