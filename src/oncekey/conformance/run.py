"""Running the checks on a store, sync or async."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from oncekey._core.drive import Op
from oncekey.abc import AsyncStore, ClockInjectable, Store
from oncekey.conformance.checks import CHECKS
from oncekey.conformance.steps import Check, Elapse, Race
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

        def elapse(ms: int) -> None:
            if clock is not None:
                clock.advance(ms / 1000)
                return
            until = store.now() + ms
            while store.now() < until:
                time.sleep(0.005)

        def race(ops: list[Op]) -> list[Any]:
            results: list[Any] = [None] * len(ops)
            start = threading.Barrier(len(ops))

            def one(index: int, op: Op) -> None:
                start.wait()
                try:
                    results[index] = getattr(store, op.method)(*op.args)
                except BaseException as error:  # noqa: BLE001 - handed to the check's thread
                    results[index] = error

            threads = [threading.Thread(target=one, args=item) for item in enumerate(ops)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return _raised(results)

        steps = check()
        result: Any = None
        while True:
            try:
                step = steps.send(result)
            except StopIteration:
                return
            if isinstance(step, Elapse):
                elapse(step.ms)
                result = None
            elif isinstance(step, Race):
                result = race(step.ops)
            else:
                result = getattr(store, step.method)(*step.args)
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

        async def elapse(ms: int) -> None:
            if clock is not None:
                clock.advance(ms / 1000)
                return
            until = await store.now() + ms
            while await store.now() < until:  # noqa: ASYNC110 - a server's clock has no event
                await asyncio.sleep(0.005)

        steps = check()
        result: Any = None
        while True:
            try:
                step = steps.send(result)
            except StopIteration:
                return
            if isinstance(step, Elapse):
                await elapse(step.ms)
                result = None
            elif isinstance(step, Race):
                calls = [getattr(store, op.method)(*op.args) for op in step.ops]
                result = list(await asyncio.gather(*calls))
            else:
                result = await getattr(store, step.method)(*step.args)
    finally:
        await opened.aclose()


def _raised(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


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
