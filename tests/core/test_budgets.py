"""What the hot paths of the core may cost, in bytecodes and Python calls.

A budget lies a few percent above what the path costs. A change that spends more says why, here;
one that spends less lowers it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from tests.budgets import Spent, awaited, hold, spent, where

from oncekey import AsyncMemoryStore, AsyncOnce, IdempotencyStore, MemoryStore, Once, ToolContext
from oncekey._core.flows import new_owner
from oncekey.canonical import FAST
from oncekey.models import Key, Scope, Terms

TERMS = Terms(lease_ms=30_000, ttl_ms=86_400_000)
FILL = 12_000  # keys that are there before: every part of a memory store has made its first room
SMALL: Any = {"media_buy_id": "mb-1"}
USUAL: Any = {
    "media_buy_id": "mb-1",
    "status": "active",
    "packages": [{"id": f"p{n}", "budget": 1000.5, "tags": ["a", "b"]} for n in range(5)],
}
Call = Callable[[], object]


def wrapped(answer: Any) -> tuple[Call, Call]:
    """``IdempotencyStore.wrap``: a fresh request, and a retry of one. Without a task of its own."""
    store = IdempotencyStore(AsyncMemoryStore(), on_cancel="lease")
    caller = ToolContext(caller_identity="buyer-acme")
    numbers = itertools.count()

    @store.wrap
    async def buy(params: Any, context: Any = None) -> Any:
        return answer

    def call(key: str) -> Any:
        return buy({"idempotency_key": key, "packages": [{"budget": 5000}], "po": "1"}, caller)

    return awaited(lambda: call(f"key-{next(numbers)}")), awaited(lambda: call("one key"))


def once() -> tuple[Call, Call]:
    """``Once`` as a decorator."""
    numbers = itertools.count()

    @Once(MemoryStore())(key="order_id")
    def charge(order_id: str, amount: int) -> dict[str, Any]:
        return {"order": order_id, "charged": amount}

    return lambda: charge(f"o-{next(numbers)}", 5), lambda: charge("one", 5)


def async_once() -> tuple[Call, Call]:
    """``AsyncOnce`` as a decorator."""
    numbers = itertools.count()

    @AsyncOnce(AsyncMemoryStore())(key="order_id")
    async def charge(order_id: str, amount: int) -> dict[str, Any]:
        return {"order": order_id, "charged": amount}

    fresh: Any = lambda: charge(f"o-{next(numbers)}", 5)  # noqa: E731
    replay: Any = lambda: charge("one", 5)  # noqa: E731
    return awaited(fresh), awaited(replay)


def first_seen() -> tuple[Call, Call]:
    """A memory store's marker, as ``check_and_record`` uses it."""
    numbers = itertools.count()
    mark = MemoryStore().marker(Scope("webhook", "webhook", "sender"), TERMS)
    for number in range(FILL):
        mark(f"old-{number}")
    return lambda: mark(f"evt-{next(numbers)}"), lambda: mark("one")


def claimed() -> tuple[Call, Call]:
    """A memory store's claim and completion; then a claim of what is completed."""
    numbers = itertools.count()
    store, scope = MemoryStore(), Scope("webhook", "webhook", "sender")

    def both(name: str) -> None:
        owner = new_owner()
        reply = store.claim(Key(scope, name), owner, b"hash", TERMS)
        store.complete(Key(scope, name), owner, reply.fence, b"j", TERMS)

    for number in range(FILL):
        both(f"old-{number}")
    both("one")
    copy = Key(scope, "one")
    return lambda: both(f"evt-{next(numbers)}"), lambda: store.claim(copy, b"own", b"hash", TERMS)


PATHS: dict[str, tuple[Callable[[], tuple[Call, Call]], dict[tuple[int, int], list[Spent]]]] = {
    "wrap, a small answer": (
        lambda: wrapped(SMALL),
        {
            (3, 11): [Spent(1478, 45), Spent(762, 22)],
            (3, 13): [Spent(1291, 44), Spent(680, 22)],
        },
    ),
    "wrap, a usual answer": (
        lambda: wrapped(USUAL),
        {
            (3, 11): [Spent(1478, 45), Spent(762, 22)],
            (3, 13): [Spent(1291, 44), Spent(680, 22)],
        },
    ),
    "Once": (
        once,
        {
            (3, 11): [Spent(1220, 38), Spent(617, 23)],
            (3, 13): [Spent(1058, 37), Spent(536, 22)],
        },
    ),
    "AsyncOnce": (
        async_once,
        {
            (3, 11): [Spent(1318, 43), Spent(650, 24)],
            (3, 13): [Spent(1134, 41), Spent(567, 23)],
        },
    ),
    "memory, first seen": (
        first_seen,
        {
            (3, 11): [Spent(100, 2), Spent(57, 2)],
            (3, 13): [Spent(90, 2), Spent(51, 2)],
        },
    ),
    "memory, claim and complete": (
        claimed,
        {
            (3, 11): [Spent(373, 9), Spent(147, 3)],
            (3, 13): [Spent(308, 9), Spent(125, 3)],
        },
    ),
}


@pytest.mark.skipif(not FAST, reason="counted with orjson")
@pytest.mark.parametrize("kind", ["new", "copy"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_hot_path_keeps_to_its_budget(path: str, kind: str) -> None:
    """A new key, and a copy of one that is done."""
    make, budgets = PATHS[path]
    number = ["new", "copy"].index(kind)
    chosen = {version: pair[number] for version, pair in budgets.items()}
    hold(f"{path}, {kind}", make()[number], chosen)


async def _show() -> None:
    for path, (make, _) in PATHS.items():
        new, copy = make()
        print(f'    "{path}": {tuple(spent(new))} {tuple(spent(copy))}')
        for call in (new, copy):
            for code, cost in sorted(where(call).items(), key=lambda row: -row[1].bytecodes)[:12]:
                print(f"        {cost.bytecodes:5} {cost.calls:3}  {code.co_qualname}")


if __name__ == "__main__":
    asyncio.run(_show())
