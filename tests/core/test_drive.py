"""The driver of flows: results go in, errors and interrupts are thrown in, in both forms."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Generator
from typing import Any

import pytest
from tests.stores.interrupting import SoftLimit, every_point

from oncekey._core import drive as module
from oncekey._core.drive import adrive, drive

Flow = Generator[str, Any, Any]


def both(make: Callable[[], Flow], do: Callable[[str], Any]) -> list[Any]:
    """What a flow gives, sync and async; an error as itself."""

    async def ado(step: str) -> Any:
        await asyncio.sleep(0)
        return do(step)

    found: list[Any] = []
    for call in (lambda: drive(make(), do), lambda: asyncio.run(adrive(make(), ado))):
        try:
            found.append(call())
        except Exception as error:
            found.append(error)
    return found


def test_results_are_sent_in_and_the_return_value_comes_out() -> None:
    """Each step gets its own result."""

    def flow() -> Flow:
        return [(yield "a"), (yield "b")]

    assert both(flow, str.upper) == [["A", "B"]] * 2


def test_errors_of_a_step_are_thrown_in() -> None:
    """A flow handles them and goes on, or ends with them as they are."""

    def fails(step: str) -> str:
        if step == "bad":
            raise KeyError(step)
        return step

    def handles() -> Flow:
        try:
            yield "bad"
        except KeyError:
            return (yield "good")

    def ends() -> Flow:
        yield "good"
        yield "bad"

    assert both(handles, fails) == ["good"] * 2
    assert [repr(error) for error in both(ends, fails)] == ["KeyError('bad')"] * 2


def test_a_step_that_raises_stop_iteration_does_not_end_the_flow() -> None:
    """It is an error like others: a flow that does not know it fails loudly."""

    def flow() -> Flow:
        yield "a"

    def stops(step: str) -> None:
        raise StopIteration(step)

    sync, other = both(flow, stops)
    assert isinstance(sync, RuntimeError)
    assert isinstance(other, RuntimeError)


def test_an_interrupt_anywhere_reaches_the_flow() -> None:
    """Also one between two steps, and one while an error is on its way to the flow."""

    def fails(step: str) -> str:
        if step == "bad":
            raise KeyError(step)
        return step

    for interrupt in every_point(module):
        seen: list[BaseException | str] = []

        def flow(seen: list[BaseException | str] = seen) -> Flow:
            try:
                seen.append((yield "good"))
                try:
                    yield "bad"
                except KeyError:
                    seen.append("bad")
                seen.append((yield "last"))
            except BaseException as error:
                seen.append(error)
                raise
            return "end"

        came = None
        try:
            with interrupt:
                assert drive(flow(), fails) == "end"
        except (KeyboardInterrupt, SoftLimit) as error:
            came = error
        assert came is (interrupt.error if interrupt.where else None)
        if came is not None and seen and seen[-1] != "last":  # begun, and not over
            assert seen[-1] is came, interrupt.where
    assert seen == ["good", "bad", "last"]


@pytest.mark.parametrize("form", ["sync", "async"])
def test_an_error_keeps_nothing_alive(form: str) -> None:
    """What a step held is freed with the error, without the collector."""

    class Held:
        pass

    held = Held()
    alive = weakref.ref(held)

    def do(step: str) -> None:
        raise KeyError(step)

    async def ado(step: str) -> None:
        raise KeyError(step)

    def flow(held: Held) -> Flow:
        yield "a"

    gc.disable()
    try:
        with pytest.raises(KeyError):
            drive(flow(held), do) if form == "sync" else adrive(flow(held), ado).send(None)
        del held
        assert alive() is None
    finally:
        gc.enable()
