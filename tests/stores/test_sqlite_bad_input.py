"""Bad files, bad disks and bad options: a typed error that names the fix, and nothing is lost."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import pickle
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oncekey import AsyncOnce, AsyncSQLiteStore, Once, SQLiteStore, connect
from oncekey.errors import (
    OncekeyError,
    StoreClosedError,
    StoreConfigError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from oncekey.models import Key, Record, Scope, State, Terms, Verdict
from oncekey.receiver import TableAudit

TERMS = Terms(lease_ms=30_000, ttl_ms=86_400_000)
SCOPE = Scope("once", "bad")
OWNER = b"o" * 16
NOBODY = 65_534

Open = Callable[..., Any]


def key(name: object) -> Key:
    return Key(SCOPE, str(name))


def do(store: Any, method: str, *args: Any) -> Any:
    """Call a method of a sync or async store."""
    result = getattr(store, method)(*args)
    if inspect.iscoroutine(result):
        return asyncio.run(_wait(result))
    return result


async def _wait(work: Any) -> Any:
    return await work


def close(store: Any) -> None:
    do(store, "close" if isinstance(store, SQLiteStore) else "aclose")


@pytest.fixture(params=["sync", "thread", "inline"])
def open_store(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens a store of each kind; what is open at the end is closed."""
    opened: list[Any] = []

    def open_it(path: Any, **options: Any) -> Any:
        store: Any
        if request.param == "sync":
            store = SQLiteStore(path, **options)
        else:
            store = AsyncSQLiteStore(path, commit=request.param, **options)
        opened.append(store)
        return store

    yield open_it
    for store in opened:
        close(store)


def filled(path: Path, count: int = 3) -> Path:
    """A closed store with ``count`` acknowledged answers."""
    with SQLiteStore(path, durability="normal") as store:
        for number in range(count):
            reply = store.claim(key(number), OWNER, b"p", TERMS)
            assert store.complete(key(number), OWNER, reply.fence, b"answer", TERMS)
    return path


def assert_intact(path: Path, count: int = 3) -> None:
    """Everything that ``filled`` was told is done is still there, and the store works."""
    with SQLiteStore(path) as store:
        for number in range(count):
            assert store.claim(key(number), b"x" * 16, b"p", TERMS).answer == b"answer"
        assert store.first_seen(key("afterwards"), TERMS) is True


# Options


@pytest.mark.parametrize(
    "path, options, fix",
    [
        (":memory:", {}, "memory://"),
        ("", {}, "sqlite:///"),
        ("file.db", {"durability": "off"}, "'full'"),
        ("file.db", {"durability": ""}, "'full'"),
        ("file.db", {"durability": "full; DROP TABLE x"}, "'full'"),
        ("nul\0.db", {}, "NUL"),
    ],
    ids=["memory", "empty", "off", "blank", "injected", "nul"],
)
def test_bad_options_are_refused_with_the_fix(
    open_store: Open, tmp_path: Path, path: str, options: dict[str, Any], fix: str
) -> None:
    """A path or durability that can't work is a StoreConfigError that says what to write."""
    where = path if path in ("", ":memory:") else os.path.join(tmp_path, path)
    with pytest.raises(StoreConfigError, match=fix):
        open_store(where, **options)
    gc.collect()  # a half-made store must not complain when it is thrown away
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_way_to_commit_is_refused(tmp_path: Path) -> None:
    """``commit`` must be thread or inline, and the error says so."""
    with pytest.raises(StoreConfigError, match="'thread' or 'inline'"):
        AsyncSQLiteStore(tmp_path / "file.db", commit="later")


@pytest.mark.parametrize(
    "url, fix",
    [
        ("sqlite://", "sqlite:///file.db"),
        ("sqlite://file.db", "sqlite:///file.db"),
        ("sqlite:///", "sqlite:///file.db"),
        ("sqlite:///file.db?sync=off", "there are busy_timeout, commit, durability"),
        ("sqlite:///file.db?busy_timeout=soon", "busy_timeout"),
        ("sqlite:///file.db?durability=off", "'full'"),
    ],
)
def test_bad_urls_are_refused_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, fix: str
) -> None:
    """A URL without a file, or with an option that isn't one, is a StoreConfigError."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreConfigError, match=fix):
        connect(url)
    gc.collect()


# Places


def test_a_directory_is_not_a_database(open_store: Open, tmp_path: Path) -> None:
    """A path that is a directory can't be opened, and the error names the path."""
    with pytest.raises(StoreConfigError, match="is a directory") as caught:
        open_store(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("path", ["missing/file.db", "file/file.db"], ids=["missing", "a file"])
def test_a_missing_directory_is_named(open_store: Open, tmp_path: Path, path: str) -> None:
    """A file in a directory that isn't there can't be made, and works once the directory is."""
    (tmp_path / "file").touch()
    with pytest.raises(StoreConfigError, match="directory exists") as caught:
        open_store(tmp_path / path)
    assert path in str(caught.value)
    (tmp_path / "file").unlink()
    (tmp_path / path).parent.mkdir()
    assert do(open_store(tmp_path / path), "first_seen", key("k"), TERMS) is True


# Read-only. Root may write anywhere, so that these run as nobody, in a child.


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that other users can reach, unlike ``tmp_path``."""
    folder = Path(tempfile.mkdtemp(prefix="oncekey-"))
    folder.chmod(0o777)
    yield folder
    folder.chmod(0o700)
    shutil.rmtree(folder)


def in_child(work: Callable[[], Any]) -> Any:
    """What ``work`` gives, or raises, in a forked child, whose user and limits are its own."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)  # a child that hangs ends
            try:
                result: Any = work()
            except Exception as error:
                result = error
            os.write(writing, pickle.dumps(result))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        data = stream.read()
    assert os.waitpid(pid, 0)[1] == 0
    result = pickle.loads(data)
    if isinstance(result, Exception):
        raise result
    return result


def as_nobody(work: Callable[[], Any]) -> Any:
    """What ``work`` gives, or raises, as a user whom permissions bind."""

    def bound() -> Any:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        return work()

    return in_child(bound)


def test_a_read_only_file_is_refused_when_it_is_opened(open_store: Open, public: Path) -> None:
    """A store file that may only be read is a StoreReadOnlyError at once, not at the first call."""
    path = filled(public / "file.db")
    path.chmod(0o444)
    with pytest.raises(StoreReadOnlyError, match="write permission"):
        as_nobody(lambda: open_store(path).path)
    for beside in public.glob("file.db-*"):
        beside.unlink()
    path.chmod(0o666)
    assert_intact(path)


@pytest.mark.parametrize("file_mode", [0o444, 0o666], ids=["read-only file", "writable file"])
def test_a_read_only_directory_is_refused(open_store: Open, public: Path, file_mode: int) -> None:
    """In a directory that may only be read WAL can't work: a StoreReadOnlyError says what to do."""
    path = filled(public / "file.db")
    path.chmod(file_mode)
    public.chmod(0o555)
    with pytest.raises(StoreReadOnlyError, match="its directory"):
        as_nobody(lambda: open_store(path).path)
    public.chmod(0o777)
    path.chmod(0o666)
    assert as_nobody(lambda: do(open_store(path), "first_seen", key("now"), TERMS)) is True
    for beside in public.glob("file.db-*"):
        beside.chmod(0o666)
    assert_intact(path)


def test_a_new_file_in_a_read_only_directory_is_refused(open_store: Open, public: Path) -> None:
    """A file that can't be made for want of permission is an error that names the permission."""
    public.chmod(0o555)
    with pytest.raises((StoreConfigError, StoreReadOnlyError), match=r"may be written|permission"):
        as_nobody(lambda: open_store(public / "new.db").path)
    assert list(public.iterdir()) == []


def test_another_database_that_is_read_only_is_refused(open_store: Open, public: Path) -> None:
    """A read-only database that is no store yet can't become one."""
    path = public / "other.db"
    raw = sqlite3.connect(path)
    raw.execute("CREATE TABLE mine (x)")
    raw.close()
    path.chmod(0o444)
    with pytest.raises(StoreReadOnlyError, match="write permission"):
        as_nobody(lambda: open_store(path).path)


def test_a_store_that_turns_read_only_still_replays_and_works_again_later(
    open_store: Open, tmp_path: Path
) -> None:
    """Writes fail with StoreReadOnlyError, replays go on, and both work when the fault is gone."""
    store = open_store(filled(tmp_path / "file.db"))
    writer = store._database.writer()
    writer.execute("PRAGMA query_only = ON")
    with pytest.raises(StoreReadOnlyError, match="write permission"):
        do(store, "first_seen", key("new"), TERMS)
    assert do(store, "claim", key(0), OWNER, b"p", TERMS).answer == b"answer"
    writer.execute("PRAGMA query_only = OFF")
    assert do(store, "first_seen", key("new"), TERMS) is True


# Full


def fill(store: Any) -> tuple[list[int], OncekeyError]:
    """Complete keys until the disk is full. Gives what was acknowledged, and the error."""
    done: list[int] = []
    try:
        for number in range(10_000):
            owner = os.urandom(16)
            reply = do(store, "claim", key(f"full{number}"), owner, b"p", TERMS)
            answer = b"%d" % number * 500
            assert do(store, "complete", key(f"full{number}"), owner, reply.fence, answer, TERMS)
            done.append(number)
    except OncekeyError as error:
        return done, error
    raise AssertionError("the disk was never full")


def assert_kept(store: Any, done: list[int]) -> None:
    assert done
    for number in done:
        reply = do(store, "claim", key(f"full{number}"), b"x" * 16, b"p", TERMS)
        assert (reply.verdict, reply.answer) == (Verdict.REPLAY, b"%d" % number * 500)


def test_a_full_database_loses_nothing_and_works_again_with_more_room(
    open_store: Open, tmp_path: Path
) -> None:
    """No more pages: StoreFullError, all that was acknowledged replays, and later it goes on."""
    store = open_store(tmp_path / "file.db")
    writer = store._database.writer()
    pages = writer.execute("PRAGMA page_count").fetchone()[0]
    writer.execute(f"PRAGMA max_page_count = {pages + 5}")
    done, error = fill(store)
    assert isinstance(error, StoreFullError)
    assert error.retryable
    assert "free disk space" in str(error)
    assert_kept(store, done)
    with pytest.raises(StoreFullError):
        do(store, "write", key("more"), b"", b"x" * 10_000, 2**41)
    writer.execute("PRAGMA max_page_count = 1000000")
    assert do(store, "first_seen", key("more"), TERMS) is True
    assert_kept(store, done)


def test_a_file_size_limit_loses_nothing_and_works_again_without_it(
    open_store: Open, tmp_path: Path
) -> None:
    """The system refuses a longer file: a typed error, nothing is lost, and later it goes on."""
    path = tmp_path / "file.db"

    def limited() -> int:
        store = open_store(path)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
        done, error = fill(store)
        assert isinstance(error, StoreError)
        assert "disk" in str(error)
        assert_kept(store, done)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert do(store, "first_seen", key("more"), TERMS) is True
        assert_kept(store, done)
        return len(done)

    done = in_child(limited)
    with SQLiteStore(path) as store:
        assert_kept(store, list(range(done)))


FILL_A_REAL_DISK = """
    import os, sys
    from oncekey.errors import StoreFullError
    from oncekey.models import Key, Scope, Terms
    from oncekey.stores.sqlite import SQLiteStore

    folder = sys.argv[1]
    terms, scope = Terms(lease_ms=30_000, ttl_ms=86_400_000), Scope("once", "bad")
    ballast = os.path.join(folder, "ballast")
    with open(ballast, "wb") as file:
        file.write(bytes(400_000))
    store = SQLiteStore(os.path.join(folder, "file.db"))
    done = []
    try:
        for number in range(10_000):
            owner = os.urandom(16)
            reply = store.claim(Key(scope, str(number)), owner, b"p", terms)
            assert store.complete(Key(scope, str(number)), owner, reply.fence, b"x" * 3000, terms)
            done.append(number)
    except StoreFullError as error:
        assert "free disk space" in str(error)
    else:
        raise SystemExit("the disk was never full")
    assert done
    for again in range(2):
        for number in done:
            reply = store.claim(Key(scope, str(number)), os.urandom(16), b"p", terms)
            assert reply.answer == b"x" * 3000
        if not again:
            os.unlink(ballast)
            assert store.first_seen(Key(scope, "more"), terms) is True
            store.close()
            store = SQLiteStore(os.path.join(folder, "file.db"))
    print("kept", len(done))
"""


def test_a_full_disk_loses_nothing_and_works_again_with_more_room(tmp_path: Path) -> None:
    """On a real file system without room: StoreFullError, nothing lost, and later it goes on."""
    script = tmp_path / "fill.py"
    script.write_text(textwrap.dedent(FILL_A_REAL_DISK))
    disk = tmp_path / "disk"
    disk.mkdir()
    shell = 'mount -t tmpfs -o size=1m none "$1" && echo mounted && exec "$2" "$3" "$1"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", shell, "sh"]
    try:
        ended = subprocess.run(
            [*command, str(disk), sys.executable, str(script)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("needs unshare, to mount a small disk that only the test sees")
    if "mounted" not in ended.stdout:
        pytest.skip("this system lets nobody mount a small disk")
    assert ended.returncode == 0, ended.stderr
    assert "kept" in ended.stdout


# Busy


def test_a_file_that_stays_locked_is_unavailable_and_works_again_later(
    open_store: Open, tmp_path: Path
) -> None:
    """A transaction that somebody holds open past busy_timeout: replays go on, writes say why."""
    path = filled(tmp_path / "file.db")
    store = open_store(path, busy_timeout=0.05)
    store._database.writer().execute("PRAGMA busy_timeout = 0")
    hog = sqlite3.connect(path, isolation_level=None)
    hog.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailableError, match="busy_timeout") as caught:
        do(store, "first_seen", key("new"), TERMS)
    assert caught.value.retryable
    assert do(store, "claim", key(0), OWNER, b"p", TERMS).answer == b"answer"
    hog.execute("ROLLBACK")
    hog.close()
    assert do(store, "first_seen", key("new"), TERMS) is True


LONG = 5.0  # many times the busy_timeout below; each retry used to take that long


def test_a_locked_file_ends_every_call_within_busy_timeout(
    open_store: Open, tmp_path: Path
) -> None:
    """The whole call ends in time, however often it would be retried, and says what is known."""
    path = filled(tmp_path / "file.db")
    store = open_store(path, busy_timeout=0.2)
    hog = sqlite3.connect(path, isolation_level=None)
    hog.execute("BEGIN EXCLUSIVE")

    async def in_a_loop() -> None:
        await AsyncOnce(store, scope="bad")(key="name")(work)("x")

    async def in_a_transaction() -> None:
        async with store.transaction("x"):
            pass

    async def work(name: str) -> None: ...

    def calls() -> dict[str, Callable[[], Any]]:
        yes: dict[str, Callable[[], Any]] = {
            "claim": lambda: do(store, "claim", key("new"), OWNER, b"p", TERMS),
            "first_seen": lambda: do(store, "first_seen", key("new"), TERMS),
            "open": lambda: open_store(path, busy_timeout=0.2),
        }
        if isinstance(store, SQLiteStore):

            def noop(name: str) -> None: ...

            once = Once(store, scope="bad")
            yes["call"] = lambda: once(key="name")(noop)("x")
            yes["transaction"] = lambda: store.transaction("x").__enter__()
        else:
            yes["call"] = lambda: asyncio.run(in_a_loop())
            yes["transaction"] = lambda: asyncio.run(in_a_transaction())
        return yes

    for name, call in calls().items():
        begun = time.monotonic()
        with pytest.raises(StoreTimeoutError) as caught:
            call()
        assert caught.value.outcome_known, name
        assert time.monotonic() - begun < LONG, name
    hog.execute("ROLLBACK")
    hog.close()
    assert do(store, "first_seen", key("new"), TERMS) is True


# Corrupt


@pytest.mark.parametrize(
    "content",
    [b"garbage " * 1000, b"not a database", b"SQLite format 3\0" + b"\xff" * 5000, b"\0" * 4096],
    ids=["garbage", "short", "header only", "zeros"],
)
def test_a_file_that_is_no_database_is_refused_and_left_alone(
    open_store: Open, tmp_path: Path, content: bytes
) -> None:
    """A file of something else is a StoreCorruptError, and not a byte of it changes."""
    path = tmp_path / "file.db"
    path.write_bytes(content)
    with pytest.raises(StoreCorruptError, match="use another file"):
        open_store(path)
    assert path.read_bytes() == content


PAGE = 4096


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:100] + b"\xa5" * (PAGE - 100) + data[PAGE:],
        lambda data: data[:PAGE] + b"\xff" * (len(data) - PAGE),
        lambda data: data[: 3 * PAGE + 100],
    ],
    ids=["schema", "pages", "cut short"],
)
def test_a_database_with_a_sound_header_and_damaged_pages_is_refused(
    open_store: Open, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    """Damage behind a sound header is a StoreCorruptError when it is opened or met; no crash."""
    path = filled(tmp_path / "file.db", 500)
    sound = path.read_bytes()
    path.write_bytes(damage(sound))
    damaged = path.read_bytes()
    with pytest.raises(StoreCorruptError, match="backup"):
        _use(open_store(path))
    assert path.read_bytes() == damaged
    for beside in tmp_path.glob("file.db-*"):
        beside.unlink()
    path.write_bytes(sound)
    assert_intact(path, 500)


def _use(store: Any) -> None:
    for number in range(500):
        do(store, "claim", key(number), b"x" * 16, b"p", TERMS)


def test_damage_in_the_leaves_is_met_with_a_typed_error(open_store: Open, tmp_path: Path) -> None:
    """Reads and writes that meet a damaged page fail with StoreCorruptError; others go on."""
    path = filled(tmp_path / "file.db", 500)
    with path.open("r+b") as file:
        file.seek(4 * PAGE)
        file.write(b"\xff" * PAGE)
    store = open_store(path)
    answers, errors = 0, 0
    for number in range(500):
        try:
            reply = do(store, "claim", key(number), b"x" * 16, b"p", TERMS)
        except StoreCorruptError:
            errors += 1
        else:
            assert reply.answer == b"answer"
            answers += 1
    assert errors
    assert answers


@pytest.mark.parametrize("state", [7, -1, "done", b"1"], ids=["7", "-1", "text", "blob"])
def test_a_row_with_an_unknown_state_is_corrupt(
    open_store: Open, tmp_path: Path, state: object
) -> None:
    """A record whose state no oncekey writes is a StoreCorruptError, for reads and for claims."""
    path = filled(tmp_path / "file.db")
    raw = sqlite3.connect(path)
    raw.execute("UPDATE oncekey_records SET state = ? WHERE key = ?", (state, key(0).digest))
    raw.commit()
    raw.close()
    store = open_store(path)
    for method, args in (
        ("read", (key(0),)),
        ("claim", (key(0), b"x" * 16, b"p", TERMS)),
        ("complete", (key(0), OWNER, 1, b"a", TERMS)),
        ("first_seen", (key(0), TERMS)),
    ):
        with pytest.raises(StoreCorruptError, match="damaged"):
            do(store, method, *args)
    assert do(store, "claim", key(1), b"x" * 16, b"p", TERMS).answer == b"answer"


DAMAGE = {
    "state flipped to pending": "state = 0",
    "state flipped to released": "state = 2",
    "a lease after the end": "lease_until = 5",
    "an end that is text": "expires_at = 'later'",
    "an end after the purge": "expires_at = purge_at + 1",
    "a purge that is bytes": "purge_at = x'00'",
    "an owner that is text": "owner = 'somebody'",
    "a payload that is a number": "fingerprint = 7",
    "an answer that is text": "answer = 'text'",
    "an answer that is no text": "answer = CAST(x'ff' AS TEXT)",
    "no attempts": "attempts = 'one'",
}


@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_row_is_corrupt_and_never_runs_again(
    open_store: Open, tmp_path: Path, change: str
) -> None:
    """A row that no oncekey writes is a StoreCorruptError for whoever meets it."""
    path = filled(tmp_path / "file.db")
    raw = sqlite3.connect(path)
    raw.execute(f"UPDATE oncekey_records SET {change} WHERE key = ?", (key(0).digest,))
    raw.commit()
    raw.close()
    store = open_store(path)
    for method, args in (
        ("read", (key(0),)),
        ("claim", (key(0), b"x" * 16, b"p", TERMS)),
        ("complete", (key(0), OWNER, 1, b"a", TERMS)),
        ("first_seen", (key(0), TERMS)),
    ):
        with pytest.raises(StoreCorruptError, match=r"damaged.*backup"):
            do(store, method, *args)
    assert do(store, "claim", key(1), b"x" * 16, b"p", TERMS).answer == b"answer"


@pytest.mark.parametrize(
    "answer", [b"j\xff\xfe{", b"j[1,", b"\x00", b"?1"], ids=["utf-8", "cut", "zero", "tag"]
)
@pytest.mark.parametrize("transactional", [False, True], ids=["lease", "transaction"])
def test_a_damaged_answer_is_corrupt_and_never_runs_again(
    tmp_path: Path, answer: bytes, transactional: bool
) -> None:
    """Bytes that are no answer are a StoreCorruptError that names the fix, and nothing runs."""
    runs: list[int] = []
    with SQLiteStore(tmp_path / "file.db") as store:

        @Once(store, scope="damage")(key="number", transactional=transactional)
        def work(number: int) -> str:
            runs.append(number)
            return "done"

        assert work(1) == "done"
        raw = sqlite3.connect(tmp_path / "file.db")
        raw.execute("UPDATE oncekey_records SET answer = ?", (answer,))
        raw.commit()
        raw.close()
        for _ in range(2):
            with pytest.raises(StoreCorruptError, match="backup"):
                work(1)
    assert runs == [1]


# Who may read it


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077], ids=oct)
def test_the_files_are_their_owners_alone(open_store: Open, tmp_path: Path, mask: int) -> None:
    """The file and those that SQLite makes beside it are 0600, whatever the umask."""
    before = os.umask(mask)
    try:
        store = open_store(tmp_path / "file.db")
        assert do(store, "first_seen", key(0), TERMS)
        audit = TableAudit(str(tmp_path / "audit.db"))
    finally:
        os.umask(before)
    audit.close()
    modes = {file.name: oct(file.stat().st_mode & 0o777) for file in tmp_path.iterdir()}
    names = ("file.db", "file.db-wal", "file.db-shm", "audit.db")
    assert modes == dict.fromkeys(names, "0o600")


def test_a_file_that_is_there_keeps_its_mode(open_store: Open, tmp_path: Path) -> None:
    """What its owner has shared stays shared, and so do the files beside it."""
    path = tmp_path / "file.db"
    path.touch()
    path.chmod(0o664)
    store = open_store(path)
    assert do(store, "first_seen", key(0), TERMS)
    modes = {oct(file.stat().st_mode & 0o777) for file in tmp_path.iterdir()}
    assert modes == {"0o664"}


# Schema


def test_a_newer_schema_is_refused(open_store: Open, tmp_path: Path) -> None:
    """A file that a newer oncekey made is left alone, and the error says to upgrade."""
    path = filled(tmp_path / "file.db")
    raw = sqlite3.connect(path)
    raw.execute("INSERT INTO oncekey_schema (version, applied_at) VALUES (99, 0)")
    raw.commit()
    with pytest.raises(StoreConfigError, match=r"schema version 99.*upgrade"):
        open_store(path)
    raw.execute("DELETE FROM oncekey_schema WHERE version = 99")
    raw.commit()
    raw.close()
    assert_intact(path)


@pytest.mark.parametrize("column", ["scope", *Record._fields])
def test_a_table_that_lacks_a_column_is_refused(
    open_store: Open, tmp_path: Path, column: str
) -> None:
    """A table without one of its columns is a StoreConfigError that names the column."""
    path = filled(tmp_path / "file.db")
    raw = sqlite3.connect(path)
    raw.execute(f"ALTER TABLE oncekey_records DROP COLUMN {column}")
    raw.commit()
    raw.close()
    with pytest.raises(StoreConfigError, match=rf"lacks {column}\b"):
        open_store(path)


def test_a_missing_table_is_refused(open_store: Open, tmp_path: Path) -> None:
    """A file whose version is right but whose table is gone is not silently started afresh."""
    path = filled(tmp_path / "file.db")
    raw = sqlite3.connect(path)
    raw.execute("DROP TABLE oncekey_records")
    raw.commit()
    raw.close()
    with pytest.raises(StoreConfigError, match=r"oncekey_records.*backup"):
        open_store(path)


@pytest.mark.parametrize("replacement", ["", "CREATE TABLE oncekey_schema (x)"], ids=["no", "odd"])
def test_a_lost_version_table_is_refused(
    open_store: Open, tmp_path: Path, replacement: str
) -> None:
    """Records without a version, or with a table of versions that isn't one: no guessing."""
    path = filled(tmp_path / "file.db")
    raw = sqlite3.connect(path)
    raw.execute("DROP TABLE oncekey_schema")
    if replacement:
        raw.execute(replacement)
    raw.commit()
    raw.close()
    with pytest.raises(StoreConfigError, match="oncekey_schema"):
        open_store(path)
    raw = sqlite3.connect(path)
    assert raw.execute("SELECT count(*) FROM oncekey_records").fetchone() == (3,)
    raw.close()


def test_a_file_with_tables_of_its_own_keeps_them(open_store: Open, tmp_path: Path) -> None:
    """A database that holds other tables can hold the store's too, and keeps its own."""
    path = tmp_path / "app.db"
    raw = sqlite3.connect(path)
    raw.execute("CREATE TABLE orders (id INTEGER)")
    raw.execute("INSERT INTO orders VALUES (1)")
    raw.commit()
    assert do(open_store(path), "first_seen", key("k"), TERMS) is True
    assert raw.execute("SELECT id FROM orders").fetchall() == [(1,)]
    raw.close()


# Closed


@pytest.mark.parametrize(
    "method, args",
    [
        ("claim", (key(0), OWNER, b"p", TERMS)),
        ("complete", (key(0), OWNER, 1, b"a", TERMS)),
        ("renew", (key(0), OWNER, 1, TERMS)),
        ("release", (key(0), OWNER, 1)),
        ("first_seen", (key("new"), TERMS)),
        ("read", (key(0),)),
        ("write", (key(0), b"p", b"a", 2**41)),
        ("wait", (key(0), 0.01)),
        ("sweep", ()),
        ("clear", ()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_closed_store_says_so(
    open_store: Open, tmp_path: Path, method: str, args: tuple[Any, ...]
) -> None:
    """Every method of a closed store is a StoreClosedError that says to connect again."""
    path = filled(tmp_path / "file.db")
    store = open_store(path)
    close(store)
    close(store)
    with pytest.raises(StoreClosedError, match="connect again"):
        do(store, method, *args)
    assert_intact(path)


def test_every_store_error_has_a_name_and_a_code() -> None:
    """The errors above are all OncekeyErrors with a code of their own."""
    kinds = [
        *(StoreClosedError, StoreConfigError, StoreCorruptError, StoreFullError),
        *(StoreReadOnlyError, StoreUnavailableError),
    ]
    assert all(issubclass(kind, StoreError) and issubclass(kind, OncekeyError) for kind in kinds)
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert State.COMPLETED == 1  # what the files hold
