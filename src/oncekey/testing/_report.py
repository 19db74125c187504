"""What an experiment found: the answers, the effects, and what a person should fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from oncekey.errors import PolicyError
from oncekey.testing._advice import (
    EFFECT_LOST,
    EFFECT_TWICE,
    HANDLED_TWICE,
    Kind,
    about_copy,
    about_first,
    about_retry,
)
from oncekey.testing._targets import Answer

__all__ = ["Report", "assert_handled_once"]

_BUSY = frozenset({0, 408, 425, 429, 503})  # what a copy may be told while another is in hand
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Report:
    """What an experiment found. ``str(report)`` is for people.

    Attributes:
        kind: Which experiment.
        answers: Every answer, in the order of the deliveries.
        events: How many different events were delivered.
        effects: How often the effect happened meanwhile; ``None``: nobody counted.
        seconds: How long it took.
        seed: What the order was made from, to see the same one again.
    """

    kind: Kind
    answers: Sequence[Answer] = field(repr=False)
    events: int = 1
    effects: int | None = None
    seconds: float = 0.0
    seed: int | None = None

    @property
    def handled(self) -> int:
        """How many events were acknowledged with 2xx."""
        return sum(any(one.ok for one in group) for group in self._groups())

    @property
    def duplicates(self) -> int:
        """How many more copies of those were."""
        return sum(one.ok for one in self.answers) - self.handled

    @property
    def retryable(self) -> int:
        """How many deliveries the sender has to make again."""
        return sum(one.retryable for one in self.answers)

    @property
    def wrong(self) -> list[Answer]:
        """Answers that are neither: a sender gives up, or retries for nothing."""
        return [one for one in self.answers if not one.ok and not one.retryable]

    @property
    def outcomes(self) -> dict[str, int]:
        """How often each outcome came; for targets that tell none, each status."""
        return dict(Counter(one.outcome or str(one.status or "none") for one in self.answers))

    @property
    def ok(self) -> bool:
        """Whether nothing is to be fixed."""
        return not self.problems

    @property
    def problems(self) -> list[str]:
        """What is wrong, and what to do about it."""
        found: Counter[str] = Counter()
        where: dict[str, list[str]] = {}
        for group in self._groups():
            for text in self._about(group):
                found[text] += 1
                where.setdefault(text, []).append(group[0].event)
        texts = [_counted(text, times, where[text]) for text, times in found.items()]
        return texts + self._about_effects()

    def _groups(self) -> list[list[Answer]]:
        groups: dict[str, list[Answer]] = {}
        for answer in self.answers:
            groups.setdefault(answer.event, []).append(answer)
        return list(groups.values())

    def _about(self, answers: list[Answer]) -> Iterable[str]:
        """What is wrong with the answers to one event."""
        if self.kind == "crash":
            yield from _after_a_crash(answers)
            return
        taken = False
        in_order = self.kind in ("once", "twice")
        for answer in answers:
            if answer.ok:
                taken = True
                if answer.outcome in ("ignored", "dead"):
                    yield about_first(answer)
            elif taken and in_order:
                yield about_copy(answer)
            elif not in_order and any(one.ok for one in answers):
                if answer.status not in _BUSY and (self.kind == "at once" or not answer.retryable):
                    yield about_copy(answer)
            elif not answer.retryable:
                yield about_first(answer, self.kind)
                return
        if not taken:
            yield about_first(answers[-1], self.kind)
        elif sum(one.outcome == "handled" for one in answers) > 1:
            yield HANDLED_TWICE[self.kind]

    def _about_effects(self) -> list[str]:
        effects, handled = self.effects, self.handled
        if effects is None or (self.kind == "replay" and effects <= self.events):
            return []  # a recording may hold events that nothing is to be done for
        if effects > self.events:
            many = f"{effects} times for {_events(self.events)}"
            return [f"the effect happened {many}: {EFFECT_TWICE[self.kind]}"]
        if effects < handled:
            never = "never happened" if not effects else f"happened {effects} times"
            were = "was" if handled == 1 else "were"
            said = f"though {_events(handled)} {were} answered 2xx"
            lost = EFFECT_LOST[self.kind]
            if self.kind in ("once", "twice", "at once") and not effects:
                lost += "; or it was handled before this test: use delivery.another()"
            return [f"the effect {never}, {said}: {lost}"]
        return []

    def check(self) -> Report:
        """Give the report back if nothing is to be fixed.

        Raises:
            AssertionError: Something is; it says what.
        """
        __tracebackhide__ = True
        if problems := self.problems:
            raise AssertionError("\n".join([*(f"- {one}" for one in problems), str(self)]))
        return self

    def __str__(self) -> str:
        told = ", ".join(f"{number} {name}" for name, number in sorted(self.outcomes.items()))
        effects = "" if self.effects is None else f", {self.effects} effects"
        seed = "" if self.seed is None else f", seed={self.seed}"
        speed = ""
        if self.seconds and len(self.answers) > 9:
            speed = f", {len(self.answers) / self.seconds:.0f} deliveries a second"
        return (
            f"{self.kind}: {_events(self.events)}, {len(self.answers)} deliveries ({told})"
            f"{effects}{speed}{seed}"
        )


def assert_handled_once(
    found: Report | Answer | Iterable[Answer], *, effects: int | None = None
) -> Report:
    """Check that each event was handled once, and that every copy was answered as it should be.

    Args:
        found: A report; or the answers to copies of one event, in the order they came.
        effects: How often the effect happened, where the experiment did not count.

    Returns:
        The report.

    Raises:
        AssertionError: It was not; says what to fix.

    Example:
        >>> from oncekey.receiver import WebhookReceiver
        >>> from oncekey.testing import deliver_twice, sample
        >>> delivery = sample("stripe")
        >>> receiver = WebhookReceiver(delivery.provider, "memory://")
        >>> charged = []
        >>> _ = receiver.on("invoice.paid")(lambda event: charged.append(event.id))
        >>> print(assert_handled_once(deliver_twice(receiver, delivery, effects=charged)))
        twice: 1 event, 2 deliveries (1 duplicate, 1 handled), 1 effects
    """
    __tracebackhide__ = True
    if isinstance(found, Answer):
        found = [found]
    report = found if isinstance(found, Report) else Report(_kind_of(found := list(found)), found)
    if not report.answers:
        raise PolicyError("nothing was delivered: there are no answers to check")
    return (report if effects is None else replace(report, effects=effects)).check()


def _kind_of(answers: list[Answer]) -> Literal["once", "twice"]:
    return "once" if len(answers) == 1 else "twice"


def _after_a_crash(answers: list[Answer]) -> Iterable[str]:
    killed, *later = answers
    if killed.status:
        yield (
            f"the worker was killed, and yet its delivery was answered {killed.status}: "
            "something catches BaseException and goes on; let it through"
        )
    if not any(one.ok for one in later):
        yield about_retry(later[-1])
    elif not later[-1].ok:
        yield about_copy(later[-1])


def _counted(text: str, times: int, events: list[str]) -> str:
    if times == 1:
        return text
    names = [one for one in events if one][:_NAMED]
    shown = f" such as {', '.join(names)}" if names else ""
    return f"{text} ({times} events{shown})"


def _events(number: int) -> str:
    return f"{number} event" if number == 1 else f"{number} events"
