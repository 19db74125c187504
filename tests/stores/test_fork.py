"""Stores after a fork: they work in parent and child, whatever other threads were doing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from oncekey import AsyncOnce, AsyncSQLiteStore, MemoryBackend, MemoryStore, Once, SQLiteStore
from oncekey._core import forks, heartbeat
from oncekey._core.flows import new_owner
from oncekey.abc import AsyncStore, Store
from oncekey.errors import IdempotencyInFlightError
from oncekey.guard import current_claim
from oncekey.instrument import events
from oncekey.models import Key, Scope, State, Terms, Verdict
from oncekey.receiver import AuditEntry, TableAudit
from oncekey.stores import memory

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

TERMS = Terms(lease_ms=30_000, ttl_ms=86_400_000)
SCOPE = Scope("once", "fork")
HANG = 120  # seconds after which a child that hangs is ended; no test waits for it


def key(name: object) -> Key:
    return Key(SCOPE, str(name))


class Child:
    """A forked child that does some work and tells what came of it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            with contextlib.suppress(BaseException):
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(HANG)
                try:
                    result = (True, work())
                except BaseException as error:
                    result = (False, f"{type(error).__name__}: {error}")
                os.write(writing, pickle.dumps(result))
            os._exit(0)
        os.close(writing)
        self.reading = reading

    def result(self) -> Any:
        """What ``work`` gave in the child; fails if it raised or hung there."""
        with os.fdopen(self.reading, "rb") as stream:
            data = stream.read()
        status = os.waitpid(self.pid, 0)[1]
        assert not os.WIFSIGNALED(status), f"the child hung: signal {os.WTERMSIG(status)}"
        done, result = pickle.loads(data)
        assert done, f"the child failed: {result}"
        return result


class Gate:
    """Lets another process go on."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()

    def open(self) -> None:
        os.write(self.writing, b"x")

    def wait(self) -> None:
        os.read(self.reading, 1)

    def close(self) -> None:
        os.close(self.reading)
        os.close(self.writing)


@pytest.fixture
def gates() -> Iterator[tuple[Gate, Gate]]:
    """One for the parent to wait at, one for the child."""
    both = (Gate(), Gate())
    yield both
    for gate in both:
        gate.close()


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    opened: Store = (
        MemoryStore()
        if request.param == "memory"
        else SQLiteStore(tmp_path / "fork.db", busy_timeout=10)
    )
    with opened:
        yield opened


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[SQLiteStore]:
    with SQLiteStore(tmp_path / "fork.db", busy_timeout=10) as opened:
        yield opened


@pytest.fixture(params=["memory", "thread", "inline"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AsyncStore]:
    opened: AsyncStore = (
        MemoryBackend()
        if request.param == "memory"
        else AsyncSQLiteStore(tmp_path / "fork.db", commit=request.param, busy_timeout=10)
    )
    yield opened
    asyncio.run(opened.aclose())


def worker(store: Store, **options: Any) -> Callable[[str], list[Any]]:
    """A guarded function that says which process ran it."""
    once = Once(store, scope="fork", **options)

    @once(key="name", name=None)
    def work(name: str) -> list[Any]:
        return [name, os.getpid()]

    return work


# Sync


def test_a_store_works_in_parent_and_child(store: Store) -> None:
    """After a fork both processes run new keys, and both replay what was done before it."""
    work = worker(store)
    before = work("before")
    child = Child(lambda: (os.getpid(), work("before"), work("child"), work("child")))
    assert work("parent") == ["parent", os.getpid()]
    pid, replayed, first, again = child.result()
    assert replayed == before == work("before")
    assert first == again == ["child", pid]
    assert work("parent") == ["parent", os.getpid()]


def test_a_grandchild_works_too(store: Store) -> None:
    """A child may fork again: each generation runs its own keys."""
    work = worker(store)
    work("before")

    def child() -> list[Any]:
        work("child")
        return [work("before"), Child(lambda: [work("before"), work("grandchild")[0]]).result()]

    mine, theirs = Child(child).result()
    assert mine == work("before") == theirs[0]
    assert theirs[1] == "grandchild"


def test_what_the_child_records_the_parent_sees(sqlite: SQLiteStore) -> None:
    """On a shared file an answer that the child acknowledged replays in the parent, and back."""
    work = worker(sqlite)
    work("before")
    child = Child(lambda: work("child"))
    assert child.result() == work("child") == ["child", child.pid]
    assert Child(lambda: work("parent again")).result() == work("parent again")


def test_parent_and_children_race_for_shared_keys(sqlite: SQLiteStore) -> None:
    """Four children and the parent mark the same keys at once: each is new to one of them only."""
    sqlite.first_seen(key("before"), TERMS)

    def mark() -> list[int]:
        return [number for number in range(100) if sqlite.first_seen(key(number), TERMS)]

    children = [Child(mark) for _ in range(4)]
    seen = Counter(mark())
    for child in children:
        seen.update(child.result())
    assert seen == Counter(range(100))


def test_nothing_the_child_acknowledged_is_lost_when_the_parent_closes(
    sqlite: SQLiteStore, gates: tuple[Gate, Gate], tmp_path: Path
) -> None:
    """The parent closes the store while the child still writes: the child's answers all stay."""
    parent, child_gate = gates
    sqlite.first_seen(key("before"), TERMS)

    def write() -> list[bool]:
        seen = [sqlite.first_seen(key("early"), TERMS)]
        parent.open()
        child_gate.wait()
        return seen + [sqlite.first_seen(key(number), TERMS) for number in range(20)]

    child = Child(write)
    parent.wait()
    sqlite.close()
    with SQLiteStore(tmp_path / "fork.db") as again:  # as the next process to come would
        again.first_seen(key("between"), TERMS)
    child_gate.open()
    assert child.result() == [True] * 21
    with SQLiteStore(tmp_path / "fork.db") as again:
        names = ["before", "early", "between", *range(20)]
        assert [name for name in names if again.read(key(name)) is None] == []
        reader = again._database.reader()
        assert reader.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_nothing_the_parent_acknowledged_is_lost_when_the_child_closes(
    sqlite: SQLiteStore, tmp_path: Path
) -> None:
    """The child closes the store it inherited; the parent goes on, and loses nothing."""
    sqlite.first_seen(key("before"), TERMS)

    def write_and_close() -> bool:
        first = sqlite.first_seen(key("child"), TERMS)
        sqlite.close()
        return first

    assert Child(write_and_close).result() is True
    assert Child(sqlite.close).result() is None
    for number in range(20):
        assert sqlite.first_seen(key(number), TERMS) is True
    with SQLiteStore(tmp_path / "fork.db") as other:
        names = ["before", "child", *range(20)]
        assert [name for name in names if other.read(key(name)) is None] == []


def test_a_claim_of_the_parent_is_not_the_childs(store: Store) -> None:
    """While the parent runs a key, the child is told that it is in flight; the parent completes."""
    once = Once(store, scope="fork", wait=0)

    def child() -> str:
        with pytest.raises(IdempotencyInFlightError):
            with once.guard("held"):
                pass
        owner = new_owner()
        reply = store.claim(key("held"), owner, b"", TERMS)
        record = store.read(key("held"))
        assert record is not None
        # Nor can it settle the claim by the fence alone.
        assert store.complete(key("held"), owner, record.fence, b"child", TERMS) is False
        assert store.release(key("held"), owner, record.fence) is False
        return reply.verdict.value

    with once.guard("held") as claim:
        assert Child(child).result() == Verdict.IN_FLIGHT.value
        claim.answer = "parent"
    with once.guard("held") as replay:
        assert (replay.replayed, replay.answer) == (True, "parent")


def test_parent_and_child_never_share_an_owner() -> None:
    """Owner ids are fresh for each call, so that parent and child can't both win as one."""
    new_owner()
    children = [Child(lambda: [new_owner() for _ in range(5)]) for _ in range(4)]
    owners = [new_owner() for _ in range(5)]
    for child in children:
        owners += child.result()
    assert len(set(owners)) == len(owners) == 25


def test_heartbeats_go_on_in_parent_and_child(store: Store) -> None:
    """A fork in the middle of a handler: claims of the parent and of the child are renewed."""
    once = Once(store, scope="fork", lease=0.3)

    def run(name: str, inside: Callable[[], Any] = lambda: None) -> Any:
        """Run a handler that ends when its claim was renewed twice after ``inside``."""
        renewals: list[Key] = []
        twice = threading.Event()
        renew = store.renew

        def counted(renewed: Key, *args: Any) -> bool:
            held = renew(renewed, *args)
            renewals.append(renewed)
            if renewals.count(key(name)) >= 2:
                twice.set()
            return held

        store.renew = counted  # type: ignore[method-assign]
        try:

            @once(key="name", name=None)
            def work(name: str) -> list[Any]:
                result = inside()
                renewals.clear()
                assert twice.wait(HANG)
                current_claim().check()
                return [name, result]

            return work(name)
        finally:
            store.renew = renew  # type: ignore[method-assign]

    # Forked while the parent's heart beats, then each on its own.
    def inside() -> Any:
        child = Child(lambda: run("child"))
        return child.result()

    assert run("parent", inside) == ["parent", ["child", None]]
    assert run("parent again") == ["parent again", None]


# Locks that other threads held when the process forked


class Held:
    """A lock that another thread holds, for as long as the fork takes."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.taken = threading.Event()
        self.forked = threading.Event()
        self.thread = threading.Thread(target=self._hold)

    def _hold(self) -> None:
        with self.lock:
            self.taken.set()
            # A store may wait for its locks before it lets a fork happen: don't hold them forever.
            self.forked.wait(0.3)

    def __enter__(self) -> None:
        self.thread.start()
        assert self.taken.wait(HANG)

    def __exit__(self, *exc: object) -> None:
        self.forked.set()
        self.thread.join()


def locks(store: Store) -> dict[str, Any]:
    """Every lock that using ``store`` may take, by name."""
    found = {
        "heartbeat": heartbeat._making,
        "names": memory._naming,
        "listeners": events._change,
    }
    if isinstance(store, SQLiteStore):
        database = store._database
        found |= {
            "write": database.write_lock,
            "read": database.read_lock,
            "waiters": database.waiters._lock,
            "group": store._commit._leads,
        }
    else:
        table = store._table  # type: ignore[attr-defined]
        found |= {"table": table.lock, "waiters": table.waiters._lock}
    return found


def use_everything(store: Store, who: str) -> list[Any]:
    """A guarded call with a heartbeat, a wait, a sweep, a new store and a listener."""
    result = worker(store, lease=0.2)(who)
    store.wait(key(who), 0.001)
    store.first_seen(key(f"mark of {who}"), TERMS)
    store.sweep()  # type: ignore[attr-defined]
    memory.MemoryStore(f"named-{who}").close()
    with events.subscribe(lambda event: None):
        pass
    return result


@pytest.mark.parametrize(
    "store, name",
    [
        *(("memory", name) for name in ("heartbeat", "names", "listeners", "waiters", "table")),
        *(("sqlite", name) for name in ("heartbeat", "write", "read", "waiters", "group")),
    ],
    indirect=["store"],
)
def test_a_lock_that_another_thread_held_does_not_hang_the_child(store: Store, name: str) -> None:
    """A fork while another thread holds one of the locks leaves the child with a free one."""
    use_everything(store, "before")
    with Held(locks(store)[name]):
        child = Child(lambda: use_everything(store, "child"))
    assert child.result() == ["child", child.pid]
    assert use_everything(store, "parent") == ["parent", os.getpid()]


def test_a_transaction_that_another_thread_had_open_does_not_block_the_child(
    sqlite: SQLiteStore,
) -> None:
    """A fork while another thread is inside a transaction: both write afterwards, none is lost."""
    inside, forked = threading.Event(), threading.Event()
    slow = threading.Thread(target=lambda: view.first_seen(key("slow"), TERMS))

    def clock() -> float:
        if threading.current_thread() is slow and sqlite._database.writer().in_transaction:
            inside.set()
            forked.wait(0.3)
        return time.time()

    view = sqlite.with_clock(clock)
    slow.start()
    assert inside.wait(HANG)
    child = Child(lambda: [sqlite.first_seen(key(f"child{n}"), TERMS) for n in range(5)])
    forked.set()
    slow.join()
    assert [sqlite.first_seen(key(f"parent{n}"), TERMS) for n in range(5)] == [True] * 5
    assert child.result() == [True] * 5
    names = ["slow", *(f"{who}{n}" for who in ("child", "parent") for n in range(5))]
    assert [name for name in names if sqlite.read(key(name)) is None] == []


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_an_audit_table_has_the_entries_of_every_process(
    database: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Four children forked amid writing threads: each entry of each process is there once."""
    connect: Any
    mark = "?"
    if database == "sqlite":
        connect = str(tmp_path / "audit.db")
    else:
        psycopg = pytest.importorskip("psycopg")
        url, mark = request.getfixturevalue("pg_url"), "%s"
        connect = lambda: psycopg.connect(url)  # noqa: E731
    audit = TableAudit(connect, mark)

    def write(who: str) -> None:
        for number in range(10):
            audit(AuditEntry(0.0, "p", "s", f"{who}-{number}", "first", 200, "", 0.0))

    threads = [threading.Thread(target=write, args=(f"thread {n}",)) for n in range(3)]
    for thread in threads:
        thread.start()
    children = [Child(lambda n=n: write(f"child {n}")) for n in range(4)]  # type: ignore[misc]
    write("parent")
    for thread in threads:
        thread.join(HANG)
    for child in children:
        child.result()
    audit.close()
    connection = sqlite3.connect(connect) if database == "sqlite" else connect()
    found = connection.cursor().execute("SELECT key_hash FROM oncekey_audit").fetchall()
    connection.close()
    assert len(found) == len(set(found)) == 10 * (3 + 4 + 1)


def test_a_lock_of_the_audit_table_does_not_hang_the_child(tmp_path: Path) -> None:
    """A fork while another thread writes an entry leaves the child with a free lock."""
    audit = TableAudit(str(tmp_path / "audit.db"))
    entry = AuditEntry(0.0, "p", "s", "k", "first", 200, "", 0.0)
    with Held(audit._lock):
        child = Child(lambda: audit(entry))
    audit(entry)
    assert child.result() is None
    audit.close()


def test_stores_may_be_made_while_the_process_forks() -> None:
    """A fork sees every store that there is, though other threads make more at that moment."""
    over = threading.Event()
    kept: deque[forks.Forking] = deque(maxlen=100)

    def make() -> None:
        while not over.is_set():
            new = forks.Forking()
            forks.watch_forks(new)
            kept.append(new)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=make)
    thread.start()
    try:
        for _ in range(50):
            first = forks.Forking()
            forks.watch_forks(first)
            try:
                forks._before()
                seen = first in forks._forking
            finally:
                forks._in_parent()
            assert seen
    finally:
        sys.setswitchinterval(before)
        over.set()
        thread.join(HANG)


def test_forks_amid_busy_threads(store: Store) -> None:
    """Ten forks while four threads run, replay and mark keys: every child works at once."""
    work = worker(store)
    stop = threading.Event()
    running = threading.Barrier(5)
    done: dict[int, int] = {}

    def hammer(who: int) -> None:
        running.wait(HANG)
        count = 0
        while not stop.is_set():
            name = f"{who}-{count}"
            assert work(name) == work(name) == [name, os.getpid()]
            assert store.first_seen(key(f"mark-{who}-{count}"), TERMS) is True
            count += 1
        done[who] = count

    def child(number: int) -> list[Any]:
        return [work(f"child-{number}")[0], *(work(f"c{number}-{n}")[0] for n in range(5))]

    with ThreadPoolExecutor(4) as pool:
        hammers = [pool.submit(hammer, who) for who in range(4)]
        try:
            running.wait(HANG)
            for number in range(10):
                wanted = [f"child-{number}", *(f"c{number}-{n}" for n in range(5))]
                assert Child(lambda number=number: child(number)).result() == wanted
        finally:
            stop.set()
        for hammered in hammers:
            hammered.result()
    for who, count in done.items():
        for number in range(count):
            record = store.read(key(f"{who}-{number}"))
            assert record is not None
            assert record.state is State.COMPLETED
    assert len(done) == 4


FORKS_FROM_THREADS = """
    import os, sys, threading
    from oncekey.models import Key, Scope, Terms
    from oncekey.stores.memory import MemoryStore
    from oncekey.stores.sqlite import SQLiteStore

    kind, path = sys.argv[1:]
    store = MemoryStore() if kind == "memory" else SQLiteStore(path, durability="normal")
    scope, terms = Scope("once", "fork"), Terms(lease_ms=30_000, ttl_ms=86_400_000)
    failed = []

    def forks(who):
        for number in range(40):
            pid = os.fork()
            if pid == 0:
                first = number % 10 or store.first_seen(Key(scope, f"child-{who}-{number}"), terms)
                os._exit(0 if first else 1)
            if os.waitpid(pid, 0)[1] or not store.first_seen(Key(scope, f"{who}-{number}"), terms):
                failed.append((who, number))

    threads = [threading.Thread(target=forks, args=(who,)) for who in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("failed", failed)
"""


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_several_threads_may_fork_at_the_same_time(kind: str, tmp_path: Path) -> None:
    """Three threads fork and use the store in between: none of them ever waits for good."""
    ended = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORKS_FROM_THREADS)),
            *(kind, str(tmp_path / "fork.db")),
        ],
        stdout=subprocess.PIPE,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "failed []\n")


# Async


def test_an_async_store_works_after_a_fork(backend: AsyncStore) -> None:
    """A backend that was used before the fork works in a new loop of the parent and the child."""
    once = AsyncOnce(backend, scope="fork")

    @once(key="name", name=None)
    async def work(name: str) -> list[Any]:
        return [name, os.getpid()]

    async def several(who: str) -> list[Any]:
        return list(await asyncio.gather(work("before"), *(work(f"{who}{n}") for n in range(8))))

    asyncio.run(several("first"))
    child = Child(lambda: asyncio.run(several("child")))
    parent = asyncio.run(several("parent"))
    theirs = child.result()
    assert parent[0] == theirs[0] == ["before", os.getpid()]
    assert parent[1:] == [[f"parent{n}", os.getpid()] for n in range(8)]
    assert theirs[1:] == [[f"child{n}", child.pid] for n in range(8)]


def test_a_child_may_close_an_async_store(backend: AsyncStore) -> None:
    """Closing in the child ends nothing of the parent's."""
    asyncio.run(backend.first_seen(key("before"), TERMS))
    assert Child(lambda: asyncio.run(backend.aclose())).result() is None
    assert asyncio.run(backend.first_seen(key("after"), TERMS)) is True


def test_several_loops_in_several_threads_share_a_store(backend: AsyncStore) -> None:
    """Eight loops in eight threads mark the same keys at once: each key is new once."""
    start = threading.Barrier(8)

    async def mark() -> list[int]:
        start.wait(HANG)
        new = await asyncio.gather(*(backend.first_seen(key(n), TERMS) for n in range(100)))
        return [number for number, first in enumerate(new) if first]

    with ThreadPoolExecutor(8) as pool:
        seen = Counter[int]()
        for found in pool.map(lambda _: asyncio.run(mark()), range(8)):
            seen.update(found)
    assert seen == Counter(range(100))


def test_a_waiter_in_one_loop_gets_the_answer_of_another(backend: AsyncStore) -> None:
    """Loops in several threads call one key: the handler runs once, everybody gets its answer."""
    once = AsyncOnce(backend, scope="fork")
    runs: list[int] = []
    started, asked = threading.Event(), threading.Semaphore(0)

    @once(key="name", name=None)
    async def work(name: str) -> int:
        runs.append(threading.get_ident())
        started.set()
        for _ in range(3):  # until the three others have come to ask
            await asyncio.to_thread(asked.acquire, timeout=HANG)
        return threading.get_ident()

    def first() -> int:
        return asyncio.run(_run(work("k")))

    def other() -> int:
        assert started.wait(HANG)
        asked.release()
        return asyncio.run(_run(work("k")))

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(first), *(pool.submit(other) for _ in range(3))]
        answers = {call.result() for call in calls}
    assert len(runs) == 1
    assert answers == set(runs)


async def _run(work: Any) -> Any:
    return await work
