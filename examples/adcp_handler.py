"""A tool of the Ad Context Protocol (AdCP): the first answer is stored, and every retry gets it.

python adcp_handler.py seller.db
"""

import asyncio
import sys

from oncekey import AsyncSQLiteStore, IdempotencyStore, OncekeyError, ToolContext, ulid
from oncekey.adcp import capabilities_response, error_envelope


class Seller:
    """Books media buys. ``bookings`` is the effect that must happen once."""

    def __init__(self, idempotency: IdempotencyStore) -> None:
        self.bookings: list[str] = []
        self.create_media_buy = idempotency.wrap(self.create_media_buy)

    async def create_media_buy(self, params: dict, context: ToolContext | None = None) -> dict:
        self.bookings.append(params["package"])
        return {"media_buy_id": f"mb-{len(self.bookings)}", "package": params["package"]}


async def main(database: str = "seller.db") -> Seller:
    async with AsyncSQLiteStore(database) as backend:
        idempotency = IdempotencyStore(backend, ttl_seconds=86_400, profile="adcp-3.2")
        print("declares", capabilities_response(["media_buy"], idempotency)["adcp"])
        seller = Seller(idempotency)
        buyer = ToolContext(caller_identity="buyer-acme")  # from the verified credentials
        request = {"idempotency_key": ulid(), "package": "summer", "context": {"trace": "t-1"}}

        print("first ", await seller.create_media_buy(request, buyer))
        print("retry ", await seller.create_media_buy(request, buyer))
        try:
            await seller.create_media_buy({**request, "package": "winter"}, buyer)
        except OncekeyError as error:  # what oncekey.adcp.mcp and .a2a put on the wire
            print("reused", error_envelope(error))
    return seller


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
