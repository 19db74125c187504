"""A platform of the ``adcp`` package, whose handlers are wrapped by our store. Imported late."""

from __future__ import annotations

from typing import Any

from adcp.decisioning import DecisioningCapabilities, DecisioningPlatform, SingletonAccounts
from adcp.decisioning.capabilities import Account, Adcp, IdempotencySupported, MediaBuy
from adcp.decisioning.serve import create_adcp_server_from_platform

from oncekey import IdempotencyStore, MemoryBackend

__all__ = ["Platform", "handler_of"]

idempotency = IdempotencyStore(MemoryBackend(), profile="adcp-3.2")


class Platform(DecisioningPlatform):
    """Says that it deduplicates, and does, in a way that the package can't see."""

    accounts = SingletonAccounts(account_id="seller")
    capabilities = DecisioningCapabilities(
        specialisms=["sales-non-guaranteed"],
        adcp=Adcp(
            major_versions=[3],
            idempotency=IdempotencySupported.model_validate(idempotency.capability()),
        ),
        account=Account(supported_billing=["operator"]),
        media_buy=MediaBuy(supported_pricing_models=["cpm"]),
    )

    def __init__(self) -> None:
        self.runs: list[str] = []

    @idempotency.wrap
    async def create_media_buy(self, req: Any, ctx: Any) -> dict[str, Any]:
        self.runs.append("create")
        return {
            "status": "completed",
            "media_buy_id": f"mb-{len(self.runs)}",
            "confirmed_at": "2026-01-01T00:00:00Z",
            "revision": 1,
            "packages": [],
        }

    @idempotency.wrap
    async def update_media_buy(self, media_buy_id: str, patch: Any, ctx: Any) -> dict[str, Any]:
        self.runs.append("update")
        return {"status": "completed", "media_buy_id": media_buy_id, "revision": len(self.runs)}

    async def get_products(self, req: Any, ctx: Any) -> None: ...
    async def sync_creatives(self, req: Any, ctx: Any) -> None: ...
    async def get_media_buy_delivery(self, req: Any, ctx: Any) -> None: ...


def handler_of(platform: Platform) -> Any:
    """The platform as the package's servers take it; refuses one that it finds unguarded."""
    handler, executor, _ = create_adcp_server_from_platform(platform, validate_at_init=False)
    executor.shutdown()
    return handler
