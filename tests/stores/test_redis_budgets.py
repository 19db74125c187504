"""What a call of the Redis store may cost on our side, with a server that answers at once.

See ``tests/core/test_budgets.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.budgets import Spent, awaited, hold

from oncekey.models import Key, Scope, Terms
from oncekey.stores.redis import AsyncRedisStore

TERMS = Terms(30_000, 60_000)
OWN, MARK = b"o" * 16, b"f" * 32
REPLIES: dict[str, Any] = {
    "claim": [[7]],
    "replay": [[[1, 7, 0, 1, b"j1", 0]]],
    "complete": [1],
}
BUDGETS = {
    "claim": {(3, 11): Spent(645, 23), (3, 13): Spent(585, 23)},
    "replay": {(3, 11): Spent(645, 23), (3, 13): Spent(585, 23)},
    "complete": {(3, 11): Spent(645, 23), (3, 13): Spent(585, 23)},
}


class Wire:
    """Answers at once, and always the same."""

    deadline = None

    def __init__(self, replies: list[Any]) -> None:
        self._replies = replies

    def send(self, send: Any, done: Callable[[Any], None], deadline: float) -> None:
        done(self._replies)


def lone_call(path: str) -> Callable[[], object]:
    """A call that comes alone, to a server that is known."""
    store = AsyncRedisStore("redis://nowhere:6379/0", check="off")
    lanes: Any = store._here().lanes
    only = lanes._batches.topology.only
    lanes._batches._trusted.add(only)
    lanes._wires[only] = Wire(REPLIES[path])
    name = Key(Scope("once", "budgets"), "k")
    if path == "complete":
        return awaited(lambda: store.complete(name, OWN, 7, b"j1", TERMS))
    return awaited(lambda: store.claim(name, OWN, MARK, TERMS))


@pytest.mark.parametrize("path", BUDGETS)
async def test_a_lone_call_keeps_to_its_budget(path: str) -> None:
    """A lone call is packed, written and answered; no flow is begun for it."""
    hold(f"Redis, {path}", lone_call(path), BUDGETS[path])
