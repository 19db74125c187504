"""Recorded deliveries made again: in order, shuffled, doubled, at once."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from oncekey.errors import PolicyError
from oncekey.testing._recording import recorded
from oncekey.testing._report import Report
from oncekey.testing._run import Count, Effects, Flow, Planned, Send, arun, run
from oncekey.testing._samples import SignedDelivery
from oncekey.testing._targets import Answer, Destination, as_target

if TYPE_CHECKING:
    from oncekey.signatures import Provider

__all__ = ["areplay", "replay"]

Recording = str | os.PathLike[str] | Iterable[SignedDelivery]


def replay(
    target: object,
    recording: Recording,
    *,
    provider: Provider | None = None,
    seed: int | None = None,
    copies: int = 1,
    at_once: int = 1,
    effects: Effects | None = None,
) -> Report:
    """Make recorded deliveries again, with the signatures and keys that they came with.

    A receiver is told that it is the time at which each of them came, so that old signatures hold.
    Other targets go by the real clock: pass ``provider`` to have them signed anew.

    Args:
        target: As for ``deliver``.
        recording: A file of a ``Recorder``, or deliveries.
        provider: Signs them anew, with the same ids and bodies.
        seed: Shuffles them, in the same way for the same seed. ``None``: the order they came in.
        copies: How often each is made.
        at_once: How many are made at the same time.
        effects: Counts effects; see ``deliver_twice``.

    Returns:
        What was found. Events are told apart by the ids that the provider reads, ``provider`` or
        that of the receiver; else by their bodies.

    Raises:
        PolicyError: The recording can't be read, or is empty.
    """
    there = as_target(target)
    flow = _replay(there, recording, provider, seed, copies, at_once, effects)
    return run(flow, there)


async def areplay(
    target: object,
    recording: Recording,
    *,
    provider: Provider | None = None,
    seed: int | None = None,
    copies: int = 1,
    at_once: int = 1,
    effects: Effects | None = None,
) -> Report:
    """``replay`` in the running event loop."""
    there = as_target(target)
    flow = _replay(there, recording, provider, seed, copies, at_once, effects)
    return await arun(flow, there)


def _replay(
    target: Destination,
    recording: Recording,
    provider: Provider | None,
    seed: int | None,
    copies: int,
    at_once: int,
    effects: Effects | None,
) -> Flow[Report]:
    if copies < 1 or at_once < 1:
        raise PolicyError("copies and at_once must be 1 or more")
    begun = time.perf_counter()
    known = provider or getattr(target.receiver, "provider", None)
    deliveries = _deliveries(recording, provider, target.receiver is not None)
    jobs = [
        Planned(one.again, name)
        for one, name in ((one, _name(one, known)) for one in deliveries)
        for _ in range(copies)
    ]
    if seed is not None:
        random.Random(seed).shuffle(jobs)  # noqa: S311 - an order, not a secret
    before = 0 if effects is None else (yield Count(effects))
    answers: list[Answer] = yield Send(jobs, at_once)
    after = None if effects is None else (yield Count(effects)) - before
    events = len({job.event for job in jobs})
    return Report("replay", answers, events, after, time.perf_counter() - begun, seed)


def _deliveries(
    recording: Recording, provider: Provider | None, keeps_time: bool
) -> list[SignedDelivery]:
    """What was recorded, to be signed anew by ``provider`` when its turn comes."""
    if isinstance(recording, (str, os.PathLike)):
        recording = recorded(recording)
    found = list(recording)
    if not found:
        raise PolicyError("the recording is empty: there is nothing to replay")
    if provider is None:
        return found
    return [replace(one, provider=provider, now=one.now if keeps_time else None) for one in found]


def _name(delivery: SignedDelivery, known: Provider | None) -> str:
    """What tells its event from others."""
    name = replace(delivery, provider=known).event_id
    return name or f"body {hashlib.sha256(delivery.body).hexdigest()[:16]}"
