"""A block that never looks whether its work was done before is told, and has no second effect."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tests.transactions.conftest import Witness
from tests.transactions.routes import ROUTES, Caller, Route, block

from oncekey import AsyncSQLiteStore, BackendMismatchError, SQLiteStore, TransactionRefusedError

JOINING = [route for route in ROUTES if route.joins]
BY_ITSELF = ("asyncpg", "django")  # their statements commit alone where no transaction is open


@pytest.mark.parametrize("route", JOINING, ids=lambda route: route.id)
async def test_what_a_forgetful_block_writes_is_undone(
    route: Route, store: Any, caller: Caller, witness: Witness, name: str
) -> None:
    """The second time it writes on what it passed, which begins a transaction by itself."""
    async with block(store, name, on=caller.on):
        await caller.write(caller.on, name)
    assert witness.effects(route.flavour, name) == 1
    with pytest.raises(TransactionRefusedError, match=r"never looked at tx\.replayed") as told:
        async with block(store, name, on=caller.on):
            await caller.write(caller.on, name)
    undone = route.library not in BY_ITSELF
    assert ("was rolled back" in str(told.value)) == undone
    if route.library != "django" and caller.in_transaction():
        await caller.commit()  # what is open still, if anything
    assert witness.effects(route.flavour, name) == (1 if undone else 2)


@pytest.mark.parametrize("route", JOINING, ids=lambda route: route.id)
async def test_a_transaction_of_the_callers_is_left_to_the_caller(
    route: Route, store: Any, caller: Caller, witness: Witness, name: str
) -> None:
    """What was written in it before the block is not undone by us, but by who gets the error."""
    async with block(store, name, on=caller.on):
        await caller.write(caller.on, name)
    await caller.begin()
    await caller.write(caller.on, f"{name} before")
    with pytest.raises(TransactionRefusedError, match="unless a transaction around it"):
        async with block(store, name, on=caller.on):
            await caller.write(caller.on, name)
    await caller.rollback()
    assert witness.effects(route.flavour, name) == 1
    assert witness.effects(route.flavour, f"{name} before") == 0


@pytest.mark.parametrize("look", ["replayed", "answer", "claim"])
def test_any_look_will_do(tmp_path: Path, look: str) -> None:
    """Who looked knows, and may do as it likes."""
    with SQLiteStore(str(tmp_path / "a.db")) as store:
        for _ in range(2):
            with store.transaction("k") as tx:
                getattr(tx, look)


def test_an_error_of_the_block_stays_the_error(tmp_path: Path) -> None:
    """Nothing is silent then; what went wrong first is what is told."""
    with SQLiteStore(str(tmp_path / "a.db")) as store:
        with store.transaction("k"):
            pass
        with pytest.raises(KeyError), store.transaction("k"):
            raise KeyError


def test_a_rollback_that_fails_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The block is told all the same."""

    class Broken(sqlite3.Connection):
        def rollback(self) -> None:
            raise sqlite3.OperationalError("broken")

    on = sqlite3.connect(str(tmp_path / "a.db"), factory=Broken)
    with SQLiteStore(str(tmp_path / "a.db")) as store:
        with store.transaction("k", on=on):
            pass
        refused = pytest.raises(TransactionRefusedError, match="never looked")
        with refused, store.transaction("k", on=on):
            pass
    on.close()
    assert "rolling back failed: broken" in caplog.text


async def test_the_wrong_with_is_told(tmp_path: Path) -> None:
    """As for guards: what to write, before anything runs."""
    with SQLiteStore(str(tmp_path / "a.db")) as store:
        transaction: Any = store.transaction("k")
        with pytest.raises(BackendMismatchError, match="this is synchronous"):
            async with transaction:
                pass
    loop = AsyncSQLiteStore(str(tmp_path / "b.db"))
    waiting: Any = loop.transaction("k")
    with pytest.raises(BackendMismatchError, match="write 'async with'"), waiting:
        pass
    await loop.aclose()
