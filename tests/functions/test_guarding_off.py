"""The switch that turns guards off in development: by one word only, and never silently."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.http.doors import JSON, AsgiDoor, Calls, Door, WsgiDoor

from oncekey import (
    AsyncMemoryStore,
    AsyncOnce,
    AsyncWebhookDedup,
    IdempotencyStore,
    MemoryStore,
    Once,
    PolicyError,
    SQLiteStore,
    ToolContext,
    WebhookDedup,
    current_claim,
)
from oncekey._core.switch import OFF, VARIABLE, guarding_is_off
from oncekey.guard import GuardingOffWarning
from oncekey.instrument import EventKind, subscribe
from oncekey.receiver import AsyncWebhookReceiver, WebhookReceiver
from oncekey.server.config import read_config
from oncekey.server.problems import ConfigError
from oncekey.testing import sample, sample_provider

stripe = sample_provider("stripe")
Twice = Callable[[list[Any]], None]


def function(runs: list[Any]) -> None:
    """``Once``, on a server that is not there, with its answers at hand."""

    @Once("postgresql://127.0.0.1:1/none", cache_entries=9)(key="k")
    def work(k: str) -> None:
        current_claim().check()
        runs.append(k)

    for _ in range(2):
        work("a")


def async_function(runs: list[Any]) -> None:
    """``AsyncOnce``, the same."""

    @AsyncOnce("redis://127.0.0.1:1/0", cache_entries=9)(key="k")
    async def work(k: str) -> None:
        runs.append(k)

    async def twice() -> None:
        await work("a")
        await work("a")

    asyncio.run(twice())


def block(runs: list[Any]) -> None:
    """``guard()``."""
    once = Once("memory://")
    for _ in range(2):
        with once.guard("k") as claim:
            if not claim.replayed:
                runs.append("k")


def request(runs: list[Any]) -> None:
    """``IdempotencyStore.wrap``."""

    @IdempotencyStore(AsyncMemoryStore()).wrap
    async def buy(params: dict[str, Any], context: Any = None) -> dict[str, Any]:
        runs.append(params)
        return {}

    async def twice() -> None:
        for _ in range(2):
            await buy({"idempotency_key": "k"}, ToolContext("acme"))

    asyncio.run(twice())


def asgi(runs: list[Any]) -> None:
    """The header, in front of an ASGI app, with its answers at hand."""
    header(AsgiDoor, AsyncMemoryStore(), runs)


def wsgi(runs: list[Any]) -> None:
    """The header, in front of a WSGI app."""
    header(WsgiDoor, MemoryStore(), runs)


def header(kind: Any, store: Any, runs: list[Any]) -> None:
    calls = Calls(lambda _: (201, [JSON], b"1"))
    door = Door(kind(calls, store, cache_entries=9))
    bearer = [("authorization", "Bearer x")]
    assert not any(door.post(headers=bearer).replayed for _ in range(2))
    runs.extend(range(calls.count))


def receiver(runs: list[Any]) -> None:
    """A webhook receiver, which still refuses forged deliveries."""
    hooks = WebhookReceiver(stripe, "memory://")
    hooks.on("invoice.paid")(runs.append)
    delivery = sample(stripe, type="invoice.paid")
    assert [hooks.receive(*delivery).status for _ in range(2)] == [200, 200]
    method, url, headers, body = delivery
    assert hooks.receive(method, url, headers, body + b" ").status == 401


def async_receiver(runs: list[Any]) -> None:
    """The same, awaited."""
    hooks = AsyncWebhookReceiver(stripe, "memory://")

    @hooks.on("invoice.paid")
    async def paid(event: Any) -> None:
        runs.append(event)

    async def twice() -> None:
        for _ in range(2):
            await hooks.receive(*sample(stripe, type="invoice.paid", id="evt_1"))

    asyncio.run(twice())


def dedup(runs: list[Any]) -> None:
    """``WebhookDedup.check_and_record``."""
    seen = WebhookDedup(MemoryStore())
    runs.extend(1 for _ in range(2) if seen.check_and_record("sender", "evt_1"))


def async_dedup(runs: list[Any]) -> None:
    """``AsyncWebhookDedup.check_and_record``."""

    async def twice() -> None:
        seen = AsyncWebhookDedup(AsyncMemoryStore())
        runs.extend([1 for _ in range(2) if await seen.check_and_record("sender", "evt_1")])

    asyncio.run(twice())


EVERY: list[Twice] = [
    function,
    async_function,
    block,
    request,
    asgi,
    wsgi,
    receiver,
    async_receiver,
    dedup,
    async_dedup,
]


@pytest.mark.parametrize("twice", EVERY)
def test_every_copy_runs_and_is_told(
    twice: Twice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of every guard both copies run; a warning, lines in the log and events say so."""
    monkeypatch.setenv(VARIABLE, OFF)
    runs: list[Any] = []
    seen: list[EventKind] = []
    with (
        pytest.warns(GuardingOffWarning, match=r"ONCEKEY_GUARDING.*every copy of a call runs"),
        caplog.at_level(logging.WARNING, "oncekey"),
        subscribe(lambda event: seen.append(event.kind)),
    ):
        twice(runs)
    assert len(runs) == 2
    assert caplog.text.count("runs unguarded") >= 2
    assert seen.count(EventKind.BYPASS) >= 2


@pytest.mark.parametrize("twice", [one for one in EVERY if "function" not in one.__name__])
def test_nothing_is_off_by_itself(twice: Twice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable, and with ``on``, each of them runs one copy: the tests above can fail.

    But for those whose server is not there.
    """
    for word in (None, "on", ""):
        if word is None:
            monkeypatch.delenv(VARIABLE, raising=False)
        else:
            monkeypatch.setenv(VARIABLE, word)
        runs: list[Any] = []
        try:
            twice(runs)
        except AssertionError:  # of the header's copies, one was replayed
            runs.append(1)
        assert len(runs) == 1


def test_transactions_commit_without_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written commits, for each copy; also with the store's own ``transaction``."""
    path = tmp_path / "a.db"
    with SQLiteStore(path) as store:
        with store.transaction("first") as tx:
            tx.connection.execute("CREATE TABLE paid (n)")
        monkeypatch.setenv(VARIABLE, OFF)
        with pytest.warns(GuardingOffWarning):
            once = Once(store)

        @once(key="k", transactional=True)
        def pay(k: str) -> None:
            from oncekey import current_transaction

            current_transaction().connection.execute("INSERT INTO paid VALUES (1)")

        for _ in range(2):
            pay("a")
            with pytest.warns(GuardingOffWarning), store.transaction("b") as tx:
                assert not tx.replayed
                tx.connection.execute("INSERT INTO paid VALUES (2)")
        with pytest.raises(sqlite3.ProgrammingError), once.transaction("c") as tx:
            tx.connection.executemany("INSERT INTO paid VALUES (?)", [(3,), ()])
        database = sqlite3.connect(path)
        assert database.execute("SELECT n FROM paid ORDER BY n").fetchall() == [
            (1,),
            (1,),
            (2,),
            (2,),
        ]
        assert database.execute("SELECT count(*) FROM oncekey_records").fetchone() == (1,)
        database.close()


@pytest.mark.parametrize("word", ["off", "0", "false", "OFF-IN-DEVELOPMENT", " "])
def test_another_word_is_refused(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is nearly the word is an error that says it, and guards nothing less."""
    monkeypatch.setenv(VARIABLE, word)
    with pytest.raises(PolicyError, match=r"unset it.*ONCEKEY_GUARDING=off-in-development"):
        Once("memory://")


def test_where_others_depend_on_it_the_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a platform that says what it is, nobody can turn guards off."""
    monkeypatch.setenv(VARIABLE, OFF)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(PolicyError, match=r"this is Kubernetes.*unset it"):
        IdempotencyStore(AsyncMemoryStore())
    assert guarding_is_off({VARIABLE: OFF})
    with pytest.raises(PolicyError, match="AWS Lambda"):
        guarding_is_off({VARIABLE: OFF, "AWS_LAMBDA_FUNCTION_NAME": "f"})


def test_the_gateway_does_not_start_with_it() -> None:
    """It is there to guard others: its config has a fault, which names the variable."""
    with pytest.raises(ConfigError, match=r"ONCEKEY_GUARDING is set.*Unset it"):
        read_config(None, {VARIABLE: OFF})
