"""Experiments on a receiver: deliveries go on, and are retried, while something fails."""

from __future__ import annotations

import random
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from oncekey.lab._bench import Bench, Experiment
from oncekey.lab._findings import Invariant
from oncekey.testing import Answer, SignedDelivery, replay
from oncekey.testing._run import Count, Flow, Pause, Planned, Send, run

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["RECEIVER"]

Found = tuple[list[Invariant], list[Answer]]
_HOUR: Final = 3600.0


class _Campaign:
    """Events and their copies, delivered until each is taken or patience ends."""

    def __init__(self, bench: Bench, events: int | None = None, copies: int = 2) -> None:
        self.bench = bench
        self.events = events or bench.lab.events
        # Ids are fresh in every run: a store that remembers the last one must not mistake them.
        self.names = [f"lab-{uuid.uuid4().hex[:12]}-{n}" for n in range(self.events)]
        self.order = self.names * copies
        random.Random(bench.lab.seed).shuffle(self.order)  # noqa: S311 - an order, not a secret
        self.offset = 0.0  # of the receiver's clock
        self.answers: list[Answer] = []
        self.effects: int | None = None

    def _planned(self, name: str) -> Planned:
        def make() -> SignedDelivery:
            delivery = self.bench.delivery
            assert delivery is not None  # noqa: S101 - there is one where there is a receiver
            if self.offset:
                delivery = replace(delivery, now=time.time() + self.offset)
            return delivery.another(name)

        return Planned(make, name)

    def _flow(self) -> Flow[None]:
        effects = self.bench.effects
        before = 0 if effects is None else (yield Count(effects))
        until = time.monotonic() + self.bench.lab.patience
        wanted, pause = self.order, 0.05
        while wanted:
            jobs = [self._planned(name) for name in wanted]
            found: list[Answer] = yield Send(jobs, self.bench.lab.workers)
            self.answers += found
            taken = {one.event for one in self.answers if one.ok}
            again = {one.event for one in found if one.retryable} - taken
            if not again or time.monotonic() > until:
                break
            wanted = sorted(again)
            yield Pause(pause)
            pause = min(pause * 2, 1.0)
        # One more copy of each, when all is well again: it must be known.
        last: list[Answer] = yield Send(
            [self._planned(name) for name in self.names], self.bench.lab.workers
        )
        self.answers += last
        if effects is not None:
            self.effects = (yield Count(effects)) - before

    def once(self) -> list[Answer]:
        """Deliver each event, and retry nothing."""

        def flow() -> Flow[list[Answer]]:
            found: list[Answer] = yield Send([self._planned(name) for name in self.names], 4)
            return found

        return run(flow(), self.bench.url)

    def run(self, fault: AbstractContextManager[object]) -> _Campaign:
        """Deliver while the fault lasts, and after it."""
        with fault:
            run(self._flow(), self.bench.url)
        return self

    def judged(self, crashes: bool = False) -> list[Invariant]:
        """What must hold, whatever was broken."""
        taken = {one.event for one in self.answers if one.ok}
        wrong = [one for one in self.answers if not one.ok and not one.retryable]
        shown = f", such as {wrong[0].status}: {wrong[0].excerpt}" if wrong else ""
        found = [
            Invariant(
                "every event is acknowledged in the end",
                len(taken) == self.events,
                f"{len(taken)} of {self.events} events, {len(self.answers)} deliveries",
            ),
            Invariant(
                "no answer makes a sender give up", not wrong, f"{len(wrong)} such answers{shown}"
            ),
        ]
        return found + _about_effects(self.effects, self.events, len(taken), self.bench, crashes)


def _about_effects(
    effects: int | None, events: int, taken: int, bench: Bench, crashes: bool
) -> list[Invariant]:
    if effects is None:
        return []
    lost = Invariant(
        "no acknowledged event lost its effect",
        effects >= taken,
        f"{effects} effects for {taken} acknowledged events",
    )
    if crashes and not bench.lab.exactly_once:
        return [lost]  # at least once: a worker that died may be followed by one that does it again
    once = Invariant(
        "no effect happened twice", effects <= events, f"{effects} effects for {events} events"
    )
    return [lost, once]


def _simple(fault: Callable[[Bench], AbstractContextManager[object]]) -> Callable[[Bench], Found]:
    """An experiment that is a campaign under a fault of the network."""

    def do(bench: Bench) -> Found:
        campaign = _Campaign(bench).run(fault(bench))
        return campaign.judged(), campaign.answers

    return do


def _crashing(fault: Callable[[Bench], AbstractContextManager[object]]) -> Callable[[Bench], Found]:
    """One in which workers die, or a store's outcome is unknown to them."""

    def do(bench: Bench) -> Found:
        campaign = _Campaign(bench).run(fault(bench))
        return campaign.judged(crashes=True), campaign.answers

    return do


def _race(bench: Bench) -> Found:
    campaign = _Campaign(bench, events=4, copies=16)
    campaign.order = sorted(campaign.order)  # all copies of an event side by side
    campaign.run(nullcontext())
    return campaign.judged(), campaign.answers


def _replay(bench: Bench) -> Found:
    delivery = bench.delivery
    assert delivery is not None  # noqa: S101 - there is one where there is a receiver
    assert bench.lab.recording is not None  # noqa: S101 - the experiment needs it
    report = replay(
        bench.url,
        bench.lab.recording,
        provider=delivery.provider,
        seed=bench.lab.seed,
        copies=2,
        at_once=bench.lab.workers,
        effects=bench.effects,
    )
    found = [
        Invariant(
            "recorded deliveries, doubled and shuffled, are answered as they should be",
            report.ok,
            str(report) + "".join(f"; {problem}" for problem in report.problems),
        )
    ]
    return found, list(report.answers)


def _lost_answers(bench: Bench) -> AbstractContextManager[object]:
    assert bench.network is not None  # noqa: S101 - there is one where there is a receiver
    bench.network.lose_replies(bench.lab.events)
    return nullcontext()


@contextmanager
def _meanwhile(act: Callable[[threading.Event], None]) -> Iterator[None]:
    """Do something beside the deliveries, until it is over; errors of it are ours."""
    over = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            act(over)
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if errors:
        raise errors[0]


def _kills(bench: Bench) -> AbstractContextManager[object]:
    command = bench.command
    assert command is not None  # noqa: S101 - the experiment needs it
    chance = random.Random(bench.lab.seed)  # noqa: S311 - moments, not secrets

    def act(over: threading.Event) -> None:
        for _ in range(3):
            time.sleep(chance.uniform(0.02, 0.3))
            command.kill()
            command.start()
            if over.is_set():
                return

    return _meanwhile(act)


def _stops(bench: Bench) -> AbstractContextManager[object]:
    command = bench.command
    assert command is not None  # noqa: S101 - the experiment needs it

    def act(over: threading.Event) -> None:
        try:
            command.signal(signal.SIGSTOP)
            over.wait(1.5)
        finally:
            command.signal(signal.SIGCONT)

    return _meanwhile(act)


def _clock(bench: Bench) -> Found:
    """The same events at three times; what was taken before a jump is known after it."""
    command = bench.command
    assert command is not None  # noqa: S101 - the experiment needs it
    campaign = _Campaign(bench)
    try:
        for offset in (0.0, 600.0, -600.0):
            command.move_clock(offset)
            campaign.offset = offset
            before = campaign.effects or 0
            campaign.run(nullcontext())
            if campaign.effects is not None:
                campaign.effects += before
    finally:
        command.move_clock(0)
    return campaign.judged(), campaign.answers


def _blackhole(bench: Bench) -> Found:
    network = bench.store_network
    assert network is not None  # noqa: S101 - the experiment needs it
    campaign = _Campaign(bench, events=4, copies=1)
    with network.blackhole():
        refused = campaign.once()
    campaign.run(nullcontext())
    closed = [one for one in refused if not one.ok]
    told = sorted({str(one.status or "none") for one in refused})
    fail_closed = Invariant(
        "while its store is silent, a receiver acknowledges nothing that it can't record",
        len(closed) == len(refused),
        f"{len(closed)} of {len(refused)} deliveries were refused, with {', '.join(told)}",
    )
    return [fail_closed, *campaign.judged(crashes=True)], [*refused, *campaign.answers]


def _slow(bench: Bench) -> AbstractContextManager[object]:
    assert bench.network is not None  # noqa: S101 - there is one where there is a receiver
    return bench.network.delay(0.02)


def _for_a_while(
    which: str, name: str, seconds: float
) -> Callable[[Bench], AbstractContextManager[object]]:
    """A fault of a network that is over after so long: deliveries get through in the end."""

    def fault(bench: Bench) -> AbstractContextManager[object]:
        network = getattr(bench, which)

        def act(over: threading.Event) -> None:
            with getattr(network, name)():
                over.wait(seconds)

        return _meanwhile(act)

    return fault


def _store_loses(bench: Bench) -> AbstractContextManager[object]:
    assert bench.store_network is not None  # noqa: S101 - the experiment needs it
    bench.store_network.lose_replies(3)
    return nullcontext()


RECEIVER: Final[Sequence[Experiment]] = (
    Experiment(
        "copies",
        "every event comes three times",
        ["receiver"],
        _simple(lambda bench: nullcontext()),
    ),
    Experiment("race", "sixteen copies of an event come at once", ["receiver"], _race),
    Experiment(
        "slow network",
        "20 ms for every piece of data, both ways",
        ["receiver"],
        _simple(_slow),
    ),
    Experiment(
        "lost answers",
        "answers are lost, and the sender retries",
        ["receiver"],
        _simple(_lost_answers),
    ),
    Experiment(
        "reset connections",
        "connections break again and again, for three seconds",
        ["receiver"],
        _simple(_for_a_while("network", "flapping", 3.0)),
    ),
    Experiment(
        "partition",
        "the receiver can't be reached for a second",
        ["receiver"],
        _simple(_for_a_while("network", "partition", 1.0)),
    ),
    Experiment(
        "recording",
        "recorded deliveries come again, doubled and shuffled",
        ["receiver", "recording"],
        _replay,
    ),
    Experiment(
        "killed worker",
        "the receiver is killed with -9, three times",
        ["receiver", "command"],
        _crashing(_kills),
    ),
    Experiment(
        "stopped worker",
        "the receiver is stopped for a while, and wakes up",
        ["receiver", "command"],
        _crashing(_stops),
    ),
    Experiment(
        "moved clock",
        "the receiver's clock jumps ten minutes ahead, and back",
        ["receiver", "clock"],
        _clock,
    ),
    Experiment(
        "store blackhole",
        "the store takes everything and answers nothing",
        ["receiver", "store network"],
        _blackhole,
    ),
    Experiment(
        "store partition",
        "the store can't be reached for a second",
        ["receiver", "store network"],
        _crashing(_for_a_while("store_network", "partition", 1.0)),
    ),
    Experiment(
        "store replies lost",
        "what the store says is lost",
        ["receiver", "store network"],
        _crashing(_store_loses),
    ),
    Experiment(
        "store connections reset",
        "connections to the store break again and again, for three seconds",
        ["receiver", "store network"],
        _crashing(_for_a_while("store_network", "flapping", 3.0)),
    ),
)
