"""Reconciliation by several at once, cut short anywhere, and of files cut off anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import itertools
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.resilience.conftest import TERMS, Away, key

from oncekey import SQLiteStore
from oncekey._core.drive import drive
from oncekey.errors import StoreFullError
from oncekey.models import Key, State
from oncekey.resilience import Breaker, Findings, reconcile, resilient
from oncekey.resilience.journal import (
    Entry,
    Journal,
    held,
    pages,
    pages_beside,
    put_away,
    read_page,
)
from oncekey.resilience.reconcile import Reconciling
from oncekey.testing import ManualClock

NAME = "SQLiteStore"


def entry(name: str, what: str) -> Entry:
    """One line, of a call with its own name."""
    one = key(name)
    answer = b"j1" if what == "done" else None
    owner = name.encode().ljust(16, b".")
    return Entry(
        what, one.digest, one.scope.label, one.scope.hash, owner, 1, b"f", TERMS, 10**13, answer
    )


def unfinished(directory: Path) -> int:
    """How many claims without an outcome are told of."""
    with contextlib.closing(Findings(str(directory / "findings.db"))) as findings:
        return [one.kind for one in findings.list()].count("unfinished")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    """What is to be made whole."""
    with SQLiteStore(str(tmp_path / "keys.db")) as made:
        yield made


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where the journals are."""
    made = tmp_path / "journal"
    made.mkdir(mode=0o700)
    return made


# Several at once


def test_a_file_that_is_just_made_is_its_makers(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reconciles can't put it away before its maker holds it, and what comes with it."""
    real = fcntl.flock

    def sweep(file: int, how: int) -> None:
        monkeypatch.undo()
        for path in list(pages(directory)):
            with held(path) as ours:
                assert ours
                put_away(path)
        real(file, how)

    monkeypatch.setattr("oncekey.resilience.journal.fcntl.flock", sweep)
    journal = Journal(directory, NAME, 10_000)
    journal.append(entry("a", "done"))
    (path,) = pages(directory)
    assert read_page(path).entries == [entry("a", "done")]
    journal.close()


def turned(directory: Path) -> list[Path]:
    """The files of a process that died when it had turned the page, with a call that ran."""
    journal = Journal(directory, NAME, 10_000)
    journal.append(entry("a", "claim"))
    journal.turn(lambda: [entry("a", "claim")])
    del journal  # as it is closed with its process
    return list(pages(directory))


@pytest.mark.parametrize("first", [0, 1])
def test_a_claim_that_was_carried_along_is_told_once(
    directory: Path, store: SQLiteStore, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Two are at the two files that have it at once, in either order: one of them tells."""
    files = turned(directory)

    def then(path: Path) -> None:
        monkeypatch.undo()
        reconcile(directory, store)  # while the other is done with its file, and holds it still
        put_away(path)

    work = sys.modules[Reconciling.__module__]  # the package has a function of its name
    monkeypatch.setattr(work, "put_away", then)
    chosen = iter([[files[first]]])
    monkeypatch.setattr(work, "pages", lambda *args: next(chosen, None) or pages(*args))
    reconcile(directory, store)
    assert not list(pages(directory))
    assert unfinished(directory) == 1


def test_files_of_a_process_are_in_order_whatever_its_clock_does(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was carried along is in a later one, also if the clock was set back meanwhile."""
    clock = itertools.count(10**18, -1000)
    monkeypatch.setattr("oncekey.resilience.journal.time.time_ns", lambda: next(clock))
    first, second = (read_page(path) for path in turned(directory))
    ((_, later),) = pages_beside(first)
    ((_, earlier),) = pages_beside(second)
    assert (later, earlier) == (True, False)


def test_an_outcome_in_a_file_that_is_put_away_counts(directory: Path, store: SQLiteStore) -> None:
    """A call that finished while the page was turned is in both; it is not told as unfinished."""
    journal = Journal(directory, NAME, 10_000)
    journal.append(entry("a", "claim"))
    journal.append(entry("a", "done"))
    journal.turn(lambda: [entry("a", "claim")])  # which had not heard of it
    reconcile(directory, store)
    journal.close()
    made = reconcile(directory, store)
    assert (made.files, made.unfinished, unfinished(directory)) == (1, 0, 0)


def test_a_file_may_be_put_away_while_others_look_at_it(directory: Path) -> None:
    """It is found under its other name, so that nothing in it is missed."""
    first, second = turned(directory)
    third = second.with_name("9" + second.name)
    shutil.copy(second, third)
    looking = pages_beside(read_page(first))
    assert next(looking)[0].path == second
    put_away(third)
    assert [(page.path.stem, later) for page, later in looking] == [(third.stem, True)]


def test_a_child_does_not_hold_what_its_parent_reconciles(directory: Path) -> None:
    """A fork beside a reconciliation that fails: the next one is not held up by the child."""
    path = turned(directory)[0]
    (told, tell), (began, begin) = os.pipe(), os.pipe()
    with held(path) as ours:
        assert ours
        child = os.fork()
        if child == 0:
            os.close(tell)
            os.write(begin, b"!")
            os.read(told, 1)  # until the parent is done
            os._exit(0)
        assert os.read(began, 1) == b"!"
    with held(path) as ours:
        assert ours
    for end in (tell, told, began, begin):
        os.close(end)
    os.waitpid(child, 0)


# Cut short


def test_a_page_that_can_not_turn_goes_on(
    directory: Path, store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk what runs stays in the last file, which stays its process's."""
    journal = Journal(directory, NAME, 10_000)
    journal.append(entry("a", "claim"))
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(journal, "_write", lambda line: (_ for _ in ()).throw(full))
        with pytest.raises(StoreFullError, match="make room"):
            journal.turn(lambda: [entry("a", "claim")])
    assert reconcile(directory, store).busy == 1
    journal.append(entry("a", "done"))
    journal.close()
    made = reconcile(directory, store)
    assert (made.inserted, made.unfinished, made.damaged) == (1, 0, 0)
    assert os.listdir(directory) == [path.name for path in pages(directory, reconciled=True)]


def test_a_call_that_is_cancelled_while_it_is_written_is_taken_back(
    aopened: Any, away: Away, tmp_path: Path
) -> None:
    """Nothing ran: no claim is told as unfinished, and the mark is not the store's afterwards."""
    store = resilient(
        aopened, on_outage="open", journal=tmp_path / "journal", breaker=Breaker(failures=1)
    )
    journal = store._fallback._journal  # type: ignore[union-attr]
    real = journal.append

    async def cut(call: Any) -> None:
        loop, writing = asyncio.get_running_loop(), asyncio.Event()
        go_on = threading.Event()

        def append(entry: Entry) -> None:
            loop.call_soon_threadsafe(writing.set)
            assert go_on.wait(60)
            real(entry)

        journal.append = append
        task = loop.create_task(call)
        await writing.wait()
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        journal.append = real

    async def main() -> None:
        away.begin()
        await cut(store.claim(key("c"), b"o" * 16, b"f", TERMS))
        await cut(store.first_seen(key("m"), TERMS))
        away.end()
        made = await store.reconcile()
        assert (made.files, made.inserted, made.unfinished) == (1, 0, 0)
        assert await aopened.first_seen(key("m"), TERMS)
        await store.aclose()

    asyncio.run(main())


def test_a_dropped_store_leaves_its_journal(opened: Any, away: Away, tmp_path: Path) -> None:
    """One that was made anew, in the same process, reconciles what the one before it did."""

    def made() -> Any:
        return resilient(
            opened, on_outage="open", journal=tmp_path / "journal", breaker=Breaker(failures=1)
        )

    store = made()
    away.begin()
    reply = store.claim(key("a"), b"o" * 16, b"f", TERMS)
    assert store.complete(key("a"), b"o" * 16, reply.fence, b"j1", TERMS)
    del store
    gc.collect()
    away.end()
    assert made().reconcile().inserted == 1


def test_a_reconciliation_whose_loop_was_closed_is_done_again(
    aopened: Any, away: Away, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not even cancelled: what it held is let go, and another does it."""
    clock = ManualClock(1000.0)
    breaker = Breaker(failures=1, successes=1, clock=clock)
    store = resilient(aopened, on_outage="open", journal=tmp_path / "journal", breaker=breaker)
    fallback: Any = store._fallback

    async def first() -> None:
        away.begin()
        reply = await store.claim(key("a"), b"o" * 16, b"f", TERMS)
        await store.complete(key("a"), b"o" * 16, reply.fence, b"j1", TERMS)
        away.end()
        clock.advance(60)
        with monkeypatch.context() as patch:
            patch.setattr(fallback._steps, "turn", lambda _: never)
            await store.read(key("b"))  # it begins
            await asyncio.sleep(0)

    async def second() -> None:
        await store.read(key("b"))
        assert not fallback._reconciling
        assert (await store.reconcile()).inserted == 1
        await store.aclose()

    loop = asyncio.new_event_loop()
    never = loop.create_future()  # what it waits for
    loop.set_exception_handler(lambda loop, context: None)  # "destroyed but it is pending"
    loop.run_until_complete(first())
    loop.close()
    del loop
    assert fallback._reconciling
    asyncio.run(asyncio.wait_for(second(), 60))


LINES = [
    *(entry("a", "claim"), entry("b", "claim"), entry("a", "done"), entry("m", "mark")),
    *(entry("b", "free"), entry("c", "claim"), entry("d", "done")),
]


def check(store: SQLiteStore, directory: Path, lines: list[Entry]) -> None:
    """What is said in ``lines`` is in the store, and nothing else; what has no end is told."""
    ends = {one.owner for one in lines if one.what in ("done", "free")}
    for name in ("a", "b", "c", "d", "m"):
        record = store.read(key(name))
        said = [one.what for one in lines if one.digest == key(name).digest]
        if "done" in said or "mark" in said:
            assert record is not None
            assert record.state is State.COMPLETED
            assert record.answer == (b"j1" if "done" in said else None)
        else:
            assert record is None
    open_ones = [one for one in lines if one.what == "claim" and one.owner not in ends]
    assert unfinished(directory) == len(open_ones)


def test_a_file_cut_off_anywhere_says_what_it_has_said(tmp_path: Path) -> None:
    """Killed at any byte of its file, each whole line counts, once, however often it is read."""
    whole = Journal(tmp_path / "whole", NAME, 10_000)
    for one in LINES:
        whole.append(one)
    (path,) = pages(tmp_path / "whole")
    text = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(text) if byte == ord("\n")]
    cuts = sorted({0, 5, *(end - by for end in ends for by in (0, 1, 30)), len(text)})
    for cut in cuts:
        directory = tmp_path / f"cut-{cut}"
        directory.mkdir(mode=0o700)
        (directory / path.name).write_bytes(text[:cut])
        with SQLiteStore(str(tmp_path / f"{cut}.db")) as store:
            made = reconcile(directory, store)
            lines = LINES[: max(0, text[:cut].count(b"\n") - 1)]
            assert (made.files, made.damaged, made.duplicates) == (1, 0, 0)
            check(store, directory, lines)
            # As if its reconciler had died before it was put away.
            (put,) = pages(directory, reconciled=True)
            put.rename(directory / path.name)
            again = reconcile(directory, store)
            assert (again.inserted, again.unfinished) == (0, made.unfinished)
            check(store, directory, lines)
    whole.close()


def test_a_reconciliation_cut_short_at_any_step_is_done_again(tmp_path: Path) -> None:
    """Killed between any two steps, it is ended by the next; a mark alone may be told as two."""

    class Killed(BaseException):
        """In the place of the process."""

    for step in itertools.count():
        directory = tmp_path / str(step)
        journal = Journal(directory, NAME, 10_000)
        for one in LINES:
            journal.append(one)
        journal.close()
        left = iter(range(step))
        with SQLiteStore(str(tmp_path / f"{step}.db")) as store:

            def do(op: Any, store: SQLiteStore = store, left: Iterator[int] = left) -> Any:
                if next(left, None) is None:
                    raise Killed
                return getattr(store, op.method)(*op.args)

            try:
                drive(Reconciling(directory, NAME, None).all(), do)
            except Killed:
                reconcile(directory, store)
            else:
                break
            check(store, directory, LINES)
            with contextlib.closing(Findings(str(directory / "findings.db"))) as findings:
                told = {one.key for one in findings.list() if one.kind == "duplicate"}
            assert told <= {Key(key("m").scope, "m").digest.hex()}
    assert step > 8
