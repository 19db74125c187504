"""Dramatiq actors under ``once_actor``: a real worker on Redis, and one in this process."""

from __future__ import annotations

import importlib
import os
import shutil
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from unittest import mock

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import AsyncIO, CurrentMessage
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend
from tests.functions.workers import HERE, Place, Worker, eventually
from tests.servers.redis import Server

from oncekey import (
    AsyncOnce,
    BackendMismatchError,
    IdempotencyConflictError,
    IdempotencyInFlightError,
    MemoryBackend,
    MemoryStore,
    Once,
    PolicyError,
    current_claim,
)
from oncekey.adapters.dramatiq import once_actor
from oncekey.guard import PerCallKeyWarning

# A worker in this process


class Here:
    """A broker in memory with a worker of four threads."""

    def __init__(self) -> None:
        self.broker = StubBroker()
        self.broker.add_middleware(CurrentMessage())
        self.broker.add_middleware(Results(backend=StubBackend(), store_results=True))
        self.broker.add_middleware(AsyncIO())
        self.worker = dramatiq.Worker(self.broker, worker_threads=4, worker_timeout=10)

    def actor(self, **options: Any) -> Any:
        return dramatiq.actor(broker=self.broker, min_backoff=1, max_backoff=1, **options)

    def join(self) -> None:
        """Until all messages are done, delayed ones too."""
        self.broker.join("default", timeout=30_000, fail_fast=False)
        self.worker.join()


@pytest.fixture
def here() -> Iterator[Here]:
    made, before = Here(), dramatiq.broker.global_broker
    dramatiq.set_broker(made.broker)  # messages look for their results there
    made.broker.emit_after("process_boot")
    made.worker.start()
    yield made
    dramatiq.set_broker(before)  # type: ignore[arg-type]
    made.worker.stop()
    made.broker.emit_before("worker_shutdown", made.worker)
    made.broker.close()


@pytest.fixture
def once() -> Once:
    return Once(MemoryStore(), scope="dramatiq")


def test_a_message_that_comes_twice_takes_effect_once(here: Here, once: Once) -> None:
    """Sent twice, and the same one delivered twice: one effect, and each has the result."""
    runs = []

    @here.actor()
    @once_actor(once, key="order_id", retry_seconds=0.05)
    def charge(order_id: str, cents: int) -> dict[str, int]:
        runs.append(order_id)
        return {order_id: cents}

    sent = [charge.send("o-1", 5), charge.send("o-1", 5)]
    here.broker.enqueue(sent[0])
    here.join()
    assert [one.get_result(block=True, timeout=10_000) for one in sent] == [{"o-1": 5}] * 2
    assert runs == ["o-1"]


async def test_an_async_actor_takes_effect_once(here: Here) -> None:
    """A coroutine function takes an ``AsyncOnce``."""
    runs = []

    @here.actor()
    @once_actor(AsyncOnce(MemoryBackend(), scope="dramatiq"), key="order_id", retry_seconds=0.05)
    async def charge(order_id: str) -> int:
        runs.append(order_id)
        return len(runs)

    sent = [charge.send("o-1") for _ in range(3)]
    here.join()
    assert [one.get_result(block=True, timeout=10_000) for one in sent] == [1, 1, 1]


def test_a_failure_is_retried(here: Here, once: Once) -> None:
    """An error frees the key, and Dramatiq's retry is the next attempt."""
    attempts = []

    @here.actor()
    @once_actor(once, key="order_id")
    def fails(order_id: str) -> None:
        attempts.append(current_claim().attempts)
        if len(attempts) < 3:
            raise ConnectionError

    fails.send("o-1")
    here.join()
    fails.send("o-1")
    here.join()
    assert attempts == [1, 2, 3]


def held_up(here: Here, once: Once, copies: int, **options: Any) -> tuple[list[Any], list[Any]]:
    """A message that runs while copies of it come; gives the runs, and all messages."""
    begun, go_on = threading.Event(), threading.Event()
    runs: list[str] = []

    @here.actor(max_retries=0)
    @once_actor(once, key="order_id", retry_seconds=0.05, **options)
    def slow(order_id: str) -> str:
        runs.append(order_id)
        begun.set()
        assert go_on.wait(30)
        return "done"

    sent = [slow.send("o-1")]
    assert begun.wait(30)
    gave_way = Counter(here.broker, copies)
    sent += [slow.send("o-1") for _ in range(copies)]
    assert gave_way.done.wait(30)
    go_on.set()
    here.join()
    return runs, sent


class Counter(dramatiq.Middleware):
    """Sees that copies have given way."""

    def __init__(self, broker: Any, wanted: int) -> None:
        self.left = wanted
        self.done = threading.Event()
        broker.add_middleware(self)

    def _one(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.done.set()

    def after_process_message(
        self, broker: Any, message: Any, *, result: Any = None, exception: Any = None
    ) -> None:
        if isinstance(exception, dramatiq.errors.Retry):
            self._one()

    def after_skip_message(self, broker: Any, message: Any) -> None:
        self._one()


def test_a_copy_in_flight_comes_again(here: Here, once: Once) -> None:
    """It gives way and replays later, though the actor allows no retries of its own."""
    runs, sent = held_up(here, once, 3)
    assert runs == ["o-1"]
    assert [one.get_result(block=True, timeout=10_000) for one in sent] == ["done"] * 4


def test_a_copy_in_flight_can_be_dropped(here: Here, once: Once) -> None:
    """It is skipped, and does not come again."""
    runs, sent = held_up(here, once, 1, in_flight="drop")
    assert runs == ["o-1"]
    assert sent[0].get_result(block=True, timeout=10_000) == "done"


def test_a_changed_message_fails(here: Here, once: Once) -> None:
    """The same key with another payload is a conflict, which ``throws`` keeps from retries."""
    here.broker.middleware = [one for one in here.broker.middleware if not isinstance(one, Results)]
    failures = []

    class Failures(dramatiq.Middleware):
        def after_process_message(self, broker: Any, message: Any, **ended: Any) -> None:
            failures.append(ended.get("exception"))

    here.broker.add_middleware(Failures())

    @here.actor(throws=IdempotencyConflictError)
    @once_actor(once, key="order_id")
    def charge(order_id: str, cents: int) -> None: ...

    for cents in (5, 6):
        charge.send("o-1", cents)
        here.join()
    assert failures[0] is None
    assert isinstance(failures[1], IdempotencyConflictError)
    assert "charge: the key 'order_id' gave" in str(failures[1]).replace("<locals>.", "")
    assert "other arguments: cents differs. Compared are cents:" in str(failures[1])


def test_an_inner_call_in_flight_is_not_ours(once: Once) -> None:
    """What an actor calls may be in flight as well: that is an error, and no reason to skip it."""
    inner = Once(once.store, scope="inner")

    @inner(key="name", name=None, wait=0)
    def helper(name: str) -> None: ...

    @once_actor(once, key="order_id", in_flight="drop")
    def work(order_id: str) -> None:
        helper("busy")

    with inner.guard("busy"), pytest.raises(IdempotencyInFlightError, match="helper"):
        work("o-1")


def test_misuse_names_the_fix(once: Once) -> None:
    """Wrong options, the wrong guard and a message's id as the key are found at once."""
    with pytest.raises(PolicyError, match="retry, drop"):
        once_actor(once, key="k", in_flight="wait")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="retry_seconds"):
        once_actor(once, key="k", retry_seconds=0)
    with pytest.raises(BackendMismatchError, match="not async"):
        once_actor(AsyncOnce("memory://"), key="k")(lambda k: 1)
    with pytest.warns(PerCallKeyWarning, match="message_id"):
        once_actor(once, key="message_id", name="work")(lambda message_id: 1)


# A worker process on Redis


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """A directory with a file for the records, in which actors have a table too."""
    made = Place()
    with closing(sqlite3.connect(made.database)) as db:
        db.execute("CREATE TABLE effects (name text)")
    yield made
    shutil.rmtree(made.directory, ignore_errors=True)


@pytest.fixture(scope="module")
def actors(place: Place) -> Iterator[Any]:
    """The actors, for sending; ``start`` starts a worker, whose processes are forked."""
    server = Server()
    workers = []
    before = dramatiq.broker.global_broker

    def start() -> None:
        command = ["dramatiq", "dramatiq_tasks", "--processes", "1", "--threads", "2"]
        with mock.patch.dict(os.environ, BROKER=f"{server.url}/0"):
            workers.append(Worker(place, *command))

    with (
        mock.patch.dict(os.environ, PLACE=str(place.directory), BROKER=f"{server.url}/0"),
        mock.patch.object(sys, "path", [str(HERE), *sys.path]),
    ):
        module = importlib.import_module("dramatiq_tasks")
        module.start = start  # type: ignore[attr-defined]
        start()
    try:
        yield module
    finally:
        for worker in workers:
            worker.kill()
        module.store.close()
        module.broker.close()
        module.broker.client.close()
        dramatiq.set_broker(before)  # type: ignore[arg-type]
        server.remove()
        for name in ("dramatiq_tasks", "workers"):
            sys.modules.pop(name, None)


def test_a_worker_process_takes_effect_once(actors: Any, place: Place) -> None:
    """The same message, sent and delivered twice to a real worker: one effect."""
    sent = actors.charge.send("twice", 5)
    actors.charge.send("twice", 5)
    actors.broker.enqueue(sent)
    first = actors.slow.send("in flight")
    place.wait_at_gate("in flight")
    actors.broker.enqueue(first)
    actors.charge.send("after them", 5)
    place.wait_for("after them")
    place.open_gate("in flight")
    actors.broker.join("default", timeout=60_000)
    assert place.effects("twice") == 1
    assert place.effects("in flight") == 1


def test_a_killed_worker_is_taken_over_from(actors: Any, place: Place) -> None:
    """kill -9 after the effect: at least once, and the second attempt knows of the first."""
    actors.dies.send("dies")
    place.wait_for("dies False")
    actors.start()
    place.wait_for("dies True")
    actors.broker.join("default", timeout=60_000)
    assert (place.effects("dies False"), place.effects("dies True")) == (1, 1)


def test_a_killed_transaction_takes_effect_once(actors: Any, place: Place) -> None:
    """kill -9 in a transaction: it ran twice, and its effect is there once."""
    actors.dies_in_transaction.send("dies in tx")
    place.wait_for("dies in tx")
    actors.start()
    eventually(lambda: place.rows("dies in tx"), "the commit")
    actors.broker.join("default", timeout=60_000)
    assert place.effects("dies in tx") == 2
    assert place.rows("dies in tx") == 1
