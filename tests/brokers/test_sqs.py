"""Consumers on SQS, as moto's server emulates it: not on AWS."""

from __future__ import annotations

from typing import Any

import pytest

from oncekey import MemoryStore, Once
from oncekey.adapters.messages import Message, Outcome, attribute, field, idempotent, sqs

pytest.importorskip("moto", reason="make test-brokers installs it")


def _receive(client: Any, url: str) -> list[dict[str, Any]]:
    found = client.receive_message(
        QueueUrl=url,
        MaxNumberOfMessages=10,
        MessageAttributeNames=["All"],
        MessageSystemAttributeNames=["All"],
    )
    messages: list[dict[str, Any]] = found.get("Messages", [])
    return messages


def _left(client: Any, url: str) -> int:
    """How many are in the queue, visible or not."""
    names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    found = client.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]
    return sum(int(found[name]) for name in names)


def test_copies_run_once_and_failures_come_again(client: Any) -> None:
    """A message that fails is visible again, with its count; one sent twice runs once."""
    queue = client("sqs")
    url = queue.create_queue(QueueName="orders")["QueueUrl"]
    ran: list[tuple[Any, int | None]] = []
    broker = sqs(queue, url, key=field("order"))

    @idempotent(Once(MemoryStore()), broker, name="paid", retry_seconds=0)
    def paid(message: Message) -> None:
        ran.append((message.json()["order"], message.attempts))
        if len(ran) == 1:
            raise ValueError("at first")

    for _ in range(2):
        queue.send_message(QueueUrl=url, MessageBody='{"order": 7}')
    outcomes = [paid(found) for _ in range(3) for found in _receive(queue, url)]
    assert sorted(outcomes) == ["done", "duplicate", "failed"]
    assert [order for order, _ in ran] == [7, 7]
    assert ran[0][1] == 1
    assert _left(queue, url) == 0


def test_a_message_in_hand_elsewhere_is_hidden_for_later(client: Any) -> None:
    """What is given back stays invisible for ``retry_seconds``."""
    queue = client("sqs")
    url = queue.create_queue(QueueName="later")["QueueUrl"]

    @idempotent(Once(MemoryStore()), sqs(queue, url), name="later", retry_seconds=600)
    def fails(message: Message) -> None:
        raise ValueError

    queue.send_message(QueueUrl=url, MessageBody="x")
    (found,) = _receive(queue, url)
    assert fails(found) is Outcome.FAILED
    assert _receive(queue, url) == []
    assert _left(queue, url) == 1


def test_keys_of_attributes(client: Any) -> None:
    """The deduplication id of a FIFO queue, and an attribute of the sender's, are keys."""
    queue = client("sqs")
    url = queue.create_queue(QueueName="keys.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"]
    queue.send_message(
        QueueUrl=url,
        MessageBody="x",
        MessageGroupId="g",
        MessageDeduplicationId="d-1",
        MessageAttributes={"event": {"DataType": "String", "StringValue": "e-1"}},
    )
    (found,) = _receive(queue, url)
    for name, key in (("MessageDeduplicationId", "d-1"), ("event", "e-1")):
        broker = sqs(queue, url, key=attribute(name))
        assert broker.key(broker.read((found,))) == key
    plain = sqs(queue, url)
    assert plain.key(plain.read((found,))) == found["MessageId"]


def test_a_poison_message_reaches_the_queue_s_own_dead_letters(client: Any) -> None:
    """Given back, the redrive policy counts it and moves it."""
    queue = client("sqs")
    dead = queue.create_queue(QueueName="dead")["QueueUrl"]
    arn = queue.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]
    policy = f'{{"deadLetterTargetArn": "{arn["QueueArn"]}", "maxReceiveCount": 2}}'
    made = queue.create_queue(QueueName="alive", Attributes={"RedrivePolicy": policy})
    url = made["QueueUrl"]

    @idempotent(Once(MemoryStore()), sqs(queue, url), name="poison", retry_seconds=0)
    def fails(message: Message) -> None:
        raise ValueError

    queue.send_message(QueueUrl=url, MessageBody="x")
    outcomes = [fails(found) for _ in range(4) for found in _receive(queue, url)]
    assert outcomes == [Outcome.FAILED, Outcome.FAILED]
    assert _left(queue, dead) == 1
