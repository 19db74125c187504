"""Celery tasks under ``once_task``: a real prefork worker on a real Redis broker."""

from __future__ import annotations

import importlib
import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from unittest import mock

import pytest
from tests.functions.workers import HERE, Place, Worker
from tests.servers.redis import Server

from oncekey import (
    AsyncOnce,
    BackendMismatchError,
    IdempotencyConflictError,
    IdempotencyInFlightError,
    InvalidKeyError,
    MemoryStore,
    Once,
    PolicyError,
    TransactionRefusedError,
)
from oncekey.adapters.celery import once_task
from oncekey.guard import PerCallKeyWarning

PATIENCE = 60


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """A directory with a file for the records, in which tasks have a table too."""
    made = Place()
    with closing(sqlite3.connect(made.database)) as db:
        db.execute("CREATE TABLE effects (name text)")
    yield made
    shutil.rmtree(made.directory, ignore_errors=True)


@pytest.fixture(scope="module")
def tasks(place: Place) -> Iterator[Any]:
    """The tasks, for sending, while a worker with two forked processes runs them."""
    broker = Server()
    with (
        mock.patch.dict(os.environ, PLACE=str(place.directory), BROKER=f"{broker.url}/0"),
        mock.patch.object(sys, "path", [str(HERE), *sys.path]),
    ):
        module = importlib.import_module("celery_tasks")
        quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        command = ["celery", "-A", "celery_tasks", "worker", "--pool", "prefork", "-c", "2"]
        worker = Worker(place, *command, *quiet)
    try:
        yield module
    finally:
        worker.kill()
        module.store.close()
        module.app.backend.client.close()
        module.app.close()
        broker.remove()
        for name in ("celery_tasks", "workers"):
            sys.modules.pop(name, None)


def result(sent: Any) -> Any:
    """What became of a task."""
    return sent.get(timeout=PATIENCE, interval=0.01)


def test_a_task_that_is_sent_twice_takes_effect_once(tasks: Any, place: Place) -> None:
    """Both have the result, whatever their ids; a changed argument is a conflict, told once."""
    first, again = (tasks.charge.delay("twice", 5) for _ in range(2))
    assert first.id != again.id
    assert result(first) == result(again) == {"order": "twice", "charged": 5}
    with pytest.raises(IdempotencyConflictError) as caught:
        result(tasks.charge.delay("twice", 6))
    text = str(caught.value)
    assert text.startswith("charge: the key 'order_id' gave a key that was used before with other")
    assert text.count("charge") == text.count("Compared are cents: call it") == 1
    assert "idempotency_key" not in text
    assert place.effects("twice") == 1


def test_a_message_that_is_delivered_twice_takes_effect_once(tasks: Any, place: Place) -> None:
    """The same message with the same id, as a broker redelivers it."""
    for _ in range(2):
        sent = tasks.charge.apply_async(("redelivered", 5), task_id="one-id")
    place.wait_for("charge redelivered SUCCESS", 2)
    assert result(sent) == {"order": "redelivered", "charged": 5}
    assert place.effects("redelivered") == 1


def test_plain_once_works_under_a_task(tasks: Any, place: Place) -> None:
    """``@app.task @once(key=...)``: a copy waits in its worker."""
    assert [result(one) for one in [tasks.plain.delay("plain") for _ in range(3)]] == [
        "plain plain"
    ] * 3
    assert place.effects("plain") == 1


def test_a_retry_runs(tasks: Any, place: Place) -> None:
    """``self.retry`` of a bound task frees the key, and each retry is an attempt."""
    assert result(tasks.retries.delay("retries")) == [2, 3]
    assert place.effects("retries") == 3
    assert result(tasks.retries.delay("retries")) == [2, 3]
    assert place.effects("retries") == 3


def test_an_automatic_retry_runs(tasks: Any, place: Place) -> None:
    """So does ``autoretry_for``."""
    assert result(tasks.autoretries.delay("autoretries")) == 2
    assert place.effects("autoretries") == 2


def test_a_copy_in_flight_gives_its_worker_back(tasks: Any, place: Place) -> None:
    """It comes again until the other is done, though the task allows no retries of its own."""
    first = tasks.slow.delay("in flight")
    place.wait_at_gate("in flight")
    copies = [tasks.slow.delay("in flight") for _ in range(3)]
    place.wait_for("slow in flight RETRY", 3)
    assert result(tasks.charge.delay("meanwhile", 1))["charged"] == 1  # the second worker is free
    place.open_gate("in flight")
    assert {result(one) for one in (first, *copies)} == {"slow in flight"}
    assert place.effects("in flight") == 1


def test_a_copy_in_flight_can_be_dropped(tasks: Any, place: Place) -> None:
    """It is ignored, and has no result; one that comes later has the answer."""
    first = tasks.dropping.delay("dropped")
    place.wait_at_gate("dropped")
    copy = tasks.dropping.delay("dropped")
    place.wait_for("dropping dropped IGNORED")
    place.open_gate("dropped")
    assert result(first) == "done"
    assert copy.state == "PENDING"
    assert result(tasks.dropping.delay("dropped")) == "done"
    assert place.effects("dropped") == 1


def test_a_soft_time_limit_frees_the_key(tasks: Any, place: Place) -> None:
    """A task that is out of time counts as failed: the retry runs at once, not after the lease."""
    sent = tasks.runs_out_of_time.delay("out of time")
    assert result(sent) == [1, 2]  # by the second attempt, on the first retry
    assert place.effects("out of time") == 2
    assert result(tasks.runs_out_of_time.delay("out of time")) == [0, 2]  # and it is done
    assert place.effects("out of time") == 2


def test_a_killed_worker_is_taken_over_from(tasks: Any, place: Place) -> None:
    """kill -9 after the effect, with ``acks_late``: at least once, and the second one knows."""
    assert result(tasks.dies.delay("dies")) is True
    assert place.effects("dies") == 2


def test_a_killed_transaction_takes_effect_once(tasks: Any, place: Place) -> None:
    """kill -9 in a transaction, with ``acks_late``: it ran twice, and its effect is there once."""
    assert result(tasks.dies_in_transaction.delay("dies in tx")) == "done"
    assert place.effects("dies in tx") == 2
    assert place.rows("dies in tx") == 1


# Without a worker


@pytest.fixture
def once() -> Once:
    return Once(MemoryStore(), scope="tests")


def test_without_a_message_a_copy_in_flight_is_an_error(once: Once) -> None:
    """Called directly or eagerly there is nothing that could come again."""
    from celery import Celery

    with Celery("here", set_as_current=False) as app:

        @app.task
        @once_task(once, key="order_id", name=None)
        def work(order_id: str) -> str:
            return "done"

        with once.guard("o-1"):
            with pytest.raises(IdempotencyInFlightError):
                work("o-1")
            with pytest.raises(IdempotencyInFlightError):
                work.apply(("o-1",), throw=True)
        assert work("o-2") == work.apply(("o-2",)).get() == "done"


def test_misuse_names_the_fix(once: Once) -> None:
    """Wrong options, an async guard and a task's id as the key are found at once."""
    with pytest.raises(PolicyError, match="retry, drop"):
        once_task(once, key="k", in_flight="wait")  # type: ignore[arg-type]
    with pytest.raises(InvalidKeyError, match="key="):
        once_task(once, key="")
    with pytest.raises(InvalidKeyError, match=r'idempotent\(once, key="order_id"\)'):
        once_task(once)
    with pytest.raises(BackendMismatchError, match="pass a Once"):
        once_task(AsyncOnce("memory://"), key="k")  # type: ignore[arg-type]
    with pytest.raises(TransactionRefusedError):
        once_task(once, key="k", transactional=True)
    with pytest.warns(PerCallKeyWarning, match=r"self\.request\.id") as told:
        once_task(once, key="self.request.id", name="work")(lambda self: 1)
    assert [one.filename for one in told] == [__file__]


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Celery or Dramatiq the import says what to install."""
    for package in ("celery", "dramatiq"):
        monkeypatch.delitem(sys.modules, f"oncekey.adapters.{package}", raising=False)
        for name in (package, f"{package}.errors", f"{package}.exceptions"):
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match=rf"oncekey\[{package}\]"):
            importlib.import_module(f"oncekey.adapters.{package}")
