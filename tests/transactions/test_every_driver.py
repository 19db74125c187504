"""Effect and answer commit together or not at all, whatever library the caller writes with."""

from __future__ import annotations

from typing import Any

import pytest
from tests.transactions.conftest import Witness
from tests.transactions.routes import ROUTES, Caller, Place, Route, block

from oncekey import IdempotencyConflictError

ANSWER = {"id": 7, "text": "grün"}

every_route = pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.id)
joining = pytest.mark.parametrize(
    "route", [route for route in ROUTES if route.joins], ids=lambda route: route.id
)
borrowing = pytest.mark.parametrize(
    "route", [route for route in ROUTES if route.borrowed], ids=lambda route: route.id
)


class Boom(Exception):
    """A handler's own failure."""


BAD_SQL = "SELECT * FROM no_such_table"


async def fail(
    store: Any, caller: Caller, name: str, on: Any = None, sql: str = "", **options: Any
) -> None:
    """A block that writes, then fails: by a statement, or by itself."""
    on = caller.on if on is None else on
    async with block(store, name, on=on, **options) as tx:
        await caller.write(tx.connection, name)
        if sql:
            await caller.run(tx.connection, sql)
        raise Boom


@every_route
async def test_first_run_commits_effect_and_answer_and_a_copy_gets_the_answer(
    route: Route, store: Any, caller: Caller, witness: Witness, name: str
) -> None:
    """Nothing is seen before the commit, all of it after, and a replay writes nothing."""
    async with block(store, name, {"a": 1}, on=caller.on) as tx:
        assert not tx.replayed
        await caller.write(tx.connection, name)
        tx.answer = ANSWER
        assert witness.effects(route.flavour, name) == 0
        assert witness.record(route.flavour, name) is None
    assert witness.effects(route.flavour, name) == 1
    written = witness.record(route.flavour, name)
    assert written is not None

    for _ in range(2):
        async with block(store, name, {"a": 1}, on=caller.on) as tx:
            assert (tx.replayed, tx.answer) == (True, ANSWER)
    assert witness.effects(route.flavour, name) == 1
    assert witness.record(route.flavour, name) == written
    if route.joins:
        assert not caller.in_transaction()


@every_route
async def test_error_takes_effect_and_claim_back_and_frees_the_key(
    route: Route, store: Any, caller: Caller, witness: Witness, name: str
) -> None:
    """A handler that fails leaves nothing; the next one runs as if it were the first."""
    with pytest.raises(Boom):
        await fail(store, caller, name)
    assert witness.effects(route.flavour, name) == 0
    assert witness.record(route.flavour, name) is None
    if route.joins:
        assert not caller.in_transaction()

    async with block(store, name, on=caller.on, wait=0) as tx:
        assert (tx.replayed, tx.claim.attempts, tx.claim.takeover) == (False, 1, False)
        await caller.write(tx.connection, name)
    assert witness.effects(route.flavour, name) == 1


@every_route
async def test_failing_statement_takes_everything_back(
    route: Route, store: Any, caller: Caller, witness: Witness, name: str
) -> None:
    """An error of the database inside the block reaches the caller as it is; nothing is left."""
    with pytest.raises(Exception, match="no_such_table"):
        await fail(store, caller, name, sql=BAD_SQL)
    assert witness.effects(route.flavour, name) == 0
    assert witness.record(route.flavour, name) is None
    async with block(store, name, on=caller.on, wait=0) as tx:
        assert not tx.replayed
        await caller.write(tx.connection, name)
    assert witness.effects(route.flavour, name) == 1


@every_route
async def test_another_payload_under_the_key_is_a_conflict(
    route: Route, store: Any, caller: Caller, witness: Witness, name: str
) -> None:
    """The block does not run for a payload that is not the first one."""
    async with block(store, name, {"a": 1}, on=caller.on) as tx:
        await caller.write(tx.connection, name)
    with pytest.raises(IdempotencyConflictError):
        async with block(store, name, {"a": 2}, on=caller.on):
            pytest.fail("ran")
    assert witness.effects(route.flavour, name) == 1
    if route.joins:
        assert not caller.in_transaction()


@every_route
@pytest.mark.parametrize("sql", ["", BAD_SQL], ids=["raised", "by-database"])
async def test_error_answer_is_stored_without_the_effects(
    route: Route, store: Any, caller: Caller, witness: Witness, name: str, sql: str
) -> None:
    """By option the answer for an error is recorded and replayed, with the writes rolled back."""

    def failed(error: Exception) -> dict[str, Any]:
        return {"failed": True}

    with pytest.raises(Exception) as caught:
        await fail(store, caller, name, sql=sql, error_answer=failed)
    assert ("no_such_table" in str(caught.value)) if sql else (caught.type is Boom)
    assert witness.effects(route.flavour, name) == 0
    async with block(store, name, on=caller.on, error_answer=failed) as tx:
        assert (tx.replayed, tx.answer) == (True, {"failed": True})

    async with block(store, f"{name} well", on=caller.on, error_answer=failed) as tx:
        await caller.write(tx.connection, name)
        tx.answer = ANSWER
    async with block(store, f"{name} well", on=caller.on, error_answer=failed) as tx:
        assert (tx.replayed, tx.answer) == (True, ANSWER)
    assert witness.effects(route.flavour, name) == 1
    if route.joins:
        assert not caller.in_transaction()


@every_route
async def test_no_answer_for_an_error_stores_nothing(
    route: Route, store: Any, caller: Caller, witness: Witness, name: str
) -> None:
    """An ``error_answer`` that gives None frees the key, as if it were not there."""
    with pytest.raises(Boom):
        await fail(store, caller, name, error_answer=lambda error: None)
    assert witness.effects(route.flavour, name) == 0
    assert witness.record(route.flavour, name) is None


@every_route
async def test_error_answer_that_fails_itself_leaves_nothing(
    route: Route, store: Any, caller: Caller, witness: Witness, name: str
) -> None:
    """The key is free and the connection as before when making the error's answer fails."""

    def worse(error: Exception) -> Any:
        raise RuntimeError("no answer for that")

    with pytest.raises((Boom, RuntimeError)):
        await fail(store, caller, name, error_answer=worse)
    assert witness.effects(route.flavour, name) == 0
    witness.all_is_tidy(route.flavour)
    async with block(store, name, on=caller.on, wait=0) as tx:
        assert not tx.replayed


@joining
@pytest.mark.parametrize("wrote", [True, False], ids=["after-a-write", "nothing-written-yet"])
async def test_callers_rollback_undoes_effect_and_record(
    route: Route, store: Any, caller: Caller, witness: Witness, name: str, wrote: bool
) -> None:
    """In a transaction that was open before, the block commits nothing by itself."""
    await caller.begin()
    if wrote:
        await caller.write(caller.on, f"{name} mine")
    async with block(store, name, on=caller.on) as tx:
        await caller.write(tx.connection, name)
        tx.answer = ANSWER
    assert caller.in_transaction()
    assert witness.effects(route.flavour, name) == 0
    await caller.rollback()
    assert not caller.in_transaction()
    assert witness.effects(route.flavour, name) == 0
    assert witness.record(route.flavour, name) is None
    async with block(store, name, on=caller.on, wait=0) as tx:
        assert not tx.replayed


@joining
async def test_callers_commit_keeps_effect_and_record(
    route: Route, store: Any, caller: Caller, witness: Witness, name: str
) -> None:
    """The caller's own writes, the effect and the answer are there after its commit; not before."""
    await caller.begin()
    await caller.write(caller.on, f"{name} mine")
    async with block(store, name, {"a": 1}, on=caller.on) as tx:
        await caller.write(tx.connection, name)
        tx.answer = ANSWER
    async with block(store, f"{name} second", on=caller.on) as tx:
        await caller.write(tx.connection, name)
    assert caller.in_transaction()
    assert witness.effects(route.flavour, name) == 0
    await caller.commit()
    assert not caller.in_transaction()
    assert witness.effects(route.flavour, f"{name} mine") == 1
    assert witness.effects(route.flavour, name) == 2
    async with block(store, name, {"a": 1}, on=caller.on) as tx:
        assert (tx.replayed, tx.answer) == (True, ANSWER)


@joining
async def test_error_that_the_caller_catches_leaves_its_transaction_usable(
    route: Route, store: Any, caller: Caller, witness: Witness, name: str
) -> None:
    """Only the block's own writes are undone; the caller goes on and commits the rest."""
    await caller.begin()
    await caller.write(caller.on, f"{name} before")
    with pytest.raises(Boom):
        await fail(store, caller, name)
    assert caller.in_transaction()
    with pytest.raises(Exception, match="no_such_table"):
        await fail(store, caller, name, sql=BAD_SQL)
    assert caller.in_transaction()
    await caller.write(caller.on, f"{name} after")
    await caller.commit()
    assert not caller.in_transaction()
    assert [
        witness.effects(route.flavour, one) for one in (f"{name} before", name, f"{name} after")
    ] == [1, 0, 1]
    assert witness.record(route.flavour, name) is None


@joining
async def test_replay_and_conflict_leave_the_callers_transaction_as_it_was(
    route: Route, store: Any, caller: Caller, witness: Witness, name: str
) -> None:
    """In an open transaction a replay and a refusal change nothing, and it can be committed."""
    async with block(store, name, {"a": 1}, on=caller.on) as tx:
        tx.answer = ANSWER
    await caller.begin()
    await caller.write(caller.on, f"{name} mine")
    async with block(store, name, {"a": 1}, on=caller.on) as tx:
        assert (tx.replayed, tx.answer) == (True, ANSWER)
    with pytest.raises(IdempotencyConflictError):
        async with block(store, name, {"a": 2}, on=caller.on):
            pytest.fail("ran")
    assert caller.in_transaction()
    await caller.commit()
    assert witness.effects(route.flavour, f"{name} mine") == 1


@joining
async def test_error_answer_in_the_callers_transaction_is_the_callers_to_commit(
    route: Route, store: Any, caller: Caller, witness: Witness, name: str
) -> None:
    """The stored error commits with the caller's writes, and its rollback takes it back."""
    for keep in (False, True):
        await caller.begin()
        await caller.write(caller.on, f"{name} mine")
        with pytest.raises(Boom):
            await fail(store, caller, name, error_answer=lambda error: "failed")
        assert caller.in_transaction()
        await (caller.commit() if keep else caller.rollback())
        assert (witness.record(route.flavour, name) is not None) is keep
        assert witness.effects(route.flavour, f"{name} mine") == int(keep)
    assert witness.effects(route.flavour, name) == 0
    async with block(store, name, on=caller.on) as tx:
        assert (tx.replayed, tx.answer) == (True, "failed")


@joining
async def test_blocks_for_other_keys_nest_on_one_connection(
    route: Route, store: Any, caller: Caller, witness: Witness, name: str
) -> None:
    """An inner step's failure undoes the inner step; outer and inner commit together."""
    async with block(store, name, on=caller.on, error_answer=lambda error: "failed") as outer:
        await caller.write(outer.connection, name)
        with pytest.raises(Boom):
            await fail(store, caller, f"{name} bad", on=outer.connection)
        async with block(store, f"{name} good", on=outer.connection) as inner:
            await caller.write(inner.connection, f"{name} good")
            inner.answer = 2
        outer.answer = 1
    assert not caller.in_transaction()
    names = (name, f"{name} bad", f"{name} good")
    assert [witness.effects(route.flavour, one) for one in names] == [1, 0, 1]
    assert [witness.record(route.flavour, one) is not None for one in names] == [True, False, True]


@borrowing
async def test_borrowed_connections_go_back(
    route: Route, store: Any, caller: Caller, name: str
) -> None:
    """After every way to leave a block the pool has all its connections again."""
    async with block(store, name, {"a": 1}, on=caller.on) as tx:
        await caller.write(tx.connection, name)
        assert caller.borrowed() == 1
    assert caller.borrowed() == 0
    async with block(store, name, {"a": 1}, on=caller.on) as tx:
        assert tx.replayed
        assert caller.borrowed() == 0
    with pytest.raises(IdempotencyConflictError):
        async with block(store, name, {"a": 2}, on=caller.on):
            pytest.fail("ran")
    assert caller.borrowed() == 0
    for option in ({}, {"error_answer": lambda error: None}, {"error_answer": lambda error: 1}):
        with pytest.raises(Boom):
            await fail(store, caller, f"{name} bad", **option)
        assert caller.borrowed() == 0


def _as_dict(cursor: Any, row: Any) -> dict[str, Any]:
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


ROWS = [
    route
    for route in ROUTES
    if route.library in ("psycopg", "sqlite3", "aiosqlite") and route.what != "none"
]


@pytest.mark.parametrize("route", ROWS, ids=lambda route: route.id)
async def test_callers_row_factory_does_not_matter(
    route: Route, place: Place, store: Any, witness: Witness, name: str
) -> None:
    """A connection that gives its rows as dicts is as good as any, and still gives dicts."""
    from psycopg.rows import dict_row

    options = {"row_factory": dict_row} if route.flavour == "pg" else {}
    async with Caller(route, place).opened(**options) as caller:
        if route.flavour == "sqlite":
            caller.on.row_factory = _as_dict
        for replayed in (False, True):
            async with block(store, name, on=caller.on) as tx:
                assert tx.replayed is replayed
                if not replayed:
                    await caller.write(tx.connection, name)
        if route.flavour == "sqlite":
            assert caller.on.row_factory is _as_dict
    assert witness.effects(route.flavour, name) == 1
