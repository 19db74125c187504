"""Consumers on a real RabbitMQ, with pika and with aio-pika."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from oncekey import AsyncOnce, MemoryBackend, MemoryStore, Once
from oncekey.adapters.messages import Message, Outcome, field, idempotent, rabbitmq

pika = pytest.importorskip("pika", reason="make test-brokers installs it")
aio_pika = pytest.importorskip("aio_pika", reason="make test-brokers installs it")

_numbers = itertools.count()


class Desk:
    """A queue with a dead-letter queue, and what is needed to look at both."""

    def __init__(self, connection: Any) -> None:
        self.channel = connection.channel()
        self.channel.confirm_delivery()
        self.name = f"orders-{next(_numbers)}"
        self.dead = self.name + "-dead"
        self.channel.queue_declare(self.dead)
        arguments = {
            "x-queue-type": "quorum",
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": self.dead,
        }
        self.channel.queue_declare(self.name, durable=True, arguments=arguments)

    def send(self, body: bytes, message_id: str | None = None) -> None:
        properties = pika.BasicProperties(message_id=message_id)
        self.channel.basic_publish("", self.name, body, properties)

    def take(self, consumer: Any, number: int) -> list[Outcome]:
        """What becomes of so many deliveries."""
        outcomes = []
        for delivery in self.channel.consume(self.name, inactivity_timeout=30):
            assert delivery[0] is not None, "no delivery came"
            outcomes.append(consumer(self.channel, *delivery))
            if len(outcomes) == number:
                break
        self.channel.cancel()
        return outcomes

    def left(self, queue: str) -> int:
        return int(self.channel.queue_declare(queue, passive=True).method.message_count)


@pytest.fixture
def desk(rabbit: int) -> Iterator[Desk]:
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", rabbit))
    yield Desk(connection)
    connection.close()


def test_copies_run_once_and_failures_come_again(desk: Desk) -> None:
    """Two copies and a failure on a real queue: one effect, and nothing is left."""
    ran: list[tuple[str, int | None]] = []

    @idempotent(Once(MemoryStore()), rabbitmq(), name="paid", retry_seconds=0)
    def paid(message: Message) -> None:
        ran.append((message.id, message.attempts))
        if len(ran) == 1:
            raise ValueError("at first")

    desk.send(b"{}", "m-1")
    desk.send(b"{}", "m-1")
    # A quorum queue puts what is given back where it was, or at its end: either copy may be next.
    assert sorted(desk.take(paid, 3)) == ["done", "duplicate", "failed"]
    assert [name for name, _ in ran] == ["m-1", "m-1"]
    assert desk.left(desk.name) == 0


def test_what_can_t_be_run_is_a_dead_letter(desk: Desk) -> None:
    """No message_id, and a key with another body: both go to the queue's dead letters."""
    once = Once(MemoryStore())

    @idempotent(once, rabbitmq(), name="named")
    def named(message: Message) -> None: ...

    @idempotent(once, rabbitmq(key=field("order")), name="ordered")
    def ordered(message: Message) -> None: ...

    desk.send(b"{}")
    assert desk.take(named, 1) == [Outcome.REFUSED]
    desk.send(b'{"order": 1, "cents": 5}')
    desk.send(b'{"order": 1, "cents": 6}')
    assert desk.take(ordered, 2) == [Outcome.DONE, Outcome.REFUSED]
    bodies = []
    for _ in range(2):
        method, _properties, body = next(desk.channel.consume(desk.dead, inactivity_timeout=30))
        desk.channel.basic_ack(method.delivery_tag)
        bodies.append(body)
    desk.channel.cancel()
    assert bodies == [b"{}", b'{"order": 1, "cents": 6}']


def test_a_quorum_queue_counts_deliveries(desk: Desk) -> None:
    """The broker's count is there, for those who run in transactions."""
    seen: list[int | None] = []

    @idempotent(Once(MemoryStore()), rabbitmq(), name="seen", retry_seconds=0)
    def look(message: Message) -> None:
        seen.append(message.attempts)
        if len(seen) < 3:
            raise ValueError

    desk.send(b"{}", "m-1")
    desk.take(look, 3)
    assert seen[1:] == [2, 3]


async def test_aio_pika(rabbit: int) -> None:
    """Its messages are taken as they come: a copy is acknowledged, a failure comes again."""
    connection = await aio_pika.connect(f"amqp://guest:guest@127.0.0.1:{rabbit}/")
    ran: list[str] = []
    outcomes: asyncio.Queue[Outcome] = asyncio.Queue()

    @idempotent(AsyncOnce(MemoryBackend()), rabbitmq(), name="paid", retry_seconds=0)
    async def paid(message: Message) -> None:
        ran.append(message.id)
        if len(ran) == 1:
            raise ValueError("at first")

    async def taken(message: Any) -> None:
        await outcomes.put(await paid(message))

    async with connection:
        channel = await connection.channel()
        await channel.set_qos(1)
        queue = await channel.declare_queue(exclusive=True)
        for name in ("m-1", "m-1"):
            message = aio_pika.Message(b"{}", message_id=name)
            await channel.default_exchange.publish(message, queue.name)
        await queue.consume(taken)
        found = [await outcomes.get() for _ in range(3)]
    assert sorted(found) == ["done", "duplicate", "failed"]
    assert ran == ["m-1", "m-1"]
