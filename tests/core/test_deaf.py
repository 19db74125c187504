"""Work that a task finishes before it is cancelled, without a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from oncekey._core.tasks import deaf, uncancelled

Finish = Callable[[Coroutine[Any, Any, Any]], Any]
BOTH = pytest.mark.parametrize("finish", [deaf, uncancelled], ids=["deaf", "uncancelled"])


class Scene:
    """Work that waits at a gate, and a task that has it done."""

    def __init__(self, finish: Finish) -> None:
        loop = asyncio.get_running_loop()
        self.gate: asyncio.Future[str] = loop.create_future()
        self.begun = asyncio.Event()
        self.steps: list[str] = []
        self.finish = finish

    async def work(self) -> str:
        self.steps.append("begun")
        self.begun.set()
        self.steps.append(await self.gate)
        await asyncio.sleep(0)
        self.steps.append("done")
        return "result"

    async def outer(self) -> str:
        result: str = await self.finish(self.work())
        self.steps.append("after")
        return result

    async def at_the_gate(self) -> asyncio.Task[str]:
        task = asyncio.create_task(self.outer())
        await self.begun.wait()
        await asyncio.sleep(0)
        return task


@BOTH
async def test_work_gives_its_result(finish: Finish) -> None:
    """Nobody is cancelled: the caller gets what the work returned."""
    scene = Scene(finish)
    task = await scene.at_the_gate()
    scene.gate.set_result("through")
    assert await task == "result"
    assert scene.steps == ["begun", "through", "done", "after"]


@BOTH
async def test_a_cancelled_task_finishes_its_work_first(finish: Finish) -> None:
    """However often it is cancelled, the work goes on, and only then the task ends."""
    scene = Scene(finish)
    task = await scene.at_the_gate()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    scene.gate.set_result("through")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert scene.steps == ["begun", "through", "done"]


@BOTH
async def test_a_cancellation_in_a_turn_without_a_future_waits_too(finish: Finish) -> None:
    """Where the work only lets others go first, a cancellation is thrown in: it is kept, too."""
    steps = []

    async def work() -> None:
        for number in range(3):
            steps.append(number)
            await asyncio.sleep(0)

    async def outer() -> None:
        await finish(work())

    task = asyncio.create_task(outer())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == [0, 1, 2]


@BOTH
async def test_the_work_gets_its_own_errors(finish: Finish) -> None:
    """What a future raises, and that it was cancelled, is the work's to handle."""
    for spoil in (
        lambda gate: gate.set_exception(ValueError("no")),
        lambda gate: gate.cancel(),
    ):
        scene = Scene(finish)
        task = await scene.at_the_gate()
        spoil(scene.gate)
        with pytest.raises((ValueError, asyncio.CancelledError)):
            await task
        assert scene.steps == ["begun"]


@BOTH
async def test_a_cancellation_hides_an_error(finish: Finish) -> None:
    """A cancelled task ends cancelled, also if its work failed after that."""
    scene = Scene(finish)
    task = await scene.at_the_gate()
    task.cancel()
    scene.gate.set_exception(ValueError("no"))
    with pytest.raises(asyncio.CancelledError):
        await task


@BOTH
async def test_a_timeout_around_it_comes_after_it(finish: Finish) -> None:
    """``asyncio.timeout`` around the work is a ``TimeoutError``, once that is done."""
    scene = Scene(finish)

    async def timed() -> None:
        async with asyncio.timeout(0) as limit:
            asyncio.get_running_loop().call_later(0, lambda: scene.gate.set_result("through"))
            await scene.outer()
        assert limit.expired()

    with pytest.raises(TimeoutError):
        await timed()
    assert scene.steps[-1] == "done"


async def test_work_that_is_thrown_away_is_closed() -> None:
    """A coroutine that is closed where it waits closes its work."""
    closed = []

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            closed.append(True)

    async def outer() -> None:
        await deaf(work())

    coroutine = outer()
    coroutine.send(None)
    coroutine.close()
    assert closed == [True]
