"""Answers that this process has seen, to replay without asking the store."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, TypeVar

from oncekey._core.call import Job, Result
from oncekey._core.codec import Codec
from oncekey._core.flows import CURRENT, Claim
from oncekey.instrument.events import EventKind, emit, listening
from oncekey.models import Key
from oncekey.policy import Duration, milliseconds

__all__ = ["FunctionAnswers", "LocalAnswers", "acached", "cached"]

A = TypeVar("A")

LARGEST: Final = 65_536
"""Of an answer at hand, in bytes: what bounds their number bounds their memory, too."""


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

    def put(self, job: Job, answer: A, size: int, claim: Claim | None) -> None:
        """Keep an answer of so many bytes at hand that was recorded under ``claim``.

        For half of what is left of its record at most. Only then is its end known: a replay from
        the store does not say when it ends, and an answer that was not recorded is none.
        """
        if claim is None or not claim.settled or claim.lost or size > LARGEST:
            return
        terms = claim.terms
        left = terms.ttl_ms / 1000
        if terms.sticky:  # its time runs from the first claim of the key
            if claim.attempts > 1:
                return
            left -= claim.monotonic() - claim.started
        lasts = min(self._lasts, left / 2)
        if lasts <= 0:
            return
        while len(self._found) >= self._most:
            try:
                self._found.popitem(last=False)
            except KeyError:  # another thread was faster
                break
        name = (job.key.scope.prefix, job.key.name, job.fingerprint)
        self._found[name] = (time.monotonic() + lasts, answer)


class FunctionAnswers(LocalAnswers[bytes]):
    """The answers of functions, encoded: every caller gets an object of its own."""

    def found(self, job: Job) -> bytes | None:
        """The answer, if it is at hand. It is told as any replay is."""
        raw = self.get(job.key, job.fingerprint)
        if raw is not None and listening():
            emit(EventKind.REPLAY, job.key, job.operation)
        return raw

    def keep(self, job: Job, noted: _Noting) -> None:
        """Keep what a call recorded that is over."""
        raw = noted.raw
        if raw is not None and len(raw) <= max(job.plan.max_answer_bytes, job.plan.pack_up_to):
            self.put(job, raw, len(raw), noted.claim)


class _Noting(Codec):
    """A function that remembers the claim that it ran under, and what was recorded of its answer.

    Not what its answer would be encoded to later: it may be changed by then.
    """

    def __init__(self, job: Job, function: Callable[..., Any]) -> None:
        self._codec = job.codec
        self.checked = job.codec.checked
        self.function = function
        self.claim: Claim | None = None
        self.raw: bytes | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it: what it gives may have to be awaited."""
        self.claim = CURRENT.get(None)
        return self.function(*args, **kwargs)

    def check(self) -> None:
        """See ``Codec``."""
        self._codec.check()

    def encode(self, value: Any) -> bytes:
        """See ``Codec``."""
        self.raw = self._codec.encode(value)
        return self.raw

    def decode(self, raw: bytes) -> Any:
        """See ``Codec``."""
        return self._codec.decode(raw)


def _noting(job: Job, function: Callable[..., Any]) -> tuple[Job, _Noting]:
    noting = _Noting(job, function)
    return job._replace(codec=noting), noting


def cached(run: Callable[..., Any], answers: FunctionAnswers) -> Callable[..., Result]:
    """What runs jobs as ``run`` does, but for those whose answers are at hand."""

    def at_hand(job: Job, function: Callable[..., Any], args: Any, kwargs: Any) -> Result:
        raw = answers.found(job)
        if raw is not None:
            return Result(job.codec.decode(raw), True)
        noted, noting = _noting(job, function)
        result: Result = run(noted, noting, args, kwargs)
        if not result.replayed:
            answers.keep(job, noting)
        return result

    return at_hand


def acached(run: Callable[..., Any], answers: FunctionAnswers) -> Callable[..., Awaitable[Result]]:
    """See ``cached``."""

    async def at_hand(job: Job, function: Callable[..., Any], args: Any, kwargs: Any) -> Result:
        raw = answers.found(job)
        if raw is not None:
            return Result(job.codec.decode(raw), True)
        noted, noting = _noting(job, function)
        result: Result = await run(noted, noting, args, kwargs)
        if not result.replayed:
            answers.keep(job, noting)
        return result

    return at_hand
