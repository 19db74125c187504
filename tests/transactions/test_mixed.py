"""Leases and transactions on one key: each respects what the other has in hand or has done."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import pytest_asyncio
from tests.transactions.conftest import Witness, close_store, make_store
from tests.transactions.routes import Caller, Place, Route, block, done, entered

from oncekey import (
    AsyncOnce,
    IdempotencyConflictError,
    IdempotencyInFlightError,
    Once,
    StoreUnavailableError,
)
from oncekey.models import Key, Scope, Terms, Verdict

TERMS = Terms(lease_ms=600_000, ttl_ms=86_400_000)
BRIEF = Terms(lease_ms=20, ttl_ms=86_400_000)
SERVERS = [
    Route("pg", "sync", "psycopg", "none"),
    Route("pg", "async", "asyncpg", "none"),
    Route("pg", "async", "psycopg", "none"),
]
FILES = [
    Route("sqlite", "sync", "sqlite3", "none"),
    Route("sqlite", "async", "aiosqlite", "none"),
]
on_a_server = pytest.mark.parametrize("route", SERVERS, ids=lambda route: route.id)
on_any = pytest.mark.parametrize("route", [*SERVERS, *FILES], ids=lambda route: route.id)


@pytest_asyncio.fixture(loop_scope="session")
async def other(route: Route, place: Place) -> AsyncIterator[Any]:
    """A store of another process, as far as the first can tell."""
    made = make_store(route, place)
    yield made
    await close_store(made)


def key_of(name: str) -> Key:
    return Key(Scope("once", "default"), name)


def guard(store: Any, name: str, payload: Any = None, **options: Any) -> Any:
    """The block of lease mode."""
    return (Once if hasattr(store, "close") else AsyncOnce)(store).guard(name, payload, **options)


async def all_at_once(route: Route, calls: list[Any]) -> list[Any]:
    """Make calls from as many threads or tasks, so that they share statements."""
    if route.world == "async":
        return await asyncio.gather(*(call() for call in calls), return_exceptions=True)

    def one(call: Any) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls))


@on_a_server
async def test_lease_calls_on_a_key_in_hand_are_answered_at_once(
    route: Route, store: Any, other: Any, caller: Caller, witness: Witness, name: str
) -> None:
    """While a transaction has a key in hand nobody waits for it: they are told that it is busy."""
    key, owner = key_of(name), os.urandom(16)
    async with block(store, name, {"a": 1}) as tx:
        await caller.write(tx.connection, name)
        reply = await done(other.claim(key, owner, b"", TERMS))
        assert reply.verdict is Verdict.IN_FLIGHT
        assert reply.lease_ms > 0
        for call in (
            lambda: other.first_seen(key, TERMS),
            lambda: other.complete(key, owner, 1, b"j", TERMS),
            lambda: other.renew(key, owner, 1, TERMS),
            lambda: other.release(key, owner, 1),
        ):
            with pytest.raises(StoreUnavailableError, match="in hand"):
                await done(call())
        assert await done(other.read(key)) is None
        with pytest.raises(IdempotencyInFlightError):
            async with entered(guard(other, name, wait=0)):
                pytest.fail("ran")
        tx.answer = 1
    assert (await done(other.claim(key, owner, b"", TERMS))).verdict is Verdict.REPLAY
    assert await done(other.first_seen(key, TERMS)) is False
    assert witness.effects("pg", name) == 1


@on_a_server
async def test_key_in_hand_does_not_hold_up_other_keys_of_its_batch(
    route: Route, store: Any, other: Any, name: str
) -> None:
    """Calls for other keys that share a statement with it end while the transaction is open."""
    names = [f"{name} {number}" for number in range(24)]
    busy, owner = 12, os.urandom(16)

    def claims(at: int) -> Any:
        return lambda: other.claim(key_of(names[at]), owner, b"", TERMS)

    async with block(store, names[busy]):
        replies = await all_at_once(route, [claims(at) for at in range(24)])
        verdicts = [reply.verdict for reply in replies]
        assert verdicts.pop(busy) is Verdict.IN_FLIGHT
        assert verdicts == [Verdict.WON] * 23

        def completes(at: int) -> Any:
            key, fence = key_of(names[at]), replies[at].fence
            return lambda: other.complete(key, owner, fence, b"j1", TERMS)

        results = await all_at_once(route, [completes(at) for at in range(24)])
        assert isinstance(results.pop(busy), StoreUnavailableError)
        assert results == [True] * 23

        def marks(at: int) -> Any:
            key = key_of(names[busy] if at == busy else f"{names[at]} marked")
            return lambda: other.first_seen(key, TERMS)

        results = await all_at_once(route, [marks(at) for at in range(24)])
        assert isinstance(results.pop(busy), StoreUnavailableError)
        assert results == [True] * 23


@on_any
async def test_answers_are_replayed_across_modes(
    route: Route, store: Any, other: Any, caller: Caller, witness: Witness, name: str
) -> None:
    """Whichever mode did the work, the other gets its answer, and a conflict is one in both."""
    leased, shared = f"{name} leased", f"{name} shared"
    async with entered(guard(store, leased, {"a": 1})) as claim:
        claim.answer = {"by": "lease"}
    async with block(store, shared, {"a": 1}) as tx:
        await caller.write(tx.connection, name)
        tx.answer = {"by": "transaction"}
    for each in (store, other):
        async with block(each, leased, {"a": 1}) as tx:
            assert (tx.replayed, tx.answer) == (True, {"by": "lease"})
        async with entered(guard(each, shared, {"a": 1})) as claim:
            assert (claim.replayed, claim.answer) == (True, {"by": "transaction"})
        with pytest.raises(IdempotencyConflictError):
            async with block(each, leased, {"a": 2}):
                pytest.fail("ran")
        with pytest.raises(IdempotencyConflictError):
            async with entered(guard(each, shared, {"a": 2})):
                pytest.fail("ran")
    assert witness.effects(route.flavour, name) == 1


@on_any
async def test_transaction_waits_for_a_leased_handler_and_gets_its_answer(
    route: Route, store: Any, other: Any, name: str
) -> None:
    """A transaction does not run beside a handler that holds a lease."""
    outside = contextvars.copy_context()

    async def copy(wait: float) -> Any:
        async with block(other, name, wait=wait) as tx:
            assert tx.replayed
            return tx.answer

    async with entered(guard(store, name)) as claim:
        with pytest.raises(IdempotencyInFlightError):
            await copy(0)
        if route.world == "sync":
            waiting = asyncio.ensure_future(
                asyncio.to_thread(lambda: outside.run(asyncio.run, copy(60)))
            )
        else:
            waiting = asyncio.create_task(copy(60), context=outside)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        claim.answer = 7
    assert await waiting == 7


@on_any
@pytest.mark.parametrize("kept", [True, False], ids=["committed", "rolled-back"])
async def test_transaction_takes_a_lapsed_lease_over_and_the_zombie_is_fenced(
    route: Route,
    store: Any,
    other: Any,
    caller: Caller,
    witness: Witness,
    name: str,
    kept: bool,
) -> None:
    """The dead worker's claim is the transaction's when that commits, and its own again if not."""
    key, zombie = key_of(name), os.urandom(16)
    claim = await done(other.claim(key, zombie, b"", BRIEF))
    assert claim.verdict is Verdict.WON

    async def take_over() -> None:
        async with block(store, name, wait=60) as tx:
            assert (tx.replayed, tx.claim.takeover, tx.claim.attempts) == (False, True, 2)
            assert tx.claim.fence > claim.fence
            await caller.write(tx.connection, name)
            if route.flavour == "pg":  # a file's one writer would wait
                with pytest.raises(StoreUnavailableError, match="in hand"):
                    await done(other.complete(key, zombie, claim.fence, b"j8", TERMS))
            tx.answer = 7
            if not kept:
                raise KeyError

    if kept:
        await take_over()
        assert not await done(other.complete(key, zombie, claim.fence, b"j8", TERMS))
        assert not await done(other.renew(key, zombie, claim.fence, TERMS))
        assert not await done(other.release(key, zombie, claim.fence))
    else:
        with pytest.raises(KeyError):
            await take_over()
        assert await done(other.complete(key, zombie, claim.fence, b"j8", TERMS))
    async with block(store, name) as tx:
        assert (tx.replayed, tx.answer) == (True, 7 if kept else 8)
    assert witness.effects(route.flavour, name) == int(kept)
