"""What a call of the SQLite store may cost on our side. See ``tests/core/test_budgets.py``."""

from __future__ import annotations

import itertools
import pathlib
import time
from collections.abc import Callable

import pytest
from tests.budgets import Spent, hold

from oncekey import SQLiteStore
from oncekey.models import Key, Scope, Terms
from oncekey.stores._batching import Job
from oncekey.stores.sqlite.database import RUN

TERMS = Terms(30_000, 60_000)
SCOPE = Scope("once", "budgets")
BUDGETS = {
    "first seen": {(3, 11): Spent(455, 21), (3, 13): Spent(405, 21)},
    "claim and complete": {(3, 11): Spent(1_190, 45), (3, 13): Spent(1_040, 45)},
    "64 marks of a commit": {(3, 11): Spent(10_100, 400), (3, 13): Spent(8_700, 400)},
}


def path_of(store: SQLiteStore, path: str) -> Callable[[], object]:
    """A call for a new key each time, as they come in a run of new keys."""
    numbers = itertools.count()
    database = store._database
    database.new_in_a_row = RUN

    def new_key() -> Key:
        key = Key(SCOPE, str(next(numbers)))
        assert key.digest
        return key

    def first_seen() -> object:
        return store.first_seen(new_key(), TERMS)

    def claim_and_complete() -> object:
        key = new_key()
        reply = store.claim(key, b"o" * 16, b"f" * 32, TERMS)
        return store.complete(key, b"o" * 16, reply.fence, b"j1", TERMS)

    def marks() -> object:
        database._writes = 0  # no step of sweeping among them
        return database.commit(
            [Job(database.mark, (new_key(), TERMS, time.time)) for _ in range(64)]
        )

    return {"first seen": first_seen, "claim and complete": claim_and_complete}.get(path, marks)


@pytest.mark.parametrize("path", BUDGETS)
def test_a_call_keeps_to_its_budget(tmp_path: pathlib.Path, path: str) -> None:
    """A new key is looked for by its insert, and those of one commit share a statement."""
    with SQLiteStore(tmp_path / "x.db", durability="normal") as store:
        hold(f"SQLite, {path}", path_of(store, path), BUDGETS[path])
