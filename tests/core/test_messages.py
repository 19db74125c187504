"""Errors that name the fix: what a person reads who has made a common mistake."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from oncekey import (
    AsyncMemoryStore,
    AsyncOnce,
    IdempotencyConflictError,
    IdempotencyStore,
    MemoryStore,
    Once,
    SQLiteStore,
    aconnect,
    connect,
)
from oncekey.adapters import asgi
from oncekey.errors import OncekeyError
from oncekey.http import Settings, by_header
from oncekey.receiver import WebhookReceiver
from oncekey.stores.postgres import AsyncPostgresStore
from oncekey.stores.postgres.addresses import own_options
from oncekey.testing import sample, sample_provider

stripe = sample_provider("stripe")


async def app(scope: Any, receive: Any, send: Any) -> None: ...


def requests() -> Any:
    return IdempotencyStore(AsyncMemoryStore())


def generates(params: Any, context: Any = None) -> Any:
    yield params


async def agenerates(params: Any, context: Any = None) -> Any:
    yield params


class Shop:
    """No function."""

    @property
    def open(self) -> bool:
        return True


@pytest.mark.parametrize(
    "mistake, says",
    [
        (lambda: connect(None), "got None: write memory.*Is the environment variable set"),  # type: ignore[arg-type]
        (lambda: connect("postgresql+psycopg2://h/d"), r"write postgresql\+psycopg://"),
        (
            lambda: connect("memory://", max_entrys=3),
            "has no option 'max_entrys'; did you mean 'max_entries'",
        ),
        (
            lambda: aconnect("postgresql://h/d", tenent="a"),
            "has no option 'tenent'; did you mean 'tenant'",
        ),
        (lambda: connect("sqlite:///f?durabilty=full"), "'durabilty'; did you mean 'durability'"),
        (lambda: connect("sqlite:///f", durabilty="full"), "did you mean 'durability'"),
        (lambda: Once(None), "got None .is the environment variable set"),  # type: ignore[arg-type]
        (lambda: AsyncOnce(None), "got None .is the environment variable set"),  # type: ignore[arg-type]
        (
            lambda: asgi.IdempotencyMiddleware(app, None),  # type: ignore[arg-type]
            "got None .is the environment variable set",
        ),
        (
            lambda: AsyncPostgresStore("postgresql+psycopg2://h/d"),
            r"got 'psycopg2': write postgresql\+psycopg://",
        ),
        (lambda: requests().wrap(generates), "generates is a generator.*return a list"),
        (lambda: requests().wrap(agenerates), "agenerates is a generator.*return a list"),
        (lambda: requests().wrap(Shop), "Shop is a class: guard its methods"),
        (lambda: requests().wrap(Shop.__dict__["open"]), "a property can't be guarded: put @prop"),
        (lambda: connect("postgress://h/d"), "did you mean 'postgres'"),
        (lambda: own_options("postgresql://h/d?tenent=a", {}), "tenent=: did you mean tenant="),
        (lambda: Once("memory://", tll=3), "no option 'tll'; did you mean 'ttl'"),  # type: ignore[call-arg]
        (
            lambda: WebhookReceiver(stripe, "memory://", retension=3),  # type: ignore[call-arg]
            "a receiver has no option 'retension'; did you mean 'retention'",
        ),
        (
            lambda: asgi.IdempotencyMiddleware(app, "memory://", requird=True),  # type: ignore[call-arg]
            "header has no option 'requird'; did you mean 'required'",
        ),
        (
            lambda: IdempotencyStore(AsyncMemoryStore(), ttl_seconds=timedelta(hours=2)),  # type: ignore[arg-type]
            "number of seconds, got a timedelta: write ttl_seconds=7200",
        ),
        (lambda: connect("redis:/localhost"), "is not a store URL: write .* redis://host:6379/0"),
        (lambda: Settings(store_status="2xx"), "store_status must be a function, got '2xx'"),  # type: ignore[arg-type]
        (lambda: Settings(applies="/x"), "applies must be a function"),  # type: ignore[arg-type]
        (lambda: Settings(redact="body"), "redact must be a function"),  # type: ignore[arg-type]
        (lambda: Settings(scope="X-API-Key"), r"write scope=by_header\('X-API-Key'\)"),  # type: ignore[arg-type]
        (lambda: Settings(scope=by_header), r"lacks its header: write by_header\('X-API-Key'\)"),  # type: ignore[arg-type]
        (lambda: Settings(required="yes"), "required must be True or False, got 'yes'"),  # type: ignore[arg-type]
        (lambda: Settings(key_format="ulid"), "would take that one key: write 'uuid', or a reg"),
        (lambda: Settings(retry_after=timedelta(seconds=3)), "write retry_after=3"),  # type: ignore[arg-type]
        (
            lambda: IdempotencyStore(AsyncMemoryStore()).wrap(validate={"type": "object"}),  # type: ignore[call-overload]
            "validate must be a Pydantic model or a function, got dict",
        ),
    ],
)
def test_a_wrong_option_is_told_with_the_right_one(mistake: Callable[[], Any], says: str) -> None:
    """What was given, what is meant, and the nearest name."""
    with pytest.raises(OncekeyError, match=says):
        mistake()


def test_no_address_shows_what_it_holds() -> None:
    """A URL with a password in it is never part of a message."""
    for url in ("postgresql+psycopg2://u:hunter2@h/d", "postgress://u:hunter2@h/d", "u:hunter2@h"):
        with pytest.raises(OncekeyError) as caught:
            connect(url)
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        lambda: "a",
        lambda order: "a",
        lambda order_id, amount: {}["x"],
        lambda order_id, amount: order_id.nothing,
    ],
)
def test_a_key_function_that_fails_is_told_how_it_is_called(key: Any) -> None:
    """Of another arity, or with a mistake in it: nothing was run."""
    once, ran = Once("memory://"), list[str]()

    @once(key=key, name="charge")
    def charge(order_id: str, amount: int) -> None:
        ran.append(order_id)

    with pytest.raises(OncekeyError, match=r"key=lambda order_id, amount: \.\.\.") as caught:
        charge("o-1", 5)
    assert caught.value.__cause__ is not None
    assert str(caught.value.__cause__) in str(caught.value)
    assert ran == []


def test_a_key_function_is_told_of_defaults() -> None:
    """It gets the arguments as they were given: what it is told to be can be called like that."""
    once = Once("memory://")

    @once(key=lambda order_id, cents: order_id, name="charge")
    def charge(order_id: str, cents: int = 1) -> int:
        return cents

    with pytest.raises(OncekeyError, match=r"key=lambda order_id, cents=1: \.\.\.") as caught:
        charge("o-1")
    assert "missing 1 required positional argument: 'cents'" in str(caught.value)


def test_an_async_generator_is_told_to_return_a_list() -> None:
    """And not that it is no async function, which sends people to ``Once``."""
    once = AsyncOnce("memory://")

    async def orders(key: str) -> AsyncIterator[int]:
        yield 1

    with pytest.raises(OncekeyError, match=r"generator.*return a list"):
        once(key="key")(orders)  # type: ignore[arg-type]


def test_the_other_kind_of_with_is_told() -> None:
    """``with`` in front of an async guard, and ``async with`` in front of a sync one."""
    with pytest.raises(OncekeyError, match="write 'async with'"):
        AsyncOnce("memory://").guard("k").__enter__()

    async def wrong() -> None:
        async with Once("memory://").guard("k"):
            pass

    with pytest.raises(OncekeyError, match="would block the event loop"):
        asyncio.run(wrong())


def test_a_conflict_of_a_function_speaks_of_its_arguments() -> None:
    """Its name, its key and what is compared; the same after a pickle, or a task queue's copy."""
    once = Once("memory://")

    @once(key="order_id", ignore=["log"])
    def charge(order_id: str, amount: int, currency: str = "EUR", log: object = None) -> int:
        return amount

    charge("o-1", 5)
    with pytest.raises(IdempotencyConflictError) as caught:
        charge("o-1", 6)
    text = str(caught.value)
    assert "charge: the key 'order_id' gave a key that was used before" in text
    assert "Compared are amount, currency:" in text
    assert "idempotency_key" not in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
    for error in (caught.value, IdempotencyConflictError("create")):
        copy = IdempotencyConflictError(*error.args)
        assert (str(copy), copy.operation) == (str(error), error.operation)
        assert (copy.message, copy.suggestion) == (error.message, error.suggestion)
        assert str(IdempotencyConflictError(*copy.args)) == str(error)


@pytest.mark.parametrize("sync", [True, False])
def test_a_conflict_names_the_argument_that_differs(sync: bool) -> None:
    """If this process has seen the first ones: by name, never by value."""
    charge = guarded_charge(sync, MemoryStore(), AsyncMemoryStore())
    charge("o-1", 5)
    for args, differs in (
        (("o-1", 678), "amount differs."),
        (("o-1", 5, "USD"), "currency differs."),
        (("o-1", 678, "USD"), "amount, currency differ."),
    ):
        with pytest.raises(IdempotencyConflictError, match=f"other arguments: {differs}") as caught:
            charge(*args)
        assert "678" not in str(caught.value)
        assert "USD" not in str(caught.value)


def guarded_charge(sync: bool, store: Any, astore: Any, fails: bool = False) -> Any:
    """A guarded function in either form. Those of one store have the same keys."""

    def charge(order_id: str, amount: int, currency: str = "EUR") -> int:
        if fails:
            raise RuntimeError
        return amount

    async def acharge(order_id: str, amount: int, currency: str = "EUR") -> int:
        return charge(order_id, amount, currency)

    if sync:
        return Once(store)(key="order_id", name="charge")(charge)
    made = AsyncOnce(astore)(key="order_id", name="charge")(acharge)
    return lambda *args: asyncio.run(made(*args))


@pytest.mark.parametrize("sync", [True, False])
def test_what_is_not_known_is_not_said(sync: bool) -> None:
    """The first arguments of another process, or ones that were too long, or of a failed call."""
    stores = MemoryStore(), AsyncMemoryStore()
    first, other = (guarded_charge(sync, *stores) for _ in range(2))
    first("o-1", 5)
    with pytest.raises(IdempotencyConflictError, match=r"other arguments\. Compared"):
        other("o-1", 6)
    first("o-2", 5, "E" * 5000)
    with pytest.raises(IdempotencyConflictError, match=r"other arguments\. Compared"):
        first("o-2", 6)
    failing = guarded_charge(sync, *stores, fails=True)
    with pytest.raises(RuntimeError):
        failing("o-3", 7)  # the key is free again
    other("o-3", 8)
    with pytest.raises(IdempotencyConflictError, match=r"other arguments\. Compared"):
        failing("o-3", 7)


def test_the_payloads_of_a_function_are_kept_in_bounds() -> None:
    """A hundred of them, each for itself: what came before is not told apart any more."""
    charge = guarded_charge(True, MemoryStore(), None)
    for number in range(1000):
        charge(f"o-{number}", number)
    with pytest.raises(IdempotencyConflictError, match="amount differs"):
        charge("o-999", 5)
    with pytest.raises(IdempotencyConflictError, match=r"other arguments\. Compared"):
        charge("o-1", 5)


def test_a_forgotten_look_at_replayed_is_told(tmp_path: Path) -> None:
    """What a block does again on a replay is refused, where it writes or gives an answer."""
    with SQLiteStore(tmp_path / "a.db") as store:
        with store.transaction("k") as tx:
            tx.answer = {"n": 1}
        with pytest.raises(OncekeyError, match=r"under 'if not tx.replayed:'"):
            with store.transaction("k") as tx:
                tx.connection.execute("SELECT 1")
        with pytest.raises(OncekeyError, match=r"under 'if not tx.replayed:'"):
            with store.transaction("k") as tx:
                tx.answer = {"n": 2}
        with store.transaction("k") as tx:
            tx.answer = tx.answer  # changes nothing
        assert tx.answer == {"n": 1}
    once = Once("memory://")
    with once.guard("k") as claim:
        claim.answer = 1
    with pytest.raises(LookupError, match=r"under 'if not claim.replayed:'"):
        with once.guard("k") as claim:
            claim.answer = 2


def test_a_conflict_inside_a_function_is_not_its_own() -> None:
    """What a guarded function calls may conflict; that is told of the inner one."""
    once = Once("memory://")

    @once(key="order_id")
    def inner(order_id: str, amount: int) -> int:
        return amount

    @once(key="run")
    def outer(run: str, amount: int) -> int:
        return inner("o-1", amount)

    outer("a", 1)
    with pytest.raises(IdempotencyConflictError, match=r"inner: the key 'order_id'"):
        outer("b", 2)


def test_a_failed_handler_is_logged_with_its_event(caplog: pytest.LogCaptureFixture) -> None:
    """Provider, type, event, attempt and what the sender does next; the id not as it is."""
    receiver = WebhookReceiver(stripe, "memory://")

    @receiver.on("invoice.paid")
    def paid(event: Any) -> None:
        raise ValueError("no stock")

    delivery = sample(stripe, type="invoice.paid", id="evt_1234567890123456")
    with caplog.at_level(logging.WARNING, "oncekey"):
        for _ in range(2):
            assert receiver.receive(*delivery).status == 500
    first, second = caplog.records
    said = first.getMessage()
    assert said.startswith("the handler of stripe for invoice.paid failed with ValueError (event ")
    assert "Stripe is answered 500 and may send it again. Its retries: 3 days in live mode" in said
    assert "evt_1234567890123456" not in caplog.text
    assert second.exc_info is not None
    assert second.exc_info[1] is not None
    assert second.exc_info[1].__notes__ == ["oncekey: this was attempt 2 at this event"]
    receiver.close()


def test_a_database_without_tables_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``oncekey conformance`` ends with the one reason, instead of once for each of its checks."""
    from oncekey import MemoryStore
    from oncekey.cli import main
    from oncekey.errors import StoreConfigError

    def read(self: Any, key: Any) -> None:
        raise StoreConfigError("the tables of oncekey are missing")

    monkeypatch.setattr(MemoryStore, "read", read)
    assert main(["conformance", "memory://", "--only", "sync"]) != 0
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("the tables of oncekey are missing") == 1


def test_an_app_of_the_other_kind_is_told_its_middleware() -> None:
    """ASGI and WSGI swapped: told when the app is made, not by the first request."""
    from oncekey.adapters import wsgi

    def wsgi_app(environ: Any, start_response: Any) -> list[bytes]:
        return []

    with pytest.raises(OncekeyError, match=r"one of WSGI.*from oncekey\.adapters\.wsgi"):
        asgi.IdempotencyMiddleware(wsgi_app, "memory://")  # type: ignore[arg-type]
    with pytest.raises(OncekeyError, match=r"one of ASGI.*from oncekey\.adapters\.asgi"):
        wsgi.IdempotencyMiddleware(app, "memory://")  # type: ignore[arg-type]
    asgi.IdempotencyMiddleware(app, "memory://")
    wsgi.IdempotencyMiddleware(wsgi_app, "memory://")
