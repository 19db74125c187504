"""Errors that name the fix: what a person reads who has made a common mistake."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import pytest

from oncekey import (
    AsyncMemoryStore,
    AsyncOnce,
    IdempotencyConflictError,
    IdempotencyStore,
    Once,
    connect,
)
from oncekey.adapters import asgi
from oncekey.errors import OncekeyError
from oncekey.receiver import WebhookReceiver
from oncekey.stores.postgres.addresses import own_options
from oncekey.testing import sample, sample_provider

stripe = sample_provider("stripe")


async def app(scope: Any, receive: Any, send: Any) -> None: ...


@pytest.mark.parametrize(
    "mistake, says",
    [
        (lambda: connect(None), "got None: write memory.*Is the environment variable set"),  # type: ignore[arg-type]
        (lambda: connect("postgresql+psycopg2://h/d"), r"write postgresql\+psycopg://"),
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
    assert ran == []


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
    plain = IdempotencyConflictError("create")
    assert str(IdempotencyConflictError(*plain.args)) == str(plain)


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
