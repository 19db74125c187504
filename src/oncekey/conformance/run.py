"""Running the checks on a store, sync or async."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from oncekey._core.drive import Op, adrive, drive
from oncekey.abc import AsyncStore, ClockInjectable, Store
from oncekey.conformance.checks import CHECKS
from oncekey.conformance.steps import Can, Check, Race, Step
from oncekey.testing import ManualClock

__all__ = ["Conformance", "arun_all", "arun_check", "run_all", "run_check"]


class Conformance:
    """The outcome of one check. ``error`` is ``None`` where the store keeps the contract."""

    def __init__(self, check: Check, error: BaseException | None) -> None:
        self.name = check.__name__
        self.promise = (check.__doc__ or "").strip()
        self.error = error


def _under_test(store: Any) -> tuple[Any, ManualClock | None]:
    """The store on a manual clock where it takes one, so that no check has to sleep."""
    if isinstance(store, ClockInjectable):
        clock = ManualClock(time.time())
        return store.with_clock(clock), clock
    return store, None


def run_check(check: Check, make_store: Callable[[], Store]) -> None:
    """Run one check on a fresh sync store, which is closed afterwards.

    Raises:
        AssertionError: The store breaks the contract; the message says how.
    """
    opened = make_store()
    try:
        store, clock = _under_test(opened)

        def race(ops: list[Op]) -> list[Any]:
            start = threading.Barrier(len(ops))

            def at_once(op: Op) -> Any:
                start.wait()
                return do(op)

            with ThreadPoolExecutor(len(ops)) as pool:
                return list(pool.map(at_once, ops))

        def do(step: Step) -> Any:
            if isinstance(step, Race):
                return race(step.ops)
            if isinstance(step, Op):
                return getattr(store, step.method)(*step.args)
            if isinstance(step, Can):
                return isinstance(store, step.kinds)
            if clock is not None:
                return clock.advance(step.ms / 1000)
            until = store.now() + step.ms
            while store.now() < until:
                time.sleep(0.005)

        drive(check(), do)
    finally:
        opened.close()


async def arun_check(check: Check, make_store: Callable[[], AsyncStore]) -> None:
    """Run one check on a fresh async store, which is closed afterwards.

    Raises:
        AssertionError: The store breaks the contract; the message says how.
    """
    opened = make_store()
    try:
        store, clock = _under_test(opened)

        async def do(step: Step) -> Any:
            if isinstance(step, Race):
                return await asyncio.gather(*(do(op) for op in step.ops))
            if isinstance(step, Op):
                return await getattr(store, step.method)(*step.args)
            if isinstance(step, Can):
                return isinstance(store, step.kinds)
            if clock is not None:
                return clock.advance(step.ms / 1000)
            until = await store.now() + step.ms
            while await store.now() < until:  # noqa: ASYNC110 - a server's clock has no event
                await asyncio.sleep(0.005)

        await adrive(check(), do)
    finally:
        await opened.aclose()


def run_all(make_store: Callable[[], Store]) -> list[Conformance]:
    """Every check on a sync store, whatever fails."""
    outcomes = []
    for check in CHECKS:
        try:
            run_check(check, make_store)
        except Exception as error:  # noqa: BLE001 - reported, with its check
            outcomes.append(Conformance(check, error))
        else:
            outcomes.append(Conformance(check, None))
    return outcomes


async def arun_all(make_store: Callable[[], AsyncStore]) -> list[Conformance]:
    """Every check on an async store, whatever fails."""
    outcomes = []
    for check in CHECKS:
        try:
            await arun_check(check, make_store)
        except Exception as error:  # noqa: BLE001 - reported, with its check
            outcomes.append(Conformance(check, error))
        else:
            outcomes.append(Conformance(check, None))
    return outcomes
