"""The doctor finds what is planted, each with its evidence and a fix, and is silent else.

The names of the plants are those of the table in docs/howto/doctor.md.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.doctor import faulty
from tests.doctor.faulty import STRIPE, Good, served
from tests.servers.fixtures_pg import Databases, _with_schema, databases_of, sql
from tests.servers.pooler import TransactionPooler

from oncekey import connect
from oncekey.doctor import Report, Severity, check_app, check_receiver, check_store
from oncekey.doctor.sqlite import file_system
from oncekey.models import Key, Scope, State

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "doctor.md"


class Scene:
    """What a plant is planted in."""

    def __init__(self, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        self.request = request
        self.path = tmp_path
        self.ended = contextlib.ExitStack()

    def fixture(self, name: str) -> Any:
        return self.request.getfixturevalue(name)

    def sqlite(self) -> str:
        url = f"sqlite:///{self.path}/keys.db"
        connect(url).close()
        return url

    def redis(self, **config: Any) -> Any:
        return self.fixture("make_server")(**{"appendfsync": "everysec", **config})

    def receiver(self, kind: Callable[[str], Any], with_store: bool = False) -> Report:
        url = f"sqlite:///{self.path}/hooks.db"
        made = kind(url)
        offset = 7200.0 if kind is Good and self.request.node.callspec.id == "late clock" else 0.0
        with served(made, offset) as endpoint:
            if not with_store:
                return check_receiver(endpoint, STRIPE)
            with connect(url) as store:
                return check_receiver(endpoint, STRIPE, store=store)

    def app(self, make: Callable[[str], Any]) -> Report:
        return check_app(make(f"sqlite:///{self.path}/app.db"))


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    made = Scene(request, tmp_path)
    with made.ended:
        yield made


@pytest.fixture(scope="session")
def _sound() -> Iterator[Databases]:
    yield from databases_of(fsync="on", autovacuum="on")


@pytest.fixture
def sound_postgres(_sound: Databases) -> Iterator[Databases]:
    """A server set up as one should be."""
    yield _sound
    _sound.tidy()


@pytest.fixture
def sound_url(sound_postgres: Databases) -> str:
    return _with_schema(sound_postgres.database())


def looked(url: str, **options: Any) -> Report:
    return check_store(url, read_only=True, **options)


# PostgreSQL


def no_fsync(scene: Scene) -> Report:
    return looked(scene.fixture("own_url"))


def asynchronous_commit(scene: Scene) -> Report:
    url = scene.fixture("sound_url")
    name = sql(url, "SELECT current_database()")[0][0]
    sql(url, f"ALTER DATABASE {name} SET synchronous_commit = off")
    return looked(url)


def no_tables(scene: Scene) -> Report:
    return looked(scene.fixture("sound_postgres").database())


def unlogged_table(scene: Scene) -> Report:
    url = scene.fixture("sound_url")
    sql(url, "ALTER TABLE oncekey_records SET UNLOGGED")
    return looked(url)


def no_autovacuum(scene: Scene) -> Report:
    url = scene.fixture("sound_url")
    sql(url, "ALTER TABLE oncekey_records SET (autovacuum_enabled = false)")
    return looked(url)


def eager_jit(scene: Scene) -> Report:
    url = scene.fixture("sound_url")
    name = sql(url, "SELECT current_database()")[0][0]
    sql(url, f"ALTER DATABASE {name} SET jit = on", f"ALTER DATABASE {name} SET jit_above_cost = 0")
    return looked(url)


def open_transaction(scene: Scene) -> Report:
    import psycopg

    url = scene.fixture("sound_url")
    with psycopg.connect(url) as held:
        held.execute("SELECT count(*) FROM oncekey_records")
        held.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        held.execute("CREATE TEMP TABLE mine (x int)")
        return looked(url, snapshot_seconds=0)


def transaction_pooler(scene: Scene) -> Report:
    pooler = TransactionPooler(scene.fixture("sound_url"))
    try:
        return looked(pooler.url)
    finally:
        pooler.close()


def role_without_rights(scene: Scene) -> Report:
    server = scene.fixture("sound_postgres")
    url = _with_schema(server.database())
    sql(
        url,
        "DROP ROLE IF EXISTS doctor_reader",
        "CREATE ROLE doctor_reader LOGIN",
        "GRANT SELECT ON oncekey_records, oncekey_state, oncekey_schema TO doctor_reader",
    )
    try:
        return looked(url.replace("postgres@", "doctor_reader@"))
    finally:
        sql(url, "DROP OWNED BY doctor_reader", "DROP ROLE doctor_reader")


def public_table(scene: Scene) -> Report:
    url = scene.fixture("sound_url")
    sql(url, "GRANT SELECT ON oncekey_records TO PUBLIC")
    return looked(url)


def clock_of_postgres(scene: Scene) -> Report:
    url = scene.fixture("timed_url")
    scene.fixture("timed_postgres").clock("+60")
    return looked(url)


# Redis


def evicting_redis(scene: Scene) -> Report:
    return looked(scene.redis(maxmemory="100mb", maxmemory_policy="allkeys-lru").url)


def forgetful_redis(scene: Scene) -> Report:
    return looked(scene.redis(appendonly="no").url)


def unsynced_redis(scene: Scene) -> Report:
    return looked(scene.redis(appendfsync="no").url)


def open_redis(scene: Scene) -> Report:
    return looked(scene.redis(protected_mode="no").url)


def clock_of_redis(scene: Scene) -> Report:
    server = scene.redis()
    server.needs_clock().move(-45)
    return looked(server.url)


def replica_redis(scene: Scene) -> Report:
    master = scene.redis()
    return looked(scene.redis(replicaof=f"127.0.0.1 {master.port}").url)


# SQLite and memory


def readable_file(scene: Scene) -> Report:
    url = scene.sqlite()
    (scene.path / "keys.db").chmod(0o644)
    return looked(url)


def lazy_file(scene: Scene) -> Report:
    return looked(scene.sqlite() + "?durability=normal")


def newer_file(scene: Scene) -> Report:
    import sqlite3

    url = scene.sqlite()
    with contextlib.closing(sqlite3.connect(scene.path / "keys.db")) as connection:
        connection.execute("INSERT INTO oncekey_schema VALUES (999, 0)")
        connection.commit()
    return looked(url)


def no_database(scene: Scene) -> Report:
    (scene.path / "keys.db").write_bytes(b"this is no database, and it is long enough" * 20)
    (scene.path / "keys.db").chmod(0o600)
    return looked(f"sqlite:///{scene.path}/keys.db")


def unswept_file(scene: Scene) -> Report:
    import sqlite3

    url = scene.sqlite()
    with connect(url, durability="normal") as store:
        for number in range(1200):
            store.write(Key(Scope("once"), f"{number}"), b"", b"", store.now() + 100_000)
    with contextlib.closing(sqlite3.connect(scene.path / "keys.db")) as connection:
        connection.execute("UPDATE oncekey_records SET expires_at = 1000, purge_at = 1000")
        connection.commit()
    return looked(url)


def processes_with_memory(scene: Scene) -> Report:
    return check_store("memory://shared")


PLANTS: dict[str, tuple[Callable[[Scene], Report], str]] = {
    "fsync off": (no_fsync, "durability"),
    "synchronous_commit off": (asynchronous_commit, "durability"),
    "no tables": (no_tables, "schema"),
    "unlogged table": (unlogged_table, "schema"),
    "autovacuum off": (no_autovacuum, "vacuum"),
    "eager JIT": (eager_jit, "jit"),
    "open transaction": (open_transaction, "snapshot"),
    "transaction pooler": (transaction_pooler, "pooler"),
    "role without rights": (role_without_rights, "permissions"),
    "table open to all roles": (public_table, "permissions"),
    "clock of PostgreSQL": (clock_of_postgres, "clock"),
    "Redis evicts": (evicting_redis, "eviction"),
    "Redis without AOF": (forgetful_redis, "durability"),
    "AOF not synced": (unsynced_redis, "durability"),
    "Redis open to all": (open_redis, "access"),
    "clock of Redis": (clock_of_redis, "clock"),
    "Redis is a replica": (replica_redis, "role"),
    "file readable by all": (readable_file, "permissions"),
    "SQLite durability normal": (lazy_file, "durability"),
    "file of a newer oncekey": (newer_file, "schema"),
    "no database": (no_database, "schema"),
    "nothing swept": (unswept_file, "sweeping"),
    "memory for several processes": (processes_with_memory, "atomicity"),
    "409 for duplicates": (lambda s: s.receiver(faulty.Conflicts), "duplicates"),
    "no verification": (lambda s: s.receiver(faulty.TakesAnything), "signature"),
    "500 for forgeries": (lambda s: s.receiver(faulty.FailsOnForgeries), "signature"),
    "body written anew": (lambda s: s.receiver(faulty.WritesAnew), "raw body"),
    "old signatures taken": (lambda s: s.receiver(faulty.AnyTime), "clock skew"),
    "no room for skew": (lambda s: s.receiver(faulty.Impatient), "clock skew"),
    "late clock": (lambda s: s.receiver(Good), "clock"),
    "4xx for unhandled types": (lambda s: s.receiver(faulty.NoSuchType), "unhandled type"),
    "500 for copies in flight": (lambda s: s.receiver(faulty.Collides), "in flight"),
    "wrong secret": (lambda s: s.receiver(lambda url: Good(url, "whsec_another")), "secret"),
    "stored before verified": (lambda s: s.receiver(faulty.StoresFirst, True), "nothing stored"),
    "short retention": (lambda s: s.receiver(faulty.Forgets, True), "ttl"),
    "route not guarded": (lambda s: s.app(faulty.unguarded_app), "guarded"),
    "route fails": (lambda s: s.app(faulty.failing_app), "request"),
    "bodies not compared": (lambda s: s.app(faulty.blind_app), "other body"),
    "callers not told apart": (lambda s: s.app(faulty.one_caller_app), "other caller"),
    "a memory for each worker": (lambda s: s.app(faulty.scattered_app), "concurrent copies"),
}


@pytest.mark.parametrize("name", PLANTS)
def test_planted_fault_is_found(name: str, scene: Scene) -> None:
    """What was planted is found by its check, and the finding says what was seen and what to do."""
    plant, check = PLANTS[name]
    report = plant(scene)
    found = [finding for finding in report.findings if finding.check == check]
    assert found, f"{check} found nothing; found were {report.findings}"
    for finding in report.findings:
        assert finding.severity in Severity
        assert len(finding.evidence) > 20
        assert len(finding.fix) > 15
    assert not report.ok


def good_sqlite(scene: Scene) -> Report:
    return check_store(scene.sqlite())


def good_postgres(scene: Scene) -> Report:
    return check_store(scene.fixture("sound_url"))


def good_postgres_behind_a_pooler(scene: Scene) -> Report:
    pooler = TransactionPooler(scene.fixture("sound_url"))
    try:
        return looked(f"{pooler.url}?prepare=false")
    finally:
        pooler.close()


def good_redis(scene: Scene) -> Report:
    return check_store(scene.redis().url)


@pytest.mark.parametrize(
    "good",
    [
        good_sqlite,
        good_postgres,
        good_postgres_behind_a_pooler,
        good_redis,
        lambda scene: scene.receiver(Good, True),
        lambda scene: scene.receiver(Good),
        lambda scene: scene.app(faulty.good_app),
    ],
    ids=["sqlite", "postgres", "pooler", "redis", "receiver", "receiver alone", "app"],
)
def test_good_set_up_is_silent(good: Callable[[Scene], Report], scene: Scene) -> None:
    """Nothing is found where nothing is wrong, and most of it was looked at."""
    report = good(scene)
    assert report.findings == []
    assert report.ok
    assert len(report.passed) >= 5


def test_every_plant_is_on_the_page() -> None:
    """The table in the docs has what is planted, and the check that finds it."""
    rows = re.findall(r"^\| ([^|]+?) \| `([^`]+)` \|", PAGE.read_text("utf-8"), re.MULTILINE)
    assert dict(rows) == {name: check for name, (_, check) in PLANTS.items()}
    assert len(PLANTS) >= 16


def test_network_shares_are_known() -> None:
    """The file system of a path is that of the longest mount above it."""
    mounts = (
        "/dev/sda / ext4 rw 0 0\nhost:/x /srv/share nfs4 rw 0 0\ntmpfs /srv/share/t tmpfs rw 0 0"
    )
    assert file_system(Path("/srv/share/a.db"), mounts) == "nfs4"
    assert file_system(Path("/srv/shared/a.db"), mounts) == "ext4"
    assert file_system(Path("/srv/share/t/a.db"), mounts) == "tmpfs"
    assert file_system(Path("/x"), "") == ""


def test_probes_are_few(tmp_path: Path) -> None:
    """A receiver gets a bounded number of requests, and a handler sees each event once."""
    made = Good(f"sqlite:///{tmp_path}/hooks.db")
    asked: list[int] = []

    def counted(headers: dict[str, str], body: bytes) -> int:
        asked.append(1)
        return made(headers, body)

    with served(counted) as url:
        assert check_receiver(url, STRIPE).ok
    assert len(asked) <= 16
    assert len(made.handled) == len(set(made.handled)) <= 6


def test_race_leaves_nothing_for_long(tmp_path: Path) -> None:
    """The records of a race end within a minute and a half, and meanwhile nobody holds them."""
    url = f"sqlite:///{tmp_path}/keys.db"
    connect(url).close()
    assert check_store(url).ok
    with connect(url) as store:
        entries = store.browse("", 1000).entries  # type: ignore[attr-defined]
        assert len(entries) == 25
        for entry in entries:
            assert entry.record.purge_at - store.now() <= 90_000
            assert entry.record.state is not State.PENDING
