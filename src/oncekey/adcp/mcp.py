"""AdCP over the Model Context Protocol (MCP), for servers of the ``mcp`` SDK.

An error becomes a tool error whose text and structured content both carry ``adcp_error``. With the
low-level ``Server``, which hands over a request as it came, ``call_tool`` is all that is needed;
for functions of ``MCPServer`` there is the decorator ``tool_errors``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, cast

from oncekey._core.call import is_async
from oncekey.adapters._webhooks import missing
from oncekey.adcp.serving import Handler, answer_to, check_handlers
from oncekey.adcp.wire import error_envelope
from oncekey.errors import OncekeyError
from oncekey.request import ToolContext

try:
    from mcp.server.context import ServerRequestContext
    from mcp.server.request_state import authenticated_principal
    from mcp.shared.exceptions import MCPError
    from mcp.types import INVALID_PARAMS, CallToolRequestParams, CallToolResult, TextContent
except ImportError as error:
    raise missing("the mcp SDK, version 2 or later", "mcp") from error

__all__ = ["authenticated_caller", "call_tool", "error_result", "tool_errors"]

F = TypeVar("F", bound=Callable[..., Any])
OnCallTool = Callable[[ServerRequestContext[Any, Any], CallToolRequestParams], Awaitable[Any]]


def _result(answer: Mapping[str, Any], failed: bool) -> CallToolResult:
    text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
    structured = dict(answer)
    error = structured.get("adcp_error")
    if isinstance(error, Mapping) and error.get("code") == "IDEMPOTENCY_CONFLICT":
        # A runner in the field takes anything else in here for a leak of what is stored. The
        # recovery class stands in ``errors`` and in the text all the same.
        told = {name: error[name] for name in ("code", "message") if name in error}
        structured["adcp_error"] = told
    return CallToolResult(
        content=[TextContent(type="text", text=text)],
        structured_content=structured,
        is_error=failed,
    )


def error_result(error: BaseException, context: Any = None) -> CallToolResult:
    """An error as the result of a tool.

    Args:
        error: What was raised.
        context: The ``context`` of the request that failed. Default: that of the error.

    Example:
        >>> from oncekey import IdempotencyInFlightError
        >>> result = error_result(IdempotencyInFlightError("create_media_buy", 5))
        >>> result.is_error, result.structured_content["adcp_error"]["retry_after"]
        (True, 5)
    """
    return _result(error_envelope(error, context), True)


def authenticated_caller(request: ServerRequestContext[Any, Any]) -> ToolContext:
    """The caller as the SDK's own authentication knows it; nobody, where there is none."""
    return ToolContext(caller_identity=authenticated_principal(request))


def call_tool(
    handlers: Mapping[str, Handler],
    caller: Callable[[ServerRequestContext[Any, Any]], Any] = authenticated_caller,
) -> OnCallTool:
    """A low-level server's ``on_call_tool`` for handlers ``handler(params, caller)``.

    Answers are given as structured content and as text, with the request's ``context``. Errors of
    oncekey become tool errors that carry ``adcp_error``, and so do answers that say ``errors``. Of
    any other error the client learns nothing but that a retry with the same key is safe; it is
    logged.

    Args:
        handlers: A handler for each tool, sync or async, such as ``IdempotencyStore.wrap`` gives.
        caller: Says who is calling, from verified credentials: a ``ToolContext``, or anything else
            that names the principal. It may be async. ``None``, or a ``PermissionError``, is for
            nobody that is known: requests with a key are then refused, with the second all are.

    Raises:
        PolicyError: ``handlers`` or ``caller`` is something else.

    Example:
        >>> from mcp.server.lowlevel import Server
        >>> async def get_products(params, caller):
        ...     return {"products": []}
        >>> server = Server("seller", on_call_tool=call_tool({"get_products": get_products}))
    """
    check_handlers(handlers, caller)

    async def on_call_tool(
        request: ServerRequestContext[Any, Any], params: CallToolRequestParams
    ) -> CallToolResult:
        handler = handlers.get(params.name)
        if handler is None:
            raise MCPError(INVALID_PARAMS, f"Unknown tool: {params.name}")
        arguments = dict(params.arguments or {})
        answer, failed = await answer_to(
            handler, arguments, lambda: caller(request), params.name, (MCPError,)
        )
        return _result(answer, failed)

    return on_call_tool


def tool_errors(tool: F) -> F:
    """Decorate a tool so that errors of oncekey become tool errors that carry ``adcp_error``.

    Put it closest to ``@server.tool()``. Arguments that the SDK itself refuses never get here, so a
    tool that is to answer a missing key declares it as ``idempotency_key: str | None = None``.

    Example:
        >>> from mcp.server.mcpserver import MCPServer
        >>> server = MCPServer("seller")
        >>> @server.tool()
        ... @tool_errors
        ... async def get_products(brief: str) -> dict[str, list[str]]:
        ...     return {"products": []}
    """
    if is_async(tool):

        @functools.wraps(tool)
        async def asynchronous(*args: Any, **kwargs: Any) -> Any:
            try:
                return await tool(*args, **kwargs)
            except OncekeyError as error:
                return error_result(error, _context(kwargs))

        return cast("F", asynchronous)

    @functools.wraps(tool)
    def synchronous(*args: Any, **kwargs: Any) -> Any:
        try:
            return tool(*args, **kwargs)
        except OncekeyError as error:
            return error_result(error, _context(kwargs))

    return cast("F", synchronous)


def _context(kwargs: dict[str, Any]) -> Any:
    """The request's own ``context``, not the SDK's object of that name."""
    found = kwargs.get("context")
    return found if isinstance(found, Mapping) else None
