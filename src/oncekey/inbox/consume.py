"""``Consumer``: deliveries of a target, inside the app's own transaction.

With the inbox in the app's database, the app's writes and the end of the delivery are one commit: a
crash at any point leaves both or neither. With the inbox elsewhere, a record in the app's own
database, written with its effects, makes a second delivery a replay. Either way each event has its
effect exactly once.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Final

from oncekey._core.drive import adrive, drive
from oncekey.drivers import Calls, DriverConnection, connection_of
from oncekey.errors import (
    IdempotencyInFlightError,
    PermanentError,
    PolicyError,
    TransactionRefusedError,
)
from oncekey.inbox.abc import AsyncInbox
from oncekey.inbox.delivery import DeliveryWorker
from oncekey.inbox.lanes import Destination, Lane
from oncekey.inbox.models import Delivery, Outcome, event_key, event_number
from oncekey.inbox.policy import TargetPolicy
from oncekey.inbox.search import PARKED
from oncekey.inbox.targets.base import Answer
from oncekey.inbox.views import SQL
from oncekey.models import check_text
from oncekey.policy import Duration, milliseconds

__all__ = ["Consumer", "Taken"]

Handler = Callable[[Any, Delivery], Any]

REMEMBER: Final = 30 * 86_400
"""Seconds: as long as a worker keeps finished events, if it is not told otherwise."""

_POLL: Final = 0.25


class LostDeliveryError(Exception):
    """Another worker has this delivery by now: nothing of ours is to be committed."""


class Consumer:
    """Takes a target's deliveries into the app's own transactions.

    Args:
        inbox: Where deliveries come from.
        target: Which target's. Nobody else should deliver to it.
        on: Where the app writes: a connection, session, pool, engine or a factory of those, sync or
            async as the handler is (psycopg, asyncpg, SQLAlchemy, Django, sqlite3, aiosqlite). With
            more than one delivery at a time it must be a pool, engine or factory.
        store: The app's own store, if the inbox is in another database than ``on``: its record is
            what makes a second delivery a replay. ``None``: the inbox is in the app's database.
        policy: How often and how fast; one at a time if not given.
        remember: With ``store``: how long its record makes a second delivery a replay. Longer than
            the inbox may bring an event again, pauses of the target and of the app counted in.

    Example:
        A handler that is exactly once::

            consumer = Consumer(inbox, "app", on=pool)

            @consumer
            async def paid(connection, delivery):
                await connection.execute("INSERT INTO payments ...")

            await consumer.run()
    """

    def __init__(
        self,
        inbox: AsyncInbox,
        target: str,
        *,
        on: Any,
        store: Any = None,
        policy: TargetPolicy | None = None,
        remember: Duration = REMEMBER,
    ) -> None:
        self._inbox = inbox
        self.target = check_text(target, "the name of a target", 200)
        milliseconds(remember, "remember", least=86_400_000)
        self._remember = remember
        self._on = on
        self._store = store
        self._policy = policy or TargetPolicy(concurrency=1)
        self._handler: Handler | None = None
        self._worker: DeliveryWorker | None = None
        self._refusal: TransactionRefusedError | None = None
        self._lane = Lane(target, Destination(self, self._policy), time.monotonic)

    def __call__(self, handler: Handler) -> Handler:
        """Make a function the handler: it gets where to write, and the delivery."""
        self._handler = handler
        return handler

    async def run(self) -> None:
        """Handle deliveries until ``stop`` is called.

        Raises:
            PolicyError: There is no handler.
            TransactionRefusedError: No delivery can be handled on such a connection; says why.
        """
        if self._handler is None:
            raise PolicyError("this consumer has no handler: decorate a function with it")
        destination = Destination(self, self._policy)
        self._worker = DeliveryWorker(self._inbox, {self.target: destination}, keep=None)
        await self._worker.run()
        if self._refusal is not None:
            await self._worker.stop()
            raise self._refusal

    async def stop(self, grace: Duration = 10) -> int:
        """Take no more; let handlers end for a while, hand the rest back."""
        return 0 if self._worker is None else await self._worker.stop(grace)

    # A target, so that the worker drives it

    async def send(self, delivery: Delivery, timeout_ms: int) -> Answer:
        """Handle one delivery; see ``Target``."""
        try:
            await self._handle(delivery, timeout_ms)
        except TimeoutError:
            return Answer(False, error="timeout", sick=False)
        except (IdempotencyInFlightError, LostDeliveryError):
            return Answer(False, error="in another worker's hand", sick=False)
        except PermanentError as error:
            note = str(error)
            return Answer(False, error="PermanentError", note=note, permanent=True, sick=False)
        except TransactionRefusedError as error:
            self._refusal = error  # the same for every delivery: run() ends with it
            if self._worker is not None:
                self._worker.halt()
            return Answer(False, error=type(error).__name__, note=str(error), sick=False)
        except Exception as error:  # noqa: BLE001 - a handler's failure is an outcome
            return Answer(False, error=type(error).__name__, sick=False)
        return Answer(True, settled=self._store is None)

    async def _handle(self, delivery: Delivery, timeout_ms: int) -> None:
        handler = self._handler
        assert handler is not None  # noqa: S101 - run() looked
        began = time.monotonic()
        try:
            if inspect.iscoroutinefunction(handler):
                async with asyncio.timeout(timeout_ms / 1000):
                    async with self._transaction(delivery, began) as connection:
                        if connection is not None:
                            await handler(connection, delivery)
            else:
                # A thread can't be stopped: its transaction decides by itself whether it counts.
                await asyncio.to_thread(self._in_thread, handler, delivery, began)
        except LostDeliveryError:
            await self._refuse_strangers(delivery)
            raise

    async def aclose(self) -> None:
        """See ``Target``; what the app passed in is the app's."""

    async def _refuse_strangers(self, delivery: Delivery) -> None:
        """Raise if the delivery is still ours: then the app writes to another database."""
        if all(await self._inbox.renew([delivery], self._policy.lease_ms)):
            raise TransactionRefusedError(
                "this connection is to another database than the inbox's, so that writes and the "
                "end of a delivery can't be one commit: pass store=, a store of the app's database"
            )

    def _transaction(self, delivery: Delivery, began: float) -> _Transaction:
        block = None if self._store is None else self._recorded(delivery)
        return _Transaction(block, self._on, delivery, began)

    def _recorded(self, delivery: Delivery) -> Any:
        """A transaction of the app's store, whose record is this target's of this event.

        Two inboxes may give two events one id: what the event is goes into its key.
        """
        event = delivery.event
        key = f"{event.id}:{event_key(event.source, event.key).digest.hex()[:32]}"
        scope = f"inbox {self.target}"
        return self._store.transaction(key, on=self._on, scope=scope, ttl=self._remember)

    def _in_thread(self, handler: Handler, delivery: Delivery, began: float) -> None:
        """A plain handler: connection, claim, work and commit, all in one thread."""
        if self._store is not None:
            with self._recorded(delivery) as tx:
                if not tx.replayed:
                    handler(tx.connection, delivery)
            return
        on = drive(connection_of(self._on, None, None, False), _call)
        try:
            drive(_enter(on, delivery), _call)
            handler(on.target, delivery)
            drive(_leave(on, delivery, began), _call)
        except BaseException:
            drive(on.rollback(), _call)
            raise

    # An iterator, for those who want a loop of their own

    async def __aiter__(self) -> AsyncIterator[Taken]:
        """Deliveries one at a time; each is to be entered with ``async with``."""
        while True:
            found = await self._inbox.fetch({self.target: 1}, self._policy.lease_ms)
            if not found:
                await self._inbox.wait_for_work(_POLL)
                continue
            taken = Taken(self, found[0])
            try:
                yield taken
            finally:
                if not taken.entered:
                    await self._inbox.hand_back(found)


class Taken:
    """One delivery of a loop: ``async with taken as connection``.

    What the block raises is recorded as a failed attempt, and raised again. On a replay, where the
    work was done before, there is nothing to do: ``connection`` is ``None``.

    Attributes:
        delivery: What came.
        entered: Whether it was begun.
    """

    def __init__(self, consumer: Consumer, delivery: Delivery) -> None:
        self.delivery = delivery
        self.entered = False
        self._consumer = consumer
        self._stack = AsyncExitStack()
        self._began = time.monotonic()
        self._lost = False

    async def __aenter__(self) -> Any:
        self.entered = True
        self._began = time.monotonic()
        try:
            try:
                transaction = self._consumer._transaction(self.delivery, self._began)
                return await self._stack.enter_async_context(transaction)
            except LostDeliveryError:
                self._lost = True
                await self._consumer._refuse_strangers(self.delivery)
                return None
        except TransactionRefusedError:
            await self._consumer._inbox.hand_back([self.delivery])
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        consumer = self._consumer
        if self._lost:
            return  # somebody else says how it ended
        try:
            await self._stack.__aexit__(kind, error, trace)
        except Exception as failed:
            error = error or failed
            raise
        finally:
            answer = Answer(True)
            if error is not None:
                permanent = isinstance(error, PermanentError)
                name = type(error).__name__
                answer = Answer(False, error=name, permanent=permanent, sick=False)
            ms = round((time.monotonic() - self._began) * 1000)
            result = consumer._lane.judged(self.delivery, answer, ms)
            if error is None and consumer._store is None:
                consumer._inbox.settled(result)
            else:
                await consumer._inbox.finish([result])


class _Transaction:
    """The app's own transaction around a delivery, async; gives what to write on."""

    def __init__(self, block: Any, on: Any, delivery: Delivery, began: float) -> None:
        self._block = block  # with the inbox elsewhere: of the app's store
        self._given = on
        self._delivery = delivery
        self._began = began
        self._on: DriverConnection | None = None

    async def __aenter__(self) -> Any:
        if self._block is not None:
            tx = await self._block.__aenter__()
            return None if tx.replayed else tx.connection
        on = await adrive(connection_of(self._given, None, None, True), _acall)
        self._on = on
        try:
            await adrive(_enter(on, self._delivery), _acall)
        except BaseException:
            await adrive(on.rollback(), _acall)
            raise
        return on.target

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._block is not None:
            await self._block.__aexit__(kind, error, trace)
            return
        on = self._on
        assert on is not None  # noqa: S101 - it was entered
        if error is not None:
            await adrive(on.rollback(), _acall)
            return
        try:
            await adrive(_leave(on, self._delivery, self._began), _acall)
        except BaseException:
            await adrive(on.rollback(), _acall)
            raise


def _enter(on: DriverConnection, delivery: Delivery) -> Calls[None]:
    """Begin, and end the delivery in this transaction, if it is still ours."""
    yield from on.begin()
    if delivery.order_key is not None and on.flavour == "postgresql":
        rows = yield from on.execute(_postgres("isolation"), [])
        if rows[0][0] != "read committed":
            raise TransactionRefusedError(
                f"an ordered delivery can't be consumed in a {rows[0][0]} transaction, which does "
                "not see who waits for it: use READ COMMITTED, or leave order_by out"
            )
    place = [event_number(delivery.event.id), delivery.target, delivery.fence]
    rows = yield from on.execute(_text(on, SQL["take"]), place)
    if not rows:
        raise LostDeliveryError


def _leave(on: DriverConnection, delivery: Delivery, began: float) -> Calls[None]:
    """Add the attempt to the history, let a follower go, commit."""
    number = event_number(delivery.event.id)
    now = int(time.time() * 1000)
    if on.flavour == "postgresql":
        rows = yield from on.execute(_postgres("now"), [])
        now = rows[0][0]
    yield from on.flush()
    on.must_be_open()
    ms = round((time.monotonic() - began) * 1000)
    done = Outcome.DELIVERED.value
    attempt = [number, delivery.target, delivery.fence, now, ms, done, 0, "", "", ""]
    yield from on.execute(_text(on, SQL["add_attempt"] + " RETURNING 1"), attempt)
    if delivery.order_key is not None:
        if on.flavour == "postgresql":
            # Only now: whoever brings an event of this entity waits for it, and others with them.
            asked = [[delivery.target], [delivery.order_key]]
            yield from on.execute(_postgres("lock_order"), asked)
        follow = [delivery.target, delivery.order_key, now, PARKED]
        yield from on.execute(_text(on, SQL["promote"] + " RETURNING 1"), follow)
    yield from on.commit()


def _postgres(name: str) -> str:
    from oncekey.inbox.postgres.schema import SQL as STATEMENTS

    return STATEMENTS[name]


def _text(on: DriverConnection, sql: str) -> str:
    return sql.replace("$", "?") if on.flavour == "sqlite" else sql


def _call(call: tuple[Any, ...]) -> Any:
    return call[0](*call[1:])


async def _acall(call: tuple[Any, ...]) -> Any:
    done = call[0](*call[1:])
    return await done if inspect.isawaitable(done) else done
