"""A task that is cancelled at any point of a block leaves all of it or nothing."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Coroutine, Generator
from typing import Any
from unittest import mock

import pytest
from tests.transactions.conftest import Witness
from tests.transactions.routes import ROUTES, Caller, Route, block

from oncekey import IdempotencyInFlightError
from oncekey._core.transact import AsyncTransaction

routes = [route for route in ROUTES if route.world == "async"]
async_route = pytest.mark.parametrize("route", routes, ids=lambda route: route.id)


class CancelledAt:
    """Runs a coroutine and cancels its task at the n-th point: a wait, or a call of a driver.

    Calls of a driver are made in a task of their own, which the cancellation must not reach.
    """

    def __init__(self, work: Coroutine[Any, Any, Any], number: int) -> None:
        self._work = work
        self._number = number
        self._task: asyncio.Task[Any] | None = None
        self.points = 0

    def _point(self) -> None:
        self.points += 1
        if self.points == self._number and self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        self._task = asyncio.current_task()
        do = AsyncTransaction._do

        async def counted(block: AsyncTransaction, step: Any) -> Any:
            self._point()
            return await do(block, step)

        with mock.patch.object(AsyncTransaction, "_do", counted):
            await self

    def __await__(self) -> Generator[Any, Any, Any]:
        step = self._work.__await__()
        send: Any = None
        error: BaseException | None = None
        while True:
            try:
                waited_for = step.throw(error) if error is not None else step.send(send)
            except StopIteration as stop:
                return stop.value
            self._point()
            send = error = None
            try:
                send = yield waited_for
            except BaseException as raised:
                error = raised


@async_route
@pytest.mark.parametrize("joined", [False, True], ids=["own", "joined"])
async def test_cancelled_at_every_point_it_leaves_all_or_nothing(
    route: Route, store: Any, caller: Caller, witness: Witness, name: str, joined: bool
) -> None:
    """Wherever the cancellation strikes: no half, the connection is good, the key is free."""
    if joined and not route.joins:
        pytest.skip("no transaction to join")
    async with block(store, f"{name} warm", on=caller.on):
        pass

    async def work(key: str) -> None:
        async with block(store, key, on=caller.on, error_answer=lambda error: None) as tx:
            await caller.write(tx.connection, key)
            tx.answer = 1

    number, outcomes = 0, set()
    while True:
        number += 1
        key = f"{name} {number}"
        if joined:
            await caller.begin()
            await caller.write(caller.on, f"{key} mine")
        cancelling = CancelledAt(work(key), number)
        task = asyncio.ensure_future(cancelling.run())
        try:
            await task
        except asyncio.CancelledError:
            assert task.cancelled()
        else:
            if cancelling.points < number:
                if joined:
                    await caller.commit()
                break
        if joined:
            # Whether the transaction survived is the library's to say; if so, it is whole.
            try:
                await caller.commit()
            except Exception:
                await caller.rollback()
        effects = witness.effects(route.flavour, key)
        outcomes.add(effects)
        assert (witness.record(route.flavour, key) is not None) == bool(effects), number
        if route.joins:
            assert not caller.in_transaction(), number
        if route.borrowed:
            assert caller.borrowed() == 0, number
        await _tidy(witness, route, number)
        async with block(store, key, on=caller.on, wait=0) as tx:
            assert tx.replayed == bool(effects)
            if not tx.replayed:
                await caller.write(tx.connection, key)
        assert witness.effects(route.flavour, key) == 1, number
    assert number > 8
    assert outcomes == {0, 1}


async def _tidy(witness: Witness, route: Route, number: int) -> None:
    """What is being ended in the background may end."""
    until = time.monotonic() + 5
    while loose := witness.loose_ends(route.flavour):
        assert time.monotonic() < until, (number, loose)
        await asyncio.sleep(0.005)


@async_route
async def test_waiting_copy_that_is_cancelled_changes_nothing(
    route: Route, store: Any, caller: Caller, place: Any, witness: Witness, name: str
) -> None:
    """The first block goes on, and a copy after it gets its answer."""
    outside = contextvars.copy_context()  # where the key is not open, as in another request
    async with Caller(route, place).opened() as other:

        async def copy(wait: float) -> None:
            async with block(store, name, on=other.on, wait=wait):
                pytest.fail("ran")

        async with block(store, name, on=caller.on) as tx:
            await caller.write(tx.connection, name)
            with pytest.raises(IdempotencyInFlightError):
                await asyncio.create_task(copy(0), context=outside)
            waiting = asyncio.create_task(copy(60), context=outside)
            for _ in range(20):
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            tx.answer = 1
        async with block(store, name, on=other.on) as tx:
            assert (tx.replayed, tx.answer) == (True, 1)
    assert witness.effects(route.flavour, name) == 1
