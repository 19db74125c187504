"""A tool of the Ad Context Protocol (AdCP): the first answer is stored, and every retry gets it.

python adcp_handler.py seller.db
"""

import asyncio
import sys

from oncekey import (
    IdempotencyConflictError,
    IdempotencyStore,
    SQLiteBackend,
    ToolContext,
    ulid,
)


class Seller:
    """Books media buys. ``bookings`` is the effect that must happen once."""

    def __init__(self, idempotency: IdempotencyStore) -> None:
        self.bookings: list[str] = []
        self.create_media_buy = idempotency.wrap(self.create_media_buy)

    async def create_media_buy(self, params: dict, context: ToolContext | None = None) -> dict:
        self.bookings.append(params["package"])
        return {"media_buy_id": f"mb-{len(self.bookings)}", "package": params["package"]}


async def main(database: str = "seller.db") -> Seller:
    async with SQLiteBackend(database) as backend:
        idempotency = IdempotencyStore(backend, ttl_seconds=86_400, profile="adcp-3.2")
        print("capability", idempotency.capability())
        seller = Seller(idempotency)
        buyer = ToolContext(caller_identity="buyer-acme")  # from the verified credentials
        request = {"idempotency_key": ulid(), "package": "summer"}

        print("first ", await seller.create_media_buy(request, buyer))
        print("retry ", await seller.create_media_buy(request, buyer))
        try:
            await seller.create_media_buy({**request, "package": "winter"}, buyer)
        except IdempotencyConflictError as error:
            print("reused", error.errors)
    return seller


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
