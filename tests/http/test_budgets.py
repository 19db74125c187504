"""What a keyed request may cost on the memory store, in bytecodes and Python calls.

A budget lies a few percent above what the path costs. A change that spends more says why, here;
one that spends less lowers it. The application and the server's part are counted, too.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.budgets import Spent, awaited, hold

from oncekey import AsyncMemoryStore
from oncekey.canonical import FAST
from oncekey.http.asgi import IdempotencyMiddleware

BODY = json.dumps({"amount": 500, "currency": "eur", "metadata": {"order": "o-1"}}).encode()
ANSWER = b'{"id":"ch_1","amount":500}'
FILL = 12_000  # keys that are there before: every part of a memory store has made its first room


async def app(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    fields = [(b"content-length", b"%d" % len(ANSWER)), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 201, "headers": fields})
    await send({"type": "http.response.body", "body": ANSWER})


def request(guarded: Any, key: str) -> Any:
    """One request, as a server gives it that has all of it."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/charges",
        "raw_path": b"/charges",
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"shop.example"),
            (b"content-type", b"application/json"),
            (b"authorization", b"Bearer token"),
            (b"idempotency-key", key.encode()),
            (b"content-length", b"%d" % len(BODY)),
        ],
    }

    async def receive() -> Any:
        return {"type": "http.request", "body": BODY, "more_body": False}

    async def send(message: Any) -> None:
        pass

    return guarded(scope, receive, send)


def paths(**options: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    """A fresh request, and a retry of one."""
    guarded = IdempotencyMiddleware(app, AsyncMemoryStore(), max_new_keys=None, **options)
    numbers = itertools.count()
    fresh = awaited(lambda: request(guarded, f"key-{next(numbers)}"))
    for _ in range(FILL):
        fresh()
    return fresh, awaited(lambda: request(guarded, "one-key"))


BUDGETS: dict[str, dict[tuple[int, int], Spent]] = {
    "keyed request, fresh": {(3, 11): Spent(1956, 49), (3, 13): Spent(1728, 47)},
    "keyed request, replay": {(3, 11): Spent(858, 20), (3, 13): Spent(767, 20)},
    "keyed request, replay at hand": {(3, 11): Spent(692, 17), (3, 13): Spent(625, 17)},
}


@pytest.mark.skipif(not FAST, reason="counted with orjson")
async def test_a_keyed_request_keeps_its_budget() -> None:
    """A fresh key, a replay from the store, and one from this process's own copies."""
    fresh, replay = paths()
    _, at_hand = paths(cache_entries=20_000)
    for path, call in zip(BUDGETS, (fresh, replay, at_hand), strict=True):
        hold(path, call, BUDGETS[path])
