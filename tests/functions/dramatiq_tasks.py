"""Actors for a real Dramatiq worker. The tests import it too, to send messages."""

from __future__ import annotations

import os

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import CurrentMessage
from workers import Place

from oncekey import Once, SQLiteStore, current_claim, current_transaction
from oncekey.adapters.dramatiq import once_actor

place = Place(os.environ["PLACE"])
# A worker that is gone is found out soon: messages that it had come again.
broker = RedisBroker(url=os.environ["BROKER"], heartbeat_timeout=1000, maintenance_chance=1_000_000)
broker.add_middleware(CurrentMessage())
dramatiq.set_broker(broker)
store = SQLiteStore(place.database)
once = Once(store, scope="dramatiq")
with once.guard("opened before the workers are forked") as claim:
    assert claim.replayed in (True, False)  # this module is imported once more by the worker


@dramatiq.actor
@once_actor(once, key="order_id", retry_seconds=0.2)
def charge(order_id: str, cents: int) -> None:
    place.effect(order_id)


@dramatiq.actor(max_retries=0)
@once_actor(once, key="order_id", retry_seconds=0.2)
def slow(order_id: str) -> None:
    place.pass_gate(order_id)
    place.effect(order_id)


@dramatiq.actor
@once_actor(once, key="order_id", lease=1)
def dies(order_id: str) -> None:
    place.effect(f"{order_id} {current_claim().takeover}")
    place.die_at_first(order_id)


@dramatiq.actor
@once_actor(once, key="order_id", transactional=True, retry_seconds=0.2)
def dies_in_transaction(order_id: str) -> None:
    current_transaction().connection.execute("INSERT INTO effects VALUES (?)", (order_id,))
    place.effect(order_id)
    place.die_at_first(order_id)
