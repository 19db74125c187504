"""Kafka and Pub/Sub: no broker comes in a wheel, so that these are their clients' own classes.

What is sent to a broker is looked at where the client would send it.
"""

from __future__ import annotations

import queue
from typing import Any

import pytest

from oncekey import AsyncOnce, BackendMismatchError, MemoryBackend, MemoryStore, Once
from oncekey.adapters.messages import Message, Outcome, attribute, idempotent, kafka, pubsub

confluent = pytest.importorskip("confluent_kafka", reason="make test-brokers installs it")
aiokafka = pytest.importorskip("aiokafka", reason="make test-brokers installs it")
pubsub_v1 = pytest.importorskip("google.cloud.pubsub_v1", reason="make test-brokers installs it")


class Consumer:
    """Where a consumer stands in one partition, with the clients' own values."""

    def __init__(self, partition: Any) -> None:
        self.assigned = [partition]
        self.log: list[Any] = []

    def assignment(self) -> list[Any]:
        return self.assigned


class Confluent(Consumer):
    def __init__(self) -> None:
        super().__init__(confluent.TopicPartition("orders", 3))

    def commit(self, *, message: Any, asynchronous: bool) -> None:
        assert not asynchronous
        self.log.append(("commit", message.offset() + 1))

    def seek(self, partition: Any) -> None:
        assert (partition.topic, partition.partition) == ("orders", 3)
        self.log.append(("seek", partition.offset))

    @staticmethod
    def message(offset: int, value: bytes = b"{}") -> Any:
        fields: dict[str, Any] = {"topic": "orders", "partition": 3, "offset": offset}
        return confluent.Message(
            **fields, key=b"k-1", headers=[("event-id", b"e-1")], value=value, error=None
        )


class Aio(Consumer):
    def __init__(self) -> None:
        super().__init__(aiokafka.TopicPartition("orders", 3))

    async def commit(self, offsets: dict[Any, int]) -> None:
        assert list(offsets) == self.assigned
        self.log.append(("commit", *offsets.values()))

    def seek(self, partition: Any, offset: int) -> None:
        assert partition == self.assigned[0]
        self.log.append(("seek", offset))

    @staticmethod
    def message(offset: int, value: bytes = b"{}") -> Any:
        return aiokafka.ConsumerRecord(
            "orders", 3, offset, 0, 0, b"k-1", value, None, 3, 2, [("event-id", b"e-1")]
        )


OPTIONS: dict[str, Any] = {"refused": "retry", "retry_seconds": 0, "name": "kafka"}


@pytest.mark.parametrize("made", [Confluent, Aio])
def test_keys_of_kafka(made: Any) -> None:
    """Topic, partition and offset; a header; the record's key."""
    for key, expected in (
        (None, "orders-3-7"),
        (attribute("event-id"), "e-1"),
        (attribute("kafka.key"), "k-1"),
    ):
        broker = kafka(made(), key=key)
        assert broker.key(broker.read((made.message(7),))) == expected


def test_kafka_goes_back_to_a_message_that_failed() -> None:
    """Those behind it in the same batch are not taken before it: no commit passes it by."""
    consumer, ran, fails = Confluent(), [], [8]

    @idempotent(Once(MemoryStore()), kafka(consumer), **OPTIONS)
    def work(message: Message) -> None:
        ran.append(message.id)
        if fails and message.id == "orders-3-8":
            fails.pop()
            raise ValueError

    batch = [Confluent.message(offset) for offset in (7, 8, 9, 10)]
    assert [work(one) for one in batch] == ["done", "failed", "behind", "behind"]
    assert consumer.log == [("commit", 8), ("seek", 8), ("seek", 8), ("seek", 8)]
    consumer.log.clear()
    assert [work(one) for one in batch[1:]] == ["done", "done", "done"]
    assert consumer.log == [("commit", 9), ("commit", 10), ("commit", 11)]
    assert ran == ["orders-3-7", "orders-3-8", "orders-3-8", "orders-3-9", "orders-3-10"]


def test_kafka_goes_on_when_the_message_is_gone() -> None:
    """One that retention has removed meanwhile does not hold its partition for ever."""
    consumer = Confluent()

    @idempotent(Once(MemoryStore()), kafka(consumer), **OPTIONS)
    def work(message: Message) -> None:
        if message.id == "orders-3-8":
            raise ValueError

    assert work(Confluent.message(8)) is Outcome.FAILED
    assert work(Confluent.message(12)) is Outcome.BEHIND  # may have been in hand already
    assert work(Confluent.message(12)) is Outcome.DONE  # came after the seek: 8 is gone


def test_a_partition_that_moved_is_left_alone() -> None:
    """A failure in a partition that another consumer has now is that one's."""
    consumer = Confluent()

    @idempotent(Once(MemoryStore()), kafka(consumer), **OPTIONS)
    def work(message: Message) -> None:
        raise ValueError

    consumer.assigned = []
    assert work(Confluent.message(8)) is Outcome.FAILED
    assert consumer.log == []


async def test_aiokafka() -> None:
    """Its consumer commits and goes back by its own partitions."""
    consumer, fails = Aio(), [True]

    @idempotent(AsyncOnce(MemoryBackend()), kafka(consumer), **OPTIONS)
    async def work(message: Message) -> None:
        if fails.pop():
            raise ValueError

    assert await work(Aio.message(8)) is Outcome.FAILED
    fails.append(False)
    assert await work(Aio.message(8)) is Outcome.DONE
    assert await work(Aio.message(8)) is Outcome.DUPLICATE
    assert consumer.log == [("seek", 8), ("commit", 9), ("commit", 9)]


def test_the_methods_of_the_consumers() -> None:
    """The real consumers have what is called on them."""
    import inspect

    real = confluent.Consumer({"bootstrap.servers": "127.0.0.1:1", "group.id": "test"})
    assert real.assignment() == []
    real.close()
    for name in ("commit", "seek"):
        assert callable(getattr(confluent.Consumer, name))
        assert inspect.iscoroutinefunction(getattr(aiokafka.AIOKafkaConsumer, name)) == (
            name == "commit"
        )


def test_an_error_event_is_no_message() -> None:
    """confluent-kafka gives errors as messages: that is told."""
    error = confluent.KafkaError(confluent.KafkaError._ALL_BROKERS_DOWN)
    with pytest.raises(BackendMismatchError, match=r"Look at message.error\(\)"):
        kafka(Confluent()).read((confluent.Message(error=error),))


def _delivery(requests: Any, attempt: int = 0) -> Any:
    """A message as a streaming pull makes it."""
    from google.cloud.pubsub_v1.subscriber.message import Message as Pulled
    from google.pubsub_v1.types import PubsubMessage

    message = PubsubMessage(data=b'{"order": 7}', message_id="42", attributes={"event-id": "e-1"})
    return Pulled(message._pb, "ack-1", attempt, requests)


def test_pubsub_is_acknowledged_or_given_back() -> None:
    """The client's queue gets an ack for what is done, a nack for what failed."""
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    fails = [True]

    @idempotent(Once(MemoryStore()), pubsub("orders"), name="pubsub")
    def work(message: Message) -> None:
        assert (message.id, message.json(), message.attempts) == ("42", {"order": 7}, 2)
        if fails.pop():
            raise ValueError

    assert work(_delivery(requests, 2)) is Outcome.FAILED
    fails.append(False)
    assert work(_delivery(requests, 2)) is Outcome.DONE
    assert work(_delivery(requests, 2)) is Outcome.DUPLICATE
    sent = [type(requests.get()).__name__ for _ in range(3)]
    assert sent == ["NackRequest", "AckRequest", "AckRequest"]


def test_keys_of_pubsub() -> None:
    """The message's id, or an attribute."""
    for key, expected in ((None, "42"), (attribute("event-id"), "e-1")):
        broker = pubsub(key=key)
        assert broker.key(broker.read((_delivery(queue.SimpleQueue()),))) == expected
