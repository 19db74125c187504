"""A program whose consumers die: it forks one for each order, as ``crashing`` does."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Generator
from typing import Any

from tests.inbox.test_consume import handler_of, options_of, passed
from tests.transactions.conftest import make_store
from tests.transactions.crashing import LOADED, Strike, follow
from tests.transactions.routes import Caller, Place, Route

from oncekey.inbox import Delivery, consume, open_inbox

# Before the transaction, before and after the app's writes, before the commit, and after it.
HERE = ["fetched", "taken", "written", "completed", "committed"]
# With a record of the app's own; after the commit the inbox does not know of it yet.
ELSEWHERE = ["fetched", "opened", "claimed", "written", "completed", "committed"]


def _struck(strike: Strike) -> Callable[..., Any]:
    """``connection_of``, which strikes before and after the commit."""
    find = consume.connection_of

    def connection_of(*args: Any) -> Generator[Any, Any, Any]:
        on = yield from find(*args)
        commit = on.commit

        def committed() -> Generator[Any, Any, None]:
            strike("completed")
            yield from commit()
            strike("committed")

        on.commit = committed
        return on

    return connection_of


def _handler(caller: Caller, strike: Strike) -> Callable[..., Any]:
    write = handler_of(caller)

    def plain(connection: Any, delivery: Delivery) -> None:
        strike("taken")
        write(connection, delivery)
        strike("written")

    async def awaits(connection: Any, delivery: Delivery) -> None:
        strike("taken")
        await write(connection, delivery)
        strike("written")

    return awaits if inspect.iscoroutinefunction(write) else plain


async def _die(url: str, route: Route, place: Place, step: str, elsewhere: bool) -> None:
    def strike(reached: str) -> None:
        if reached == step:
            os.kill(os.getpid(), signal.SIGKILL)

    store: Any = None
    if elsewhere:
        store = make_store(route, place)
        follow(store, strike)
    else:
        consume.connection_of = _struck(strike)
    inbox = await open_inbox(url)
    async with Caller(route, place).opened(**options_of(route)) as caller:
        consumer = consume.Consumer(inbox, "app", on=passed(caller, []), store=store)
        consumer(_handler(caller, strike))
        (delivery,) = await inbox.fetch({"app": 1}, 1)  # whoever lives has it again at once
        strike("fetched")
        await consumer.send(delivery, 20_000)


def main() -> None:
    """Carry out orders until there are no more."""
    for module in LOADED:
        importlib.import_module(module)
    for line in sys.stdin:
        url, route, place, step, elsewhere = json.loads(line)
        child = os.fork()
        if child == 0:
            asyncio.run(_die(url, Route(*route), Place(*place), step, elsewhere))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
