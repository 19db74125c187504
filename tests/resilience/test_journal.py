"""The journal: what is in it is on disk, whatever becomes of the process or of a file's end."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
from tests.resilience.conftest import TERMS, key

from oncekey import SQLiteStore
from oncekey.errors import PolicyError, StoreFullError
from oncekey.resilience import reconcile, resilient
from oncekey.resilience.journal import Entry, Journal, held, pages, read_page


def entry(name: str, what: str = "done", answer: bytes | None = b"j1") -> Entry:
    """An entry of a key of the tests' own."""
    one = key(name)
    return Entry(
        what, one.digest, one.scope.label, one.scope.hash, name.encode(), 7, b"f", TERMS, 5, answer
    )


def only(directory: Path) -> Path:
    """The one journal of a directory."""
    (found,) = pages(directory)
    return found


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """Every field comes back, the key by its digest alone, from a file that is its owner's."""
    journal = Journal(tmp_path / "j", "PostgresStore", 10_000)
    written = [entry("a", "claim", None), entry("a"), entry("b", answer=b"\x00\xff\n")]
    for one in written:
        journal.append(one)
    path = only(tmp_path / "j")
    page = read_page(path)
    assert page.entries == written
    assert page.store == "PostgresStore"
    assert page.process.endswith(f":{os.getpid()}")
    assert page.entries[0].key.digest == key("a").digest
    assert page.entries[0].key.scope.hash == key("a").scope.hash
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    """Whoever could put a journal there could say what was done; the error names the fix."""
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(PolicyError, match=f"chmod go-w {place}"):
        Journal(place, "S", 10_000)
    with SQLiteStore(tmp_path / "s.db") as store:
        with pytest.raises(PolicyError, match="chmod go-w"):
            resilient(store, on_outage="open", journal=place)
        with pytest.raises(PolicyError, match="chmod go-w"):
            reconcile(place, store)
    assert list(place.iterdir()) == []
    place.chmod(0o755)
    Journal(place, "S", 10_000).close()


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner could change what is in it, whatever its mode."""
    someone = os.geteuid() + 1
    if os.geteuid() == 0:
        os.chown(tmp_path, someone, -1)
    else:  # only root can give a directory away
        monkeypatch.setattr(os, "geteuid", lambda: someone)
    with pytest.raises(PolicyError, match=f"chown .* {tmp_path}"):
        Journal(tmp_path, "S", 10_000)


def test_no_name_of_a_key_is_in_it(tmp_path: Path) -> None:
    """What a sender called its key stays out of the file."""
    journal = Journal(tmp_path, "S", 10_000)
    journal.append(entry("card-4242")._replace(owner=b"o"))
    assert b"card-4242" not in only(tmp_path).read_bytes()


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_end_costs_only_itself(tmp_path: Path, cut: int) -> None:
    """Whatever is missing of the last line, those before it are read, and it counts as unsaid."""
    journal = Journal(tmp_path, "S", 10_000)
    journal.append(entry("a"))
    journal.append(entry("b"))
    path = only(tmp_path)
    raw = path.read_bytes()
    path.write_bytes(raw[:-cut])
    page = read_page(path)
    assert [one.owner for one in page.entries] == [b"a"]
    assert page.damaged == 0


def test_a_damaged_line_is_counted_and_passed_over(tmp_path: Path) -> None:
    """A flipped bit in the middle costs that line, and is told."""
    journal = Journal(tmp_path, "S", 10_000)
    for name in "abc":
        journal.append(entry(name))
    path = only(tmp_path)
    lines = path.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b"done", b"dome")
    path.write_bytes(b"\n".join(lines))
    page = read_page(path)
    assert [one.owner for one in page.entries] == [b"a", b"c"]
    assert page.damaged == 1


def test_it_does_not_grow_without_end(tmp_path: Path) -> None:
    """A full journal takes no claim or mark, and still the outcome of what runs."""
    journal = Journal(tmp_path, "S", 600)
    journal.append(entry("a", "claim", None))

    def fill() -> None:
        for number in range(9):
            journal.append(entry(f"n{number}", "claim", None))

    with pytest.raises(StoreFullError, match="oncekey reconcile"):
        fill()
    journal.append(entry("a"))
    assert read_page(only(tmp_path)).entries[-1].what == "done"


def test_a_disk_that_fails_refuses_the_call(tmp_path: Path) -> None:
    """What can't be written down is an error, and leaves no half a line behind."""
    journal = Journal(tmp_path, "S", 10_000)
    journal.append(entry("a"))
    real, journal._file = journal._file, os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(StoreFullError, match="can't be written"):
        journal.append(entry("b"))
    os.close(journal._file)
    journal._file = real
    journal.append(entry("c"))
    assert [one.owner for one in read_page(only(tmp_path)).entries] == [b"a", b"c"]


def test_a_disk_that_is_full_at_first_loses_nothing_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose head could not be written is not gone on with: its first entry would be lost."""
    journal = Journal(tmp_path, "S", 10_000)
    real, full = os.write, OSError(errno.ENOSPC, "No space left on device")

    def write(file: int, data: bytes) -> int:
        if len(data) < 20:
            raise full
        return real(file, data[:10])  # a disk with ten bytes left

    monkeypatch.setattr("oncekey.resilience.journal.os.write", write)
    monkeypatch.setattr("oncekey.resilience.journal._line", lambda value: b"x" * 25)
    with pytest.raises(StoreFullError):
        journal.append(entry("a"))
    monkeypatch.undo()
    written = [entry("b"), entry("c")]
    for one in written:
        journal.append(one)
    page = read_page(only(tmp_path))
    assert (page.entries, page.damaged) == (written, 0)


def test_a_page_may_turn_while_an_entry_is_synced(tmp_path: Path) -> None:
    """Who wrote to the last page is told that it is on disk: it is, as the turn saw to it."""
    journal = Journal(tmp_path, "S", 10_000)

    class Turning:
        """In place of the lock that an entry waits for, after it was written."""

        def __enter__(self) -> None:
            journal._syncing = threading.Lock()
            journal.turn(tuple)

        def __exit__(self, *_: object) -> None:
            """Nothing is held."""

    journal._syncing = cast(threading.Lock, Turning())
    journal.append(entry("a"))
    assert read_page(only(tmp_path)).entries == [entry("a")]


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    """Many threads at once lose nothing and mix nothing, while somebody turns the page."""
    journal = Journal(tmp_path, "S", 10_000_000)
    together = threading.Barrier(8)

    def write(thread: int) -> None:
        together.wait()
        for number in range(20):
            journal.append(entry(f"{thread}-{number}"))
            if thread == 0 and number == 10:
                journal.turn(tuple)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    found = [read_page(path) for path in pages(tmp_path)]
    assert sum(page.damaged for page in found) == 0
    owners = {one.owner for page in found for one in page.entries}
    assert len(owners) == 160
    assert len(found) == 2


def test_what_runs_goes_along_to_the_next_page(tmp_path: Path) -> None:
    """A turned page leaves the old file to whoever reconciles, with what runs in the new one."""
    journal = Journal(tmp_path, "S", 10_000)
    running = entry("a", "claim", None)
    journal.append(running)
    first = only(tmp_path)
    with held(first) as ours:
        assert not ours
    journal.turn(lambda: [running])
    second = journal.path
    assert second is not None
    assert second != first
    with held(first) as ours:
        assert ours
    assert read_page(second).entries == [running]


WORKER = """
import sys
from pathlib import Path
from oncekey import SQLiteStore
from oncekey.resilience import reconcile, resilient
from oncekey.resilience.journal import Entry, Journal
from oncekey.models import Terms
journal = Journal(Path(sys.argv[1]), "S", 10**9)
number = 0
while True:
    name = b"%d" % number
    journal.append(Entry("done", name * 4, "l", "s", name, 1, b"", Terms(1, 1), 1, b"j" * 200))
    print(number, flush=True)
    number += 1
"""


def test_kill_9_loses_nothing_that_was_said(tmp_path: Path) -> None:
    """Every entry whose append had returned is in the file of a process that was killed."""
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    said = [int(worker.stdout.readline()) for _ in range(50)]
    worker.send_signal(signal.SIGKILL)
    said += [int(line) for line in worker.stdout.read().split("\n")[:-1]]
    worker.wait()
    worker.stdout.close()
    path = only(tmp_path)
    with held(path) as ours:
        assert ours  # its process is gone
    page = read_page(path)
    assert page.damaged == 0
    assert {int(one.owner) for one in page.entries} >= set(said)


def test_a_child_writes_to_a_file_of_its_own(tmp_path: Path) -> None:
    """After a fork neither writes to the other's, and the parent's stays locked."""
    journal = Journal(tmp_path, "S", 10_000)
    journal.append(entry("parent"))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            journal.fork()
            journal.append(entry("child"))
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    journal.append(entry("again"))
    mine = journal.path
    assert mine is not None
    with held(mine) as ours:
        assert not ours
    (theirs,) = (path for path in pages(tmp_path) if path != mine)
    assert [one.owner for one in read_page(theirs).entries] == [b"child"]
    assert [one.owner for one in read_page(mine).entries] == [b"parent", b"again"]
