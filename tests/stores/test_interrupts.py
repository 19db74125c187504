"""Ctrl-C, or a task's time limit, at every step of a sync call: the store stays usable."""

from __future__ import annotations

import gc
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.stores.interrupting import Interrupt, SoftLimit, every_point, in_own_thread

from oncekey import (
    MemoryStore,
    Once,
    SQLiteStore,
    StoreUnavailableError,
    current_claim,
    drivers,
    guard,
)
from oncekey._core import block, call, drive, flows, heartbeat, transact, transaction_flow
from oncekey._core.flows import new_owner
from oncekey.abc import Store
from oncekey.drivers import sqlite as sqlite_driver
from oncekey.models import Key, Scope, Terms, Verdict
from oncekey.stores import (
    _batching,
    _memory_table,
    _waiters,
    memory,
)
from oncekey.stores._batching import Job, ThreadBatch
from oncekey.stores.postgres import PostgresStore, connections
from oncekey.stores.redis import RedisStore
from oncekey.stores.sqlite import database, files, lending, transactions
from oncekey.stores.sqlite import store as sqlite_store
from oncekey.testing import ManualClock

TERMS = Terms(lease_ms=30_000, ttl_ms=86_400_000)
WAIT = 60  # seconds after which a hang is one; nothing waits for it
SHARED = (_batching, call, drive, flows, heartbeat, _waiters)
FILE = (*SHARED, block, guard, sqlite_store, database, files)
OWN = (transact, transaction_flow, drive, drivers, sqlite_driver, transactions, lending)


def aside(work: Callable[[], Any]) -> Any:
    """What ``work`` gives in another thread; fails if it hangs there."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT)
    assert found, "the store hangs"
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def renewed(store: Store) -> list[str]:
    """The claims that the store's heartbeat still has."""
    heart = heartbeat._hearts.get(store)
    if heart is None:
        return []
    with heart._lock:
        held = [*heart._new, *(entry[2] for entry in heart._heap)]
    live = [schedule for schedule in map(heartbeat._live, held) if schedule is not None]
    return [schedule.claim.key.name for schedule in live]


def interrupted(interrupt: Interrupt, work: Callable[[], Any]) -> bool:
    """Run ``work`` with the interrupt. True: it came, and reached the caller as it was."""
    came: BaseException | None = None
    try:
        with interrupt:
            work()
    except (KeyboardInterrupt, SoftLimit) as error:
        came = error.with_traceback(None)  # its caller has done with it
        came.__context__ = None
    assert came is (interrupt.error if interrupt.where else None), f"lost: {interrupt.where}"
    return came is not None


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[SQLiteStore]:
    path = tmp_path / "x.db"
    with SQLiteStore(path, durability="normal", clock=clock, busy_timeout=WAIT) as opened:
        yield opened


def usable(store: Store, clock: ManualClock, name: str, where: str) -> None:
    """Another thread can use the store, and the key itself once its lease is over."""
    once = Once(store, scope="after", wait=0)
    assert aside(lambda: once(key="name", name=None)(lambda name: name)(name)) == name, where
    clock.advance(31)
    key = Key(Scope("once", "x"), name)
    verdict = aside(lambda: store.claim(key, new_owner(), b"", TERMS)).verdict
    assert verdict in (Verdict.WON, Verdict.REPLAY), where
    assert name not in renewed(store), where


def shapes(once: Once) -> dict[str, Callable[[str], Any]]:
    """A guarded call and a guarded block."""

    @once(key="name", name=None)
    def work(name: str) -> str:
        current_claim().check()
        return name

    def block(name: str) -> None:
        with once.guard(name) as claim:
            claim.answer = name

    return {"call": work, "block": block}


@pytest.mark.parametrize("shape", ["call", "block"])
@in_own_thread
def test_a_leased_call_may_be_interrupted_anywhere(
    store: SQLiteStore, clock: ManualClock, shape: str
) -> None:
    """Any step of claiming, renewing and completing on SQLite: the interrupt comes out as it is."""
    work = shapes(Once(store, scope="x"))[shape]
    for number, interrupt in enumerate(every_point(*FILE)):
        name = f"{shape}-{number}"
        if interrupted(interrupt, lambda name=name: work(name)):
            assert not store._database.writer().in_transaction, interrupt.where
            usable(store, clock, name, interrupt.where)


@in_own_thread
def test_a_memory_store_may_be_interrupted_anywhere(clock: ManualClock) -> None:
    """The same on a memory store."""
    with MemoryStore(clock=clock) as store:
        work = shapes(Once(store, scope="x"))["call"]
        for number, interrupt in enumerate(every_point(*SHARED, _memory_table, memory)):
            if interrupted(interrupt, lambda name=str(number): work(name)):
                usable(store, clock, str(number), interrupt.where)


@pytest.mark.parametrize("on", ["own", "callers", "joined", "handler"])
@in_own_thread
def test_a_transaction_may_be_interrupted_anywhere(
    store: SQLiteStore, clock: ManualClock, on: str, tmp_path: Path
) -> None:
    """Any step of a transaction: all of it is committed or nothing, and no lock stays."""
    mine = sqlite3.connect(tmp_path / "x.db", isolation_level=None, check_same_thread=False)
    mine.execute("CREATE TABLE effects (name TEXT)")
    once = Once(store, scope="x")

    @once(key="name", name=None, transactional=True)
    def handler(name: str) -> str:
        connection = transact.current_transaction().connection
        connection.execute("INSERT INTO effects VALUES (?)", (name,))
        return name

    def block(name: str) -> None:
        with store.transaction(name, scope="x", on=None if on == "own" else mine) as tx:
            if not tx.replayed:
                tx.connection.execute("INSERT INTO effects VALUES (?)", (name,))
                tx.answer = name

    for number, interrupt in enumerate(every_point(*OWN)):
        name = str(number)
        if on == "joined":
            mine.execute("BEGIN IMMEDIATE")
        work = handler if on == "handler" else block
        came = interrupted(interrupt, lambda name=name, work=work: work(name))
        if on == "joined":
            assert mine.in_transaction, interrupt.where
            mine.execute("COMMIT")
        if came:
            assert not mine.in_transaction, interrupt.where
            done = mine.execute("SELECT count(*) FROM effects WHERE name = ?", (name,)).fetchone()
            record = store.read(Key(Scope("once", "x"), name))
            assert done == (0 if record is None else 1,), interrupt.where
            assert not transaction_flow.open_keys.get(), interrupt.where
            aside(lambda name=name, work=work: work(name))
            usable(store, clock, name, interrupt.where)
    effects = mine.execute("SELECT count(*), count(DISTINCT name) FROM effects").fetchone()
    assert effects == (number + 1, number + 1)
    mine.close()


@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")
@in_own_thread
def test_opening_a_file_may_be_interrupted_anywhere(tmp_path: Path) -> None:
    """Many a step of opening a new file: it can be opened again, and holds no lock.

    Between ``sqlite3.connect`` and whoever is to close the connection, only garbage collection can.
    """
    for number, interrupt in enumerate(every_point(sqlite_store, database, files, stride=7)):
        path = tmp_path / f"{number}.db"
        if interrupted(interrupt, lambda path=path: SQLiteStore(path, durability="normal").close()):
            with SQLiteStore(path, durability="normal", busy_timeout=0) as store:
                assert store.first_seen(Key(Scope("x"), "x"), TERMS)
    gc.collect()  # here, where Python's warning of such a connection is expected


class Pair:
    """Two threads in one batch: this one, which is interrupted, and another."""

    def __init__(self, leads: bool) -> None:
        self.batch = ThreadBatch(self.run)
        self.ran: list[str] = []
        self.told: list[Any] = []
        self._leads = leads
        self._started, self._go_on, self._gone = (threading.Event() for _ in range(3))
        self._other = threading.Thread(target=self._theirs, daemon=True)
        self._helper = threading.Thread(target=self._join, daemon=True)
        if not leads:
            self._other.start()
            assert self._started.wait(WAIT)
        self._helper.start()

    def run(self, jobs: Sequence[Job]) -> None:
        self._started.set()
        if not self.ran:
            self._go_on.wait(WAIT)  # until the second has come, or will not come
        for job in jobs:
            self.ran.append(job.method)
            job.result = job.method

    def _theirs(self) -> None:
        try:
            self.told.append(self.batch.submit("theirs", ()))
        except StoreUnavailableError as error:
            self.told.append(error)

    def _join(self) -> None:
        """Let the first go on once the second waits, or has gone."""
        self._started.wait(WAIT)
        if self._leads:
            self._other.start()
        while not (self.batch._gathering.waiting or self._gone.is_set()):
            self._gone.wait(0.001)
        self._go_on.set()

    def end(self) -> None:
        """Wait for the other."""
        self._gone.set()
        self._started.set()
        self._helper.join(WAIT)
        self._other.join(WAIT)
        assert not self._other.is_alive(), "the other hangs"


@pytest.mark.parametrize("leads", [True, False], ids=["leader", "follower"])
@in_own_thread
def test_threads_that_share_a_batch_may_be_interrupted_anywhere(leads: bool) -> None:
    """Any step of leading or following: the other thread's call is made, or it is told."""
    for interrupt in every_point(_batching):
        pair = Pair(leads)
        batch = pair.batch
        came = interrupted(interrupt, lambda batch=batch: batch.submit("mine", ()))
        pair.end()
        assert pair.told[0] == "theirs" or came, interrupt.where
        assert pair.ran.count("theirs") <= 1
        assert pair.ran.count("mine") <= 1
        assert aside(lambda batch=batch: batch.submit("after", ())) == "after", interrupt.where
        assert not batch.busy


@pytest.mark.parametrize("where", ["postgres", "redis"])
@in_own_thread
def test_a_server_is_usable_after_an_interrupt_anywhere(
    where: str, request: pytest.FixtureRequest
) -> None:
    """PostgreSQL and Redis share the batches: any step there and of the calls above them."""
    store: Any
    if where == "postgres":
        store = PostgresStore(request.getfixturevalue("pg_url"))
        store.create_schema()
    else:
        store = RedisStore(request.getfixturevalue("redis_server").url)
    with store:
        once = Once(store, scope="x", wait=0)
        work = once(key="name", name=None)(lambda name: name)
        work("before")
        for number, interrupt in enumerate(every_point(_batching, call, heartbeat, connections)):
            if interrupted(interrupt, lambda name=str(number): work(name)):
                assert aside(lambda name=f"after {number}": work(name)), interrupt.where
                assert renewed(store) == [], interrupt.where
