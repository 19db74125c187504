"""``/_oncekey/mcp``: the gateway's tools for agents, by the Model Context Protocol.

Each request stands for itself and carries its token: nothing is kept between two of them, so any
worker or node may answer.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, Final

from oncekey._version import __version__
from oncekey.adapters._webhooks import missing
from oncekey.errors import OncekeyError, StoreError
from oncekey.server.auth import Person
from oncekey.server.endpoints import ApiError
from oncekey.server.tools import TOOLS, call_tool

try:
    from mcp.server.context import ServerRequestContext
    from mcp.server.lowlevel import Server
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
    from mcp.types import (
        CallToolRequestParams,
        CallToolResult,
        ListToolsResult,
        PaginatedRequestParams,
        TextContent,
        Tool,
        ToolAnnotations,
    )
except ImportError as error:
    raise missing("the MCP SDK 2", "mcp") from error

if TYPE_CHECKING:
    from oncekey.server.gateway import Gateway

__all__ = ["PERSON", "serve_mcp"]

logger = logging.getLogger("oncekey")

PERSON: Final = "oncekey.person"
"""Where a request has who calls, once that is known."""
MOST_BODY: Final = 65_536
_ABOUT: Final = (
    "An inbox of webhooks: events that came in once, and their deliveries to targets. Look with "
    "search, event and issues. What replay does is shown first, and done only by a second call."
)


async def serve_mcp(gateway: Gateway, scope: Any, receive: Any, send: Any) -> None:
    """Answer one request of somebody who is known: ``scope`` has them as ``PERSON``."""
    manager = StreamableHTTPSessionManager(
        _server(gateway), json_response=True, stateless=True, max_request_body_size=MOST_BODY
    )
    async with manager.run():
        await manager.handle_request(scope, receive, send)


def _server(gateway: Gateway) -> Server[Any]:
    async def list_tools(
        context: ServerRequestContext[Any, Any], params: PaginatedRequestParams | None
    ) -> ListToolsResult:
        person = _person(context)
        return ListToolsResult(
            tools=[
                Tool(
                    name=one.name,
                    description=one.help,
                    input_schema=one.schema(),
                    annotations=ToolAnnotations(read_only_hint=one.role == "read"),
                )
                for one in TOOLS
                if person.may(one.role)
            ]
        )

    async def on_call(
        context: ServerRequestContext[Any, Any], params: CallToolRequestParams
    ) -> CallToolResult:
        try:
            told = await call_tool(gateway, _person(context), params.name, params.arguments or {})
        except ApiError as error:
            return _result({"error": error.title, "detail": error.detail}, failed=True)
        except StoreError as error:
            logger.warning("a tool can't reach the inbox: %s", error)
            return _result({"error": "the inbox can't be reached right now"}, failed=True)
        except OncekeyError as error:
            return _result({"error": str(error)}, failed=True)
        return _result(told)

    return Server(
        "oncekey",
        version=__version__,
        instructions=_ABOUT,
        on_list_tools=list_tools,
        on_call_tool=on_call,
    )


def _person(context: ServerRequestContext[Any, Any]) -> Person:
    if context.request is None:
        raise RuntimeError("a request without its HTTP request")  # the transport always has it
    person: Person = context.request.scope[PERSON]
    return person


def _result(told: Any, *, failed: bool = False) -> CallToolResult:
    text = json.dumps(told, ensure_ascii=False)
    return CallToolResult(
        content=[TextContent(type="text", text=text)], structured_content=told, is_error=failed
    )
