"""A worker that dies between effect and mark: exactly once, twice, never, or stuck."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tests.testing import apps, naive

from oncekey import MemoryBackend, MemoryStore, SQLiteStore
from oncekey.errors import PolicyError
from oncekey.receiver import WebhookReceiver
from oncekey.testing import (
    ManualClock,
    WorkerKilled,
    acrash_after_effect,
    assert_handled_once,
    crash_after_effect,
    deliver,
    kill_after_effect,
    killed_at,
    sample,
)

STRIPE = naive.STRIPE
TWICE = "happened 2 times for 1 event: the worker died after the effect and before the mark"


def fails(report: Any, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        assert_handled_once(report)


# Ours


def test_without_a_transaction_the_effect_happens_twice(clock: ManualClock) -> None:
    """At least once is what a mark beside the effect gives; the retry is handled, and said so."""
    charged: list[str] = []
    receiver = apps.sync_receiver(STRIPE, charged, MemoryStore(clock=clock))
    begun = clock()
    found = crash_after_effect(receiver, sample(STRIPE), effects=charged)

    assert [(one.status, one.outcome) for one in found.answers] == [
        (0, ""),
        (200, "handled"),
        (200, "duplicate"),
    ]
    assert found.answers[0].error == "the worker was killed"
    assert found.effects == 2
    assert clock() == begun + 300  # the receiver's lease, and no more
    fails(found, TWICE)


async def test_without_a_transaction_the_effect_happens_twice_in_a_loop(clock: ManualClock) -> None:
    """The same for async receivers and stores."""
    charged: list[str] = []
    receiver = apps.async_receiver(STRIPE, charged, MemoryBackend(clock=clock))
    found = await acrash_after_effect(receiver, sample(STRIPE), effects=charged)

    assert [one.outcome for one in found.answers] == ["", "handled", "duplicate"]
    fails(found, TWICE)


def transactional(store: SQLiteStore, *, path: str, **options: Any) -> tuple[WebhookReceiver, Any]:
    with contextlib.closing(sqlite3.connect(path)) as own:
        own.execute("CREATE TABLE charges (event TEXT)")
        own.commit()
    receiver = WebhookReceiver(STRIPE, store, transactional=True, **options)

    @receiver.on("invoice.paid")
    def paid(event: Any, tx: Any) -> None:
        tx.connection.execute("INSERT INTO charges VALUES (?)", (event.id,))

    def charges() -> int:
        with contextlib.closing(sqlite3.connect(path)) as own:
            return int(own.execute("SELECT count(*) FROM charges").fetchone()[0])

    return receiver, charges


def test_in_a_transaction_the_effect_happens_once(tmp_path: Path, clock: ManualClock) -> None:
    """What died was not committed; the retry is the first that counts."""
    path = str(tmp_path / "shop.db")
    with SQLiteStore(path, clock=clock) as store:
        receiver, charges = transactional(store, path=path)
        found = crash_after_effect(receiver, sample(STRIPE), effects=charges)

    assert [one.outcome for one in found.answers] == ["", "handled", "duplicate"]
    assert assert_handled_once(found).effects == 1


def test_an_app_dies_where_it_is_told_to(clock: ManualClock) -> None:
    """A Flask and an ASGI app: pass the store that they record in."""
    charged: list[str] = []
    store = MemoryStore(clock=clock)
    app = apps.flask_app(apps.sync_receiver(STRIPE, charged, store))
    delivery = sample(STRIPE, url="/hooks/stripe")
    found = crash_after_effect(app, delivery, effects=charged, at=store)
    assert [one.status for one in found.answers] == [0, 200, 200]
    fails(found, TWICE)

    backend = MemoryBackend(clock=clock)
    asgi = apps.starlette_app(apps.async_receiver(STRIPE, charged, backend))
    found = crash_after_effect(asgi, delivery.another(), effects=charged, at=backend)
    assert [one.status for one in found.answers] == [0, 200, 200]
    fails(found, TWICE)


def test_a_lease_on_a_real_clock_is_waited_for() -> None:
    """Without a manual clock the sender retries until the lease has ended."""
    charged: list[str] = []
    receiver = apps.sync_receiver(STRIPE, charged, lease=0.2, wait=0)
    found = crash_after_effect(receiver, sample(STRIPE), effects=charged)

    assert found.answers[-1].outcome == "duplicate"
    assert found.effects == 2


def test_a_lease_that_outlasts_patience_is_explained() -> None:
    """The message says what to pass."""
    charged: list[str] = []
    receiver = apps.sync_receiver(STRIPE, charged, lease=300, wait=0)
    found = crash_after_effect(receiver, sample(STRIPE), effects=charged, patience=0)

    fails(found, "nothing frees the event of a worker that died.*pass clock= with the store's")


# Others


def test_check_then_mark_happens_twice() -> None:
    """The naive receiver's own mark is where it dies."""
    receiver = naive.CheckThenMark()
    found = crash_after_effect(
        receiver, sample(STRIPE), effects=receiver.charged, at=(receiver, "mark")
    )

    assert found.effects == 2
    fails(found, TWICE)


def test_mark_first_loses_the_event() -> None:
    """Marked, dead, and the retry is taken for a duplicate."""
    receiver = naive.MarkFirst()
    found = crash_after_effect(
        receiver, sample(STRIPE), effects=receiver.charged, at=(receiver, "charge")
    )

    assert (found.effects, [one.status for one in found.answers]) == (0, [0, 200, 200])
    fails(found, "never happened, though .* answered 2xx: the event was marked as done before its")


def test_a_lock_without_an_end_is_stuck() -> None:
    """Every retry is told to come again."""
    receiver = naive.Locked()
    found = crash_after_effect(
        receiver, sample(STRIPE), effects=receiver.charged, at=(receiver, "mark"), patience=0
    )

    fails(found, "the retry after the crash was answered 503.*Give its claim an end")


def test_a_409_after_the_crash_is_found() -> None:
    """The copy after the retry is judged like any duplicate."""
    receiver = naive.Conflict()
    found = crash_after_effect(
        receiver, sample(STRIPE), effects=receiver.charged, at=(receiver, "mark")
    )

    assert [one.status for one in found.answers] == [0, 200, 409]
    fails(found, "the duplicate was answered 409")


def test_whoever_survives_a_kill_is_found() -> None:
    """A receiver that catches everything answers for a worker that is dead."""
    receiver = naive.CheckThenMark()

    def stubborn(method: str, url: str, headers: Any, body: bytes) -> int:
        try:
            return receiver(method, url, headers, body)
        except BaseException:
            return 500

    found = crash_after_effect(
        stubborn, sample(STRIPE), effects=receiver.charged, at=(receiver, "mark")
    )
    fails(found, "its delivery was answered 500: something catches BaseException")


# Wrong calls


def test_a_worker_that_never_comes_to_its_end_is_refused() -> None:
    """An experiment that did not happen shows nothing."""
    receiver = naive.Forgetful()
    with pytest.raises(PolicyError, match=r"never came to where it was to die.*answered 200"):
        crash_after_effect(receiver, sample(STRIPE), effects=[], at=(receiver, "mark"))
    receiver.take("x")  # nothing is left in it
    receiver.mark("x")
    with pytest.raises(PolicyError, match="say where the worker dies"):
        crash_after_effect(receiver, sample(STRIPE), effects=[])
    with pytest.raises(PolicyError, match="no method 'nonsense'"):
        crash_after_effect(receiver, sample(STRIPE), effects=[], at=(receiver, "nonsense"))
    with pytest.raises(PolicyError, match="can't be replaced"):
        crash_after_effect(receiver, sample(STRIPE), effects=[], at=((), "count"))
    with pytest.raises(PolicyError, match="see kill_after_effect"):
        crash_after_effect("http://127.0.0.1:9/", sample(STRIPE), effects=[])


def test_killed_at_strikes_once_and_leaves_nothing_behind() -> None:
    """Later calls are as before, also outside of the block."""
    receiver = naive.CheckThenMark()
    delivery = sample(STRIPE)
    with killed_at(receiver, "mark") as kill:
        assert not kill.happened
        assert deliver(receiver, delivery).status == 0
        assert kill.happened
        assert deliver(receiver, delivery).status == 200
    assert "mark" not in vars(receiver)
    with killed_at(naive.CheckThenMark, "mark"), pytest.raises(WorkerKilled):
        receiver.mark("x")
    receiver.mark("x")


async def test_killed_at_strikes_coroutines_when_they_run(clock: ManualClock) -> None:
    """An async method is killed when it is awaited."""
    store = MemoryBackend(clock=clock)
    with killed_at(store, "clear"):
        work = store.clear()
        with pytest.raises(WorkerKilled):
            await work
        await store.clear()
    assert "clear" not in vars(store)


# Processes

SHOP = """
import contextlib, os, sqlite3
from oncekey import AsyncSQLiteStore, SQLiteStore
from oncekey.receiver import WebhookReceiver
from oncekey.testing import sample_provider

PATH = os.environ["SHOP_DB"]
PROVIDER = sample_provider("stripe")

def insert(connection, name):
    connection.execute("INSERT INTO charges VALUES (?)", (name,))

def beside():
    receiver = WebhookReceiver(PROVIDER, SQLiteStore(PATH), lease=0.2, wait=0)
    @receiver.on()
    def paid(event):
        print("what a target prints is not an answer")
        with contextlib.closing(sqlite3.connect(PATH, isolation_level=None)) as own:
            insert(own, event.id)
    return receiver

def together():
    receiver = WebhookReceiver(PROVIDER, SQLiteStore(PATH), transactional=True)
    receiver.on()(lambda event, tx: insert(tx.connection, event.id))
    return receiver

class Inbox:
    def mark(self, name):
        with contextlib.closing(sqlite3.connect(PATH, isolation_level=None)) as own:
            own.execute("INSERT INTO done VALUES (?)", (name,))
    def knows(self, name):
        with contextlib.closing(sqlite3.connect(PATH)) as own:
            return own.execute("SELECT 1 FROM done WHERE event = ?", (name,)).fetchone()
    def charge(self, name):
        with contextlib.closing(sqlite3.connect(PATH, isolation_level=None)) as own:
            insert(own, name)

inbox = Inbox()

async def mark_first(method, url, headers, body):
    name = PROVIDER.verify(method, url, headers, body).event_id
    if not inbox.knows(name):
        inbox.mark(name)
        inbox.charge(name)
    return 200

broken = 7
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module ``shop`` that new processes can import, and a count of its charges."""
    (tmp_path / "shop.py").write_text(SHOP)
    path = str(tmp_path / "shop.db")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SHOP_DB", path)
    with contextlib.closing(sqlite3.connect(path)) as own:
        own.execute("CREATE TABLE charges (event TEXT)")
        own.execute("CREATE TABLE done (event TEXT)")
        own.commit()

    def charges() -> int:
        with contextlib.closing(sqlite3.connect(path)) as own:
            return int(own.execute("SELECT count(*) FROM charges").fetchone()[0])

    return charges


def test_a_killed_process_without_a_transaction_charges_twice(shop: Any) -> None:
    """The effect was committed, the mark was not; the lease ends and the retry runs."""
    found = kill_after_effect("shop:beside", sample(STRIPE), effects=shop)

    assert (found.answers[0].status, found.answers[-1].outcome) == (0, "duplicate")
    assert found.effects == 2
    fails(found, TWICE)


def test_a_killed_process_in_a_transaction_charges_once(shop: Any) -> None:
    """SQLite undoes what the dead process did not commit."""
    found = kill_after_effect("shop:together", sample(STRIPE), effects=shop)

    assert [one.outcome for one in found.answers] == ["", "handled", "duplicate"]
    assert assert_handled_once(found).effects == 1


def test_a_killed_process_that_marks_first_loses_the_event(shop: Any) -> None:
    """An async function, killed at a method of its own."""
    found = kill_after_effect(
        "shop:mark_first", sample(STRIPE), effects=shop, at="shop:inbox.charge"
    )

    assert found.effects == 0
    fails(found, "the event was marked as done before its effect")


@pytest.mark.parametrize(
    "target, at, says",
    [
        ("shop", None, "write it like shop.hooks:receiver"),
        ("no_such_shop:receiver", None, "ended by itself:(.|\n)*No module named 'no_such_shop'"),
        ("shop:broken", None, "ended by itself:(.|\n)*int is no target"),
        ("shop:mark_first", None, "say where the worker dies"),
        ("shop:mark_first", "shop:inbox.nonsense", "no method 'nonsense'"),
        ("shop:beside", "shop:inbox.mark", "never came to where it was to die"),
    ],
)
def test_a_process_that_can_not_die_as_told_is_refused(
    shop: Any, target: str, at: str | None, says: str
) -> None:
    """What the process said last is in the message."""
    with pytest.raises(PolicyError, match=says):
        kill_after_effect(target, sample(STRIPE), effects=shop, at=at)
