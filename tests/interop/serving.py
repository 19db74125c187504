"""Real servers for the tests: an ASGI app in a thread, and the reference seller as a process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import uvicorn

SELLER = Path(__file__).parents[2] / "examples" / "adcp_seller" / "server.py"
PATIENCE = 60.0
JSON = {"content-type": "application/json", "accept": "application/json"}


def load_seller() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("adcp_seller", SELLER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where Pydantic looks its models' types up
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an app with uvicorn in a thread; gives its URL.

    ``app`` is an ASGI app, or an asynchronous context that gives one, entered in the server's loop.
    """
    servers: list[uvicorn.Server] = []

    async def main(listener: socket.socket) -> None:
        async with contextlib.AsyncExitStack() as stack:
            served = await stack.enter_async_context(app) if hasattr(app, "__aenter__") else app
            config = uvicorn.Config(served, log_level="warning", lifespan="on")
            servers.append(uvicorn.Server(config))
            await servers[0].serve([listener])

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        thread = threading.Thread(target=lambda: asyncio.run(main(listener)))
        thread.start()
        try:
            deadline = time.monotonic() + PATIENCE
            while not (servers and servers[0].started):
                assert thread.is_alive(), "the server did not start"
                assert time.monotonic() < deadline, "the server did not start in time"
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for server in servers:
                server.should_exit = True
            thread.join(PATIENCE)


@contextlib.contextmanager
def selling(store_url: str, tokens: dict[str, str] | None = None) -> Iterator[str]:
    """The reference seller in a thread; gives the URL of its MCP."""
    example = load_seller()

    @contextlib.asynccontextmanager
    async def app() -> AsyncIterator[Any]:
        async with example.opened(store_url, "salt") as seller:
            yield example.create_app(seller, tokens)

    with serving(app()) as url:
        yield f"{url}/mcp"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class SellerProcess:
    """The reference seller, or a script that builds on it, as a process of its own."""

    def __init__(self, store_url: str, script: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        command = [sys.executable, str(script), "--port", str(self.port), "--store", store_url]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            assert self.process.poll() is None, "the seller did not start"
            assert time.monotonic() < deadline, "the seller did not start in time"
            time.sleep(0.02)

    def kill(self) -> None:
        """End it at once, as a crash of the machine does."""
        self.process.kill()
        self.process.wait(PATIENCE)


@contextlib.contextmanager
def sellers(store_url: str, *scripts: Path) -> Iterator[list[SellerProcess]]:
    """A process for each script, started together on one database."""
    running = []
    try:
        for script in scripts:
            running.append(SellerProcess(store_url, script))  # noqa: PERF401 - so all are ended
        for process in running:
            process.wait()
        yield running
    finally:
        for process in running:
            process.kill()


def message(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call of a tool as the bare JSON that goes over the wire."""
    params = {"name": tool, "arguments": arguments}
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}


def call(url: str, tool: str, arguments: dict[str, Any], **headers: str) -> dict[str, Any]:
    """Call a tool without a session; gives its result."""
    reply = httpx.post(
        url, json=message(tool, arguments), headers={**JSON, **headers}, timeout=PATIENCE
    )
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/json"
    result: dict[str, Any] = reply.json()["result"]
    return result
