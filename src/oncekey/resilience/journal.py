"""The journal of what went on without the store: a file that outlives ``kill -9`` and a torn end.

A line is the CRC-32 of its text and its text, JSON. Each is on disk before the call goes on. A file
belongs to one process, which holds its lock for as long as it lives; whoever gets the lock of a
file may reconcile it.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple
from zlib import crc32

from oncekey.errors import PolicyError, StoreFullError
from oncekey.models import Key, Scope, Terms

__all__ = [
    "Entry",
    "Journal",
    "Page",
    "check_private",
    "held",
    "own_directory",
    "pages",
    "pages_beside",
    "process_name",
    "put_away",
    "read_page",
]

SUFFIX: Final = ".journal"
NEW_SUFFIX: Final = ".new"  # until it is locked: whoever reconciles must not come before that
KEPT_SUFFIX: Final = ".reconciled"
KEPT: Final = 32  # reconciled files that stay, so that a process can be named in later findings
LINE_MOST: Final = 64 * 1_048_576


class _StoredScope(Scope):
    """A scope of which only what stores and events show is known."""

    __slots__ = ("_hash",)

    def __init__(self, label: str, shown: str) -> None:
        super().__init__("journal", label)
        self.label = label
        self._hash = shown

    @property
    def hash(self) -> str:
        return self._hash


class Entry(NamedTuple):
    """One line: a claim, an outcome, a mark, or that a claim was given back.

    Attributes:
        what: ``claim``, ``done``, ``free`` or ``mark``.
        digest: Of the key. Its name is nowhere in a journal.
        label: The scope, as the store's column has it.
        scope: The scope's hash, as events have it.
        owner: Whose claim.
        fence: Its fence.
        fingerprint: Of the payload.
        terms: How long things last.
        at: Milliseconds since 1970.
        answer: The outcome.
    """

    what: str
    digest: bytes
    label: str
    scope: str
    owner: bytes
    fence: int
    fingerprint: bytes
    terms: Terms
    at: int
    answer: bytes | None = None

    @property
    def key(self) -> Key:
        """The key as stores know it: by its digest."""
        key = Key(_StoredScope(self.label, self.scope), "")
        key._digest = self.digest
        return key

    def line(self) -> bytes:
        """The entry as it is written."""
        terms = self.terms
        lasts = [terms.lease_ms, terms.ttl_ms, terms.skew_ms, terms.remember_ms, terms.sticky]
        answer = None if self.answer is None else base64.b64encode(self.answer).decode()
        return _line(
            [
                self.what,
                self.digest.hex(),
                self.label,
                self.scope,
                self.owner.hex(),
                self.fence,
                self.fingerprint.hex(),
                lasts,
                self.at,
                answer,
            ]
        )


def _line(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    return b"%08x %b\n" % (crc32(text), text)


def _parsed(line: bytes) -> Any:
    """What a line says; ``None``: it is damaged."""
    crc, _, text = line.partition(b" ")
    try:
        return json.loads(text) if int(crc, 16) == crc32(text) else None
    except ValueError:
        return None


def _entry(value: list[Any]) -> Entry:
    what, digest, label, scope, owner, fence, mark, lasts, at, answer = value
    return Entry(
        what,
        bytes.fromhex(digest),
        label,
        scope,
        bytes.fromhex(owner),
        fence,
        bytes.fromhex(mark),
        Terms(*lasts),
        at,
        None if answer is None else base64.b64decode(answer),
    )


def process_name() -> str:
    """This process, in findings: its machine and its number."""
    return f"{socket.gethostname()}:{os.getpid()}"


class Page(NamedTuple):
    """One file, as it was read.

    Attributes:
        path: The file.
        process: Who wrote it.
        store: What kind of store it is of.
        entries: What it says, in order.
        damaged: How many lines could not be read. A torn last line is none: nobody was told that it
            had been written.
    """

    path: Path
    process: str
    store: str
    entries: list[Entry]
    damaged: int


def read_page(path: Path) -> Page:
    """Read a file, whatever its end looks like."""
    lines = path.read_bytes().split(b"\n")
    lines.pop()  # what comes after the last line end: nothing, or torn
    head = _parsed(lines[0]) if lines else None
    process, store = (head["process"], head["store"]) if isinstance(head, dict) else ("", "")
    entries, damaged = [], 0
    for line in lines[1:]:
        value = _parsed(line)
        if isinstance(value, list):
            entries.append(_entry(value))
        elif line:
            damaged += 1
    return Page(path, process, store, entries, damaged + (bool(lines) and not process))


def pages(directory: Path, *, reconciled: bool = False) -> Iterator[Path]:
    """The files of a directory, oldest first."""
    suffix = KEPT_SUFFIX if reconciled else SUFFIX
    with contextlib.suppress(OSError):
        yield from sorted(directory.glob(f"*{suffix}"), key=lambda path: path.name)


def pages_beside(page: Page) -> Iterator[tuple[Page, bool]]:
    """The other files of its directory, reconciled ones last, and whether each is a later one.

    Another process may put a file away meanwhile: it comes among those that are reconciled then.
    """
    for reconciled in (False, True):
        for path in pages(page.path.parent, reconciled=reconciled):
            if path.stem != page.path.stem:
                with contextlib.suppress(FileNotFoundError):
                    yield read_page(path), path.stem > page.path.stem


def own_directory(directory: Path) -> None:
    """Make the directory, for its owner only, or see that nobody else may write to it.

    Raises:
        PolicyError: It is another user's, or others may write to it.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(directory)


def check_private(directory: Path) -> None:
    """What a journal says is put into the store: nobody else may have written it.

    Raises:
        PolicyError: The directory is another user's, or others may write to it.
    """
    try:
        found = directory.stat()
    except FileNotFoundError:
        return  # so that there is no journal either
    user = os.geteuid()
    if found.st_uid != user:
        raise PolicyError(
            f"the journal's directory {directory} belongs to user {found.st_uid} and this process "
            f"is user {user}: run as its owner, give another directory, or chown {user} {directory}"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PolicyError(
            f"others than its owner may write to the journal's directory {directory}, and so could "
            f"make up what was done: chmod go-w {directory}"
        )


class Journal:
    """This process's files in a directory. Safe to use from several threads.

    Args:
        directory: Where they are, made for its owner only.
        store: A name for the store that they are of.
        most: How many bytes a file may have before no call goes on without the store. What runs
            then still gets its outcome written.

    Raises:
        PolicyError: Others may write to the directory, or it is another user's.
    """

    def __init__(self, directory: Path, store: str, most: int) -> None:
        self.directory = directory
        self._store = store
        self._most = most
        self._named = 0
        self._file = -1
        own_directory(directory)
        self._fresh()

    def _fresh(self) -> None:
        self._writing = threading.Lock()
        self._syncing = threading.Lock()
        self._file = -1
        self._path: Path | None = None
        self._size = 0
        self._written = self._synced = 0

    def __del__(self) -> None:
        # Of a store that nobody has any more: its file is for whoever reconciles.
        if getattr(self, "_file", -1) >= 0:
            os.close(self._file)

    def fork(self) -> None:
        """In a child: a file of its own. Closing does not unlock what the parent has."""
        if self._file >= 0:
            os.close(self._file)
        self._fresh()

    @property
    def path(self) -> Path | None:
        """The file that is written to now, if there is one."""
        return self._path

    def append(self, entry: Entry) -> None:
        """Write one entry. It is on disk when this returns.

        Raises:
            StoreFullError: The file is as large as it may be, or it can't be written.
        """
        line = entry.line()
        try:
            with self._writing:
                if self._file < 0:
                    self._open()
                if entry.what in ("claim", "mark") and self._size + len(line) > self._most:
                    raise StoreFullError(
                        f"{self._path} is full: what went on without the store must be reconciled "
                        "first (oncekey reconcile), or raise journal_bytes="
                    )
                self._write(line)
                self._written += 1
                mine = self._written
            with self._syncing:  # whoever comes first does it for those that wait
                if self._synced < mine:
                    upto = self._written
                    os.fdatasync(self._file)
                    self._synced = upto
        except OSError as error:
            raise self._refused(error) from error

    def _write(self, line: bytes) -> None:
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except BaseException:
            with contextlib.suppress(OSError):  # no half a line may stand before the next
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)

    def _open(self) -> None:
        # Files of one process are in their order, whatever its clock does: what runs goes along to
        # the next one.
        self._named = max(time.time_ns(), self._named + 1)
        name = f"{self._named:020d}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        path = self.directory / name
        new = path.with_suffix(NEW_SUFFIX)
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(new, flags, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._path, self._size = path, 0
            self._write(_line({"v": 1, "process": process_name(), "store": self._store}))
            new.rename(path)
        except BaseException:  # without its head, the first entry would be read as that
            file, self._file = self._file, -1
            os.close(file)
            new.unlink(missing_ok=True)
            raise
        folder = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def turn(self, running: Callable[[], Iterable[Entry]]) -> None:
        """Go on in a new file, with what still runs; the last one may be reconciled now.

        Raises:
            StoreFullError: There is no room for what runs. The last file goes on.
        """
        with self._writing, self._syncing:
            if self._file < 0:
                return
            carried = list(running())
            os.fdatasync(self._file)
            self._synced = self._written  # for those that wrote, and wait for their turn to sync
            old, path, size = self._file, self._path, self._size
            self._file = -1
            try:
                if carried:
                    self._open()
                    for entry in carried:
                        self._write(entry.line())
                    os.fdatasync(self._file)
            except BaseException as error:
                if self._file >= 0:
                    if self._path is not None:  # while nobody else may read it
                        self._path.unlink(missing_ok=True)
                    os.close(self._file)
                self._file, self._path, self._size = old, path, size
                if isinstance(error, OSError):
                    raise self._refused(error) from error
                raise
            os.close(old)

    def _refused(self, error: OSError) -> StoreFullError:
        return StoreFullError(
            f"the journal in {self.directory} can't be written ({error.strerror}), so that no "
            "call may go on without the store: make room, or give another directory"
        )

    def close(self) -> None:
        """Give the file to whoever reconciles."""
        self.turn(tuple)


_holding: set[int] = set()


def _let_go() -> None:
    """In a forked child: a lock is held for as long as any process has the file open."""
    while _holding:
        os.close(_holding.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


@contextlib.contextmanager
def held(path: Path) -> Iterator[bool]:
    """Hold a file's lock. False: its process lives, or somebody reconciles it already."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    _holding.add(file)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield path.exists()  # it may have been put away before the lock was had
    finally:
        if file in _holding:  # else this is a child, in which it is closed already
            _holding.discard(file)
            os.close(file)


def put_away(path: Path) -> None:
    """A file that is reconciled. Some stay, by another name."""
    path.rename(path.with_suffix(KEPT_SUFFIX))
    kept = list(pages(path.parent, reconciled=True))
    for old in kept[:-KEPT]:
        old.unlink(missing_ok=True)
