"""MCP tools that take effect once for each set of arguments, however often a model calls them.

    from mcp.server.mcpserver import Context, MCPServer
    from oncekey import AsyncOnce
    from oncekey.adapters.mcp_tools import once_tool

    server = MCPServer("shop")
    once = AsyncOnce("sqlite:///tools.db", ttl=600)

    @server.tool()
    @once_tool(once, key="order_id")
    async def refund(order_id: str, cents: int, ctx: Context) -> dict:
        return {"order": order_id, "refunded": cents}

A client that lost an answer, or a model that is not sure, calls a tool again with the same
arguments and a new request id: the id says nothing, the arguments say what is to be done. So they
are the key, all of them or those that are chosen, for each authenticated client. A call of the same
kind that is meant to happen twice must differ in one of them, or come after the ``ttl``.

An error of the tool frees the key, also one that it returns (``is_error``), and so does a question
to the client (``InputRequiredResult``). Refusals reach the client as errors of the tool, with their
code in front.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from typing import Any, TypeVar, Unpack

from oncekey._core.call import Job
from oncekey._core.transact import in_transaction
from oncekey.adapters._threads import in_thread
from oncekey.adapters._webhooks import missing
from oncekey.errors import InvalidKeyError, OncekeyError, StoreError
from oncekey.guard import AsyncOnce, Once
from oncekey.models import Key, Scope, check_text
from oncekey.policy import OnCancel, PolicyOptions, check_on_cancel

try:
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.server.mcpserver.utilities.context_injection import find_context_parameter
    from mcp.server.request_state import authenticated_principal
    from mcp.types import CallToolResult, InputRequiredResult
except ImportError as error:
    raise missing("the MCP SDK 2", "mcp") from error

__all__ = ["authenticated_client", "once_tool"]

F = TypeVar("F", bound=Callable[..., Any])
Client = Callable[[Any], str | None]


def authenticated_client(context: Any = None) -> str | None:
    """Who calls, by the verified access token: client, issuer and subject. ``None``: there is none.

    The ``context`` is not needed for it.
    """
    return authenticated_principal(context)


def once_tool(
    once: Once | AsyncOnce,
    *,
    key: str | Sequence[str] | None = None,
    name: str | None = "",
    ignore: Iterable[str] = (),
    client: Client = authenticated_client,
    transactional: bool = False,
    on: Any = None,
    on_cancel: OnCancel = "finish",
    **options: Unpack[PolicyOptions],
) -> Callable[[F], F]:
    """Decorate the function of a tool, under ``@server.tool()``.

    A function that is not async becomes one: it runs in a thread of oncekey's own, in asyncio. At
    most eight copies of one call wait for it there, unless ``max_waiters`` says otherwise; one more
    is told at once that the call is in flight.

    Args:
        once: The guard: ``AsyncOnce`` for an async function, ``Once`` for another.
        key: The argument that is the key, or several; dotted paths are fine. The others must not
            change under one key. ``None``: all of them are the key.
        name: What keeps its keys apart from other functions'. See ``Once``.
        ignore: Arguments that neither are the key nor compared. The ``Context`` never is.
        client: Gets the tool's ``Context``, or ``None`` if it has none, and gives who calls, by
            something that was verified. Each client has its own keys. Default: the access token.
        transactional: Run the tool in a transaction of the store's database. See ``Once``.
        on: Where that transaction is, if not on the store's own connections.
        on_cancel: What becomes of an async tool whose client hangs up or cancels. ``finish``: it
            goes on in a task of its own and its answer is stored, for at most ``max_run`` or an
            hour. ``lease``: it is cancelled, and as what it did is unknown, the key is held until
            its lease ends. ``release``, which is the same as ``retry_safe``: it is cancelled and
            the key is free. A transaction is always rolled back.
        **options: Options of ``Policy``.

    Raises:
        InvalidKeyError: The function has no such argument, or none at all.
        BackendMismatchError: An async function with ``Once``, or another one with ``AsyncOnce``.
        TransactionRefusedError: ``transactional``, and the store has no transactions.
    """
    # Long: most of it says what the options do.
    run = once.runner(transactional, on, options)
    if check_on_cancel(on_cancel) == "release":
        options["retry_safe"] = True
    alone: set[asyncio.Task[Any]] = set()  # tools that go on without their client

    def decorate(function: F) -> Any:
        context = find_context_parameter(function)
        ignored = {ignore} if isinstance(ignore, str) else set(ignore)
        if context is not None:
            ignored.add(context)
        parts = key or [name for name in signature(function).parameters if name not in ignored]
        if not parts:
            raise InvalidKeyError(
                f"{function.__name__} has no arguments to tell its calls apart by: give it one, "
                "such as an idempotency_key"
            )
        binding = once.bind(function, parts, ignored, options, name)
        # Tools that share a scope still differ: arguments alone don't say what is to be done.
        named = (binding.scope.kind, *binding.scope.parts, "tool", function.__name__)

        def job(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Job:
            made = binding.job(args, kwargs)
            given = binding.signature.bind(*args, **kwargs).arguments.get(context or "")
            who = client(given)
            if not who:
                raise InvalidKeyError(
                    f"{binding.operation} needs an authenticated client: switch the server's "
                    "auth on, or pass client= to once_tool, on stdio client=lambda context: 'local'"
                )
            scope = Scope(*named, check_text(who, "client"))
            finishes = on_cancel == "finish" and not made.plan.retry_safe and not in_transaction()
            return made._replace(
                key=Key(scope, made.key.name), keeps=_keeps, finishing=alone if finishes else None
            )

        def outcome(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return run(job(args, kwargs), function, args, kwargs)

        @functools.wraps(function)
        async def tool(*args: Any, **kwargs: Any) -> Any:
            try:
                if isinstance(once, AsyncOnce):
                    return (await outcome(args, kwargs)).value
                # Not in the SDK's threads: those serve every sync tool.
                return (await in_thread("tool", outcome, args, kwargs)).value
            except StoreError:
                raise  # the server's own trouble: it is logged there
            except OncekeyError as error:
                raise ToolError(f"{error.code}: {error}") from error

        return tool

    return decorate


def _keeps(value: Any) -> bool:
    """Whether an answer is an outcome, and so is stored."""
    if isinstance(value, CallToolResult):
        return not value.is_error
    return not isinstance(value, InputRequiredResult)
