"""What SQLite stores promise about the disk: what survives, is shared, or is never written."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from oncekey import AsyncSQLiteStore, Once, SQLiteStore, SyncWebhookDedupStore, WebhookDedupStore
from oncekey.instrument import subscribe
from oncekey.instrument.events import Event, EventKind
from oncekey.models import Key, Scope, State, Terms, Verdict
from oncekey.stores._batching import Job
from oncekey.stores.sqlite import database as module
from oncekey.stores.sqlite.database import Database
from oncekey.testing import ManualClock

TERMS = Terms(lease_ms=30_000, ttl_ms=86_400_000)
SCOPE = Scope("once", "durable")
OWNER = b"o" * 16


def key(name: object) -> Key:
    return Key(SCOPE, str(name))


def run_script(script: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, args)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100, check=False)


# What survives

ACKNOWLEDGE_SYNC = """
    import os, signal, sys
    from oncekey import Once
    from oncekey.stores.sqlite import SQLiteStore

    once = Once(SQLiteStore(sys.argv[1], durability=sys.argv[2]), scope="durable")

    @once(key="name", name=None)
    def work(name: str) -> dict:
        return {"by": os.getpid()}

    for number in range(20):
        answer = work(f"k{number}")
    os.write(1, str(answer["by"]).encode())
    os.kill(os.getpid(), signal.SIGKILL)
"""

ACKNOWLEDGE_ASYNC = """
    import asyncio, os, signal, sys
    from oncekey import AsyncOnce
    from oncekey.stores.sqlite import AsyncSQLiteStore

    async def main():
        backend = AsyncSQLiteStore(sys.argv[1], durability=sys.argv[2], commit=sys.argv[3])
        once = AsyncOnce(backend, scope="durable")

        @once(key="name", name=None)
        async def work(name: str) -> dict:
            return {"by": os.getpid()}

        answers = await asyncio.gather(*(work(f"k{number}") for number in range(20)))
        os.write(1, str(answers[-1]["by"]).encode())
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(main())
"""


@pytest.mark.parametrize("durability", ["full", "normal"])
@pytest.mark.parametrize("kind", ["sync", "thread", "inline"])
def test_an_acknowledged_answer_survives_kill_9(tmp_path: Path, durability: str, kind: str) -> None:
    """A process is killed right after its calls returned: their answers are all there."""
    path = tmp_path / "killed.db"
    script = ACKNOWLEDGE_SYNC if kind == "sync" else ACKNOWLEDGE_ASYNC
    ended = run_script(script, path, durability, kind)
    assert ended.returncode == -signal.SIGKILL
    pid = int(ended.stdout)
    once = Once(SQLiteStore(path), scope="durable")

    @once(key="name", name=None)
    def work(name: str) -> dict:  # type: ignore[type-arg]
        raise AssertionError(f"{name} ran again")

    for number in range(20):
        assert work(f"k{number}") == {"by": pid}
    once.store.close()


def test_a_mark_survives_kill_9(tmp_path: Path) -> None:
    """A delivery that check_and_record called new is a duplicate after kill -9."""
    path = tmp_path / "marked.db"
    script = """
        import os, signal, sys
        from oncekey import SQLiteStore, SyncWebhookDedupStore
        dedup = SyncWebhookDedupStore(SQLiteStore(sys.argv[1]))
        new = [dedup.check_and_record("s", str(n)) for n in range(20)]
        os.write(1, str(new.count(True)).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = run_script(script, path)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "20")
    with SQLiteStore(path) as store:
        dedup = SyncWebhookDedupStore(store)
        assert not any(dedup.check_and_record("s", str(n)) for n in range(20))


def test_a_claim_of_a_killed_process_is_held_until_its_lease_ends(tmp_path: Path) -> None:
    """A claim survives kill -9 too: nobody runs beside it before the lease is over."""
    path = tmp_path / "claimed.db"
    clock = ManualClock()
    script = """
        import os, signal, sys
        from oncekey import Once, SQLiteStore
        from oncekey.testing import ManualClock
        once = Once(SQLiteStore(sys.argv[1], clock=ManualClock()), scope="durable", lease=30)
        with once.guard("k") as claim:
            os.write(1, str(claim.fence).encode())
            os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = run_script(script, path)
    assert ended.returncode == -signal.SIGKILL
    with SQLiteStore(path, clock=clock) as store:
        clock.advance(29.999)
        assert store.claim(key("k"), OWNER, b"", TERMS).verdict is Verdict.IN_FLIGHT
        clock.advance(0.001)
        reply = store.claim(key("k"), OWNER, b"", TERMS)
        assert (reply.verdict, reply.takeover) == (Verdict.WON, True)
        assert reply.fence > int(ended.stdout)


@pytest.mark.parametrize(
    "durability, level", [(None, 2), ("full", 2), ("normal", 1)], ids=["default", "full", "normal"]
)
def test_connections_sync_as_durability_says(
    tmp_path: Path, durability: str | None, level: int
) -> None:
    """By default the file is in WAL mode and every connection syncs each commit to the disk."""
    options = {} if durability is None else {"durability": durability}
    with SQLiteStore(tmp_path / "pragma.db", **options) as store:
        store.first_seen(key("k"), TERMS)
        database = store._database
        for connection in (database.writer(), database.reader()):
            assert connection.execute("PRAGMA synchronous").fetchone() == (level,)
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


# What is shared

CALLERS = 24


class Counted:
    """Counts the commits of a database, and can hold the first one until callers have queued up."""

    def __init__(self, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[int] = []
        self.entered = threading.Event()
        self.may_go_on = threading.Event()
        commit = database.commit

        def counted(jobs: Sequence[Job]) -> None:
            self.batches.append(len(jobs))
            if len(self.batches) == 1:
                self.entered.set()
                assert self.may_go_on.wait(60)
            commit(jobs)

        monkeypatch.setattr(database, "commit", counted)
        self.statements: list[str] = []
        database.writer().set_trace_callback(self.statements.append)

    @property
    def commits(self) -> int:
        """How many times SQLite was told to commit."""
        return self.statements.count("COMMIT")


def test_threads_share_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that call while a commit is under way are all taken along by the next one."""
    with SQLiteStore(tmp_path / "group.db") as store:
        count = Counted(store._database, monkeypatch)
        monkeypatch.setattr(store._commit, "_run", store._database.commit)
        results: list[bool] = []

        def call(number: int) -> None:
            results.append(store.first_seen(key(number), TERMS))

        threads = [threading.Thread(target=call, args=(number,)) for number in range(CALLERS)]
        threads[0].start()
        assert count.entered.wait(60)
        for thread in threads[1:]:
            thread.start()
        # All of them wait for the first commit.
        while len(store._commit._gathering.waiting) < CALLERS - 1:
            threading.Event().wait(0.001)
        count.may_go_on.set()
        for thread in threads:
            thread.join()
        assert results == [True] * CALLERS
        assert count.batches == [1, CALLERS - 1]
        assert count.commits == 2
        assert all(store.read(key(number)) is not None for number in range(CALLERS))


async def test_tasks_share_a_commit_of_the_writer_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks that call while the writer thread commits are all taken along by its next commit."""
    async with AsyncSQLiteStore(tmp_path / "group.db") as backend:
        count = Counted(backend._database, monkeypatch)
        first = asyncio.create_task(backend.first_seen(key(0), TERMS))
        await asyncio.to_thread(count.entered.wait, 60)
        rest = [
            asyncio.create_task(backend.first_seen(key(number), TERMS))
            for number in range(1, CALLERS)
        ]
        while backend._commit._queue.qsize() < CALLERS - 1:  # type: ignore[union-attr]
            await asyncio.sleep(0)
        count.may_go_on.set()
        assert await asyncio.gather(first, *rest) == [True] * CALLERS
        assert count.batches == [1, CALLERS - 1]
        assert count.commits == 2


async def test_tasks_of_one_tick_share_an_inline_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With commit="inline" all calls of one tick of the loop are one commit."""
    async with AsyncSQLiteStore(tmp_path / "group.db", commit="inline") as backend:
        count = Counted(backend._database, monkeypatch)
        count.may_go_on.set()
        calls = (backend.first_seen(key(number), TERMS) for number in range(CALLERS))
        assert await asyncio.gather(*calls) == [True] * CALLERS
        assert count.batches == [CALLERS]
        assert count.commits == 1


def test_one_bad_change_does_not_take_its_neighbours_down(tmp_path: Path) -> None:
    """In a shared commit, a change that fails fails alone; the others are recorded."""
    with SQLiteStore(tmp_path / "bad.db") as store:
        database = store._database

        def broken(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT INTO oncekey_records (key) VALUES (NULL)")

        jobs = [
            Job(database.mark, (key("a"), TERMS, store._clock)),
            Job(broken, ()),
            Job(database.mark, (key("b"), TERMS, store._clock)),
        ]
        database.commit(jobs)
        assert [job.error is None for job in jobs] == [True, False, True]
        assert (jobs[0].outcome(), jobs[2].outcome()) == (True, True)
        assert store.read(key("a")) is not None
        assert store.read(key("b")) is not None


# What is never written


class Untouched:
    """Asserts that nothing was written to a database: no statement, no change, no byte of WAL."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def __enter__(self) -> None:
        self.statements: list[str] = []
        self.before = self.state()
        self.database.writer().set_trace_callback(self.statements.append)

    def state(self) -> tuple[int, int, bytes]:
        wal = Path(self.database.path + "-wal").read_bytes()
        return self.database.writer().total_changes, len(wal), wal

    def __exit__(self, exc_type: type[BaseException] | None, *rest: object) -> None:
        self.database.writer().set_trace_callback(None)
        if exc_type is None:
            assert self.statements == []
            assert self.state() == self.before


def test_duplicates_write_nothing(tmp_path: Path) -> None:
    """A replay, a conflict, a claim in flight and a duplicate delivery leave the file as it is."""
    with SQLiteStore(tmp_path / "still.db") as store:
        done = store.claim(key("done"), OWNER, b"p", TERMS)
        store.complete(key("done"), OWNER, done.fence, b"answer", TERMS)
        store.claim(key("running"), OWNER, b"p", TERMS)
        store.first_seen(key("seen"), TERMS)
        other = b"x" * 16
        with Untouched(store._database):
            assert store.claim(key("done"), other, b"p", TERMS).verdict is Verdict.REPLAY
            assert store.claim(key("done"), other, b"q", TERMS).verdict is Verdict.CONFLICT
            assert store.claim(key("running"), other, b"p", TERMS).verdict is Verdict.IN_FLIGHT
            assert store.first_seen(key("seen"), TERMS) is False
            assert store.read(key("nothing")) is None
        with pytest.raises(AssertionError):  # a win is seen to write
            with Untouched(store._database):
                store.first_seen(key("new"), TERMS)


@pytest.mark.parametrize("commit", ["thread", "inline"])
async def test_async_duplicates_write_nothing(tmp_path: Path, commit: str) -> None:
    """The async store answers replays and duplicate deliveries without its writer."""
    async with AsyncSQLiteStore(tmp_path / "still.db", commit=commit) as backend:
        dedup = WebhookDedupStore(backend)
        done = await backend.claim(key("done"), OWNER, b"p", TERMS)
        await backend.complete(key("done"), OWNER, done.fence, b"answer", TERMS)
        assert await dedup.check_and_record("s", "k") is True
        with Untouched(backend._database):
            reply = await backend.claim(key("done"), b"x" * 16, b"p", TERMS)
            assert (reply.verdict, reply.answer) == (Verdict.REPLAY, b"answer")
            assert await dedup.check_and_record("s", "k") is False


# Sweeping


@pytest.fixture
def swept() -> Iterator[list[int]]:
    """How many records each sweep removed."""
    counts: list[int] = []

    def listen(event: Event) -> None:
        if event.kind is EventKind.SWEPT:
            counts.append(event.count)

    with subscribe(listen):
        yield counts


def rows(store: SQLiteStore) -> int:
    reader = store._database.reader()
    found: int = reader.execute("SELECT count(*) FROM oncekey_records").fetchone()[0]
    return found


def test_expired_rows_go_by_themselves_in_small_steps(tmp_path: Path, swept: list[int]) -> None:
    """Writing new keys removes expired ones, a few at a time, until none is left."""
    clock = ManualClock()
    short, long = Terms(lease_ms=100, ttl_ms=1_000), TERMS
    with SQLiteStore(tmp_path / "sweep.db", clock=clock, durability="normal") as store:
        commit, mark = store._database.commit, store._database.mark
        commit([Job(mark, (key(f"old{n}"), short, clock)) for n in range(2_000)])
        commit([Job(mark, (key(f"live{n}"), long, clock)) for n in range(100)])
        assert rows(store) == 2_100
        clock.advance(1)  # expired, but within the grace that clocks are given
        for number in range(700):
            store.first_seen(key(f"soon{number}"), long)
        assert (swept, rows(store)) == ([], 2_800)
        clock.advance(module.GRACE_MS / 1000)
        for number in range(2_600):
            store.first_seen(key(f"new{number}"), long)
        assert sum(swept) == 2_000
        assert max(swept) <= module.SWEEP_ROWS
        assert rows(store) == 100 + 700 + 2_600
        for name in [f"live{n}" for n in range(100)] + [f"new{n}" for n in range(2_600)]:
            assert store.read(key(name)) is not None


def test_a_sweep_removes_nothing_that_lives(tmp_path: Path, swept: list[int]) -> None:
    """Pending, released, completed and remembered records stay until their own time is over."""
    clock = ManualClock()
    terms = Terms(lease_ms=1_000, ttl_ms=10_000, skew_ms=5_000, remember_ms=20_000)
    with SQLiteStore(tmp_path / "live.db", clock=clock) as store:
        for name in ("pending", "released", "completed"):
            reply = store.claim(key(name), OWNER, b"", terms)
            if name == "released":
                store.release(key(name), OWNER, reply.fence)
            if name == "completed":
                store.complete(key(name), OWNER, reply.fence, b"answer", terms)
        ends = {"pending": 11.0, "released": 11.0, "completed": 35.0}
        passed = 0.0
        for at in (10.999, 11.0, 34.999, 35.0):
            clock.advance(at - passed)
            passed = at
            store.sweep()
            left = {name for name in ends if store.read(key(name)) is not None}
            assert left == {name for name, end in ends.items() if at < end}
    assert sum(swept) == 3


def test_a_view_on_another_clock_does_not_lose_its_records(tmp_path: Path) -> None:
    """Of several clocks on one store the one furthest behind decides what is swept by itself."""
    ahead, behind = ManualClock(1_700_100_000.0), ManualClock(1_700_000_000.0)
    terms = Terms(lease_ms=100, ttl_ms=1_000)
    with SQLiteStore(tmp_path / "views.db", clock=ahead) as store:
        view = store.with_clock(behind)
        view.first_seen(key("mine"), terms)
        for number in range(2 * module.SWEEP_EVERY):
            store.first_seen(key(number), TERMS)
        assert view.first_seen(key("mine"), terms) is False


# Migrations

OPEN_AND_MARK = """
    import json, sqlite3, sys
    from oncekey.models import Key, Scope, Terms
    from oncekey.stores.sqlite import SQLiteStore

    print("ready", flush=True)
    sys.stdin.readline()
    store = SQLiteStore(sys.argv[1])
    scope, terms = Scope("once", "durable"), Terms(lease_ms=1000, ttl_ms=86_400_000)
    print(json.dumps([store.first_seen(Key(scope, str(n)), terms) for n in range(5)]), flush=True)
"""


@pytest.mark.parametrize("made", [False, True], ids=["missing", "empty"])
def test_eight_processes_may_open_a_new_file_at_once(tmp_path: Path, made: bool) -> None:
    """A missing or empty file opened by eight processes at once is migrated once, and works."""
    path = tmp_path / "new.db"
    if made:
        path.touch()
    command = [sys.executable, "-c", textwrap.dedent(OPEN_AND_MARK), str(path)]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    said = [worker.communicate()[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 8
    firsts = [json.loads(one) for one in said]
    assert [sum(column) for column in zip(*firsts, strict=True)] == [1] * 5
    raw = sqlite3.connect(path)
    versions = raw.execute("SELECT version FROM oncekey_schema ORDER BY version").fetchall()
    raw.close()
    assert versions == [(number,) for number, _ in module.MIGRATIONS]


def test_a_file_that_another_process_holds_for_itself_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening waits for whoever makes the file, for longer than SQLite's own small slice."""
    path = tmp_path / "held.db"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("CREATE TABLE theirs (a INTEGER)")
    other.execute("BEGIN EXCLUSIVE")
    pauses: list[float] = []

    def let_go(seconds: float) -> None:
        pauses.append(seconds)
        if other.in_transaction:
            other.execute("COMMIT")

    monkeypatch.setattr(module, "SLICE", 0.0)
    monkeypatch.setattr("oncekey.stores.sqlite.files.time.sleep", let_go)
    with SQLiteStore(path) as store:
        assert store.first_seen(key("after"), TERMS) is True
    other.close()
    assert pauses, "nobody held the file"


def test_a_migration_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A migration is one transaction: half of it never stays, and the next opening does it all."""
    path = tmp_path / "half.db"
    newest = module.MIGRATIONS[-1][0] + 1
    broken = "CREATE TABLE oncekey_half (a INTEGER);\nINSERT INTO nowhere VALUES (1);\n"
    with SQLiteStore(path) as store:
        store.first_seen(key("before"), TERMS)
    with monkeypatch.context() as patch:
        patch.setattr(module, "MIGRATIONS", [*module.MIGRATIONS, (newest, broken)])
        with pytest.raises(module.StoreError):
            SQLiteStore(path)
    raw = sqlite3.connect(path)
    assert raw.execute("SELECT 1 FROM sqlite_master WHERE name = 'oncekey_half'").fetchall() == []
    raw.close()
    with SQLiteStore(path) as store:
        assert store.first_seen(key("before"), TERMS) is False
    better = broken.replace("INSERT INTO nowhere", "INSERT INTO oncekey_half")
    monkeypatch.setattr(module, "MIGRATIONS", [*module.MIGRATIONS, (newest, better)])
    with SQLiteStore(path) as store:
        assert store.first_seen(key("before"), TERMS) is False
        record = store.read(key("before"))
        assert record is not None
        assert record.state is State.COMPLETED
