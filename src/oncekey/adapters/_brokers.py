"""Messages of queues: how each broker's are read and given back. Imports none of the clients."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as _field
from math import ceil
from typing import Any, NamedTuple

from oncekey._core.binding import key_name
from oncekey.errors import BackendMismatchError, InvalidKeyError

__all__ = [
    "Broker",
    "KeyOf",
    "Message",
    "Sleep",
    "Step",
    "attribute",
    "field",
    "kafka",
    "pubsub",
    "rabbitmq",
    "sqs",
]


@dataclass(frozen=True, slots=True)
class Message:
    """A message as its function gets it, from whichever broker.

    Attributes:
        id: The broker's own name for it. Empty: it has none.
        body: What was sent.
        attributes: Headers or attributes, as text.
        source: The queue, topic or subscription.
        attempts: How often the broker has delivered it, this time included. ``None``: not told.
        raw: The delivery, as the broker's client gave it.
    """

    id: str
    body: bytes = _field(repr=False)
    attributes: Mapping[str, str] = _field(repr=False)
    source: str
    attempts: int | None = None
    raw: Any = _field(default=None, repr=False, compare=False)

    def json(self) -> Any:
        """The body, parsed.

        Raises:
            ValueError: It is no JSON.
        """
        return json.loads(self.body)


KeyOf = Callable[[Message], object]


def attribute(name: str) -> KeyOf:
    """The key is an attribute or header: ``key=attribute("event-id")``."""

    def key(message: Message) -> str:
        found = message.attributes.get(name)
        if not found:
            raise InvalidKeyError(
                f"the message has no attribute {name!r} to take its key from: let the sender set "
                "it, ask the broker for it when you receive, or take the key from elsewhere (key=)"
            )
        return found

    return key


def field(path: str) -> KeyOf:
    """The key is in the body, which is JSON: ``key=field("order.id")``."""

    def key(message: Message) -> Any:
        try:
            value = message.json()
        except ValueError:
            raise InvalidKeyError(
                f"the message's body is no JSON, so that there is no {path!r} in it: take its key "
                "from elsewhere (key=)"
            ) from None
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None:
            raise InvalidKeyError(
                f"the message's body has no {path!r} to take its key from: let the sender set it, "
                "or take the key from elsewhere (key=)"
            )
        return value

    return key


class Sleep(NamedTuple):
    """Wait, in this thread or this task."""

    seconds: float
    way: Callable[[float], object] = time.sleep


Step = Callable[[], Any] | Sleep


class Broker:
    """How messages of one broker are read and given back. A preset makes it; subclass for others.

    Args:
        key: Where a message's key comes from. ``None``: its ``id``.
    """

    rejects = False  # whether a message can be handed to the broker's own dead letters
    counts = True  # whether the broker makes a dead letter of one that comes back too often
    no_id = "the message has no id: take its key from an attribute or from the body (key=)"

    def __init__(self, key: KeyOf | None = None) -> None:
        self._key = key

    def key(self, message: Message) -> str:
        """The message's key.

        Raises:
            InvalidKeyError: It has none; says what to do.
        """
        if self._key is None:
            if not message.id:
                raise InvalidKeyError(self.no_id)
            return message.id
        return key_name(self._key(message), "the key of the message")

    def read(self, delivery: tuple[Any, ...]) -> Message:
        """A delivery, as the client hands it over, as a message."""
        raise NotImplementedError

    def behind(self, message: Message) -> bool:
        """Whether another message has to come before it."""
        return False

    def ack(self, message: Message) -> list[Step]:
        """The steps that say: done with it."""
        raise NotImplementedError

    def retry(self, message: Message, seconds: float) -> list[Step]:
        """The steps that give it back, to come again in about ``seconds``."""
        raise NotImplementedError

    def reject(self, message: Message) -> list[Step]:
        """The steps that make a dead letter of it, where ``rejects``."""
        raise NotImplementedError


class _SQS(Broker):
    """Amazon SQS: boto3's client, or aiobotocore's."""

    def __init__(self, client: Any, queue_url: str, key: KeyOf | None) -> None:
        super().__init__(key)
        self._client = client
        self._url = queue_url

    def read(self, delivery: tuple[Any, ...]) -> Message:
        (raw,) = delivery
        attributes = {
            name: str(value.get("StringValue", ""))
            for name, value in raw.get("MessageAttributes", {}).items()
        }
        attributes.update(raw.get("Attributes", {}))
        count = attributes.get("ApproximateReceiveCount")
        body = raw.get("Body", "").encode()
        attempts = int(count) if count else None
        return Message(raw["MessageId"], body, attributes, self._url, attempts, raw)

    def _call(self, method: str, message: Message, **more: Any) -> list[Step]:
        handle = message.raw["ReceiptHandle"]
        call = getattr(self._client, method)
        return [functools.partial(call, QueueUrl=self._url, ReceiptHandle=handle, **more)]

    def ack(self, message: Message) -> list[Step]:
        return self._call("delete_message", message)

    def retry(self, message: Message, seconds: float) -> list[Step]:
        timeout = min(43_200, max(0, ceil(seconds)))
        return self._call("change_message_visibility", message, VisibilityTimeout=timeout)


class _RabbitMQ(Broker):
    """RabbitMQ: deliveries of pika's ``BlockingChannel``, or messages of aio-pika."""

    rejects = True
    no_id = (
        "the message has no message_id: let the sender set one (pika.BasicProperties(message_id="
        "...), aio_pika.Message(..., message_id=...)), or take the key from a header or from the "
        'body: rabbitmq(key=field("order_id"))'
    )

    def read(self, delivery: tuple[Any, ...]) -> Message:
        if len(delivery) == 4:
            channel, method, properties, body = delivery
            if not hasattr(getattr(channel, "connection", None), "sleep"):
                raise BackendMismatchError(
                    "rabbitmq() takes deliveries of a channel of pika's BlockingConnection, or "
                    "messages of aio-pika"
                )
            source, name = method.routing_key, properties.message_id
        elif len(delivery) == 1 and hasattr(delivery[0], "message_id"):
            properties = delivery[0]
            body, source, name = properties.body, properties.routing_key, properties.message_id
        else:
            raise BackendMismatchError(
                "rabbitmq() takes what pika's basic_consume calls back with (channel, method, "
                f"properties, body), or a message of aio-pika; got {len(delivery)} arguments"
            )
        headers = {str(k): _text(v) for k, v in (properties.headers or {}).items()}
        count = headers.get("x-delivery-count", "")  # of quorum queues: times it came back
        attempts = int(count) + 1 if count.isdigit() else None
        return Message(name or "", bytes(body), headers, source or "", attempts, delivery)

    def _settle(self, message: Message, word: str, **more: Any) -> list[Step]:
        if len(message.raw) == 1:
            return [functools.partial(getattr(message.raw[0], word), **more)]
        channel, method = message.raw[:2]
        return [functools.partial(getattr(channel, "basic_" + word), method.delivery_tag, **more)]

    def ack(self, message: Message) -> list[Step]:
        return self._settle(message, "ack")

    def retry(self, message: Message, seconds: float) -> list[Step]:
        # RabbitMQ has no "later": what is given back comes again at once. So keep it until then.
        pika = len(message.raw) == 4
        wait = Sleep(seconds, message.raw[0].connection.sleep) if pika else Sleep(seconds)
        return [wait, *self._settle(message, "nack", requeue=True)]

    def reject(self, message: Message) -> list[Step]:
        return self._settle(message, "reject", requeue=False)


class _PubSub(Broker):
    """Google Cloud Pub/Sub: messages of a streaming pull (``subscriber.subscribe``)."""

    def __init__(self, subscription: str, key: KeyOf | None) -> None:
        super().__init__(key)
        self._subscription = subscription

    def read(self, delivery: tuple[Any, ...]) -> Message:
        (raw,) = delivery
        attributes = dict(raw.attributes)
        name, attempts = raw.message_id, raw.delivery_attempt
        return Message(name, raw.data, attributes, self._subscription, attempts, raw)

    def ack(self, message: Message) -> list[Step]:
        return [message.raw.ack]

    def retry(self, message: Message, seconds: float) -> list[Step]:
        return [message.raw.nack]  # when it comes again is the subscription's retry policy's


class _Held:
    """A partition that stands still at a message that has to come again."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.highest = offset  # that was given to us since, and not taken
        self.attempts = 1


class _Kafka(Broker):
    """Kafka: messages of confluent-kafka's ``Consumer``, or records of aiokafka's.

    Kafka has no acknowledgement of one message, only how far a partition is done. So a message that
    is given back holds its partition: the consumer goes back to it, and those behind it, which may
    be in hand already, are not taken before it was.
    """

    counts = False

    def __init__(self, consumer: Any, key: KeyOf | None) -> None:
        super().__init__(key)
        self._consumer = consumer
        self._held: dict[tuple[str, int], _Held] = {}

    def read(self, delivery: tuple[Any, ...]) -> Message:
        (raw,) = delivery
        error = raw.error() if callable(getattr(raw, "error", None)) else None
        if error is not None:
            raise BackendMismatchError(
                f"this is an error of the consumer, not a message: {error}. Look at "
                "message.error() before you hand it on"
            )
        topic, partition, offset = _where(raw)
        headers = _got(raw.headers) or ()
        attributes = {name: _text(value) for name, value in headers}
        if (key := _got(raw.key)) is not None:
            attributes["kafka.key"] = _text(key)
        value = _got(raw.value) or b""
        body = value if isinstance(value, bytes) else str(value).encode()
        held = self._held.get((topic, partition))
        attempts = held.attempts if held is not None and held.offset == offset else 1
        return Message(f"{topic}-{partition}-{offset}", body, attributes, topic, attempts, raw)

    def behind(self, message: Message) -> bool:
        topic, partition, offset = _where(message.raw)
        held = self._held.get((topic, partition))
        if held is None or offset <= held.offset:
            return False
        if offset <= held.highest:  # read again, and still the one before it did not come:
            del self._held[topic, partition]  # it is gone, by the topic's retention
            return False
        held.highest = offset
        return True

    def _partition(self, topic: str, partition: int) -> Any:
        for assigned in self._consumer.assignment():
            if assigned.topic == topic and assigned.partition == partition:
                return assigned
        return None  # another consumer has it now, and the message with it

    def ack(self, message: Message) -> list[Step]:
        topic, partition, offset = _where(message.raw)
        held = self._held.get((topic, partition))
        if held is not None and offset >= held.offset:
            del self._held[topic, partition]
        commit = self._consumer.commit
        if callable(message.raw.offset):
            return [functools.partial(commit, message=message.raw, asynchronous=False)]
        where = self._partition(topic, partition)
        return [] if where is None else [functools.partial(commit, {where: offset + 1})]

    def retry(self, message: Message, seconds: float) -> list[Step]:
        topic, partition, offset = _where(message.raw)
        held = self._held.setdefault((topic, partition), _Held(offset))
        if offset == held.offset:
            held.attempts += 1
        elif offset < held.offset:
            held = self._held[topic, partition] = _Held(offset)
        where = self._partition(topic, partition)
        if where is None:
            del self._held[topic, partition]
            return []
        seek = self._consumer.seek
        if callable(message.raw.offset):
            where.offset = held.offset
            return [functools.partial(seek, where), Sleep(seconds)]
        return [functools.partial(seek, where, held.offset), Sleep(seconds)]


def _got(value: Any) -> Any:
    """What confluent-kafka has as a method, and aiokafka as an attribute."""
    return value() if callable(value) else value


def _where(raw: Any) -> tuple[str, int, int]:
    return _got(raw.topic), _got(raw.partition), _got(raw.offset)


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def sqs(client: Any, queue_url: str, *, key: KeyOf | None = None) -> Broker:
    """Amazon SQS. The key is ``MessageId``, which a message that was sent twice has two of.

    ``attribute("MessageDeduplicationId")`` is better in a FIFO queue (ask for it with
    ``MessageSystemAttributeNames``), ``field("order_id")`` in any.

    Args:
        client: boto3's SQS client, or with ``AsyncOnce`` that of aiobotocore.
        queue_url: The queue.
        key: Where a message's key comes from.
    """
    return _SQS(client, queue_url, key)


def rabbitmq(*, key: KeyOf | None = None) -> Broker:
    """RabbitMQ. The key is the property ``message_id``, which the sender has to set.

    The function takes what ``basic_consume`` of pika calls back with, or with ``AsyncOnce`` a
    message of aio-pika.

    Args:
        key: Where a message's key comes from.
    """
    return _RabbitMQ(key)


def pubsub(subscription: str = "", *, key: KeyOf | None = None) -> Broker:
    """Google Cloud Pub/Sub. The key is ``message_id``; a message published twice has two of them.

    The function is the ``callback`` of ``subscriber.subscribe``. A message that is given back comes
    again when the subscription's retry policy says: set one.

    Args:
        subscription: Its name, for logs.
        key: Where a message's key comes from.
    """
    return _PubSub(subscription, key)


def kafka(consumer: Any, *, key: KeyOf | None = None) -> Broker:
    """Kafka. The key is topic, partition and offset; a message produced twice has two of them.

    ``attribute("event-id")`` takes a header instead, ``attribute("kafka.key")`` the record's key.

    Args:
        consumer: confluent-kafka's ``Consumer``, or with ``AsyncOnce`` aiokafka's; made with
            ``enable.auto.commit`` off.
        key: Where a message's key comes from.
    """
    return _Kafka(consumer, key)
