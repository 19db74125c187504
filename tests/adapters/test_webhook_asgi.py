"""The ASGI app by itself, and what it shares with the adapters of frameworks."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from tests.adapters.hooks import PATIENCE, Hook, make_hook, signed
from tests.adapters.sites import listening, no_errors, serve_asgi

from oncekey.adapters import _threads, _webhooks
from oncekey.adapters._webhooks import deliver, webhook_lifespan
from oncekey.adapters.asgi import WebhookApp, request_url
from oncekey.errors import OncekeyError
from oncekey.http.body import read_chunks, read_stream

# The app alone


@pytest.mark.parametrize("name", ["async", "sync"])
@pytest.mark.parametrize("closes", [False, True])
def test_app_alone(name: str, closes: bool) -> None:
    """It is all that a server needs, and closes the store at its end if it is told to."""
    hook = make_hook(name)
    app = WebhookApp(hook.receiver, close_on_shutdown=closes)
    with no_errors(), listening() as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/anywhere"
        request = signed(hook, "evt_1")
        with serve_asgi(app, sock):
            answers = [
                httpx.post(url, content=request.body, headers=request.headers, trust_env=False)
                for _ in range(2)
            ]
            assert not hook.store.closed
    assert [answer.status_code for answer in answers] == [200, 200]
    assert hook.ids("evt") == ["evt_1"]
    assert hook.store.closed is closes


def scope_of(hook: Hook, event: str, **more: Any) -> dict[str, Any]:
    headers = [
        (name.lower().encode(), value.encode())
        for name, value in signed(hook, event).headers.items()
    ]
    return {"type": "http", "method": "POST", "path": "/", "headers": headers, **more}


async def test_store_that_fails_to_close() -> None:
    """The server is told, not left waiting."""
    hook = make_hook("async")
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    async def aclose() -> None:
        raise OSError("the disk is gone")

    hook.store.aclose = aclose
    await WebhookApp(hook.receiver, close_on_shutdown=True)({"type": "lifespan"}, receive, send)
    assert [one["type"] for one in sent] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.failed",
    ]
    assert "the disk is gone" in sent[-1]["message"]


async def test_client_that_is_not_there_for_the_answer() -> None:
    """A server that raises because nobody listens does not undo what is recorded."""
    hook = make_hook("async")
    body = signed(hook, "evt_1").body

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        raise BrokenPipeError

    await WebhookApp(hook.receiver)(scope_of(hook, "evt_1"), receive, send)
    assert hook.outcomes() == ["first"]


async def test_other_protocols() -> None:
    """A websocket is turned away quietly; what no server has today is an error."""
    app = WebhookApp(make_hook("async").receiver)
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await app({"type": "websocket"}, receive, send)
    assert sent == ["websocket.close"]
    with pytest.raises(OncekeyError, match="smoke-signal"):
        await app({"type": "smoke-signal"}, receive, send)


# URLs

HOST = [(b"host", b"shop.example:8443")]


@pytest.mark.parametrize(
    "scope, url",
    [
        ({"raw_path": b"/a%2fb", "path": "/a/b"}, "http://shop.example:8443/a%2fb"),
        (
            {"raw_path": b"/a", "query_string": b"b=%20&&c", "scheme": "https"},
            "https://shop.example:8443/a?b=%20&&c",
        ),
        # Servers that give no raw path.
        ({"path": "/a b/\xe9;x=~1"}, "http://shop.example:8443/a%20b/%C3%A9;x=~1"),
        ({"path": "/a", "raw_path": None}, "http://shop.example:8443/a"),
        # A prefix that is in the path already, as under uvicorn or in a mounted app, or is not.
        ({"raw_path": b"/api/a", "root_path": "/api"}, "http://shop.example:8443/api/a"),
        ({"raw_path": b"/a%20b/c", "root_path": "/a b"}, "http://shop.example:8443/a%20b/c"),
        ({"raw_path": b"/api", "root_path": "/api/"}, "http://shop.example:8443/api"),
        ({"raw_path": b"/a", "root_path": "/x y"}, "http://shop.example:8443/x%20y/a"),
        ({"raw_path": b"/apis", "root_path": "/api"}, "http://shop.example:8443/api/apis"),
        # No Host field, as in HTTP/1.0.
        ({"raw_path": b"/", "headers": [], "server": ("10.0.0.1", 80)}, "http://10.0.0.1/"),
        (
            {"raw_path": b"/", "headers": [], "server": ("::1", 8443), "scheme": "https"},
            "https://[::1]:8443/",
        ),
        ({"raw_path": b"/", "headers": [], "server": ("/run/app.sock", None)}, "http://localhost/"),
        ({"raw_path": b"/", "headers": []}, "http://localhost/"),
        # Bytes that no URL has are shown, never an error.
        ({"raw_path": b"/\xff", "query_string": b"\xfe"}, "http://shop.example:8443/\xff?\xfe"),
    ],
)
def test_request_url(scope: dict[str, Any], url: str) -> None:
    """The URL is put together from what a server tells, and nothing in it is changed."""
    assert request_url({"headers": HOST, **scope}) == url


# Bodies


async def pieces(taken: list[bytes], *chunks: bytes) -> AsyncGenerator[bytes, None]:
    for chunk in chunks:
        taken.append(chunk)
        yield chunk


@pytest.mark.parametrize(
    "declared", [None, "4", b"4", "", "+4", "-1", "\xb2", "four", "0004", "9" * 19]
)
async def test_read_chunks(declared: str | bytes | None) -> None:
    """A length that says too much is believed at once; one that says nothing is passed over."""
    taken: list[bytes] = []
    most = 5 if declared != "9" * 19 else 10**19
    assert await read_chunks(pieces(taken, b"ab", b"", b"cd"), most, declared) == b"abcd"
    assert taken == [b"ab", b"", b"cd"]


@pytest.mark.parametrize("declared", ["6", b"6", "9" * 20, "9" * 5000])
async def test_declared_too_long(declared: str | bytes) -> None:
    """Nothing is read of a body that is declared as too long."""
    taken: list[bytes] = []
    assert len(await read_chunks(pieces(taken, b"ab"), 5, declared)) == 6
    assert len(read_stream(lambda n: taken.append(b"x") or b"x", 5, declared)) == 6
    assert taken == []


async def test_read_no_further() -> None:
    """What shows that a body is too long is the last that is asked for."""
    taken: list[bytes] = []
    assert len(await read_chunks(pieces(taken, b"abc", b"def", b"ghi"), 5)) == 6
    assert taken == [b"abc", b"def"]
    asked: list[int] = []

    def endless(n: int) -> bytes:
        asked.append(n)
        return b"x" * n

    assert len(read_stream(endless, 100_000)) == 100_001
    assert asked == [65_536, 100_001 - 65_536]


def test_read_stream() -> None:
    """A file is read to its end, and never past its declared length."""
    content = [b"ab", b"cd", b""]
    assert read_stream(lambda n: content.pop(0), 10) == b"abcd"
    content = [b"ab", b"cd", b"next request"]
    assert read_stream(lambda n: content.pop(0), 10, "4") == b"abcd"
    assert content == [b"next request"]
    assert read_stream(lambda n: b"", 10, "4") == b""


# Receivers in an event loop


async def left_running(hook: Hook, event: str) -> threading.Event:
    """Start a delivery, and cancel its caller while the handler runs. Gives the handler's gate."""
    gate = hook.gates[event] = threading.Event()
    caller = asyncio.create_task(deliver(hook.receiver, *signed(hook, event)))
    assert await asyncio.to_thread(hook.started.get, timeout=PATIENCE) == event
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    return gate


@pytest.mark.parametrize("name", ["async", "sync"])
async def test_end_waits_for_deliveries(name: str) -> None:
    """A store is closed after the last delivery is recorded, also one whose caller is gone."""
    hook, other = make_hook(name), make_hook(name)
    lifespan = webhook_lifespan(hook.receiver)(None)
    await lifespan.__aenter__()
    gate = await left_running(hook, "evt_1")
    elsewhere = await left_running(other, "evt_1")
    ending = asyncio.create_task(lifespan.__aexit__(None, None, None))
    assert await asyncio.wait([ending], timeout=0.05) == (set(), {ending})
    assert not hook.store.closed
    gate.set()
    await ending
    assert hook.outcomes() == ["first"]
    assert hook.store.closed
    assert other.outcomes() == []  # not waited for: it is another receiver's
    elsewhere.set()
    await _webhooks.settle(other.receiver)
    assert other.outcomes() == ["first"]
    assert not other.store.closed
    assert not _webhooks._running


async def test_lifespan_closes_after_an_error() -> None:
    """An app that ends with an error closes its stores too."""
    hook = make_hook("async")
    with pytest.raises(RuntimeError, match="mine"):
        async with webhook_lifespan(hook.receiver)(None):
            raise RuntimeError("mine")
    assert hook.store.closed


async def test_waiting_copies_leave_the_loops_threads_alone() -> None:
    """Handlers and copies of a sync receiver don't hold the threads that resolve names."""
    hook = make_hook("sync")
    gate = hook.gates["evt_1"] = threading.Event()
    request = signed(hook, "evt_1")
    copies = [
        asyncio.create_task(deliver(hook.receiver, *request)) for _ in range(_threads.THREADS)
    ]
    assert await asyncio.to_thread(hook.started.get, timeout=PATIENCE) == "evt_1"
    async with asyncio.timeout(PATIENCE):
        assert await asyncio.to_thread(threading.active_count) > _threads.THREADS
    gate.set()
    assert {(await copy).status for copy in copies} == {200}
    assert hook.ids("evt") == ["evt_1"]


@pytest.mark.parametrize(
    "name, package",
    [
        ("starlette", "Starlette"),
        ("fastapi", "FastAPI"),
        ("litestar", "Litestar"),
        ("aiohttp", "aiohttp"),
    ],
)
def test_missing_framework(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its framework an adapter says what to install."""
    for module in list(sys.modules):
        if module.split(".")[0] in (name, "starlette"):
            monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, name, None)
    for adapter in ("starlette", "fastapi", "litestar", "aiohttp"):
        monkeypatch.delitem(sys.modules, f"oncekey.adapters.{adapter}", raising=False)
    with pytest.raises(ImportError, match=rf"needs {package}: .*'oncekey\[{name}\]'"):
        importlib.import_module(f"oncekey.adapters.{name}")
