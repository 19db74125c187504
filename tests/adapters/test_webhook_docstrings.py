"""What the adapters' own pages show works as it stands."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

BODY = b'{"id": "evt_1", "type": "invoice.paid"}'
JSON = {"Content-Type": "application/json"}


@asynccontextmanager
async def running(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    if isinstance(app, web.Application):
        async with TestServer(app) as server:
            async with httpx.AsyncClient(base_url=str(server.make_url("/"))) as client:
                yield client
    else:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x.example") as client:
            yield client


@pytest.mark.parametrize("name", ["asgi", "starlette", "fastapi", "litestar", "aiohttp"])
async def test_docstring(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of each adapter receives a webhook, and answers its copy in the same way."""
    monkeypatch.chdir(tmp_path)
    page = inspect.getdoc(importlib.import_module(f"oncekey.adapters.{name}")) or ""
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    page_names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, name, "exec", dont_inherit=True), page_names)
    receiver = page_names["receiver"]
    request = receiver.provider.sign("POST", "http://x.example/hooks/stripe", JSON, BODY)
    paths = ["/hooks/stripe", "/hooks/counted" if name == "fastapi" else "/hooks/stripe"]
    async with running(page_names["app"]) as client:
        for path in paths:
            answer = await client.post(path, content=BODY, headers=request.headers)
            assert answer.status_code == 200
    await receiver.aclose()
