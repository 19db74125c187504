"""Calls of one event loop that share a round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from oncekey.stores._batching import ALONE, Job, LoopBatch


class Runner:
    """Answers each job with how many there were in its batch, after a while."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    async def __call__(self, jobs: Sequence[Job]) -> None:
        self.begun.append(len(jobs))
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        for job in jobs:
            job.result = len(jobs)


@pytest.mark.parametrize("stepped", [True, False])
async def test_calls_of_one_turn_go_together(stepped: bool) -> None:
    """Also where the call before was alone."""
    runner = Runner()
    batch = LoopBatch(runner, stepped=stepped)
    assert await batch.submit("call", ()) == 1
    assert await asyncio.gather(*(batch.submit("call", ()) for _ in range(5))) == [5] * 5


async def test_who_was_alone_for_a_while_is_sent_at_once() -> None:
    """Before the caller waits; those who come meanwhile share the next batch."""
    runner = Runner()
    batch = LoopBatch(runner, stepped=True)
    for _ in range(ALONE):
        await batch.submit("call", ())
    calls = [batch.submit("call", ()) for _ in range(4)]
    assert len(runner.begun) == ALONE + 1
    assert await asyncio.gather(*calls) == [1, 3, 3, 3]


@pytest.mark.parametrize("stepped", [True, False])
async def test_a_cancelled_caller_does_not_stop_its_batch(stepped: bool) -> None:
    """The others get their answers, and what nobody sent yet is not sent."""
    runner = Runner()
    batch = LoopBatch(runner, stepped=stepped)
    first = [batch.submit("call", ()) for _ in range(2)]
    while not runner.begun:
        await asyncio.sleep(0)
    late = batch.submit("call", ())
    first[0].cancel()
    late.cancel()
    assert await first[1] == 2
    await batch.drain()
    assert runner.begun == [2]


@pytest.mark.parametrize("stepped", [True, False])
async def test_an_error_reaches_every_caller(stepped: bool) -> None:
    """And the next batch runs."""
    fails = True

    async def run(jobs: Sequence[Job]) -> None:
        if fails:
            raise OSError("gone")
        for job in jobs:
            job.result = 1

    batch = LoopBatch(run, stepped=stepped)
    calls = [batch.submit("call", ()) for _ in range(3)]
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(one) for one in found] == [OSError] * 3
    fails = False
    assert await batch.submit("call", ()) == 1
