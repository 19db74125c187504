"""What a call of the PostgreSQL store may cost on our side, with a server that answers at once.

See ``tests/core/test_budgets.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.budgets import Spent, awaited, hold
from tests.servers.fixtures_pg import TERMS, key

from oncekey.stores._batching import ALONE
from oncekey.stores.postgres import AsyncPostgresStore
from oncekey.stores.postgres.statements import statements_in

OWN, MARK = b"o" * 16, b"f" * 32
ROWS: dict[str, Any] = {
    "claim": (b"", 0, OWN, 7, MARK, 30_000, False, 1, False, None),
    "replay": (b"", 1, b"other", 7, MARK, 0, False, 1, False, b"j1"),
    "complete": (b"", True, False),
    "first seen": (b"", True),
}
BUDGETS = {
    "claim": {(3, 11): Spent(750, 26), (3, 13): Spent(680, 26)},
    "replay": {(3, 11): Spent(745, 25), (3, 13): Spent(675, 25)},
    "complete": {(3, 11): Spent(680, 24), (3, 13): Spent(630, 24)},
    "first seen": {(3, 11): Spent(632, 24), (3, 13): Spent(573, 24)},
}


def lone_call(path: str) -> Callable[[], object]:
    """A call that comes alone, to a store whose server answers at once, and always the same."""
    store = AsyncPostgresStore("postgresql://nobody@nowhere/nothing", driver="asyncpg")
    rows = [ROWS[path]]

    async def fetch(*asked: Any, deadline: Any = None) -> Any:
        return rows

    store._source.fetch = fetch
    store._home = statements_in("public")
    lanes = store._lanes()
    lanes.claims._alone = lanes.settles._alone = ALONE
    name = key("k")
    if path == "complete":
        return awaited(lambda: store.complete(name, OWN, 7, b"j1", TERMS))
    if path == "first seen":
        return awaited(lambda: store.first_seen(name, TERMS))
    return awaited(lambda: store.claim(name, OWN, MARK, TERMS))


@pytest.mark.parametrize("path", BUDGETS)
async def test_a_lone_call_keeps_to_its_budget(path: str) -> None:
    """A lone call makes no task, and no more than a few steps of ours."""
    hold(f"PostgreSQL, {path}", lone_call(path), BUDGETS[path])
