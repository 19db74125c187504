"""aiohttp: what it does to bodies before an adapter sees them."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Iterator

import httpx
import pytest
from aiohttp import web
from tests.adapters.hooks import PATIENCE, SMALL, Hook, make_hook, signed
from tests.adapters.sites import listening, no_errors, serve_aiohttp

from oncekey.adapters.aiohttp import as_response, receive_webhook
from oncekey.signatures.base import SignedRequest


@pytest.fixture
def hook() -> Hook:
    return make_hook("async", max_body_bytes=SMALL)


@contextlib.contextmanager
def serving(hook: Hook) -> Iterator[str]:
    """A handler of the user's own; gives its URL."""

    async def handler(request: web.Request) -> web.Response:
        received = await receive_webhook(request, hook.receiver)
        response = as_response(received)
        response.headers["X-Outcome"] = received.outcome
        if received.status == 200:  # it can be read once more
            assert (await request.json())["type"] == "paid"
        return response

    app = web.Application()
    app.router.add_post("/in", handler)
    with listening() as sock, serve_aiohttp(app, sock):
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/in"


@pytest.fixture
def url(hook: Hook) -> Iterator[str]:
    with no_errors(), serving(hook) as found:
        yield found


def post(url: str, request: SignedRequest, body: bytes, **headers: str) -> httpx.Response:
    fields = {**request.headers, **headers}
    return httpx.post(url, content=body, headers=fields, trust_env=False, timeout=PATIENCE)


def test_compressed_body(url: str, hook: Hook) -> None:
    """What is signed is what was compressed, and a handler of one's own sees the outcome."""
    request = signed(hook, "evt_1")
    packed = {"Content-Encoding": "gzip"}
    answer = post(url, request, gzip.compress(request.body), **packed)
    assert (answer.status_code, answer.headers["X-Outcome"]) == (200, "handled")
    answer = post(url, request, request.body)
    assert (answer.status_code, answer.headers["X-Outcome"]) == (200, "duplicate")
    assert [one.body for one in hook.handled] == [request.body]


def test_compressed_bomb(url: str, hook: Hook) -> None:
    """The limit is on what comes out: a small body that unpacks to a large one is a 413."""
    bomb = gzip.compress(bytes(500_000))
    assert len(bomb) < SMALL
    answer = post(url, signed(hook, "evt_1"), bomb, **{"Content-Encoding": "gzip"})
    assert answer.status_code == 413
    assert hook.handled == []


def test_broken_compression(hook: Hook) -> None:
    """A body that can't be unpacked is a 400."""
    with serving(hook) as url:  # aiohttp logs an error, for what it could not read to its end
        answer = post(url, signed(hook, "evt_1"), b"no gzip", **{"Content-Encoding": "gzip"})
    assert (answer.status_code, answer.json()["error"]) == (400, "body_incomplete")
    assert hook.handled == []
    assert hook.store.calls == []
