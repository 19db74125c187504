"""How an experiment is run: ``run`` in this thread, ``arun`` in this event loop.

An experiment is a generator. It yields what it wants sent or counted and gets the answers back, so
that each is written once, for targets of both worlds.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence, Sized
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

from oncekey._core.drive import adrive, drive
from oncekey.errors import PolicyError
from oncekey.testing._samples import SignedDelivery
from oncekey.testing._targets import Answer, Destination, as_target, asend, send

__all__ = ["Count", "Effects", "Flow", "Pause", "Planned", "Send", "arun", "run"]

T = TypeVar("T")

Effects = Callable[[], Any] | Sized
"""What counts effects: a function that gives a number or a collection, or a collection itself."""


class Planned(NamedTuple):
    """A delivery to make; it is signed when its turn comes."""

    make: Callable[[], SignedDelivery]
    event: str = ""


class Send(NamedTuple):
    """Make these deliveries, so many at once.

    Attributes:
        jobs: Which.
        at_once: How many at the same time.
        shaken: Let threads take turns at every call of a function: slow, and finds races.
        tell: Hears each answer.
    """

    jobs: Sequence[Planned]
    at_once: int = 1
    shaken: bool = False
    tell: Callable[[Answer], None] | None = None


class Count(NamedTuple):
    """How many effects there are by now."""

    effects: Effects


class Pause(NamedTuple):
    """Let real time pass."""

    seconds: float


Step = Send | Count | Pause
Flow = Generator[Step, Any, T]


def run(flow: Flow[T], target: object) -> T:
    """Run an experiment. An async target gets an event loop for as long as it lasts."""
    there = as_target(target)
    if there.is_async:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(arun(flow, there))
        raise PolicyError(
            "this target is async, and an event loop runs here: await the form whose name begins "
            "with a, such as adeliver"
        )

    def do(step: Step) -> Any:
        if isinstance(step, Send):
            return _in_threads(there, step)
        if isinstance(step, Count):
            return _number(_counted(step.effects))
        return time.sleep(step.seconds)

    return drive(flow, do)


async def arun(flow: Flow[T], target: object) -> T:
    """Run an experiment in this loop. A target that is not async runs in threads."""
    there = as_target(target)

    async def do(step: Step) -> Any:
        if isinstance(step, Send):
            if there.is_async:
                return await _in_tasks(there, step)
            return await asyncio.to_thread(_in_threads, there, step)
        if isinstance(step, Count):
            found = _counted(step.effects)
            return _number(await found if inspect.isawaitable(found) else found)
        return await asyncio.sleep(step.seconds)

    return await adrive(flow, do)


def _counted(effects: Effects) -> Any:
    return effects() if callable(effects) else effects


def _number(found: Any) -> int:
    if isinstance(found, int):
        return found
    if isinstance(found, Sized):
        return len(found)
    if inspect.iscoroutine(found):
        found.close()
        raise PolicyError("effects= is async: await the form whose name begins with a")
    raise PolicyError(
        f"effects= gave a {type(found).__name__}: give a number, or the list of what happened"
    )


class _Turns:
    """Hands out jobs: to each worker the one of its number first, so that all begin together."""

    def __init__(self, target: Destination, step: Send) -> None:
        self.target = target
        self.step = step
        self.answers: list[Any] = [None] * len(step.jobs)
        self.workers = max(1, min(step.at_once, len(step.jobs)))
        self._rest = iter(range(self.workers, len(step.jobs)))
        self._lock = threading.Lock()

    def of(self, worker: int) -> Iterator[int]:
        yield worker
        while True:
            with self._lock:
                number = next(self._rest, None)
            if number is None:
                return
            yield number

    def put(self, number: int, answer: Answer) -> None:
        self.answers[number] = answer
        if self.step.tell is not None:
            with self._lock:
                self.step.tell(answer)


def _in_threads(target: Destination, step: Send) -> list[Answer]:
    turns = _Turns(target, step)
    errors: list[BaseException] = []
    start = threading.Barrier(turns.workers)

    def work(worker: int) -> None:
        try:
            start.wait()
            for number in turns.of(worker):
                job = step.jobs[number]
                delivery = job.make()
                with _shaken() if step.shaken else nullcontext():
                    answer = send(target, delivery, job.event)
                turns.put(number, answer)
        except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
            errors.append(error)

    if not step.jobs:
        return []
    if turns.workers == 1:
        work(0)
    else:
        with _many_switches():
            threads = [
                threading.Thread(target=work, args=(number,), daemon=True)
                for number in range(turns.workers)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    if errors:
        raise errors[0]
    return turns.answers


async def _in_tasks(target: Destination, step: Send) -> list[Answer]:
    turns = _Turns(target, step)

    async def work(worker: int) -> None:
        for number in turns.of(worker):
            job = step.jobs[number]
            turns.put(number, await asend(target, job.make(), job.event))

    if step.jobs:
        await asyncio.gather(*(work(number) for number in range(turns.workers)))
    return turns.answers


@contextmanager
def _shaken() -> Iterator[None]:
    """Let another thread go on at every call and return, so that copies go step by step.

    Whatever is not one atomic step then has a copy in the middle of it.
    """
    if sys.getprofile() is not None:  # somebody measures this thread
        yield
        return

    def give_way(frame: Any, event: str, argument: Any) -> None:
        time.sleep(0)

    sys.setprofile(give_way)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextmanager
def _many_switches() -> Iterator[None]:
    """Let threads take turns as often as Python can: a race that is there is found sooner."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
