"""Decorated handlers and webhook deliveries in a transaction: once, whatever comes twice."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any

import pytest
from tests.transactions.conftest import Witness
from tests.transactions.routes import Caller, Route, done, entered

from oncekey import (
    AsyncOnce,
    IdempotencyConflictError,
    IdempotencyInFlightError,
    IdempotencyStore,
    InvalidKeyError,
    Once,
    SyncWebhookDedupStore,
    ToolContext,
    TransactionRefusedError,
    WebhookDedupStore,
    current_transaction,
)

ROUTES = [
    Route("pg", "sync", "psycopg", "none"),
    Route("pg", "sync", "sqlalchemy+psycopg", "sessionmaker"),
    Route("pg", "async", "asyncpg", "none"),
    Route("pg", "async", "sqlalchemy+asyncpg", "sessionmaker"),
    Route("sqlite", "sync", "sqlite3", "none"),
    Route("sqlite", "async", "aiosqlite", "none"),
]
everywhere = pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.id)
ALICE = ToolContext(caller_identity="alice")


def at_once(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits")


async def elsewhere(route: Route, call: Any) -> Any:
    """Make a call as another request would: from another thread or task, with nothing open."""
    if route.world == "sync":
        return await asyncio.to_thread(contextvars.Context().run, call)

    async def called() -> Any:
        return await call()

    return await asyncio.create_task(called(), context=contextvars.Context())


class Work:
    """A handler, sync or async as the route is, that can be told to fail or to ask again."""

    def __init__(self, route: Route, caller: Caller, name: str) -> None:
        self.route, self.caller, self.name = route, caller, name
        self.ran = 0
        self.answer: Any = {"id": 7}
        self.error: Exception | None = None
        self.meanwhile: Any = None

    async def __call__(self, tx: Any) -> Any:
        self.ran += 1
        await self.caller.write(tx.connection, self.name)
        if self.meanwhile is not None:
            self.meanwhile()
        if self.error is not None:
            raise self.error
        return self.answer

    def handler(self, kind: str) -> Any:
        """A function for one of the decorators."""
        if self.route.world == "async":

            async def create(params: Any, context: Any = None, *, tx: Any) -> Any:
                assert current_transaction() is tx
                return await self(tx)

            async def plain(key: str, amount: int) -> Any:
                return await self(current_transaction())

            async def deliver(sender: str, key: str, payload: Any, *, tx: Any) -> None:
                await self(tx)

            return {"request": create, "once": plain, "webhook": deliver}[kind]

        def create_now(params: Any, context: Any = None, *, tx: Any) -> Any:
            assert current_transaction() is tx
            return at_once(self(tx))

        def plain_now(key: str, amount: int) -> Any:
            return at_once(self(current_transaction()))

        def deliver_now(sender: str, key: str, payload: Any, *, tx: Any) -> None:
            at_once(self(tx))

        return {"request": create_now, "once": plain_now, "webhook": deliver_now}[kind]


@pytest.fixture
def work(route: Route, caller: Caller, name: str) -> Work:
    return Work(route, caller, name)


@everywhere
async def test_wrapped_handler_runs_once_and_its_answer_is_replayed(
    route: Route, store: Any, caller: Caller, witness: Witness, work: Work, name: str
) -> None:
    """Another payload is a conflict, a request without a key is refused, replays write nothing."""
    idempotency = IdempotencyStore(store)
    create = idempotency.wrap(transactional=True, on=caller.on)(work.handler("request"))
    params = {"idempotency_key": name[-200:], "amount": 1}
    for _ in range(3):
        assert await done(create(params, ALICE)) == {"id": 7}
    with pytest.raises(IdempotencyConflictError):
        await done(create({**params, "amount": 2}, ALICE))
    for bad, who in (({"amount": 1}, ALICE), (params, None)):
        with pytest.raises(InvalidKeyError):
            with pytest.warns() if who is None else _nothing():
                await done(create(bad, who))
    assert (work.ran, witness.effects(route.flavour, name)) == (1, 1)


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *exc: object) -> None: ...


@everywhere
async def test_wrapped_handler_that_fails_leaves_nothing(
    route: Route, store: Any, caller: Caller, witness: Witness, work: Work, name: str
) -> None:
    """An exception and an answer that says errors are rolled back; the next call runs."""
    idempotency = IdempotencyStore(store)
    create = idempotency.wrap(transactional=True, on=caller.on)(work.handler("request"))
    params = {"idempotency_key": name[-200:]}
    work.error = KeyError("no")
    with pytest.raises(KeyError):
        await done(create(params, ALICE))
    work.error, work.answer = None, {"errors": ["no"]}
    assert await done(create(params, ALICE)) == {"errors": ["no"]}
    assert (work.ran, witness.effects(route.flavour, name)) == (2, 0)
    work.answer = {"id": 8}
    for _ in range(2):
        assert await done(create(params, ALICE)) == {"id": 8}
    assert (work.ran, witness.effects(route.flavour, name)) == (3, 1)


@everywhere
async def test_wrapped_handlers_error_can_be_its_answer(
    route: Route, store: Any, caller: Caller, witness: Witness, work: Work, name: str
) -> None:
    """With ``error_answer`` the caller gets that answer, now and ever after, without the writes."""
    decorate = IdempotencyStore(store).wrap(
        transactional=True, on=caller.on, error_answer=lambda error: {"refused": str(error)}
    )
    create = decorate(work.handler("request"))
    work.error = ValueError("too much")
    for _ in range(2):
        answer = await done(create({"idempotency_key": name[-200:]}, ALICE))
        assert answer == {"refused": "too much"}
    assert (work.ran, witness.effects(route.flavour, name)) == (1, 0)


@everywhere
async def test_wrapped_handler_that_is_running_is_in_flight_for_others(
    route: Route, store: Any, caller: Caller, witness: Witness, work: Work, name: str
) -> None:
    """A copy is rejected at once while the first runs, and inside the handler itself refused."""
    idempotency = IdempotencyStore(store, on_in_flight="reject")
    create = idempotency.wrap(transactional=True, on=caller.on)(work.handler("request"))
    params = {"idempotency_key": name[-200:]}
    copies: list[Any] = []
    if route.world == "async":
        running, go_on = asyncio.Event(), asyncio.Event()
        handler = work.handler("request")

        async def slow(params: Any, context: Any = None, *, tx: Any) -> Any:
            with pytest.raises(TransactionRefusedError):
                await held(params, ALICE)
            running.set()
            await go_on.wait()
            return await handler(params, context, tx=tx)

        held = idempotency.wrap(transactional=True, on=caller.on, operation="create")(slow)
        first = asyncio.create_task(held(params, ALICE))
        await running.wait()
        with pytest.raises(IdempotencyInFlightError):
            await elsewhere(route, lambda: create(params, ALICE))
        go_on.set()
        assert await first == {"id": 7}
    else:

        def ask_again() -> None:
            with pytest.raises(TransactionRefusedError):
                create(params, ALICE)
            context = contextvars.Context()
            with pytest.raises(IdempotencyInFlightError) as caught:
                context.run(create, params, ALICE)
            copies.append(caught.value)

        work.meanwhile = ask_again
        assert create(params, ALICE) == {"id": 7}
        assert len(copies) == 1
    assert (work.ran, witness.effects(route.flavour, name)) == (1, 1)


@everywhere
async def test_once_decorator_runs_in_a_transaction(
    route: Route, store: Any, caller: Caller, witness: Witness, work: Work, name: str
) -> None:
    """``@once(transactional=True)``: effect and answer together, replays, conflicts, failures."""
    once: Any = (Once if route.world == "sync" else AsyncOnce)(store)
    pay = once(key="key", name="pay", transactional=True, on=caller.on)(work.handler("once"))
    work.error = KeyError("no")
    with pytest.raises(KeyError):
        await done(pay(name, 1))
    assert witness.effects(route.flavour, name) == 0
    work.error = None
    for _ in range(2):
        assert await done(pay(name, 1)) == {"id": 7}
    with pytest.raises(IdempotencyConflictError):
        await done(pay(name, 2))
    assert (work.ran, witness.effects(route.flavour, name)) == (2, 1)


def dedup_of(route: Route, store: Any) -> Any:
    return (SyncWebhookDedupStore if route.world == "sync" else WebhookDedupStore)(store)


@everywhere
@pytest.mark.parametrize("payload", [{"a": 1}, b'{"a": 1}'], ids=["json", "bytes"])
async def test_wrapped_webhook_is_handled_once(
    route: Route,
    store: Any,
    caller: Caller,
    witness: Witness,
    work: Work,
    name: str,
    payload: Any,
) -> None:
    """True for the delivery that was handled, False for copies; a failure leaves it to the next."""
    dedup = dedup_of(route, store)
    receive = dedup.wrap(work.handler("webhook"), on=caller.on)
    work.error = KeyError("no")
    with pytest.raises(KeyError):
        await done(receive("sender", name, payload))
    assert witness.effects(route.flavour, name) == 0
    work.error = None
    assert await done(receive("sender", name, payload)) is True
    assert await done(receive("sender", name, payload)) is False
    with pytest.raises(IdempotencyConflictError):
        await done(receive("sender", name, {"a": 2}))
    assert (work.ran, witness.effects(route.flavour, name)) == (2, 1)
    assert await done(receive("another", name, {"a": 2})) is True
    assert await done(dedup.check_and_record("sender", name)) is False


@everywhere
async def test_copies_of_a_webhook_at_once_are_handled_once(
    route: Route, store: Any, caller: Caller, witness: Witness, work: Work, name: str
) -> None:
    """Eight copies at the same time: one says that it handled it, seven that it was done."""
    receive = dedup_of(route, store).wrap(work.handler("webhook"), on=caller.on)
    calls = [elsewhere(route, lambda: receive("sender", name, b"x")) for _ in range(8)]
    assert sorted(await asyncio.gather(*calls)) == [False] * 7 + [True]
    assert (work.ran, witness.effects(route.flavour, name)) == (1, 1)


@everywhere
async def test_webhook_in_a_transaction_is_in_flight_for_others(
    route: Route, store: Any, caller: Caller, witness: Witness, name: str
) -> None:
    """A copy that does not want to wait is told so, and one that was marked before is replayed."""
    dedup = dedup_of(route, store)

    async def copy(wait: float) -> Any:
        made = dedup.transaction("sender", name, "hash", on=caller.on, wait_seconds=wait)
        async with entered(made) as tx:
            return tx.replayed

    def copied() -> Any:
        return asyncio.run(copy(0)) if route.world == "sync" else copy(0)

    async with entered(dedup.transaction("sender", name, "hash", on=caller.on)) as tx:
        await caller.write(tx.connection, name)
        with pytest.raises(IdempotencyInFlightError):
            await elsewhere(route, copied)
    assert await copy(0) is True
    with pytest.raises(IdempotencyConflictError):
        async with entered(dedup.transaction("sender", name, "other", on=caller.on)):
            pytest.fail("ran")
    assert witness.effects(route.flavour, name) == 1

    assert await done(dedup.check_and_record("sender", f"{name} marked")) is True
    async with entered(dedup.transaction("sender", f"{name} marked", "hash", on=caller.on)) as tx:
        assert tx.replayed
