"""A load test that knows what is right: many events, copies of them, workers at once."""

from __future__ import annotations

import random
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from oncekey.errors import PolicyError
from oncekey.testing._report import Report
from oncekey.testing._run import Count, Effects, Flow, Pause, Planned, Send, arun, run
from oncekey.testing._samples import SignedDelivery, sample
from oncekey.testing._targets import Answer, Destination, as_target

__all__ = ["astorm", "storm"]

_ROUNDS: Final = 10  # of retries, before an event counts as not handled
_QUIET: Final = 3.0  # seconds without a line of progress


def storm(
    target: object,
    delivery: SignedDelivery | None = None,
    *,
    events: int = 1000,
    duplicates: float = 0.3,
    workers: int = 8,
    seed: int | None = None,
    effects: Effects | None = None,
    progress: Callable[[str], object] | None = None,
) -> Report:
    """Deliver many events at once, with copies, and retry what is to be retried, as senders do.

    Half of the copies come right beside the delivery they are of, so that both are in hand at the
    same time; the others at any time. Every delivery is signed when it is made.

    Args:
        target: As for ``deliver``.
        delivery: What the deliveries look like; each gets an id of its own. For a receiver a
            sample of its provider, if not given.
        events: How many events.
        duplicates: Which part of all first deliveries are copies, from 0 to less than 1.
        workers: How many deliveries are made at the same time.
        seed: The same seed gives the same order. Random if not given; the report has it.
        effects: Counts effects; see ``deliver_twice``.
        progress: Gets a line of text now and then. If not given, the lines go to standard error,
            from the third second on.

    Returns:
        What was found: ``handled``, ``duplicates``, ``retryable``, ``wrong``, ``effects``, and
        ``problems`` in words.

    Raises:
        PolicyError: An option can't work.

    Example:
        >>> from oncekey.receiver import WebhookReceiver
        >>> from oncekey.testing import sample_provider
        >>> receiver, charged = WebhookReceiver(sample_provider("stripe"), "memory://"), []
        >>> _ = receiver.on("invoice.paid")(lambda event: charged.append(event.id))
        >>> report = storm(receiver, events=70, duplicates=0.3, effects=charged).check()
        >>> report.handled, report.duplicates, report.effects
        (70, 30, 70)
    """
    there = as_target(target)
    plan = _Plan(there, delivery, events, duplicates, workers, seed, progress)
    return run(_storm(plan, effects), there)


async def astorm(
    target: object,
    delivery: SignedDelivery | None = None,
    *,
    events: int = 1000,
    duplicates: float = 0.3,
    workers: int = 8,
    seed: int | None = None,
    effects: Effects | None = None,
    progress: Callable[[str], object] | None = None,
) -> Report:
    """``storm`` in the running event loop."""
    there = as_target(target)
    plan = _Plan(there, delivery, events, duplicates, workers, seed, progress)
    return await arun(_storm(plan, effects), there)


class _Plan:
    """What is delivered in which order, and what has become of it so far."""

    def __init__(
        self,
        target: Destination,
        delivery: SignedDelivery | None,
        events: int,
        duplicates: float,
        workers: int,
        seed: int | None,
        progress: Callable[[str], object] | None,
    ) -> None:
        if events < 1 or workers < 1 or not 0 <= duplicates < 1:
            raise PolicyError(
                "events and workers must be 1 or more, and duplicates from 0 to less than 1"
            )
        if delivery is None:
            if target.receiver is None:
                raise PolicyError("pass a delivery, such as sample(your_provider, url='/hooks')")
            delivery = sample(target.receiver.provider)
        self.delivery = delivery
        self.events = events
        self.workers = workers
        self.seed = random.SystemRandom().randrange(10**6) if seed is None else seed
        # Ids are fresh in every run: a store that remembers the last one must not mistake them.
        self.names = [f"storm-{uuid.uuid4().hex[:12]}-{number}" for number in range(events)]
        self.order = self._order(duplicates)
        self.total = len(self.order)
        self._done = self._wrong = 0
        self._begun = self._told = time.monotonic()
        self._progress = progress or _to_stderr

    def _order(self, duplicates: float) -> list[int]:
        chance = random.Random(self.seed)  # noqa: S311 - an order, not a secret
        order = list(range(self.events))
        chance.shuffle(order)
        for number in range(round(self.events * duplicates / (1 - duplicates))):
            place = chance.randrange(len(order))
            event = order[place]
            order.insert(place if number % 2 else chance.randrange(len(order) + 1), event)
        return order

    def planned(self, event: int) -> Planned:
        name = self.names[event]
        return Planned(lambda: self.delivery.another(name), name)

    def tell(self, answer: Answer) -> None:
        self._done += 1
        self._wrong += not answer.ok and not answer.retryable
        now = time.monotonic()
        if now - self._told >= _QUIET:
            self._told = now
            speed = self._done / (now - self._begun)
            self._progress(
                f"storm: {self._done} of {self.total} deliveries, {speed:.0f} a second, "
                f"{self._wrong} wrong answers"
            )


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _storm(plan: _Plan, effects: Effects | None) -> Flow[Report]:
    begun = time.perf_counter()
    before = 0 if effects is None else (yield Count(effects))
    wanted, answers = plan.order, list[Answer]()
    for number in range(_ROUNDS):
        found: list[Answer] = yield Send(
            [plan.planned(one) for one in wanted], plan.workers, tell=plan.tell
        )
        answers += [_slim(one) for one in found]
        wanted = [event for event, one in zip(wanted, found, strict=True) if one.retryable]
        if not wanted:
            break
        plan.total += len(wanted)
        yield Pause(min(0.02 * 2**number, 1))
    after = None if effects is None else (yield Count(effects)) - before
    return Report("storm", answers, plan.events, after, time.perf_counter() - begun, plan.seed)


def _slim(answer: Answer) -> Answer:
    """What is as it should be is only counted: a long storm has to fit into memory."""
    return replace(answer, headers={}, body=b"") if answer.ok else answer
