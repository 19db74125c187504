"""An app that pulls: ``python -m tests.server.taker INBOX APP``, until SIGTERM.

It consumes what the gateway keeps for the target ``app``, and writes the key of each event into the
table ``effects`` of its own database, in one transaction with the end of the delivery.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

from tests.inbox.node import consumer_of

from oncekey.inbox import open_inbox


async def main(store: str, app: str) -> None:
    inbox = await open_inbox(store)
    pool: Any = None
    if app.startswith("postgresql"):
        import asyncpg

        pool = await asyncpg.create_pool(app, min_size=1, max_size=2)
    consumer = consumer_of(inbox, app, pool)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    running = asyncio.create_task(consumer.run())
    print("up", flush=True)
    await ended.wait()
    await consumer.stop()
    await running
    if pool is not None:
        await pool.close()
    await inbox.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
