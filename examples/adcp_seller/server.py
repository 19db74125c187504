"""A seller agent of the Ad Context Protocol (AdCP) over MCP, in which every buy is booked once.

    pip install "oncekey[mcp,sqlite]" uvicorn        # for PostgreSQL: "oncekey[mcp,postgres]"
    python server.py --port 8000 --store sqlite:///seller.db

The media buy and the stored answer are one transaction, so that a crash at any point leaves both or
neither: see README.md.
"""

import argparse
import asyncio
import contextlib
import datetime as dt
import hashlib
import ipaddress
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import uvicorn
from mcp import types
from mcp.server.lowlevel import Server
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from oncekey import IdempotencyStore, ToolContext, aconnect
from oncekey.adcp import capabilities_response
from oncekey.adcp.mcp import call_tool

PRODUCT = {
    "product_id": "test-product",
    "name": "Run of site",
    "description": "Display ads on every page",
    "publisher_properties": [{"publisher_domain": "seller.example", "selection_type": "all"}],
    "format_ids": [{"agent_url": "https://seller.example", "id": "display_300x250"}],
    "delivery_type": "non_guaranteed",
    "delivery_measurement": {"provider": "the ad server's own counts"},
    "pricing_options": [
        {
            "pricing_option_id": "test-pricing",
            "pricing_model": "cpm",
            "currency": "USD",
            "fixed_price": 5.0,
        }
    ],
    "reporting_capabilities": {
        "available_reporting_frequencies": ["daily"],
        "expected_delay_minutes": 240,
        "timezone": "UTC",
        "supports_webhooks": False,
        "available_metrics": ["impressions"],
        "date_range_support": "date_range",
    },
}


class Package(BaseModel):
    model_config = ConfigDict(extra="allow")
    product_id: str
    pricing_option_id: str
    budget: float = Field(ge=0)


class CreateMediaBuy(BaseModel):
    """What a request must look like before anything is looked up for it."""

    model_config = ConfigDict(extra="allow")
    account: dict[str, Any]
    brand: dict[str, Any]
    packages: list[Package] = Field(min_length=1)
    start_time: AwareDatetime | Literal["asap"]
    end_time: AwareDatetime


class Books:
    """The seller's own table, in the database that the store is in."""

    TABLE = (
        "CREATE TABLE IF NOT EXISTS media_buys "
        "(id text PRIMARY KEY, account text NOT NULL, body text NOT NULL)"
    )
    INSERT = "INSERT INTO media_buys (id, account, body) VALUES ($1, $2, $3)"
    SELECT = "SELECT body FROM media_buys WHERE account = $1 ORDER BY id"

    def __init__(self, url: str) -> None:
        self.url = url
        self.on_sqlite = url.startswith("sqlite:")

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        """A connection to read on. Writes go through that of the transaction."""
        if self.on_sqlite:
            import aiosqlite

            path = self.url.removeprefix("sqlite:///").partition("?")[0]
            async with aiosqlite.connect(path) as connection:
                yield connection
            return
        import asyncpg

        connection = await asyncpg.connect(self.url)
        try:
            yield connection
        finally:
            await connection.close()

    async def run(self, connection: Any, statement: str, *values: Any) -> list[Any]:
        """Run a statement; aiosqlite and asyncpg differ in how they take parameters."""
        if self.on_sqlite:
            return list(await connection.execute_fetchall(statement.replace("$", "?"), values))
        return list(await connection.fetch(statement, *values))


class Seller:
    """The tools. ``params`` is the request as it came, ``caller`` whose token came with it."""

    def __init__(self, books: Books, idempotency: IdempotencyStore) -> None:
        self.books = books
        self.idempotency = idempotency
        transactional = idempotency.wrap(validate=CreateMediaBuy, transactional=True)
        self.tools = {
            "get_adcp_capabilities": self.get_adcp_capabilities,
            "get_products": self.get_products,
            "create_media_buy": transactional(self.create_media_buy),
            "get_media_buys": self.get_media_buys,
        }

    async def get_adcp_capabilities(self, params: dict, caller: ToolContext) -> dict:
        return capabilities_response(
            ["media_buy"],
            idempotency=self.idempotency,
            account={"supported_billing": ["operator"]},
            media_buy={"features": {"inline_creative_management": False}},
        )

    async def get_products(self, params: dict, caller: ToolContext) -> dict:
        return _completed(params, products=[PRODUCT])

    async def create_media_buy(self, params: dict, context: ToolContext, tx: Any) -> dict:
        """Book a buy on ``tx``, which commits together with the answer that is returned here."""
        for at, package in enumerate(params["packages"]):
            if package["product_id"] != PRODUCT["product_id"]:
                error = {
                    "code": "PRODUCT_NOT_FOUND",
                    "message": "there is no such product",
                    "recovery": "correctable",
                    "field": f"packages[{at}].product_id",
                }
                return {"status": "failed", "errors": [error]}  # rolled back, and not stored
        now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        buy = {
            "media_buy_id": f"mb_{uuid.uuid4().hex}",
            "media_buy_status": "pending_creatives",
            "confirmed_at": now,
            "revision": 1,
            "packages": [
                {"package_id": f"pkg_{uuid.uuid4().hex}", **_kept(package)}
                for package in params["packages"]
            ],
        }
        await self.book(tx.connection, context.account_id, buy)
        return _completed(params, **buy)

    async def book(self, connection: Any, account: str, buy: dict) -> None:
        values = (buy["media_buy_id"], account, json.dumps(buy))
        await self.books.run(connection, Books.INSERT, *values)

    async def get_media_buys(self, params: dict, caller: ToolContext) -> dict:
        wanted = params.get("media_buy_ids")
        async with self.books.connection() as connection:
            rows = await self.books.run(connection, Books.SELECT, caller.account_id)
        buys = [json.loads(row[0]) for row in rows]
        shown = [
            {
                "media_buy_id": buy["media_buy_id"],
                "status": buy["media_buy_status"],
                "currency": "USD",
                "total_budget": sum(package["budget"] for package in buy["packages"]),
                "confirmed_at": buy["confirmed_at"],
                "revision": buy["revision"],
                "packages": buy["packages"],
            }
            for buy in buys
            if wanted is None or buy["media_buy_id"] in wanted
        ]
        return _completed(params, media_buys=shown)


def _completed(params: dict, **body: Any) -> dict:
    """An answer. In AdCP 3.0 ``status`` is that of the media buy, since 3.1 that of the task."""
    asked = params.get("adcp_version", "3.0")
    return body if asked.startswith("3.0") else {"status": "completed", **body}


def _kept(package: dict) -> dict:
    return {name: package[name] for name in ("product_id", "pricing_option_id", "budget")}


def caller(request: Any) -> ToolContext:
    """Who is calling, from the verified token. Each buyer has one account here."""
    buyer = request.request.state.buyer
    return ToolContext(caller_identity=buyer, account_id=f"acct_{buyer}")


class Tokens:
    """Lets requests with a known token through, and says whose it is.

    Without tokens everybody is one and the same buyer, which is for trying it out.
    """

    def __init__(self, app: Any, tokens: dict[str, str] | None) -> None:
        self.app = app
        self.buyers = tokens and {_digest(token): buyer for token, buyer in tokens.items()}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        buyer = "local-buyer" if self.buyers is None else self.buyers.get(_digest(_bearer(scope)))
        if buyer is None:
            headers = [(b"www-authenticate", b"Bearer"), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body"})
            return
        scope.setdefault("state", {})["buyer"] = buyer
        await self.app(scope, receive, send)


def _bearer(scope: Any) -> str:
    value = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
    kind, _, token = value.partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()  # so that comparing tells nothing of a token


def create_app(seller: Seller, tokens: dict[str, str] | None = None, host: str = "127.0.0.1"):
    """The agent as an ASGI application, with MCP at ``/mcp``."""

    async def on_list_tools(request: Any, params: Any) -> types.ListToolsResult:
        schema = {"type": "object", "additionalProperties": True}
        return types.ListToolsResult(
            tools=[types.Tool(name=name, input_schema=schema) for name in seller.tools]
        )

    server = Server(
        "oncekey-reference-seller",
        on_list_tools=on_list_tools,
        on_call_tool=call_tool(seller.tools, caller),
    )
    app = server.streamable_http_app(stateless_http=True, json_response=True, host=host)
    return Tokens(app, tokens)


@contextlib.asynccontextmanager
async def opened(url: str, salt: str, kind: type[Seller] = Seller) -> AsyncIterator[Seller]:
    """A seller on the database at ``url``, with its tables made."""
    books = Books(url)
    backend = aconnect(url)
    try:
        if not books.on_sqlite:
            await backend.create_schema()
        async with books.connection() as connection:
            # One at a time: PostgreSQL fails all but one of those that make a table at once.
            first = "" if books.on_sqlite else "SELECT pg_advisory_xact_lock(1); "
            await connection.execute(first + Books.TABLE)
        yield kind(books, IdempotencyStore(backend, profile="adcp-3.2", account_salt=salt))
    finally:
        await backend.aclose()


async def serve(options: argparse.Namespace, kind: type[Seller] = Seller) -> None:
    tokens = json.loads(Path(options.tokens).read_text("utf-8")) if options.tokens else None
    async with opened(options.store, options.salt, kind) as seller:
        config = uvicorn.Config(
            create_app(seller, tokens, options.host),
            host=options.host,
            port=options.port,
            log_level="warning",
        )
        print(f"MCP at http://{options.host}:{options.port}/mcp", flush=True)
        await uvicorn.Server(config).serve()


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="An AdCP seller in which every buy is booked once")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--store", default="sqlite:///seller.db", help="sqlite:///... or postgresql://..."
    )
    parser.add_argument(
        "--tokens", help='a JSON file, {"token": "buyer"}; without: one buyer, local'
    )
    parser.add_argument("--salt", default="", help="a secret for accounts named by their brand")
    options = parser.parse_args(words)
    if not options.store.startswith(("sqlite:///", "postgresql://", "postgres://")):
        parser.error("--store must be sqlite:///file.db or postgresql://user@host/database")
    if options.tokens is None and not _is_local(options.host):
        parser.error("--host is open to others: say with --tokens who may buy")
    return options


def _is_local(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(arguments()))
