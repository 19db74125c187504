"""What type checkers must see: checked by mypy --strict and basedpyright, never run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, assert_type

from oncekey import (
    AsyncMemoryStore,
    AsyncOnce,
    AsyncRedisStore,
    AsyncWebhookDedup,
    IdempotencyStore,
    MemoryStore,
    Once,
    RedisStore,
    WebhookDedup,
    WebhookDedupClaim,
    aconnect,
    connect,
)
from oncekey.abc import AsyncStore, Store
from oncekey.models import ClaimReply, Key, Record, Terms

once = Once("memory://")
async_once = AsyncOnce(aconnect("memory://"))


@once(key="order_id", ttl=60)
def charge(order_id: str, amount: int) -> dict[str, int]:
    return {order_id: amount}


@async_once(key="order_id")
async def acharge(order_id: str, amount: int) -> list[int]:
    return [amount]


assert_type(charge("a", 1), dict[str, int])
assert_type(connect("memory://"), Store)
assert_type(aconnect("memory://"), AsyncStore)

idempotency = IdempotencyStore(AsyncMemoryStore(), ttl_seconds=3600)


@idempotency.wrap
async def create(params: dict[str, Any], context: object = None) -> str:
    return "x"


@idempotency.wrap(operation="update")
async def update(params: dict[str, Any], context: object = None) -> str:
    return "x"


handler: Callable[[dict[str, Any]], Awaitable[str]] = create


async def use() -> None:
    assert_type(await acharge("a", 1), list[int])
    assert_type(await create({}), str)
    assert_type(await update({}), str)
    dedup = AsyncWebhookDedup(AsyncMemoryStore())
    assert_type(await dedup.check_and_record("s", "k"), bool)
    assert_type(await dedup.claim("s", "k", "h"), WebhookDedupClaim)
    assert_type(WebhookDedup(MemoryStore()).check_and_record("s", "k"), bool)
    assert_type(idempotency.capability(), dict[str, Any])


async def use_redis(key: Key, terms: Terms) -> None:
    store, astore = RedisStore("redis://"), AsyncRedisStore("redis://")
    assert_type(store.claim(key, b"", b"", terms), ClaimReply)
    assert_type(store.complete(key, b"", 1, b"", terms), bool)
    assert_type(store.read(key), Record | None)
    assert_type(store.now(), int)
    assert_type(await astore.claim(key, b"", b"", terms), ClaimReply)
    assert_type(await astore.first_seen(key, terms), bool)
    assert_type(await astore.read(key), Record | None)
    assert_type(await astore.now(), int)
