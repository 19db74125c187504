"""Experiments on a store by itself: races, zombies, lost replies, silence."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from oncekey.errors import OncekeyError, StoreError
from oncekey.guard import Once
from oncekey.lab._bench import Bench, Experiment
from oncekey.lab._findings import Invariant
from oncekey.models import ClaimVerdict, Key, Scope, Terms
from oncekey.stores.urls import connect
from oncekey.testing import Answer, Proxy

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["STORE"]

Found = tuple[list[Invariant], list[Answer]]
TERMS: Final = Terms(lease_ms=60_000, ttl_ms=600_000)
BRIEF: Final = Terms(lease_ms=200, ttl_ms=600_000)
RACERS: Final = 64
CALLS: Final = 20


def _key(name: str = "") -> Key:
    """A key that nobody else has; its record ends by itself."""
    return Key(Scope("lab", "store"), f"{name}{os.urandom(12).hex()}")


@contextmanager
def _through_network(bench: Bench) -> Iterator[tuple[Proxy, Any]]:
    with Proxy(bench.store_url or "") as proxy, connect(proxy.url) as store:
        store.read(_key())  # it works before anything fails
        yield proxy, store


def _race(bench: Bench) -> Found:
    key, start = _key(), threading.Barrier(RACERS)
    with connect(bench.store_url or "") as store:

        def claim(number: int) -> ClaimVerdict:
            start.wait()
            return store.claim(key, os.urandom(16), b"f", TERMS).verdict

        with ThreadPoolExecutor(RACERS) as pool:
            verdicts = list(pool.map(claim, range(RACERS)))
    won = verdicts.count(ClaimVerdict.WON)
    waiting = verdicts.count(ClaimVerdict.IN_FLIGHT)
    seen = f"{won} won and {waiting} wait, of {RACERS}"
    return [Invariant("one of many claims at once wins", won == 1 == RACERS - waiting, seen)], []


def _zombie(bench: Bench) -> Found:
    key = _key()
    with connect(bench.store_url or "") as store:
        old = store.claim(key, b"a" * 16, b"f", BRIEF)
        time.sleep(BRIEF.lease_ms / 1000)
        until = time.monotonic() + 30  # the store's clock decides, and may be slow
        new = store.claim(key, b"b" * 16, b"f", TERMS)
        while new.verdict is ClaimVerdict.IN_FLIGHT and time.monotonic() < until:
            time.sleep(0.05)
            new = store.claim(key, b"b" * 16, b"f", TERMS)
        late = store.complete(key, b"a" * 16, old.fence, b"late", TERMS)
        kept = store.complete(key, b"b" * 16, new.fence, b"kept", TERMS)
        record = store.read(key)
    answer = None if record is None else record.answer
    return [
        Invariant(
            "a lapsed claim is taken over under a higher fence",
            new.verdict is ClaimVerdict.WON and new.fence > old.fence,
            f"{new.verdict.name.lower()}, fence {old.fence} then {new.fence}",
        ),
        Invariant("who was taken over from records nothing", not late, f"complete said {late}"),
        Invariant(
            "the outcome is the successor's",
            bool(kept) and answer == b"kept",
            f"complete said {kept}",
        ),
    ], []


def _calls(store: Any, fault: Callable[[int], None]) -> Found:
    """Guarded calls, each made until it has an answer, while something fails."""
    once = Once(store, scope=f"lab-{os.urandom(6).hex()}", lease=1, wait=30)
    runs: dict[int, int] = {}
    answers: dict[int, set[int]] = {}

    @once(key="number", name=None)
    def work(number: int) -> int:
        runs[number] = runs.get(number, 0) + 1
        return runs[number]

    failures = 0
    until = time.monotonic() + 60
    for number in range(CALLS):
        fault(number)
        while time.monotonic() < until:
            try:
                answers.setdefault(number, set()).add(work(number))
                answers[number].add(work(number))
                break
            except OncekeyError:
                failures += 1
    told = [found for found in answers.values() if len(found) == 1]
    twice = sum(number > 1 for number in runs.values())
    return [
        Invariant(
            "every call gets one answer, and its copy the same",
            len(told) == CALLS,
            f"{len(told)} of {CALLS} calls, {failures} attempts failed, {twice} ran again",
        )
    ], []


def _lost_replies(bench: Bench) -> Found:
    with _through_network(bench) as (proxy, store):
        found = _calls(store, lambda number: proxy.lose_replies(1))
        seen = f"{proxy.lost} replies were lost"
        return [*found[0], Invariant("replies were lost at all", proxy.lost > 0, seen)], []


def _resets(bench: Bench) -> Found:
    with _through_network(bench) as (proxy, store):
        return _calls(store, lambda number: proxy.reset())


def _blackhole(bench: Bench) -> Found:
    with _through_network(bench) as (proxy, store):
        begun = time.monotonic()
        error: StoreError | None = None
        with proxy.blackhole():
            try:
                store.claim(_key(), b"a" * 16, b"f", TERMS)
            except StoreError as raised:
                error = raised
        seconds = time.monotonic() - begun
        reply = store.claim(_key(), b"b" * 16, b"f", TERMS)
    told = "an answer" if error is None else type(error).__name__
    return [
        Invariant(
            "silence is an error that can be retried, after the deadline",
            error is not None and error.retryable,
            f"{told} after {seconds:.1f} s",
        ),
        Invariant(
            "the same store works again afterwards",
            reply.verdict is ClaimVerdict.WON,
            reply.verdict.name,
        ),
    ], []


STORE: Final[Sequence[Experiment]] = (
    Experiment("claims at once", f"{RACERS} callers claim one key", ["store"], _race),
    Experiment("zombie", "an owner comes back after its lease", ["store"], _zombie),
    Experiment("lost replies", "what the store says is lost", ["networked store"], _lost_replies),
    Experiment(
        "reset store", "connections to it break before every call", ["networked store"], _resets
    ),
    Experiment(
        "silent store", "it takes everything and answers nothing", ["networked store"], _blackhole
    ),
)
