"""Blocks that were fenced off, calls inside themselves, and sync guards inside an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest

from oncekey import (
    AsyncOnce,
    AsyncSQLiteStore,
    BackendMismatchError,
    ClaimLostError,
    IdempotencyInFlightError,
    IdempotencyRecursionError,
    MemoryBackend,
    MemoryStore,
    Once,
    SQLiteStore,
)

Places = tuple[Callable[..., Any], Callable[..., Any]]
LONG = 30  # whoever waits for itself would be noticed


def elsewhere(work: Callable[[], Any]) -> Any:
    """Run ``work`` as another worker would: without this one's context."""
    return contextvars.Context().run(work)


def outcome_of_another(once: Once, answer: str) -> None:
    """Another worker does the work."""

    def work() -> None:
        with once.guard("k") as claim:
            assert not claim.replayed
            claim.answer = answer

    elsewhere(work)


# Fenced off


def test_a_block_that_was_fenced_off_has_the_official_answer(store: Any) -> None:
    """It leaves with the recorded outcome, as a replay: on every store."""
    once = Once(store)
    with once.guard("k") as claim:
        store.release(claim.claim.key, claim.claim.owner, claim.fence)  # as after a lease
        outcome_of_another(once, "official")
        claim.answer = "mine"
    assert (claim.answer, claim.replayed) == ("official", True)
    with once.guard("k") as later:
        assert later.answer == "official"


def test_a_block_without_an_official_answer_is_an_error(store: Any) -> None:
    """Where the successor is not done yet, nobody knows the outcome."""
    once = Once(store)
    block = once.guard("k")
    claim = block.__enter__()
    store.release(claim.claim.key, claim.claim.owner, claim.fence)
    elsewhere(once.guard("k").__enter__)
    claim.answer = "mine"
    with pytest.raises(ClaimLostError, match="taken its key over"):
        block.__exit__(None, None, None)


async def test_an_async_block_that_was_fenced_off_has_the_official_answer(places: Places) -> None:
    """The same for ``async with``, with an answer and without one."""
    async with places[1]() as store:
        once = AsyncOnce(store)
        async with once.guard("k") as claim:
            await store.release(claim.claim.key, claim.claim.owner, claim.fence)
            async with once.guard("k") as other:
                other.answer = "official"
            claim.answer = "mine"
        assert (claim.answer, claim.replayed) == ("official", True)
        block = once.guard("j")
        claim = await block.__aenter__()
        await store.release(claim.claim.key, claim.claim.owner, claim.fence)
        async with once.guard("j"):
            claim.answer = "mine"
            with pytest.raises(ClaimLostError):
                await block.__aexit__(None, None, None)


# Inside itself


def test_a_call_inside_itself_is_told_at_once(store: Any) -> None:
    """It would wait for its own answer; the error says so, and the key is free afterwards."""
    once = Once(store, wait=LONG)
    again: list[str] = ["k"]

    @once(key="k")
    def walk(k: str) -> str:
        return walk(again.pop()) if again else "done"

    with pytest.raises(IdempotencyRecursionError, match="wait for itself") as caught:
        walk("k")
    assert not caught.value.retryable
    assert walk("k") == "done"


def test_it_is_seen_through_other_calls_and_threads(store: Any) -> None:
    """Whatever lies between the two calls: another guard, a block, a thread with the context."""
    once = Once(store, wait=LONG)

    @once(key="k")
    def inner(k: str) -> str:
        with once.guard(k):
            return "unreachable"

    with once.guard("k"), pytest.raises(IdempotencyRecursionError):
        inner("k")
    found: list[BaseException] = []

    def threaded() -> None:
        try:
            once.guard("j").__enter__()
        except BaseException as error:
            found.append(error)

    with once.guard("j"):
        thread = threading.Thread(target=contextvars.copy_context().run, args=(threaded,))
        thread.start()
        thread.join()
    assert [type(error) for error in found] == [IdempotencyRecursionError]


async def test_async_calls_inside_themselves_are_told_at_once(places: Places) -> None:
    """Also in child tasks, which the outer call waits for; a call of its own has the answer."""
    async with places[1]() as store:
        once = AsyncOnce(store, wait=LONG)

        @once(key="k")
        async def walk(k: str, deep: bool = True) -> str:
            if not deep:
                return "done"
            results = await asyncio.gather(walk(k, deep), return_exceptions=True)
            raise results[0]  # type: ignore[misc]

        with pytest.raises(IdempotencyRecursionError):
            await walk("k")
        assert await walk("k", deep=False) == "done"


async def test_a_task_that_outlives_the_call_may_use_its_key(places: Places) -> None:
    """Once the outer call is over, a task that it started gets its answer."""
    async with places[1]() as store:
        once = AsyncOnce(store, wait=LONG)
        over = asyncio.Event()
        tasks: list[asyncio.Task[str]] = []

        async def later() -> str:
            await over.wait()
            return await work("k")

        @once(key="k")
        async def work(k: str) -> str:
            tasks.append(asyncio.create_task(later()))
            return "done"

        assert await work("k") == "done"
        over.set()
        assert await tasks[0] == "done"


def test_a_chain_of_tasks_does_not_grow() -> None:
    """Tasks that start each other for ever keep only the claims that are open."""
    once = AsyncOnce(MemoryBackend())
    depths: list[int] = []

    async def step(left: int) -> None:
        async with once.guard(f"k{left}") as opened:
            claim, depth = opened.claim, 0
            while claim is not None:
                claim, depth = claim.outer, depth + 1
            depths.append(depth)
            following = asyncio.create_task(step(left - 1)) if left else None
        if following is not None:
            await following

    asyncio.run(step(50))
    assert max(depths) <= 3


def test_guards_and_transactions_of_one_key_dont_wait_for_each_other(tmp_path: Any) -> None:
    """A transaction in a guard of its key, and a guard in a transaction: an error at once."""
    with SQLiteStore(tmp_path / "records.db") as store:
        once = Once(store, wait=LONG)
        with once.guard("k"), pytest.raises(IdempotencyRecursionError):
            once.transaction("k").__enter__()
        with once.transaction("j"), pytest.raises(IdempotencyRecursionError):
            once.guard("j").__enter__()
        with once.guard("k") as claim:
            assert not claim.replayed or claim.answer is None


def test_transactions_on_postgresql_dont_wait_for_their_guards(pg_url: str) -> None:
    """The same where transactions have connections of their own."""
    from oncekey import PgStore

    with PgStore(pg_url) as store:
        once = Once(store, wait=LONG)
        with once.guard("k"), pytest.raises(IdempotencyRecursionError):
            once.transaction("k").__enter__()
        with once.transaction("j"), pytest.raises(IdempotencyRecursionError):
            once.guard("j").__enter__()


def test_a_copy_without_a_wait_still_learns_that_one_is_running() -> None:
    """A real copy, from elsewhere, is in flight as before."""
    once = Once(MemoryStore())
    with once.guard("k"), pytest.raises(IdempotencyInFlightError) as caught:
        elsewhere(once.guard("k", wait=0).__enter__)
    assert not isinstance(caught.value, IdempotencyRecursionError)


# In an event loop


async def test_a_sync_guard_does_not_stall_the_loop_it_runs_in(store: Any) -> None:
    """Where it had to wait for a task of its own loop, it says so instead."""
    once = Once(store, wait=LONG)
    held, go = asyncio.Event(), asyncio.Event()

    async def holder() -> None:
        with once.guard("k") as claim:
            held.set()
            await go.wait()
            claim.answer = "done"

    task = asyncio.create_task(holder())
    await held.wait()
    with pytest.raises(BackendMismatchError, match=r"event loop.*AsyncOnce"):
        once.guard("k").__enter__()
    with pytest.raises(IdempotencyInFlightError):
        once.guard("k", wait=0).__enter__()
    waiter = asyncio.create_task(asyncio.to_thread(once.guard("k").__enter__))
    go.set()
    await task
    assert (await waiter).answer == "done"
    with once.guard("k") as claim:
        assert claim.answer == "done"  # what needs no waiting works in a loop too


async def test_a_transaction_does_not_stall_the_loop_either(tmp_path: Any) -> None:
    """A sync transaction in a loop, whose key an async one holds."""
    with SQLiteStore(tmp_path / "records.db") as sync:
        async with AsyncSQLiteStore(tmp_path / "records.db") as store:
            async with AsyncOnce(store).guard("k"):
                with pytest.raises(BackendMismatchError, match="event loop"):
                    elsewhere(Once(sync, wait=LONG).transaction("k").__enter__)
