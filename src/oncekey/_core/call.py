"""A guarded call from end to end: acquire, run the handler, record the outcome.

``call`` and ``acall`` differ only in what Python makes different: how a handler is run, how it is
interrupted, and how the outcome is protected from the interruption.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple, Self, TypeVar

from oncekey._core.codec import DONE, Codec, omitted
from oncekey._core.drive import Flow, Op, arun, is_async, run
from oncekey._core.failures import failure, is_outcome
from oncekey._core.flows import (
    CURRENT,
    Claim,
    Plan,
    acquire,
    complete,
    new_owner,
    release,
    retry_after,
    won,
)
from oncekey._core.heartbeat import AsyncBeat, Beat
from oncekey._core.packing import packed
from oncekey._core.tasks import in_background, outliving, uncancelled
from oncekey.abc import AsyncStore, Store
from oncekey.errors import (
    ClaimLostError,
    IdempotencyConflictError,
    IdempotencyError,
    IdempotencyExpiredError,
    IdempotencyInFlightError,
    IdempotencyRecursionError,
    OncekeyError,
    StoreError,
    UnsupportedAnswerError,
)
from oncekey.instrument import events
from oncekey.instrument.events import EventKind, emit
from oncekey.instrument.timings import ended, started
from oncekey.models import ClaimReply, ClaimVerdict, Key, Record, State, Terms

__all__ = [
    "CURRENT",
    "Claim",
    "Job",
    "Result",
    "acall",
    "agive_up",
    "aopen_claim",
    "arecord",
    "call",
    "give_up",
    "guarded",
    "is_async",
    "open_claim",
    "record",
    "recorded_at_once",
    "refusal",
]

logger = logging.getLogger("oncekey")

T = TypeVar("T")

_WON, _REPLAY = ClaimVerdict.WON, ClaimVerdict.REPLAY
_NO_NAMES: Final[Mapping[str, Any]] = {}
_new = tuple.__new__  # named tuples without their keyword machinery, for the paths of every call


class Job(NamedTuple):
    """What is to be done once."""

    key: Key
    fingerprint: bytes
    plan: Plan
    codec: Codec
    operation: str
    keeps: Callable[[Any], bool] = lambda value: True  # whether this answer is a success
    strict: bool = True  # raise if the outcome could not be recorded, else warn and go on
    # Where the tasks of handlers are kept that go on without their caller. ``None``: none does.
    finishing: set[asyncio.Task[Any]] | None = None

    def replay(self, reply: ClaimReply) -> Any:
        """What a claim that was not won gives: the stored answer.

        Raises:
            IdempotencyError: There is none: a conflict, in flight past the wait, or expired.
        """
        if reply.verdict is not _REPLAY:
            raise refusal(reply, self.operation, self.plan.terms)
        return self.codec.decode(reply.answer or DONE)


class Result(NamedTuple):
    """How a guarded call ended well."""

    value: Any
    replayed: bool


def refusal(reply: ClaimReply, operation: str, terms: Terms) -> IdempotencyError:
    """The error for a reply that is neither a win nor a replay."""
    if reply.verdict is ClaimVerdict.CONFLICT:
        return IdempotencyConflictError(operation)
    if reply.verdict is ClaimVerdict.EXPIRED:
        return IdempotencyExpiredError(operation)
    if reply.own:
        return IdempotencyRecursionError(operation, retry_after(reply, terms))
    return IdempotencyInFlightError(operation, retry_after(reply, terms))


def _encode(job: Job, value: Any) -> bytes:
    """The answer to store. One that can't be kept still counts as done, only without a body."""
    try:
        answer = job.codec.encode(value)
    except UnsupportedAnswerError as error:
        logger.warning("%s was done, but its answer can't be replayed: %s", job.operation, error)
        return omitted(None, str(error))
    if len(answer) <= job.plan.max_answer_bytes:
        return answer
    return packed(answer) if len(answer) <= job.plan.pack_up_to else omitted(answer)


def _encode_failure(job: Job, error: BaseException) -> bytes:
    """The error to store as the outcome. One that can't be kept counts all the same."""
    try:
        answer = failure(error)
    except UnsupportedAnswerError as why:
        logger.warning("%s failed for good, but its error can't be kept: %s", job.operation, why)
        return omitted(None, str(why))
    return answer if len(answer) <= job.plan.max_answer_bytes else omitted(answer)


def _not_recorded(job: Job, error: StoreError) -> None:
    """The handler is done, the store failed: warn, so that it is never silent."""
    emit(EventKind.STORE_ERROR, job.key, job.operation, error=type(error).__name__)
    logger.warning(
        "%s is done but its outcome could not be recorded (scope=%s key=%s): %s. "
        "A retry with this key may run it again",
        job.operation,
        job.key.scope.hash,
        job.key.shown,
        error,
        exc_info=error,
    )


def _official(job: Job, found: Record | None) -> Result:
    """What a worker returns that was fenced off: the recorded outcome, if there is one already."""
    if (
        found is not None
        and found.state is State.COMPLETED
        and found.fingerprint == job.fingerprint
        and found.answer is not None
    ):
        return Result(job.codec.decode(found.answer), True)
    raise ClaimLostError(
        f"{job.operation} finished after another worker had taken its key over, so its outcome "
        "was not recorded. If handlers often outlive their lease, raise the lease"
    )


def _record(job: Job, claim: Claim, value: Any) -> Flow[Result]:
    """Record the outcome of a handler that returned ``value``."""
    monotonic = job.plan.monotonic
    try:
        if not job.keeps(value):
            yield from release(claim, None, monotonic)
            return Result(value, False)
        if (yield from complete(claim, _encode(job, value), monotonic)):
            return Result(value, False)
        found: Record | None = yield Op("read", (job.key,))
    except StoreError as error:
        if job.strict:
            raise
        _not_recorded(job, error)
        return Result(value, False)
    return _official(job, found)


def _record_failure(job: Job, claim: Claim, error: BaseException) -> Flow[Result | None]:
    """Record an error that is the outcome. What is given counts in its place: another worker's."""
    try:
        if not claim.lost:
            answer = _encode_failure(job, error)
            if (yield from complete(claim, answer, job.plan.monotonic)):
                return None
        found: Record | None = yield Op("read", (job.key,))
    except StoreError as failed:
        if job.strict:
            failed.add_note(f"The work had failed with {type(error).__name__}, its outcome.")
            raise
        _not_recorded(job, failed)
        return None
    try:
        return _official(job, found)
    except Exception as official:
        raise official from error


def _give_up(job: Job, claim: Claim, error: BaseException) -> Flow[Result | None]:
    """Free the key after a failure, unless it is the outcome, or what was done is unknown.

    Gives what counts in place of an error that is the outcome: that of whoever took the key over.
    """
    if claim.settled:
        return None
    if job.plan.replay_errors and is_outcome(error, job.plan.replay_errors):
        return (yield from _record_failure(job, claim, error))
    if claim.lost:
        return None
    if not isinstance(error, Exception) and not job.plan.retry_safe:
        return None  # cancelled or interrupted halfway: the lease decides when another may run
    try:
        yield from release(claim, error, job.plan.monotonic)
    except StoreError as failed:
        logger.warning(
            "%s failed and its key could not be released, it frees itself when the lease ends: %s",
            job.operation,
            failed,
        )
    return None


# Straight to a store that answers at once: no reply can come late, and nobody can come between.
# Whatever is not decided by the first look is the flow's, which asks again as the same owner.


def _decided(
    reply: ClaimReply, job: Job, owner: bytes, now: float, store: Store | AsyncStore
) -> Claim | ClaimReply | None:
    if reply.verdict is _REPLAY:
        return reply
    if reply.verdict is _WON:
        return won(job.key, owner, reply, job.plan, job.operation, now, store)
    return None


def _acquiring(store: Store | AsyncStore, job: Job, owner: bytes) -> Flow[Claim | ClaimReply]:
    key, mark, plan, operation = job.key, job.fingerprint, job.plan, job.operation
    return acquire(key, mark, plan, operation, store.poll_seconds, owner, store)


# Sync


def open_claim(store: Store, job: Job) -> Claim | ClaimReply:
    """Acquire. An interrupt while the claim is under way gives it back."""
    codec = job.codec
    if not codec.checked:
        codec.check()
    owner = new_owner()
    try:
        if store.never_waits and not events._listeners:
            plan = job.plan
            now, terms = plan.monotonic(), plan.claiming or plan.terms
            reply = store.claim(job.key, owner, job.fingerprint, terms)
            found = _decided(reply, job, owner, now, store)
            if found is not None:
                return found
        return run(_acquiring(store, job, owner), store)
    except OncekeyError:
        raise
    except BaseException:  # also what a task's time limit raises, which is an Exception
        with contextlib.suppress(Exception):
            store.release(job.key, owner, None)
        raise


def record(store: Store, job: Job, claim: Claim, value: Any) -> Result:
    """Record the outcome."""
    claim.ended = True
    if events._timers:
        ended(claim)
    if store.never_waits and not events._listeners and job.keeps(value):
        answer = _encode(job, value)
        if store.complete(claim.key, claim.owner, claim.fence, answer, claim.terms):
            claim.settled = True
            return _new(Result, (value, False))
    return run(_record(job, claim, value), store)


def give_up(store: Store, job: Job, claim: Claim, error: BaseException) -> Result | None:
    """Free the key after a failure. What is given is the outcome in the error's place.

    Raises:
        ClaimLostError: The error is no outcome after all, as another worker has the key.
        StoreError: The error is the outcome, and could not be recorded.
    """
    claim.ended = True  # should an interrupt have come before its heartbeat was told
    if events._timers:
        ended(claim, error)
    return run(_give_up(job, claim, error), store)


def call(
    store: Store,
    job: Job,
    handler: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] = _NO_NAMES,
) -> Result:
    """Run ``handler`` if nobody else did, else give its stored answer back.

    Raises:
        IdempotencyError: Conflict, in flight past the wait, or expired.
        StoreError: The store failed before the handler ran.
    """
    claim = open_claim(store, job)
    if type(claim) is not Claim:
        return _new(Result, (job.replay(claim), True))  # type: ignore[arg-type]
    try:
        token = CURRENT.set(claim)
        try:
            with Beat(store, claim, job.plan):
                value = handler(*args, **kwargs)
        finally:
            CURRENT.reset(token)
    except BaseException as error:
        instead = give_up(store, job, claim, error)
        if instead is None:
            raise
        return instead
    return record(store, job, claim, value)


# Async


async def aopen_claim(store: AsyncStore, job: Job) -> Claim | ClaimReply:
    """Acquire. A cancellation while the claim is under way gives it back, in the background."""
    codec = job.codec
    if not codec.checked:
        codec.check()
    owner = new_owner()
    if store.never_waits and not events._listeners:
        plan, straight = job.plan, store.at_once
        now, terms = plan.monotonic(), plan.claiming or plan.terms
        if straight is None:
            reply = await store.claim(job.key, owner, job.fingerprint, terms)
        else:
            reply = straight.claim(job.key, owner, job.fingerprint, terms)
        found = _decided(reply, job, owner, now, store)
        if found is not None:
            return found
    try:
        return await arun(_acquiring(store, job, owner), store)
    except (Exception, GeneratorExit):
        raise
    except BaseException:
        in_background(store.release(job.key, owner, None))
        raise


def recorded_at_once(store: AsyncStore, job: Job, claim: Claim, value: Any) -> bool:
    """Record the outcome if that needs no waiting. False: ``arecord`` does."""
    straight = store.at_once
    if straight is None or events._listeners or not job.keeps(value):
        return False
    answer = _encode(job, value)
    if not straight.complete(claim.key, claim.owner, claim.fence, answer, claim.terms):
        return False
    claim.settled = True
    return True


async def arecord(store: AsyncStore, job: Job, claim: Claim, value: Any) -> Result:
    """Record the outcome, whatever happens to this task."""
    if store.at_once is not None and recorded_at_once(store, job, claim, value):
        return _new(Result, (value, False))
    if store.never_waits:  # then nothing can happen to this task meanwhile
        return await arun(_record(job, claim, value), store)
    return await uncancelled(arun(_record(job, claim, value), store))


async def agive_up(
    store: AsyncStore, job: Job, claim: Claim, error: BaseException
) -> Result | None:
    """``give_up``, whatever happens to this task."""
    return await uncancelled(arun(_give_up(job, claim, error), store))


async def acall(
    store: AsyncStore,
    job: Job,
    handler: Callable[..., Awaitable[Any]],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] = _NO_NAMES,
) -> Result:
    """Run ``handler`` if nobody else did, else give its stored answer back.

    A handler whose claim is lost is cancelled.

    Raises:
        IdempotencyError: Conflict, in flight past the wait, or expired.
        StoreError: The store failed before the handler ran.
        ClaimLostError: Another worker took the key over while the handler ran.
    """
    claim = await aopen_claim(store, job)
    if type(claim) is not Claim:
        return _new(Result, (job.replay(claim), True))  # type: ignore[arg-type]
    if job.finishing is None:
        return await _arun(store, job, claim, handler, args, kwargs)
    work = _arun(store, job, claim, handler, args, kwargs)
    return await outliving(work, job, claim, job.finishing)


async def _arun(
    store: AsyncStore,
    job: Job,
    claim: Claim,
    handler: Callable[..., Awaitable[Any]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Result:
    """Run the handler of a claim that was won, and record the outcome."""
    try:
        with guarded(store, job, claim):
            value = await handler(*args, **kwargs)
    except GeneratorExit:
        raise  # thrown away with its loop: nothing can be awaited, the lease frees the key
    except BaseException as error:
        instead = await agive_up(store, job, claim, error)
        if instead is None:
            raise
        return instead
    return await arecord(store, job, claim, value)


class guarded(AsyncBeat):  # noqa: N801 - read as `with guarded(...)`
    """Keep ``claim`` alive while the block runs; cancel the block if the claim is lost.

    Never waits itself, so that both ``with`` and ``async with`` do. A block that settles the claim
    before its own end calls ``stop``.
    """

    __slots__ = ("_before", "_interrupted", "_task", "_token")

    def __init__(self, store: AsyncStore, job: Job, claim: Claim) -> None:
        super().__init__(store, claim, job.plan)
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a guarded call must run in an asyncio task")
        self._task = task
        self._interrupted = False
        self._before = task.cancelling()

    def lost(self) -> None:
        """Interrupt the block."""
        self._interrupted = True
        self._task.cancel()

    def __enter__(self) -> Self:
        self._token = CURRENT.set(self.claim)
        self._heart.add(self)
        if events._timers:
            started(self.claim)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.stop()
        if events._timers:
            ended(self.claim, error)
        try:
            CURRENT.reset(self._token)
        except ValueError:
            pass  # a coroutine that is thrown away ends in another context than its own
        if not self._interrupted:
            return
        # Our cancellation, not the caller's: the same bookkeeping as asyncio.timeout does. A block
        # that turned it into something else keeps that; one that swallowed it will find out that
        # it is fenced off when it completes.
        others = self._task.uncancel() > self._before
        if isinstance(error, asyncio.CancelledError) and not others:
            self.claim.check()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.__exit__(kind, error, trace)
