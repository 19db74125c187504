"""What the tests use of the ``adcp`` package. Importing it takes seconds, so it is done late."""

from __future__ import annotations

import warnings
from typing import Any

import pydantic

from oncekey import IdempotencyStore, MemoryBackend
from oncekey.adcp import capabilities_response

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    import adcp.types as types
    from adcp.exceptions import IdempotencyConflictError
    from adcp.server import ADCPHandler, ToolContext, create_a2a_server, create_mcp_server
    from adcp.server.base import AccountAwareToolContext
    from adcp.server.helpers import STANDARD_ERROR_CODES
    from adcp.server.idempotency import IdempotencyStore as Store
    from adcp.server.idempotency import MemoryBackend as Memory
    from adcp.server.idempotency import WebhookDedupStore
    from adcp.server.responses import capabilities_response as capabilities

__all__ = [
    "STANDARD_ERROR_CODES",
    "IdempotencyConflictError",
    "Memory",
    "Seller",
    "Store",
    "ToolContext",
    "WebhookDedupStore",
    "a2a_app_of",
    "app_of",
    "capabilities",
    "types",
]


class Named(pydantic.BaseModel):
    """What a request must look like, on top of the package's own rules."""

    name: str | None = pydantic.Field(None, max_length=10)


class Seller(ADCPHandler[Any]):
    """A seller of the package's kind, with its models, guarded by our store."""

    def __init__(self, backend: Any = None, **options: Any) -> None:
        self.runs: list[Any] = []
        self.idempotency = IdempotencyStore(
            backend or MemoryBackend(), profile="adcp-3.2", **options
        )
        wrap = self.idempotency.wrap(operation="create_media_buy", validate=Named)
        self.guarded = wrap(self.book)

    async def get_adcp_capabilities(self, params: Any, context: Any = None) -> dict[str, Any]:
        return capabilities_response(["media_buy"], idempotency=self.idempotency)

    async def create_media_buy(
        self, params: types.CreateMediaBuyRequest, context: Any = None
    ) -> types.CreateMediaBuySuccessResponse:
        answer: types.CreateMediaBuySuccessResponse = await self.guarded(params, context)
        return answer

    async def book(
        self, params: types.CreateMediaBuyRequest, context: Any = None
    ) -> types.CreateMediaBuySuccessResponse:
        self.runs.append((params, context))
        return types.CreateMediaBuySuccessResponse.model_validate(
            {
                "status": "completed",
                "media_buy_id": f"mb-{len(self.runs)}",
                "confirmed_at": "2026-01-01T00:00:00Z",
                "revision": 1,
                "packages": [{"package_id": "pkg-1", "product_id": "p", "budget": 5000}],
            }
        )


def caller(metadata: Any) -> AccountAwareToolContext:
    return AccountAwareToolContext(caller_identity="alice", account_id="acct-1")


def app_of(seller: Any) -> Any:
    """The package's MCP server for a seller, as an ASGI app."""
    server = create_mcp_server(
        seller,
        context_factory=caller,
        stateless_http=True,
        validation=None,  # reads every schema of the protocol, which takes its time
    )
    return server.streamable_http_app(stateless_http=True, json_response=True)


def a2a_app_of(seller: Any) -> Any:
    """The package's A2A server for a seller, as an ASGI app."""
    return create_a2a_server(seller, context_factory=caller, validation=None)
