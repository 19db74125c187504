"""The SQLite store, durable, beside the bare driver and a thread per call. Run by ``run.py``."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import harness
import targets
from harness import Case, Options, in_tasks, in_threads, new_keys

from oncekey import AsyncSQLiteStore, AsyncWebhookDedup, SQLiteStore, WebhookDedup

LIMIT = "limit: sqlite3"
SYNC = "**oncekey** sync, threads"
THREAD = "**oncekey** async"
INLINE = '**oncekey** async, commit="inline"'
AIOSQLITE = "aiosqlite, one by one"
HAND_OFF = "floor: a hand-off between threads"
BY_HAND = "limit: by hand, a turn each"
TRANSACTION = "**oncekey** transaction"
REFERENCES = {"of the limit": LIMIT, "of by hand": BY_HAND, "times aiosqlite": AIOSQLITE}

BARE = "CREATE TABLE seen (key TEXT PRIMARY KEY, expires_at INTEGER NOT NULL) WITHOUT ROWID"
INSERT = "INSERT INTO seen VALUES (?, ?) ON CONFLICT DO NOTHING"
UPDATE = "UPDATE seen SET expires_at = ? WHERE key = ?"
SELECT = "SELECT expires_at FROM seen WHERE key = ?"
MOST = 12_800  # keys of a case
LONGEST = 3.0  # seconds of a case, on a disk that is slower than any that was seen
EXPIRES_AT = 4_102_444_800_000

now_ns = time.perf_counter_ns
Op = Callable[[str], Awaitable[Any]]


class Files:
    """A scratch directory that gives each case a new file."""

    def __init__(self, parent: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="oncekey-bench-", dir=parent))
        self._numbers = itertools.count()

    def new(self) -> str:
        return str(self.path / f"{next(self._numbers)}.db")

    def empty(self) -> None:
        for path in self.path.iterdir():
            path.unlink()


def file_system(directory: str) -> str:
    """The kind of file system that holds ``directory``, where the system tells."""
    best, kind = "", "unknown file system"
    try:
        for line in Path("/proc/mounts").read_text("utf-8").splitlines():
            _, mount, type_, *_ = line.split()
            inside = os.path.commonpath((mount, os.path.realpath(directory))) == mount
            if inside and len(mount) >= len(best):
                best, kind = mount, type_
    except OSError:
        pass
    return kind


def sync_us(files: Files) -> float:
    """Microseconds to append 4 KB and sync it to this disk."""
    taken = []
    with open(files.path / "sync", "wb", buffering=0) as file:
        for _ in range(50):
            file.write(bytes(4096))
            start = now_ns()
            os.fsync(file.fileno())
            taken.append((now_ns() - start) / 1e3)
    return statistics.median(taken)


# ---------------------------------------------------------------------------------------- drivers


def bare(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute(BARE)
    return connection


def commits(options: Options, disk_us: float) -> int:
    """How many commits a case makes: fewer on a slow disk, so that the time stays bounded."""
    target_us = options.pick(50_000, 160_000)
    return max(40, min(1_000, int(target_us / (disk_us * 1.5 + 60))))


def limit(path: str, keys: list[str], concurrency: int, statements: list[str]) -> float:
    """Each statement for ``concurrency`` keys in a transaction of its own, nothing else."""
    with closing(bare(path)) as connection:
        execute = connection.execute
        start = now_ns()
        for at in range(0, len(keys), concurrency):
            for statement in statements:
                part = keys[at : at + concurrency]
                rows = [(key, EXPIRES_AT) if statement is INSERT else (0, key) for key in part]
                if concurrency > 1:
                    execute("BEGIN IMMEDIATE")
                done = [execute(statement, row).rowcount for row in rows]
                if concurrency > 1:
                    execute("COMMIT")
                if sum(done) != len(part):
                    raise SystemExit("the limit did not write every row")
        return (now_ns() - start) / len(keys) / 1e9


@asynccontextmanager
async def aiosqlite_table(path: str) -> Any:
    async with harness.peer("aiosqlite").connect(path, isolation_level=None) as connection:
        for statement in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL"):
            await connection.execute(statement)
        await connection.execute(BARE.replace("TABLE", "TABLE IF NOT EXISTS"))
        yield connection


@asynccontextmanager
async def oncekey_dedup(path: str, commit: str) -> Any:
    async with AsyncSQLiteStore(path, commit=commit) as backend:
        yield AsyncWebhookDedup(backend)


def async_case(
    label: str,
    files: Files,
    keys: list[str],
    concurrency: int,
    opened: Callable[[str], AbstractAsyncContextManager[Any]],
    op: Callable[[Any], Op],
    prepare: Callable[[str], None] | None = None,
) -> Case:
    async def go() -> dict[str, float]:
        path = files.new()
        if prepare is not None:
            prepare(path)
        async with opened(path) as store:
            return {label: (await in_tasks(op(store), keys, concurrency, LONGEST)).each}

    return lambda: asyncio.run(go())


def sync_case(
    label: str,
    files: Files,
    keys: list[str],
    concurrency: int,
    op: Callable[[WebhookDedup], Callable[[str], bool]],
    prepare: Callable[[str], None] | None = None,
) -> Case:
    def go() -> dict[str, float]:
        path = files.new()
        if prepare is not None:
            prepare(path)
        with SQLiteStore(path) as store:
            timed = in_threads(op(WebhookDedup(store)), keys, concurrency, LONGEST)
            return {label: timed.each}

    return go


def hand_off(label: str, keys: list[str], concurrency: int) -> Case:
    """What a thread pays that has another one do its work: a queue there, a lock back."""

    def go() -> dict[str, float]:
        queue: SimpleQueue[threading.Lock | None] = SimpleQueue()

        def serve() -> None:
            while (waiting := queue.get()) is not None:
                waiting.release()

        def op(_: str) -> bool:
            done = threading.Lock()
            done.acquire()
            queue.put(done)
            return done.acquire()

        server = threading.Thread(target=serve)
        server.start()
        try:
            return {label: in_threads(op, keys, concurrency, LONGEST).each}
        finally:
            queue.put(None)
            server.join()

    return go


# ------------------------------------------------------------------------------------- operations


def marks(dedup: Any) -> Any:
    return lambda key: dedup.check_and_record("sender-1", key)


def claims(dedup: AsyncWebhookDedup) -> Op:
    async def claim_and_complete(key: str) -> bool:
        claim = await dedup.claim("sender-1", key, "hash")
        return await dedup.complete("sender-1", key, "hash", claim.claim_token or "")

    return claim_and_complete


def sync_claims(dedup: WebhookDedup) -> Callable[[str], bool]:
    def claim_and_complete(key: str) -> bool:
        claim = dedup.claim("sender-1", key, "hash")
        return dedup.complete("sender-1", key, "hash", claim.claim_token or "")

    return claim_and_complete


def copies(dedup: AsyncWebhookDedup) -> Op:
    async def is_copy(key: str) -> bool:
        return not await dedup.check_and_record("sender-1", key)

    return is_copy


def sync_copies(dedup: WebhookDedup) -> Callable[[str], bool]:
    return lambda key: not dedup.check_and_record("sender-1", key)


def peer_writes(*statements: str) -> Callable[[Any], Op]:
    def op(connection: Any) -> Op:
        async def write(key: str) -> bool:
            done = 0
            for statement in statements:
                row = (key, EXPIRES_AT) if statement is INSERT else (0, key)
                async with connection.execute(statement, row) as cursor:
                    done += cursor.rowcount
            return done == len(statements)

        return write

    return op


def peer_reads(connection: Any) -> Op:
    async def read(key: str) -> bool:
        async with connection.execute(SELECT, (key,)) as cursor:
            return await cursor.fetchone() is not None

    return read


def first_seen_cases(files: Files, commits: int, concurrency: int, seed: int) -> dict[str, Case]:
    label = f"first seen, {concurrency} at a time"
    keys = new_keys(min(commits * concurrency, MOST), seed)
    few = keys[: max(concurrency, commits)]  # as many commits as the others have
    cases: dict[str, Case] = {
        LIMIT: lambda: {label: limit(files.new(), keys, concurrency, [INSERT])},
        SYNC: sync_case(label, files, keys, concurrency, marks),
        HAND_OFF: hand_off(label, keys, concurrency),
    }
    for name, commit in ((THREAD, "thread"), (INLINE, "inline")):
        opened = lambda path, commit=commit: oncekey_dedup(path, commit)  # noqa: E731
        cases[name] = async_case(label, files, keys, concurrency, opened, marks)
    if harness.peer("aiosqlite"):
        op = peer_writes(INSERT)
        cases[AIOSQLITE] = async_case(label, files, few, concurrency, aiosqlite_table, op)
    return cases


def claim_cases(files: Files, commits: int, concurrency: int, seed: int) -> dict[str, Case]:
    label = f"claim, complete, {concurrency} at a time"
    keys = new_keys(min(commits // 2 * concurrency, MOST), seed)
    few = keys[: max(concurrency, commits // 2)]
    both = [INSERT, UPDATE]
    cases: dict[str, Case] = {
        LIMIT: lambda: {label: limit(files.new(), keys, concurrency, both)},
        SYNC: sync_case(label, files, keys, concurrency, sync_claims),
    }
    for name, commit in ((THREAD, "thread"), (INLINE, "inline")):
        opened = lambda path, commit=commit: oncekey_dedup(path, commit)  # noqa: E731
        cases[name] = async_case(label, files, keys, concurrency, opened, claims)
    if harness.peer("aiosqlite"):
        op = peer_writes(*both)
        cases[AIOSQLITE] = async_case(label, files, few, concurrency, aiosqlite_table, op)
    return cases


def duplicate_cases(files: Files, count: int, concurrency: int, seed: int) -> dict[str, Case]:
    """Nothing is written: all keys are there already."""
    label = f"duplicate, {concurrency} at a time"
    keys = new_keys(count, seed)

    def mark_all(path: str) -> None:
        async def go() -> None:
            async with oncekey_dedup(path, "inline") as dedup:
                await in_tasks(marks(dedup), keys, 128)

        # Async cases call this with their loop running: it needs a thread for its own.
        thread = threading.Thread(target=lambda: asyncio.run(go()))
        thread.start()
        thread.join()

    def fill_bare(path: str) -> None:
        with closing(bare(path)) as connection:
            connection.execute("BEGIN")
            connection.executemany(INSERT, [(key, EXPIRES_AT) for key in keys])
            connection.execute("COMMIT")

    def read_limit() -> dict[str, float]:
        path = files.new()
        fill_bare(path)
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            execute = connection.execute
            start = now_ns()
            found = [execute(SELECT, (key,)).fetchone() for key in keys]
            taken = (now_ns() - start) / count / 1e9
        if None in found:
            raise SystemExit("the limit did not find every row")
        return {label: taken}

    cases: dict[str, Case] = {
        LIMIT: read_limit,
        SYNC: sync_case(label, files, keys, concurrency, sync_copies, mark_all),
        THREAD: async_case(
            label,
            files,
            keys,
            concurrency,
            lambda path: oncekey_dedup(path, "thread"),
            copies,
            mark_all,
        ),
    }
    if harness.peer("aiosqlite"):
        cases[AIOSQLITE] = async_case(
            label, files, keys, concurrency, aiosqlite_table, peer_reads, fill_bare
        )
    return cases


# ------------------------------------------------------------------------------------ transactions

CALLERS = 16  # of transactions, sync and async
EFFECTS = "CREATE TABLE IF NOT EXISTS effects (key TEXT)"
EFFECT = "INSERT INTO effects VALUES (?)"
RESULT = {"id": "pay_1", "status": "ok", "amount": 129.95}


def _with_effects(path: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(EFFECTS)


def by_hand_case(label: str, files: Files, keys: list[str]) -> Case:
    """Threads that take turns on one connection: a row that marks, a row of effect, a commit."""

    def go() -> dict[str, float]:
        path = files.new()
        _with_effects(path)
        lock, taken = threading.Lock(), list[float]()
        with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as one:
            one.execute("PRAGMA synchronous=FULL")
            one.execute(BARE)

            def pay(key: str) -> bool:
                start = now_ns()
                with lock:
                    one.execute("BEGIN IMMEDIATE")
                    done = one.execute(INSERT, (key, EXPIRES_AT)).rowcount
                    one.execute(EFFECT, (key,))
                    one.execute(UPDATE, (0, key))
                    one.execute("COMMIT")
                taken.append((now_ns() - start) / 1e9)
                return done == 1

            found = in_threads(pay, keys, CALLERS, LONGEST).each
        harness.latencies("sqlite", label, BY_HAND, taken)
        return {label: found}

    return go


def sync_transactions(label: str, files: Files, keys: list[str]) -> Case:
    def go() -> dict[str, float]:
        path, taken = files.new(), list[float]()
        _with_effects(path)
        with SQLiteStore(path) as store:

            def pay(key: str) -> bool:
                start = now_ns()
                with store.transaction(key, scope="bench") as tx:
                    tx.connection.execute(EFFECT, (key,))
                    tx.answer = RESULT
                taken.append((now_ns() - start) / 1e9)
                return not tx.replayed

            found = in_threads(pay, keys, CALLERS, LONGEST).each
        harness.latencies("sqlite", label, TRANSACTION, taken)
        return {label: found}

    return go


def async_transactions(label: str, files: Files, keys: list[str]) -> Case:
    async def go() -> dict[str, float]:
        path, taken = files.new(), list[float]()
        _with_effects(path)
        async with AsyncSQLiteStore(path) as backend:

            async def pay(key: str) -> bool:
                start = now_ns()
                async with backend.transaction(key, scope="bench") as tx:
                    await tx.connection.execute(EFFECT, (key,))
                    tx.answer = RESULT
                taken.append((now_ns() - start) / 1e9)
                return not tx.replayed

            found = (await in_tasks(pay, keys, CALLERS, LONGEST)).each
        harness.latencies("sqlite", label, TRANSACTION, taken)
        return {label: found}

    return lambda: asyncio.run(go())


def transaction_cases(files: Files, count: int, seed: int, world: str) -> dict[str, Case]:
    label = f"transaction, {CALLERS} callers, {world}"
    keys = new_keys(count, seed)
    ours = sync_transactions if world == "sync" else async_transactions
    return {
        BY_HAND: by_hand_case(label, files, keys),
        TRANSACTION: ours(label, files, keys),
    }


# ----------------------------------------------------------------------------------------- report


def tidied(files: Files, case: Case) -> Case:
    """The case, and no files left behind by it."""

    def go() -> dict[str, float]:
        try:
            return case()
        finally:
            files.empty()

    return go


def speeds(options: Options, files: Files, disk_us: float) -> harness.Samples:
    """Measure every operation."""
    count = commits(options, disk_us)
    groups = [
        *(first_seen_cases(files, count, callers, options.seed) for callers in (1, 16, 128)),
        claim_cases(files, count, 16, options.seed),
        duplicate_cases(files, options.pick(2_000, 5_000), 16, options.seed),
        transaction_cases(files, options.pick(160, 480), options.seed, "sync"),
    ]
    if harness.peer("aiosqlite"):
        found = transaction_cases(files, options.pick(160, 480), options.seed, "async")
        groups.append(found)
    samples: harness.Samples = {}
    for number, cases in enumerate(groups, start=1):
        samples |= harness.measure(
            f"sqlite {number} of {len(groups)}",
            {name: tidied(files, case) for name, case in cases.items()},
            rounds=options.pick(3, 7, 15),
            seconds=options.pick(2, 8, 60),
            seed=options.seed,
        )
    return samples


def report(options: Options) -> str:
    """Measure, and give the section in Markdown."""
    files = Files(options.directory)
    try:
        disk_us = sync_us(files)
        samples = speeds(options, files, disk_us)
    finally:
        shutil.rmtree(files.path, ignore_errors=True)
    kind = file_system(options.directory)
    note = " **No real disk: the syncs cost nothing here.**" if kind in ("tmpfs", "ramfs") else ""
    return f"""### SQLite, durable

{harness.left_out("aiosqlite")}
Every answer is on disk before it is given (`synchronous=FULL`), for all alike. Files in \
`{options.directory}` ({kind}), where one sync of 4 KB takes {disk_us:.0f} us.{note} The limit is \
the bare driver in one thread, which writes as many rows in a transaction as there are callers at \
a time, into a table of two columns; for claim and complete in two transactions. For a duplicate \
it is one select. A transaction is a claim, a row of the caller's and the answer in one commit; \
{CALLERS} callers at a time, and p99 is the longest of a hundred calls.

{harness.speed_table(samples, REFERENCES)}
{harness.latency_table("sqlite")}
{targets.table("sqlite")}"""
