"""How callers share a commit: interrupted ones, bad ones, and closing while calls come in."""

from __future__ import annotations

import asyncio
import pathlib
import signal
import sqlite3
import threading
import time
from typing import Any

import pytest

from oncekey import AsyncOnce, AsyncSQLiteStore, SQLiteStore, StoreClosedError, StoreCorruptError
from oncekey._core.flows import new_owner
from oncekey.models import Key, Scope, Terms, Verdict
from oncekey.stores._batching import Job, ThreadBatch
from oncekey.stores.sqlite.database import RUN, Database

TERMS = Terms(lease_ms=30_000, ttl_ms=60_000)
WAIT = 30


def key(name: object) -> Key:
    return Key(Scope("commit"), str(name))


class Interrupted(BaseException):
    """What a signal handler raises, as Ctrl-C does."""


def test_an_interrupted_follower_is_never_made_to_lead(tmp_path: pathlib.Path) -> None:
    """A caller that is interrupted while it waits for a commit leaves the store usable."""
    with SQLiteStore(tmp_path / "x.db") as store:
        commit: ThreadBatch = store._commit
        leading, go_on = threading.Event(), threading.Event()

        def slow(on: Any) -> None:
            leading.set()
            assert go_on.wait(WAIT)

        leader = threading.Thread(target=commit.submit, args=(slow, ()))
        leader.start()
        assert leading.wait(WAIT)

        def interrupt(signum: int, frame: Any) -> None:
            raise Interrupted

        main = threading.main_thread().ident
        assert main is not None

        def poke() -> None:
            while not commit._gathering.waiting:
                time.sleep(0.001)
            signal.pthread_kill(main, signal.SIGUSR1)

        before = signal.signal(signal.SIGUSR1, interrupt)
        poker = threading.Thread(target=poke)
        try:
            poker.start()
            with pytest.raises(Interrupted):
                store.first_seen(key("interrupted"), TERMS)
        finally:
            signal.signal(signal.SIGUSR1, before)
            poker.join()
        assert not commit._gathering.waiting
        go_on.set()
        leader.join(WAIT)
        done = threading.Event()
        after = threading.Thread(
            target=lambda: store.first_seen(key("after"), TERMS) and done.set(), daemon=True
        )
        after.start()
        assert done.wait(WAIT), "the store hangs: nobody leads"


def test_a_damaged_record_fails_alone(tmp_path: pathlib.Path) -> None:
    """In a shared commit only the change that met the damage fails."""
    path = tmp_path / "x.db"
    with SQLiteStore(path) as store:
        owner = new_owner()
        store.first_seen(key("damaged"), TERMS)
        reply = store.claim(key("good"), owner, b"", TERMS)
        raw = sqlite3.connect(path)
        raw.execute("UPDATE oncekey_records SET state = 9 WHERE key = ?", (key("damaged").digest,))
        raw.commit()
        raw.close()
        database = store._database

        def odd(on: Any) -> None:
            raise UnicodeError("odd")

        from oncekey.transitions import Event

        settle = (key("good").digest, Event.COMPLETE, owner, reply.fence, TERMS, time.time, b"j1")
        jobs = [
            Job(database.claim, (key("damaged"), owner, b"", TERMS, time.time)),
            Job(database.settle, settle),
            Job(odd, ()),
            Job(database.mark, (key("new"), TERMS, time.time)),
        ]
        database.commit(jobs)
        with pytest.raises(StoreCorruptError):
            jobs[0].outcome()
        assert jobs[1].outcome() is True
        with pytest.raises(UnicodeError):
            jobs[2].outcome()
        assert jobs[3].outcome() is True
        assert store.claim(key("good"), new_owner(), b"", TERMS).verdict is Verdict.REPLAY


async def test_closing_amid_calls_ends(tmp_path: pathlib.Path) -> None:
    """aclose finishes what was asked before it, refuses what comes later, and returns."""
    backend = AsyncSQLiteStore(tmp_path / "x.db")
    early = [asyncio.create_task(backend.first_seen(key(n), TERMS)) for n in range(20)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(backend.aclose())
    await asyncio.sleep(0)
    with pytest.raises(StoreClosedError):
        await backend.first_seen(key("late"), TERMS)
    await asyncio.wait_for(closing, WAIT)
    assert await asyncio.gather(*early) == [True] * 20


@pytest.mark.parametrize("commit", ["thread", "inline"])
async def test_a_loop_that_stood_still_does_not_lose_its_claim(
    tmp_path: pathlib.Path, commit: str
) -> None:
    """A handler that blocked the loop past its lease goes on, if nobody took its key."""
    runs = []
    async with AsyncSQLiteStore(tmp_path / "x.db", commit=commit) as backend:
        renewed = asyncio.Event()
        renew = backend.renew

        async def watched(*args: Any) -> bool:
            held = await renew(*args)
            renewed.set()
            return held

        backend.renew = watched  # type: ignore[method-assign]
        once = AsyncOnce(backend, lease=0.2)

        @once(key="k")
        async def charge(k: str) -> str:
            runs.append(1)
            time.sleep(0.3)  # longer than the lease, on purpose
            await asyncio.wait_for(renewed.wait(), WAIT)
            return "done"

        assert await charge("1") == "done"
        assert await charge("1") == "done"
    assert len(runs) == 1


def jobs_of(database: Database, names: list[str], what: str) -> list[Job]:
    """Calls of one kind, in the order of their names."""
    if what == "mark":
        return [Job(database.mark, (key(name), TERMS, time.time)) for name in names]
    claims = [(key(name), new_owner(), b"f", TERMS, time.time) for name in names]
    return [Job(database.claim, args) for args in claims]


def won(job: Job) -> bool:
    """Whether a call was the first of its key."""
    result = job.outcome()
    return result is True or (result is not False and result.verdict is Verdict.WON)


@pytest.mark.parametrize("what", ["mark", "claim"])
def test_keys_of_one_commit_are_told_apart(tmp_path: pathlib.Path, what: str) -> None:
    """All new, some known, one twice, all new again: each call gets its own answer."""
    with SQLiteStore(tmp_path / "x.db") as store:
        database = store._database
        batches = [
            (["a", "b", "c"], [True, True, True]),
            (["d", "b", "e"], [True, False, True]),
            (["f", "f", "g"], [True, False, True]),
            (["h", "i"], [True, True]),
            (["j", "k"], [True, True]),
            (["a", "k"], [False, False]),
        ]
        for names, expected in batches:
            jobs = jobs_of(database, names, what)
            database.commit(jobs)
            assert [won(job) for job in jobs] == expected, names
        assert all(store.read(key(name)) is not None for name in "abcdefghijk")


def test_a_call_that_fails_takes_no_other_of_its_commit_along(tmp_path: pathlib.Path) -> None:
    """Also where the others are new keys that go by one statement."""

    def broken() -> float:
        raise ValueError("no time")

    with SQLiteStore(tmp_path / "x.db") as store:
        database = store._database
        jobs = jobs_of(database, ["a", "b", "c"], "mark")
        jobs[1].args = (*jobs[1].args[:2], broken)
        database.commit(jobs)
        assert (won(jobs[0]), won(jobs[2])) == (True, True)
        with pytest.raises(ValueError, match="no time"):
            jobs[1].outcome()
        assert store.read(key("b")) is None


async def test_a_run_of_new_keys_is_not_looked_up(tmp_path: pathlib.Path) -> None:
    """Until one comes that is there: it is answered all the same, and then they are again."""
    async with AsyncSQLiteStore(tmp_path / "x.db", commit="inline") as store:
        looked: list[str] = []
        store._database.reader().set_trace_callback(looked.append)
        for number in range(RUN):
            assert await store.first_seen(key(number), TERMS)
        assert len(looked) == RUN
        assert await store.first_seen(key("one more"), TERMS)
        claim = await store.claim(key("and one"), new_owner(), b"f", TERMS)
        assert claim.verdict is Verdict.WON
        assert len(looked) == RUN
        assert not await store.first_seen(key(0), TERMS)  # found by the insert
        assert len(looked) == RUN
        assert not await store.first_seen(key(1), TERMS)
        other = await store.claim(key("and one"), new_owner(), b"f", TERMS)
        assert other.verdict is Verdict.IN_FLIGHT
        assert len(looked) == RUN + 2
