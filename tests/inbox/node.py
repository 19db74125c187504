"""A node that is killed: ``python node.py URL NAME TARGET FIRST LAST CONSUME``.

It ingests its events, each twice, prints the number of each when it is acknowledged, and delivers:
to TARGET by HTTP, and to the table ``effects`` of the database CONSUME by a consumer. It ends by
itself when it has ingested all and nothing waits any more.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from typing import Any

from oncekey import SQLiteStore
from oncekey.inbox import Arrival, AsyncInbox, Delivery, Route, TargetPolicy, open_inbox
from oncekey.inbox.consume import Consumer
from oncekey.inbox.delivery import DeliveryWorker, Destination
from oncekey.inbox.targets import HttpTarget

POLICY = TargetPolicy(timeout=0.5, first_delay=0.05, factor=1, tries=1000, breaker_after=0)
ONE = TargetPolicy(
    timeout=0.5, first_delay=0.05, factor=1, tries=1000, breaker_after=0, concurrency=1
)


async def ingest(inbox: AsyncInbox, name: str, numbers: range) -> None:
    async def one(number: int) -> None:
        key = f"{name}{number}"
        body = key.encode() * 50
        routes = (Route("web"), Route("app", order_key=f"{name}{number % 7}"))
        arrival = Arrival("shop", key, "paid", body, (("content-type", "x/y"),), routes)
        kept = await asyncio.gather(inbox.ingest(arrival), inbox.ingest(arrival))
        assert len({one.id for one in kept}) == 1
        print(number, kept[0].id, flush=True)

    for start in range(numbers.start, numbers.stop, 10):
        await asyncio.gather(*(one(n) for n in range(start, min(start + 10, numbers.stop))))


def consumer_of(inbox: AsyncInbox, app: str, pool: Any) -> Consumer:
    if pool is not None:
        consumer = Consumer(inbox, "app", on=pool, policy=ONE)

        @consumer
        async def effect(connection: Any, delivery: Delivery) -> None:
            await connection.execute("INSERT INTO effects (name) VALUES ($1)", delivery.event.key)

        return consumer
    if not inbox.url.endswith(app):
        # The inbox is elsewhere: the record in the app's own file makes a second one a replay.
        elsewhere = Consumer(inbox, "app", on=None, store=SQLiteStore(app), policy=ONE)

        @elsewhere
        def replayed(connection: Any, delivery: Delivery) -> None:
            connection.execute("INSERT INTO effects (name) VALUES (?)", (delivery.event.key,))

        return elsewhere
    opened = sqlite3.connect(app, check_same_thread=False, isolation_level=None, timeout=20)
    opened.execute("PRAGMA synchronous=NORMAL")  # the processes die here, the machine does not
    consumer = Consumer(inbox, "app", on=opened, policy=ONE)

    @consumer
    def plain(connection: Any, delivery: Delivery) -> None:
        connection.execute("INSERT INTO effects (name) VALUES (?)", (delivery.event.key,))

    return consumer


async def main(url: str, name: str, target: str, first: str, last: str, app: str) -> None:
    inbox = await open_inbox(url, node=f"{name}:{first}")
    pool: Any = None
    if app.startswith("postgresql"):
        import asyncpg

        pool = await asyncpg.create_pool(app, min_size=1, max_size=2)
    to = HttpTarget(target, allow_private=True)
    worker = DeliveryWorker(inbox, {"web": Destination(to, POLICY)})
    consumer = consumer_of(inbox, app, pool)
    tasks = [asyncio.create_task(worker.run()), asyncio.create_task(consumer.run())]
    await ingest(inbox, name, range(int(first), int(last)))
    while any(depth.waiting for depth in await inbox.depths()):
        await asyncio.sleep(0.05)
    await worker.stop()
    await consumer.stop()
    await asyncio.gather(*tasks)
    await to.aclose()
    if pool is not None:
        await pool.close()
    await inbox.aclose()
    print("over", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
