"""``oncekey proxy`` as a process, before a real upstream."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.server.process import PATIENCE

from oncekey.cli import main
from oncekey.server.forwarding import answer_fields, upstream_at

ME = {"Authorization": "Bearer mine"}
HANDSHAKE = (
    b"Host: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
KEYED = {**ME, "Idempotency-Key": "k-1", "Content-Type": "application/json"}


class Upstream:
    """A service: notes what comes, and waits where a test says so."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.port = 0
        self.go = threading.Event()  # lets a slow answer go on
        self.came = threading.Event()  # something slow has begun
        self.parts: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def app(self) -> web.Application:
        app = web.Application(client_max_size=0)
        app.router.add_get("/ws", self.ws)
        app.router.add_get("/events", self.events)
        app.router.add_post("/slow", self.slow)
        app.router.add_post("/upload", self.upload)
        app.router.add_post("/half", self.half)
        app.router.add_route("*", "/{rest:.*}", self.any)
        return app

    async def wait(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.go.wait, PATIENCE)

    async def any(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.requests.append((request.method, request.raw_path, dict(request.headers), body))
        answer = web.json_response({"number": len(self.requests)}, status=201)
        answer.headers.add("Set-Cookie", "a=1")
        answer.headers.add("Set-Cookie", "b=2")
        answer.headers["Keep-Alive"] = "timeout=9"
        return answer

    async def slow(self, request: web.Request) -> web.Response:
        self.came.set()
        await self.wait()
        return await self.any(request)

    async def upload(self, request: web.Request) -> web.Response:
        async for part in request.content.iter_any():
            self.parts.append(part)
            self.came.set()
        return web.Response(text=str(sum(map(len, self.parts))))

    async def half(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Length": "100"})
        await answer.prepare(request)
        await answer.write(b"half")
        assert request.transport is not None
        request.transport.close()
        return answer

    async def events(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        await self.wait()
        await answer.write(b"data: 2\n\n")
        return answer

    async def ws(self, request: web.Request) -> web.StreamResponse:
        if "refuse" in request.query:
            return web.Response(status=403, text="not you")
        socket = web.WebSocketResponse(protocols=("chat",))
        await socket.prepare(request)
        await socket.send_json(dict(request.headers))
        async for message in socket:
            if message.type is aiohttp.WSMsgType.TEXT:
                await socket.send_str(message.data)
            else:
                await socket.send_bytes(message.data)
        return socket


@contextlib.contextmanager
def running(upstream: Upstream) -> Iterator[Upstream]:
    """The service on a loop of its own; on the port it had before, if it had one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(upstream.app(), shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", upstream.port, reuse_address=True)
        await site.start()
        upstream.port = runner.addresses[0][1]
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(PATIENCE)
    try:
        yield upstream
    finally:
        upstream.go.set()
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(PATIENCE)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class Proxy:
    """``oncekey proxy`` as a process of its own."""

    def __init__(self, upstream: str, store: str, *more: str) -> None:
        words = ["proxy", "--upstream", upstream, "--store-env", "STORE", "--port", "0", "--json"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "oncekey", *words, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "STORE": store},
        )
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(4)]
        if '"address"' not in "".join(lines):
            raise AssertionError(self.process.communicate(timeout=PATIENCE))
        self.address: str = json.loads("".join(lines))["address"]
        self.port = int(self.address.rpartition(":")[2])

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        with contextlib.closing(self.connection()) as one:
            one.request(method, path, body, headers or {})
            answer = one.getresponse()
            return answer.status, answer.headers, answer.read()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=PATIENCE)


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with running(Upstream()) as one:
        yield one


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/keys.db"


@pytest.fixture
def proxy(upstream: Upstream, store: str) -> Iterator[Proxy]:
    with Proxy(upstream.url, store) as one:
        yield one


def test_a_keyed_request_reaches_the_upstream_once(proxy: Proxy, upstream: Upstream) -> None:
    """Eight copies at once and one later: one request, one answer; others have their own keys."""

    def post(headers: dict[str, str] = KEYED, body: bytes = b'{"a": 1}') -> tuple[int, Any, bytes]:
        return proxy.call("POST", "/charges", body, headers)

    with ThreadPoolExecutor(8) as pool:
        statuses = {one[0] for one in pool.map(lambda _: post(), range(8))}
    assert statuses <= {201, 409}
    status, headers, body = post()
    assert (status, json.loads(body)) == (201, {"number": 1})
    assert headers["Idempotent-Replayed"] == "true"
    assert len(upstream.requests) == 1
    assert upstream.requests[0][2]["idempotency-key"] == "k-1"
    assert post(body=b'{"a": 2}')[0] == 422
    assert post({**KEYED, "Authorization": "Bearer another"})[0] == 201
    assert post({"Idempotency-Key": "k-1"})[0] == 401
    assert len(upstream.requests) == 2
    assert [post(ME)[0], post(ME)[0]] == [201, 201]  # no key, no rule
    assert len(upstream.requests) == 4


def test_a_whole_answer_is_a_recorded_one(proxy: Proxy, upstream: Upstream) -> None:
    """Whoever has read an answer to its end finds it recorded: a retry at once is a replay."""
    for number in range(30):
        headers = {**KEYED, "Idempotency-Key": f"k-{number}"}
        found = [proxy.call("POST", "/charges", b"{}", headers) for _ in range(2)]
        assert [one[0] for one in found] == [201, 201]
        assert found[0][2] == found[1][2]
    assert len(upstream.requests) == 30


def test_callers_by_a_header_and_a_key_that_must_be(upstream: Upstream, store: str) -> None:
    """``--scope-header`` tells callers apart; ``--require-key`` refuses who has no key."""
    with Proxy(upstream.url, store, "--scope-header", "X-User", "--require-key") as proxy:
        for user, number in (("ann", 1), ("bob", 2), ("ann", 1)):
            headers = {"X-User": user, "Idempotency-Key": "k"}
            assert json.loads(proxy.call("POST", "/", b"x", headers)[2]) == {"number": number}
        assert proxy.call("POST", "/", b"x", {"X-User": "ann"})[0] == 400
        assert proxy.call("GET", "/")[0] == 201
    assert len(upstream.requests) == 3


def test_what_is_passed_on(proxy: Proxy, upstream: Upstream) -> None:
    """Path, query and body stay as they are; what is about one connection stays behind."""
    headers = {
        "Host": "shop.example",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "1",
        "TE": "trailers",
        "Proxy-Authorization": "Basic eDp5",
        "X-Forwarded-For": "6.6.6.6",
        "X-Forwarded-Proto": "https",
        "Forwarded": "for=6.6.6.6",
        "Accept-Encoding": "gzip",
    }
    status, answer, _ = proxy.call("PUT", "/a%2Fb/../c?q=%20&r", b"body", headers)
    assert status == 201
    assert answer.get_all("Set-Cookie") == ["a=1", "b=2"]
    assert "Keep-Alive" not in answer
    method, path, seen, body = upstream.requests[0]
    assert (method, path, body) == ("PUT", "/a%2Fb/../c?q=%20&r", b"body")
    low = {name.lower(): value for name, value in seen.items()}
    assert low == {
        "host": f"127.0.0.1:{upstream.port}",
        "content-length": "4",
        "accept-encoding": "gzip",
        "x-forwarded-for": "127.0.0.1",
        "x-forwarded-proto": "http",
        "x-forwarded-host": "shop.example",
    }
    status, answer, body = proxy.call("HEAD", "/")
    assert (status, body) == (201, b"")


def test_behind_another_proxy(upstream: Upstream, store: str) -> None:
    """``--trust-forwarded`` adds to what came; ``--keep-host`` leaves the client's host."""
    with Proxy(upstream.url + "/base/", store, "--trust-forwarded", "--keep-host") as proxy:
        headers = {
            "Host": "shop.example",
            "X-Forwarded-For": "1.2.3.4",
            "X-Forwarded-Proto": "https",
        }
        proxy.call("GET", "/x", headers=headers)
    _, path, seen, _ = upstream.requests[0]
    assert path == "/base/x"
    assert seen["Host"] == "shop.example"
    low = {name.lower(): value for name, value in seen.items()}
    assert low["x-forwarded-for"] == "1.2.3.4, 127.0.0.1"
    assert low["x-forwarded-proto"] == "https"


def test_bodies_stream_up(proxy: Proxy, upstream: Upstream) -> None:
    """The upstream has the first part before the second is sent; a large body gets through."""

    def parts() -> Iterator[bytes]:
        yield b"first"
        assert upstream.came.wait(PATIENCE), "the first part was held back"
        for _ in range(64):
            yield b"x" * 65_536

    assert proxy.call("POST", "/upload", parts())[2] == b"%d" % (5 + 64 * 65_536)
    assert upstream.parts[0] == b"first"


def test_event_streams_stream_down(upstream: Upstream, store: str) -> None:
    """An event is here before the next is made, and quiet longer than ``--timeout`` is no end."""
    with (
        Proxy(upstream.url, store, "--timeout", "0.2") as proxy,
        contextlib.closing(proxy.connection()) as one,
    ):
        one.request("GET", "/events")
        answer = one.getresponse()
        assert answer.readline() == b"data: 1\n"
        assert not upstream.go.wait(0.5)  # longer than the time limit of other answers
        upstream.go.set()
        assert answer.read() == b"\ndata: 2\n\n"


async def test_websockets_pass_untouched(proxy: Proxy) -> None:
    """Subprotocol, text, binary and the closing code are the upstream's own."""
    async with aiohttp.ClientSession() as session:
        url = f"{proxy.address}/ws"
        async with session.ws_connect(url, protocols=("chat",), headers={"X-Mine": "1"}) as one:
            assert one.protocol == "chat"
            seen = {name.lower(): value for name, value in (await one.receive_json()).items()}
            assert seen["x-mine"] == "1"
            assert seen["x-forwarded-for"] == "127.0.0.1"
            await one.send_str("hello")
            assert await one.receive_str() == "hello"
            big = os.urandom(1_000_000)
            await one.send_bytes(big)
            assert await one.receive_bytes() == big
            await one.close(code=1000)
            assert one.close_code == 1000
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(f"{url}?refuse")
        assert refused.value.status == 403


def test_a_refused_websocket_is_no_way_around(proxy: Proxy, upstream: Upstream) -> None:
    """After an upgrade that the upstream refuses, nothing more of that connection is passed on."""
    with socket.create_connection(("127.0.0.1", proxy.port), PATIENCE) as raw:
        raw.sendall(b"GET /ws?refuse HTTP/1.1\r\n" + HANDSHAKE)
        with contextlib.suppress(OSError):
            raw.sendall(b"POST /past HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
        told = b""
        with contextlib.suppress(OSError):
            while part := raw.recv(65_536):
                told += part
    assert told.startswith(b"HTTP/1.1 403 ")
    assert told.count(b"HTTP/1.1") == 1
    assert upstream.requests == []


def test_an_upstream_that_is_down(store: str) -> None:
    """502 as a problem document; the key is free, and the retry runs when it is up again."""
    upstream = Upstream()
    with running(upstream):
        pass  # its port is known now, and nobody listens
    with Proxy(upstream.url, store) as proxy:
        status, headers, body = proxy.call("POST", "/charges", b"{}", KEYED)
        assert status == 502
        assert headers["Content-Type"] == "application/problem+json"
        assert json.loads(body)["type"] == "urn:oncekey:problem:upstream-unreachable"
        with running(upstream):
            assert proxy.call("POST", "/charges", b"{}", KEYED)[0] == 201
        assert proxy.call("POST", "/charges", b"{}", KEYED)[0] == 201  # it is down, and replayed
    assert len(upstream.requests) == 1


def test_an_upstream_that_is_slow_or_breaks_off(upstream: Upstream, store: str) -> None:
    """504 after the time limit; an answer that breaks off is never taken for a whole one."""
    with Proxy(upstream.url, store, "--timeout", "0.3") as proxy:
        status, _, body = proxy.call("POST", "/slow", b"{}")
        assert (status, json.loads(body)["title"]) == (504, "Gateway timeout")
        with pytest.raises(http.client.IncompleteRead):
            proxy.call("POST", "/half", b"{}")
        upstream.go.set()
        assert proxy.call("GET", "/")[0] == 201


def test_who_hangs_up_finds_the_answer(proxy: Proxy, upstream: Upstream) -> None:
    """A caller gone in the middle of a keyed request: it is completed, and the retry gets it."""
    one = proxy.connection()
    one.request("POST", "/slow", b"{}", KEYED)
    assert upstream.came.wait(PATIENCE)
    one.close()
    upstream.go.set()
    ends = time.monotonic() + PATIENCE
    while (found := proxy.call("POST", "/slow", b"{}", KEYED))[0] == 409:
        assert time.monotonic() < ends
        time.sleep(0.05)
    assert found[0] == 201
    assert found[1]["Idempotent-Replayed"] == "true"
    assert len(upstream.requests) == 1


def test_stops_when_requests_are_done(proxy: Proxy, upstream: Upstream) -> None:
    """SIGTERM lets the request under way end, cuts WebSockets, and then the process ends well."""
    with (
        contextlib.closing(proxy.connection()) as one,
        socket.create_connection(("127.0.0.1", proxy.port), PATIENCE) as raw,
    ):
        raw.sendall(b"GET /ws HTTP/1.1\r\n" + HANDSHAKE)
        assert raw.recv(65_536).startswith(b"HTTP/1.1 101 ")
        one.request("POST", "/slow", b"{}", KEYED)
        assert upstream.came.wait(PATIENCE)
        proxy.process.send_signal(signal.SIGTERM)
        while raw.recv(65_536):
            pass  # until it is cut: it stops
        upstream.go.set()
        assert one.getresponse().status == 201
    assert proxy.process.wait(PATIENCE) == 0


@pytest.mark.parametrize(
    "url", ["127.0.0.1:9", "ftp://a/", "http://u:p@a/", "http://a/?q", "http://a:99999/", "http://"]
)
def test_wrong_upstreams_are_refused(
    url: str, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 2 and how to write it, never the password."""
    assert main(["proxy", "--upstream", url, "--store", store]) == 2
    said = capsys.readouterr().err
    assert "--upstream" in said
    assert "u:p" not in said


def test_lengths_that_no_answer_has() -> None:
    """A 304 keeps its header but for the length of a body that it has not."""
    fields = [(b"ETag", b"x"), (b"Content-Length", b"9"), (b"Connection", b"x-a"), (b"X-A", b"1")]
    assert answer_fields(304, fields) == [(b"etag", b"x")]
    assert answer_fields(200, fields) == [(b"etag", b"x"), (b"content-length", b"9")]
    assert upstream_at("https://[::1]:8443/a/").authority == "[::1]:8443"
