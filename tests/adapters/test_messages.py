"""Consumers of queues: what becomes of a delivery, on a broker that is a list."""

from __future__ import annotations

import inspect
import json
import logging
import pathlib
import sqlite3
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from oncekey import (
    AsyncOnce,
    BackendMismatchError,
    InvalidKeyError,
    MemoryBackend,
    MemoryStore,
    Once,
    PermanentError,
    PolicyError,
    SQLiteStore,
    StoreUnavailableError,
    current_transaction,
)
from oncekey._core.fingerprint import fingerprint
from oncekey._core.flows import new_owner
from oncekey.adapters.messages import (
    Broker,
    Message,
    Outcome,
    attribute,
    field,
    idempotent,
    kafka,
    rabbitmq,
    sqs,
)
from oncekey.models import Key, Scope, Terms
from oncekey.testing import ManualClock


class Queue(Broker):
    """A queue in memory, which writes down what it is told."""

    rejects = True

    def __init__(self, key: Any = None) -> None:
        super().__init__(key)
        self.told: list[str] = []

    def read(self, delivery: tuple[Any, ...]) -> Message:
        name, body, *more = delivery
        return Message(name, body, more[0] if more else {}, "orders", None, delivery)

    def _tell(self, word: str) -> list[Any]:
        def tell() -> dict[str, str]:  # clients answer with something
            self.told.append(word)
            return {"told": word}

        return [tell]

    def ack(self, message: Message) -> list[Any]:
        return self._tell("ack")

    def retry(self, message: Message, seconds: float) -> list[Any]:
        return self._tell(f"retry {seconds:g}")

    def reject(self, message: Message) -> list[Any]:
        return self._tell("reject")


class Counting(Queue):
    """A broker that counts itself, and has no way to reject."""

    rejects = False


class Bare(Queue):
    """A broker without dead letters."""

    rejects = counts = False


Take = Callable[..., Any]


async def done(value: Any) -> Any:
    """The value, awaited where it is the async form's."""
    return await value if inspect.isawaitable(value) else value


class Side:
    """One of the two forms, called the same way."""

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self.store = MemoryBackend() if asynchronous else MemoryStore()
        self.clock = ManualClock(1_000_000)
        store = self.store.with_clock(self.clock)
        self.once: Any = AsyncOnce(store) if asynchronous else Once(store)

    def consumer(self, broker: Broker, function: Callable[[Message], Any], **options: Any) -> Take:
        async def handler(message: Message) -> Any:
            return function(message)

        def plain(message: Message) -> Any:
            return function(message)

        made = idempotent(self.once, broker, name="test", **options)(
            handler if self.asynchronous else plain
        )

        async def take(*delivery: Any) -> Outcome:
            return await done(made(*delivery))  # type: ignore[no-any-return]

        return take


@pytest.fixture(params=["sync", "async"])
def side(request: pytest.FixtureRequest) -> Side:
    return Side(request.param == "async")


async def test_a_duplicate_is_acknowledged_without_running(side: Side) -> None:
    """The first delivery runs and is acknowledged, each copy is only acknowledged."""
    queue, ran = Queue(), []
    take = side.consumer(queue, lambda message: ran.append(message.json()))
    outcomes = [await take("m-1", b'{"cents": 5}') for _ in range(3)]
    assert outcomes == [Outcome.DONE, Outcome.DUPLICATE, Outcome.DUPLICATE]
    assert ran == [{"cents": 5}]
    assert queue.told == ["ack"] * 3


async def test_a_failure_comes_again(side: Side, caplog: pytest.LogCaptureFixture) -> None:
    """An error is logged and the message given back; the next delivery runs."""
    queue, fails = Queue(), deque([True, False])

    def work(message: Message) -> None:
        if fails.popleft():
            raise ValueError("no such order")

    take = side.consumer(queue, work, retry_seconds=7)
    assert await take("m-1", b"x") is Outcome.FAILED
    assert await take("m-1", b"x") is Outcome.DONE
    assert queue.told == ["retry 7", "ack"]
    (record,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert "no such order" in str(record.exc_info)
    assert "m-1" not in record.getMessage()


async def test_a_copy_in_flight_is_given_back_for_later(side: Side) -> None:
    """While another worker holds the message's key, it is given back; then it runs."""
    queue, ran, owner = Queue(), [], new_owner()
    take = side.consumer(queue, lambda message: ran.append(message.id), retry_seconds=3)
    key, terms = Key(Scope("once", "", "test"), "m-1"), Terms(lease_ms=60_000, ttl_ms=60_000)
    store = side.once.store
    held = await done(store.claim(key, owner, fingerprint(b"x"), terms))
    assert await take("m-1", b"x") is Outcome.IN_FLIGHT
    assert (ran, queue.told) == ([], ["retry 3"])
    assert await done(store.release(key, owner, held.fence))
    assert await take("m-1", b"x") is Outcome.DONE


@pytest.mark.parametrize(
    "refused, told", [("dead-letter", "reject"), ("ack", "ack"), ("retry", "retry 5")]
)
async def test_a_key_with_another_body_is_refused(side: Side, refused: str, told: str) -> None:
    """The same key with another body never runs, and goes where ``refused`` says."""
    queue, ran = Queue(field("order")), []
    take = side.consumer(queue, lambda message: ran.append(message.id), refused=refused)
    assert await take("m-1", b'{"order": 1, "cents": 5}') is Outcome.DONE
    assert await take("m-2", b'{"order": 1, "cents": 6}') is Outcome.REFUSED
    assert ran == ["m-1"]
    assert queue.told == ["ack", told]


async def test_a_message_without_a_key_is_refused(
    side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    """There is nothing to run it under: a dead letter, and the log names the fix."""
    queue, ran = Queue(), []
    take = side.consumer(queue, ran.append)
    assert await take("", b"x") is Outcome.REFUSED
    assert (ran, queue.told) == ([], ["reject"])
    assert "take its key from an attribute or from the body (key=)" in caplog.text


async def test_a_poison_message_is_a_dead_letter(side: Side) -> None:
    """After ``max_attempts`` failures it is given up; brought back, it has one more try."""
    queue, dead = Counting(), []

    def work(message: Message) -> None:
        raise ValueError(message.id)

    take = side.consumer(
        queue,
        work,
        max_attempts=2,
        dead_letter=lambda message, error: dead.append((message.id, str(error))),
    )
    assert [await take("m-1", b"x") for _ in range(3)] == ["failed", "dead", "dead"]
    assert dead == [("m-1", "m-1")] * 2
    assert queue.told == ["retry 5", "ack", "ack"]


async def test_a_message_that_kills_its_workers_is_a_dead_letter(side: Side) -> None:
    """Workers that die count: after ``max_attempts`` of them it is not run again."""
    queue = Queue()

    class Died(BaseException):
        pass

    def work(message: Message) -> None:
        raise Died

    take = side.consumer(queue, work, max_attempts=2, retry_safe=False)
    for _ in range(2):
        with pytest.raises(Died):
            await take("m-1", b"x")
        side.clock.advance(3600)
    assert await take("m-1", b"x") is Outcome.DEAD
    assert queue.told == ["reject"]


async def test_a_permanent_error_is_a_dead_letter_at_once(side: Side) -> None:
    """``PermanentError`` says that no retry helps; a broker that counts gets it back."""
    queue = Counting()

    def work(message: Message) -> None:
        raise PermanentError("no such customer")

    take = side.consumer(queue, work)
    assert await take("m-1", b"x") is Outcome.DEAD
    assert queue.told == ["retry 5"]


async def test_a_dead_letter_that_can_t_be_kept_comes_again(side: Side) -> None:
    """If ``dead_letter`` fails, the message is given back, not lost."""
    queue = Queue()

    def work(message: Message) -> None:
        raise PermanentError("no such customer")

    def keep(message: Message, error: Exception) -> None:
        raise OSError("disk full")

    take = side.consumer(queue, work, dead_letter=keep)
    assert await take("m-1", b"x") is Outcome.FAILED
    assert queue.told == ["retry 5"]


async def test_a_store_that_is_down_gives_the_message_back(side: Side) -> None:
    """Nothing runs unguarded: the message comes again."""
    queue, ran = Queue(), []

    def claim(*args: object) -> Any:
        raise StoreUnavailableError("down")

    take = side.consumer(queue, ran.append)
    side.once.store.claim = claim
    assert await take("m-1", b"x") is Outcome.FAILED
    assert (ran, queue.told) == ([], ["retry 5"])


def test_an_effect_and_its_mark_commit_together(tmp_path: pathlib.Path) -> None:
    """A transactional consumer that fails after its write leaves neither the write nor the mark."""
    file = str(tmp_path / "shop.db")
    with closing(sqlite3.connect(file)) as db:
        db.execute("CREATE TABLE payments (id TEXT)")
    store, queue, fails = SQLiteStore(file), Queue(), deque([True, False])

    @idempotent(Once(store), queue, transactional=True)
    def pay(message: Message) -> None:
        tx = current_transaction()
        tx.connection.execute("INSERT INTO payments VALUES (?)", (message.id,))
        if fails.popleft():
            raise ValueError("after the write")

    assert [pay("m-1", b"x") for _ in range(3)] == ["failed", "done", "duplicate"]
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("SELECT * FROM payments").fetchall() == [("m-1",)]
    store.close()


def test_where_keys_come_from() -> None:
    """An attribute, a path into the body; what is not there is told with the fix."""
    message = Message("", json.dumps({"order": {"id": 7}}).encode(), {"event-id": "e-1"}, "q")
    assert Broker(attribute("event-id")).key(message) == "e-1"
    assert Broker(field("order.id")).key(message) == "7"
    for key in (attribute("other"), field("order.name"), field("order.id.x")):
        with pytest.raises(InvalidKeyError, match=r"\(key=\)"):
            Broker(key).key(message)
    with pytest.raises(InvalidKeyError, match="no JSON"):
        Broker(field("order")).key(Message("", b"\xff", {}, "q"))
    with pytest.raises(InvalidKeyError, match="BasicProperties"):
        rabbitmq().key(message)


def test_options_that_can_t_work_are_refused() -> None:
    """Each is told with what to write; Kafka's want of dead letters too."""
    once = Once(MemoryStore())
    with pytest.raises(PolicyError, match="dead-letter, ack, retry"):
        idempotent(once, Queue(), refused="drop")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="retry_seconds"):
        idempotent(once, Queue(), retry_seconds=-1)
    with pytest.raises(PolicyError, match="max_attempts"):
        idempotent(once, Queue(), max_attempts=0)
    for broker in (kafka(None), Bare()):
        with pytest.raises(PolicyError, match="no dead letters: pass dead_letter="):
            idempotent(once, broker)
        with pytest.raises(PolicyError, match="no dead letters"):
            idempotent(once, broker, refused="retry", max_attempts=3)
        idempotent(once, broker, refused="retry")
    with pytest.raises(BackendMismatchError, match="AsyncOnce"):

        @idempotent(once, Queue())
        async def handler(message: Message) -> None: ...


def test_an_asynchronous_client_under_once_is_told() -> None:
    """Nothing would be acknowledged, so that it is an error."""

    class Client:
        async def delete_message(self, **options: Any) -> None: ...

    @idempotent(Once(MemoryStore()), sqs(Client(), "url"))
    def handle(message: Message) -> None: ...

    with pytest.raises(BackendMismatchError, match="guard the function with AsyncOnce"):
        handle({"MessageId": "1", "ReceiptHandle": "r", "Body": "x"})


def test_no_client_is_imported() -> None:
    """The adapter needs none of the brokers' packages."""
    code = (
        "import sys, oncekey.adapters.messages\n"
        "print({'boto3', 'pika', 'aio_pika', 'aiokafka', 'confluent_kafka', 'google.cloud'}"
        " & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


class Declined(Exception):
    """An outcome of the work."""


class Held(Declined):
    """One that can't be kept, so that it can't be raised again."""

    def __init__(self) -> None:
        super().__init__(object())


@pytest.mark.parametrize("error", [Declined("no"), Held()])
async def test_a_declared_error_is_final(side: Side, error: Exception) -> None:
    """It is a dead letter, and so is each copy of it, of which none runs."""
    queue, ran, dead = Queue(), [], []

    def function(message: Message) -> None:
        ran.append(message.id)
        raise error

    declared: Any = {"replay_errors": [Declined], "max_attempts": 5}
    take = side.consumer(queue, function, **declared)
    assert [await take("m-1", b"{}") for _ in range(3)] == [Outcome.DEAD] * 3
    assert (ran, queue.told) == (["m-1"], ["reject"] * 3)
    told: Any = lambda message, error: dead.append(type(error))  # noqa: E731
    take = side.consumer(Counting(), function, dead_letter=told, **declared)
    assert await take("m-2", b"{}") == Outcome.DEAD
    assert dead == [type(error)]


async def test_an_outcome_whose_type_is_declared_no_more_is_final(side: Side) -> None:
    """A copy of it can't be told its error, and is no poison message for that."""
    queue = Queue()

    def function(message: Message) -> None:
        raise Declined("no")

    await side.consumer(queue, function, replay_errors=[Declined])("m-1", b"{}")
    assert await side.consumer(queue, function)("m-1", b"{}") == Outcome.DEAD


async def test_a_copy_needs_no_answer(side: Side) -> None:
    """A policy that keeps no answers makes no poison messages either."""
    queue = Queue()
    take = side.consumer(queue, lambda message: None, max_answer_bytes=0)
    assert [await take("m-1", b"{}") for _ in range(2)] == [Outcome.DONE, Outcome.DUPLICATE]


def test_options_that_are_not_for_transactions_are_refused(tmp_path: pathlib.Path) -> None:
    """As by every other guard with ``transactional``."""
    with SQLiteStore(tmp_path / "a.db") as store:
        for wrong in ({"replay_errors": [Declined]}, {"cache_entries": 5}):
            options: Any = wrong
            with pytest.raises(PolicyError, match="not for transactions"):
                idempotent(Once(store), Queue(), transactional=True, **options)
