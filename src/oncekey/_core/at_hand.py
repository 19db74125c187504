"""Answers that this process has seen, to replay without asking the store."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from oncekey._core.call import Job, Result
from oncekey._core.flows import CURRENT, Claim
from oncekey.errors import UnsupportedAnswerError
from oncekey.instrument.events import EventKind, emit, listening
from oncekey.models import Key
from oncekey.policy import Duration, milliseconds

__all__ = ["FunctionAnswers", "LocalAnswers", "acached", "cached"]

A = TypeVar("A")


class LocalAnswers(Generic[A]):
    """A bounded table of recorded answers, from which the oldest goes first.

    A stored answer never changes before it ends, so that a copy of it is as good, for a short
    while. Only the same key with the same fingerprint finds one; everything else asks the store.
    """

    def __init__(self, entries: int, seconds: Duration, ttl: Duration) -> None:
        self._most = entries
        # The store's clock and ours may run apart by a little.
        lasts = min(milliseconds(seconds, "cache_seconds"), milliseconds(ttl, "ttl") / 2)
        self._lasts = lasts / 1000
        self._found: OrderedDict[tuple[bytes, str, bytes], tuple[float, A]] = OrderedDict()

    def get(self, key: Key, fingerprint: bytes) -> A | None:
        """The answer, if it is at hand."""
        name = (key.scope.prefix, key.name, fingerprint)
        found = self._found.get(name)
        if found is None:
            return None
        if found[0] <= time.monotonic():
            self._found.pop(name, None)
            return None
        return found[1]

    def put(self, job: Job, answer: A, ttl: float | None = None) -> None:
        """Keep a recorded answer at hand; no longer than half of its own ``ttl``, in seconds."""
        while len(self._found) >= self._most:
            try:
                self._found.popitem(last=False)
            except KeyError:  # another thread was faster
                break
        name = (job.key.scope.prefix, job.key.name, job.fingerprint)
        lasts = self._lasts if ttl is None else min(self._lasts, ttl / 2)
        self._found[name] = (time.monotonic() + lasts, answer)


class FunctionAnswers(LocalAnswers[bytes]):
    """The answers of functions, encoded: every caller gets an object of its own."""

    def found(self, job: Job) -> bytes | None:
        """The answer, if it is at hand. It is told as any replay is."""
        raw = self.get(job.key, job.fingerprint)
        if raw is not None and listening():
            emit(EventKind.REPLAY, job.key, job.operation)
        return raw

    def keep(self, job: Job, result: Result, claim: Claim | None) -> None:
        """Keep what a call gave that is over, of the claim that it had, if it had one."""
        try:
            raw = job.codec.encode(result.value)
        except UnsupportedAnswerError:
            return  # it can't be replayed from the store either
        if len(raw) <= max(job.plan.max_answer_bytes, job.plan.pack_up_to):
            self.put(job, raw, None if claim is None else claim.ttl)


class _Noting:
    """A function that remembers the claim that it ran under."""

    __slots__ = ("claim", "function")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.claim: Claim | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it: what it gives may have to be awaited."""
        self.claim = CURRENT.get(None)
        return self.function(*args, **kwargs)


def cached(run: Callable[..., Any], answers: FunctionAnswers) -> Callable[..., Result]:
    """What runs jobs as ``run`` does, but for those whose answers are at hand."""

    def at_hand(job: Job, function: Callable[..., Any], args: Any, kwargs: Any) -> Result:
        raw = answers.found(job)
        if raw is not None:
            return Result(job.codec.decode(raw), True)
        noting = _Noting(function)
        result: Result = run(job, noting, args, kwargs)
        answers.keep(job, result, noting.claim)
        return result

    return at_hand


def acached(run: Callable[..., Any], answers: FunctionAnswers) -> Callable[..., Awaitable[Result]]:
    """See ``cached``."""

    async def at_hand(job: Job, function: Callable[..., Any], args: Any, kwargs: Any) -> Result:
        raw = answers.found(job)
        if raw is not None:
            return Result(job.codec.decode(raw), True)
        noting = _Noting(function)
        result: Result = await run(job, noting, args, kwargs)
        answers.keep(job, result, noting.claim)
        return result

    return at_hand
