"""What a delivery may cost, in bytecodes and Python calls: a first one, and a copy.

A budget lies a few percent above what the path costs. A change that spends more says why, here;
one that spends less lowers it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.budgets import Spent, awaited, hold, spent, where

from oncekey import AsyncWebhookDedup, WebhookDedup, aconnect, connect
from oncekey.canonical import FAST
from oncekey.receiver import AsyncWebhookReceiver, WebhookReceiver
from oncekey.testing import sample

Call = Callable[[], object]
NOW = 1_794_800_000.0
FIRSTS = 60  # warm-ups and tries of a first delivery: each is another one


def deliveries(name: str) -> tuple[Any, list[tuple[Any, ...]]]:
    """A provider, and signed deliveries with header fields as a server of ASGI gives them."""
    one = sample(name, now=NOW)
    made = [one.another(f"evt_{number}") for number in range(FIRSTS)]
    return one.provider, [
        (
            copy.method,
            copy.url,
            [(name.lower().encode(), value.encode()) for name, value in dict(copy.headers).items()],
            copy.body,
        )
        for copy in made
    ]


def first(name: str) -> Call:
    """A first delivery to a ``WebhookReceiver``."""
    provider, made = deliveries(name)
    receiver = WebhookReceiver(provider, connect("memory://"), per_key=None)
    receiver.on()(lambda event: None)
    rest = iter(made)
    return lambda: receiver.receive(*next(rest), now=NOW)


def copy(name: str) -> Call:
    """A copy of what was handled."""
    provider, made = deliveries(name)
    receiver = WebhookReceiver(provider, connect("memory://"), per_key=None)
    receiver.on()(lambda event: None)
    return lambda: receiver.receive(*made[0], now=NOW)


def async_copy(name: str) -> Call:
    """The same in an ``AsyncWebhookReceiver``; it needs no task of its own, as a first one does."""
    provider, made = deliveries(name)
    receiver = AsyncWebhookReceiver(provider, aconnect("memory://"), per_key=None)
    receiver.on()(lambda event: None)
    asyncio.run(receiver.receive(*made[0], now=NOW))
    return awaited(lambda: receiver.receive(*made[0], now=NOW))


def claimed() -> Call:
    """A claim and its completion."""
    dedup = WebhookDedup(connect("memory://"))
    numbers = iter(range(10**6))

    def both() -> None:
        name = f"evt-{next(numbers)}"
        found = dedup.claim("sender", name, "hash")
        dedup.complete("sender", name, "hash", found.claim_token or "")

    return both


def claimed_again() -> Call:
    """A claim of what is completed."""
    dedup = WebhookDedup(connect("memory://"))
    token = dedup.claim("sender", "evt", "hash").claim_token or ""
    dedup.complete("sender", "evt", "hash", token)
    return lambda: dedup.claim("sender", "evt", "hash")


def seen_again() -> Call:
    """A mark that is there."""
    dedup = AsyncWebhookDedup(aconnect("memory://"))
    return awaited(lambda: dedup.check_and_record("sender", "evt"))


PATHS: dict[str, tuple[Callable[[], Call], dict[tuple[int, int], Spent]]] = {
    "receiver, a first one of Stripe's": (
        lambda: first("stripe"),
        {(3, 11): Spent(2760, 85), (3, 13): Spent(2442, 84)},
    ),
    "receiver, a copy of Stripe's": (
        lambda: copy("stripe"),
        {(3, 11): Spent(1995, 67), (3, 13): Spent(1781, 66)},
    ),
    "receiver, a first one of Slack's": (
        lambda: first("slack"),
        {(3, 11): Spent(2917, 91), (3, 13): Spent(2590, 90)},
    ),
    "receiver, a copy of Slack's": (
        lambda: copy("slack"),
        {(3, 11): Spent(2153, 73), (3, 13): Spent(1930, 72)},
    ),
    "async receiver, a copy of Stripe's": (
        lambda: async_copy("stripe"),
        {(3, 11): Spent(2021, 67), (3, 13): Spent(1810, 66)},
    ),
    "dedup, claim and complete": (claimed, {(3, 11): Spent(790, 22), (3, 13): Spent(679, 22)}),
    "dedup, claim of what is done": (
        claimed_again,
        {(3, 11): Spent(318, 12), (3, 13): Spent(271, 12)},
    ),
    "dedup, seen before": (seen_again, {(3, 11): Spent(99, 4), (3, 13): Spent(90, 4)}),
}


@pytest.mark.skipif(not FAST, reason="counted with orjson")
@pytest.mark.parametrize("path", PATHS)
def test_a_delivery_keeps_to_its_budget(path: str) -> None:
    """A new delivery, and a copy of one that was handled."""
    make, budgets = PATHS[path]
    hold(path, make(), budgets)


def _show() -> None:
    for path, (make, _) in PATHS.items():
        call = make()
        print(f'    "{path}": {tuple(spent(call))}')
        for code, cost in sorted(where(call).items(), key=lambda row: -row[1].bytecodes)[:12]:
            print(f"        {cost.bytecodes:5} {cost.calls:3}  {code.co_qualname}")


if __name__ == "__main__":
    _show()
