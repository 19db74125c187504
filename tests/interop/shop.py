"""Handlers of an AdCP seller, for the tests of each transport."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

import pydantic
from tests.interop.serving import PATIENCE

from oncekey import IdempotencyStore, MemoryBackend, MemoryStore, StoreUnavailableError, ToolContext

ALICE = ToolContext("alice")
CONTEXT = {"correlation_id": "c-1", "attempt": 2}


class Bought(pydantic.BaseModel):
    """An answer with fields that may be left out."""

    media_buy_id: str
    name: str | None = None
    replayed: bool | None = None
    context: dict[str, Any] | None = None


class Shop:
    """The handlers by name, and how often each has run."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.inside = threading.Event()  # the server runs in a thread of its own
        self.gate = threading.Event()
        store = IdempotencyStore(MemoryBackend(), profile="adcp-3.2")
        impatient = IdempotencyStore(MemoryBackend(), profile="adcp-3.2", on_in_flight="reject")
        sync = IdempotencyStore(MemoryStore(), profile="adcp-3.2")
        self.handlers = {
            "create_media_buy": store.wrap(self.create_media_buy),
            "update_media_buy": store.wrap(self.update_media_buy),
            "slow": impatient.wrap(self.slow),
            "sync_creatives": sync.wrap(self.sync_creatives),
            "refuse": store.wrap(self.refuse),
            "crash": store.wrap(self.crash),
            "unreachable": store.wrap(self.unreachable),
            "get_products": self.get_products,
            "text": self.text,
        }

    async def create_media_buy(self, params: Any, context: Any = None) -> dict[str, Any]:
        self.runs.append("create_media_buy")
        await asyncio.sleep(0)
        return {"media_buy_id": f"mb-{len(self.runs)}", "budget": params.get("budget")}

    async def update_media_buy(self, params: Any, context: Any = None) -> Bought:
        self.runs.append("update_media_buy")
        return Bought(media_buy_id="mb-9")

    async def slow(self, params: Any, context: Any = None) -> dict[str, Any]:
        self.runs.append("slow")
        self.inside.set()
        assert await asyncio.to_thread(self.gate.wait, PATIENCE)
        return {"done": True}

    def sync_creatives(self, params: Any, context: Any = None) -> dict[str, Any]:
        self.runs.append("sync_creatives")
        return {"creatives": len(self.runs)}

    async def refuse(self, params: Any, context: Any = None) -> dict[str, Any]:
        self.runs.append("refuse")
        return {"errors": [{"code": "BUDGET_TOO_LOW", "message": "at least 500"}]}

    async def crash(self, params: Any, context: Any = None) -> dict[str, Any]:
        raise RuntimeError("s3cret")

    async def unreachable(self, params: Any, context: Any = None) -> dict[str, Any]:
        raise StoreUnavailableError("s3cret-host:5432")

    async def get_products(self, params: Any, context: Any = None) -> dict[str, Any]:
        return {"products": []}

    async def text(self, params: Any, context: Any = None) -> str:
        return "hello"


def request(**fields: Any) -> dict[str, Any]:
    return {"idempotency_key": "key-0123456789abcdef", "context": CONTEXT, **fields}


def import_without(package: str, adapter: str) -> str:
    """What is said where ``package`` is not installed."""
    code = f"import sys; sys.modules[{package!r}] = None; import oncekey.adapters.{adapter}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    return done.stderr
