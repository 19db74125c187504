"""Consumers of message queues: each message takes effect once, however often it is delivered.

    import boto3
    from oncekey import Once
    from oncekey.adapters.messages import field, idempotent, sqs

    once = Once("postgresql://localhost/shop")
    client = boto3.client("sqs")

    @idempotent(once, sqs(client, QUEUE_URL, key=field("order_id")))
    def paid(message):
        print("paid:", message.json())

    for received in client.receive_message(QueueUrl=QUEUE_URL).get("Messages", []):
        paid(received)

What is decorated takes a delivery as the broker's client gives it. It claims the message's key,
runs the function, records that, and acknowledges the message: in that order, so that a worker that
dies loses nothing. It gives an ``Outcome``, and does what that says:

* a copy of a message that is done is acknowledged, without running;
* a copy of one that another worker has in hand is given back, for later;
* one whose function fails is given back, with the error logged, and runs again; after
  ``max_attempts``, or a ``PermanentError``, it is a dead letter; so it is, and each copy of it,
  after an error that ``replay_errors`` names;
* one that can't be run (the key was used with another body, or there is no key) is a dead letter.

The brokers' clients are passed in by you; none is imported here.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Generator
from enum import StrEnum
from typing import Any, Final, Literal, Unpack

from oncekey._core.call import CURRENT, Job
from oncekey._core.codec import Codec
from oncekey._core.drive import adrive, drive
from oncekey._core.failures import is_outcome
from oncekey._core.fingerprint import fingerprint
from oncekey.adapters._brokers import (
    Broker,
    Message,
    Sleep,
    Step,
    attribute,
    field,
    kafka,
    pubsub,
    rabbitmq,
    sqs,
)
from oncekey.errors import (
    AnswerOmittedError,
    BackendMismatchError,
    IdempotencyConflictError,
    IdempotencyExpiredError,
    IdempotencyInFlightError,
    InvalidKeyError,
    PermanentError,
    PolicyError,
    StoreConfigError,
    StoreError,
    UnsupportedAnswerError,
)
from oncekey.guard import AsyncOnce, Once
from oncekey.models import Key
from oncekey.policy import PolicyOptions

__all__ = [
    "Broker",
    "Message",
    "Outcome",
    "Refused",
    "attribute",
    "field",
    "idempotent",
    "kafka",
    "pubsub",
    "rabbitmq",
    "sqs",
]

logger = logging.getLogger("oncekey")

Refused = Literal["dead-letter", "ack", "retry"]
REFUSED: Final = ("dead-letter", "ack", "retry")


class Outcome(StrEnum):
    """What became of a delivery."""

    DONE = "done"  # it ran, and is acknowledged
    DUPLICATE = "duplicate"  # it was done before, and is acknowledged
    IN_FLIGHT = "in_flight"  # another worker has it in hand: given back, for later
    FAILED = "failed"  # its function failed, or the store did: given back
    DEAD = "dead"  # it failed for good, and is a dead letter
    REFUSED = "refused"  # it can't be run: a dead letter, or as ``refused`` says
    BEHIND = "behind"  # Kafka: one before it in its partition comes again first


def idempotent(
    once: Once | AsyncOnce,
    broker: Broker,
    *,
    name: str = "",
    refused: Refused = "dead-letter",
    dead_letter: Callable[[Message, Exception], Any] | None = None,
    max_attempts: int | None = None,
    retry_seconds: float = 5,
    transactional: bool = False,
    on: Any = None,
    **options: Unpack[PolicyOptions],
) -> Callable[[Callable[[Message], Any]], Callable[..., Any]]:
    """Decorate a function that takes a ``Message``. What is made of it takes a delivery.

    An error of the broker's client reaches you: the connection is to be opened again. A message
    that was not acknowledged for it is delivered again, and then a duplicate.

    Args:
        once: The guard: ``AsyncOnce`` for a coroutine function and an asynchronous client.
        broker: ``sqs(...)``, ``kafka(...)``, ``rabbitmq()`` or ``pubsub()``.
        name: What keeps its keys apart from other functions'. See ``Once``.
        refused: What becomes of a message that can't be run: its key was used with another body, or
            is remembered as expired, or it has none. ``dead-letter``: see below. ``ack``: it is
            acknowledged, and so forgotten. ``retry``: it comes again.
        dead_letter: Called with a dead letter and its error, before it is acknowledged. Without
            it, RabbitMQ gets it as rejected (and drops it, if the queue has no dead-letter
            exchange); SQS and Pub/Sub get it back until their own policy makes a dead letter of it;
            and Kafka, which has none, needs it.
        max_attempts: After how many attempts that failed, or in which the worker died, a message is
            a dead letter. ``None``: never. They are counted in the store. With ``transactional``
            the broker's count is taken, if it has one.
        retry_seconds: After how many seconds a message that was given back comes again.
        transactional: Run the function in a transaction of the store's database: its writes and the
            mark commit together. It writes on ``current_transaction().connection``.
        on: Where that transaction is, if not on the store's own connections.
        **options: Options of ``Policy``. ``wait`` is 0 here, unless it is given. An error of
            ``replay_errors`` is final: the message does not run again.

    Raises:
        PolicyError: An option can't work, or is not for transactions.
        BackendMismatchError: A coroutine function with ``Once``, or another one with ``AsyncOnce``.
        TransactionRefusedError: ``transactional``, and the store has no transactions.
    """
    _check(broker, refused, dead_letter, max_attempts, retry_seconds)
    options = {"wait": 0, **options}
    run = once.runner(transactional, on, options)

    def decorate(function: Callable[[Message], Any]) -> Callable[..., Any]:
        binding = once.bind(function, lambda message: message.id, (), options, name)
        consumer = _Consumer(
            broker, binding, run, function, refused, dead_letter, max_attempts, retry_seconds
        )
        consumer.counted = not transactional
        return consumer.taking(isinstance(once, AsyncOnce))

    return decorate


def _check(
    broker: Broker,
    refused: Refused,
    dead_letter: Callable[[Message, Exception], Any] | None,
    max_attempts: int | None,
    retry_seconds: float,
) -> None:
    if refused not in REFUSED:
        raise PolicyError(f"refused must be one of {', '.join(REFUSED)}, got {refused!r}")
    if not retry_seconds >= 0:
        raise PolicyError(f"retry_seconds must be 0 or above, got {retry_seconds!r}")
    if max_attempts is not None and max_attempts < 1:
        raise PolicyError(f"max_attempts must be 1 or above, got {max_attempts!r}")
    stuck = dead_letter is None and not broker.rejects and not broker.counts
    if stuck and (refused == "dead-letter" or max_attempts is not None):
        raise PolicyError(
            "this broker has no dead letters: pass dead_letter=, a function that takes the message "
            "and the error and puts them where you look; or refused='ack' or refused='retry', and "
            "no max_attempts"
        )


class _Poison(PermanentError):
    """The workers of earlier attempts died of it, or so it seems."""


class _Attempt:
    """The function, called for one message, and what is known of that."""

    def __init__(self, consumer: _Consumer, message: Message) -> None:
        self._consumer = consumer
        self.begun = False
        self.attempts: int | None = message.attempts

    def begin(self) -> None:
        consumer = self._consumer
        if consumer.counted:
            claim = CURRENT.get()
            self.attempts = claim.attempts
            limit = consumer.max_attempts
            if limit is not None and claim.takeover and claim.attempts > limit:
                raise _Poison(f"{limit} workers stopped in the middle of this message")
        self.begun = True

    def __call__(self, message: Message) -> None:
        self.begin()
        self._consumer.function(message)  # what it returns is nobody's: it is not kept


class _AsyncAttempt(_Attempt):
    async def __call__(self, message: Message) -> None:  # type: ignore[override]
        self.begin()
        await self._consumer.function(message)


class _Consumer:
    """What a delivery goes through: one flow, for threads and for tasks."""

    counted = True

    def __init__(
        self,
        broker: Broker,
        binding: Any,
        run: Callable[..., Any],
        function: Callable[[Message], Any],
        refused: Refused,
        dead_letter: Callable[[Message, Exception], Any] | None,
        max_attempts: int | None,
        retry_seconds: float,
    ) -> None:
        self.broker = broker
        self.binding = binding
        self.codec = Codec(Any)  # what the function returns is not kept, whatever it is
        self.codec.errors = binding.codec.errors
        self.run = run
        self.function = function
        self.refused = refused
        self.dead_letter = dead_letter
        self.max_attempts = max_attempts
        self.retry_seconds = retry_seconds

    def taking(self, asynchronous: bool) -> Callable[..., Any]:
        """What takes the deliveries."""

        @functools.wraps(self.function)
        def take(*delivery: Any) -> Outcome:
            return drive(self.flow(delivery, attempt=_Attempt), _do)

        @functools.wraps(self.function)
        async def atake(*delivery: Any) -> Outcome:
            return await adrive(self.flow(delivery, attempt=_AsyncAttempt), _ado)

        return atake if asynchronous else take

    def _job(self, message: Message) -> Job:
        binding = self.binding
        if not binding.alone():
            binding.job((message,), {})  # which says so
        key = Key(binding.scope, self.broker.key(message))
        body = fingerprint(message.body)
        return Job(key, body, binding.plan, self.codec, binding.operation)

    def flow(
        self, delivery: tuple[Any, ...], attempt: type[_Attempt]
    ) -> Generator[Step, Any, Outcome]:
        broker = self.broker
        message = broker.read(delivery)
        if broker.behind(message):
            yield from _each(broker.retry(message, 0))
            return Outcome.BEHIND
        try:
            job = self._job(message)
        except InvalidKeyError as error:
            return (yield from self._refuse(message, error))
        work = attempt(self, message)
        try:
            result = yield functools.partial(self.run, job, work, (message,), {})
        except StoreConfigError:
            raise
        except Exception as error:
            if not work.begun:
                if isinstance(error, IdempotencyInFlightError):
                    seconds = min(error.retry_after or self.retry_seconds, self.retry_seconds)
                    yield from _each(broker.retry(message, seconds))
                    return Outcome.IN_FLIGHT
                if isinstance(error, (IdempotencyConflictError, IdempotencyExpiredError)):
                    return (yield from self._refuse(message, error))
                if isinstance(error, AnswerOmittedError) and not job.plan.replay_errors:
                    yield from _each(broker.ack(message))  # it is done, and nobody wants an answer
                    return Outcome.DUPLICATE
                if not isinstance(error, (StoreError, _Poison)) and not _final(job, error, work):
                    raise  # the caller's mistake, not the message's
            return (yield from self._fail(message, job, error, work))
        yield from _each(broker.ack(message))
        return Outcome.DUPLICATE if result.replayed else Outcome.DONE

    def _fail(
        self, message: Message, job: Job, error: Exception, work: _Attempt
    ) -> Generator[Step, Any, Outcome]:
        limit, count = self.max_attempts, work.attempts
        spent = work.begun and limit is not None and count is not None and count >= limit
        dead = spent or _final(job, error, work)
        logger.error(
            "%s failed for a message of %s (key %s, attempt %s): %s",
            job.operation,
            message.source or type(self.broker).__name__.strip("_"),
            job.key.shown,
            count if count is not None else "unknown",
            "it is a dead letter" if dead else "it comes again",
            exc_info=error,
        )
        if dead and (yield from self._bury(message, error)):
            return Outcome.DEAD
        if not dead:
            yield from _each(self.broker.retry(message, self.retry_seconds))
        return Outcome.FAILED

    def _refuse(self, message: Message, error: Exception) -> Generator[Step, Any, Outcome]:
        logger.error(
            "a message of %s can't be run, %s: %s",
            message.source or type(self.broker).__name__.strip("_"),
            {"ack": "and is forgotten", "retry": "and comes again"}.get(
                self.refused, "and is a dead letter"
            ),
            error,
        )
        if self.refused == "dead-letter":
            yield from self._bury(message, error)
        elif self.refused == "ack":
            yield from _each(self.broker.ack(message))
        else:
            yield from _each(self.broker.retry(message, self.retry_seconds))
        return Outcome.REFUSED

    def _bury(self, message: Message, error: Exception) -> Generator[Step, Any, bool]:
        """Make a dead letter of it. False: that failed, and it comes again."""
        broker = self.broker
        if self.dead_letter is not None:
            try:
                yield functools.partial(self.dead_letter, message, error)
            except Exception as failed:
                logger.error("dead_letter failed, so that the message comes again", exc_info=failed)
                yield from _each(broker.retry(message, self.retry_seconds))
                return False
            yield from _each(broker.ack(message))
        elif broker.rejects:
            yield from _each(broker.reject(message))
        else:
            yield from _each(broker.retry(message, self.retry_seconds))
        return True


def _final(job: Job, error: Exception, work: _Attempt) -> bool:
    """Whether no other attempt would end otherwise: by its own word, or as it is the outcome.

    An outcome that can't be raised again, which copies are told by other errors, is one too.
    """
    if isinstance(error, PermanentError) or is_outcome(error, job.plan.replay_errors):
        return True
    return not work.begun and isinstance(error, (AnswerOmittedError, UnsupportedAnswerError))


def _each(steps: list[Step]) -> Generator[Step, Any, None]:
    for step in steps:  # noqa: UP028 - what a step gives would be sent to the list
        yield step


def _do(step: Step) -> Any:
    if isinstance(step, Sleep):
        return step.way(step.seconds)
    value = step()
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise BackendMismatchError(
            "the client is asynchronous, so that nothing was acknowledged: guard the function with "
            "AsyncOnce, and await it"
        )
    return value


async def _ado(step: Step) -> Any:
    if isinstance(step, Sleep):
        return await asyncio.sleep(step.seconds)
    value = step()
    return await value if inspect.isawaitable(value) else value
