"""What a PostgreSQL store is looked at for."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from oncekey.doctor.findings import Report, Severity
from oncekey.errors import StoreConfigError
from oncekey.stores.postgres.addresses import own_options, plain
from oncekey.stores.postgres.errors import named
from oncekey.stores.postgres.store import open_sync

__all__ = ["examine"]

OLDEST: Final = 130_000
CHEAP: Final = 100_000.0  # jit_above_cost as it comes
_SETTINGS: Final = (
    "server_version_num",
    "server_version",
    "fsync",
    "full_page_writes",
    "synchronous_commit",
    "autovacuum",
    "jit",
    "jit_above_cost",
)
_SCHEMA: Final = """
SELECT to_regclass('oncekey_records') IS NOT NULL,
    coalesce((SELECT reloptions::text FROM pg_catalog.pg_class
              WHERE oid = to_regclass('oncekey_records')), '')
"""
_GRANTS: Final = """
SELECT t.name, t.rights, has_table_privilege(t.name, t.rights)
FROM (VALUES ('oncekey_records', 'SELECT'), ('oncekey_records', 'INSERT'),
             ('oncekey_records', 'UPDATE'), ('oncekey_records', 'DELETE'),
             ('oncekey_waiters', 'INSERT'), ('oncekey_waiters', 'DELETE'),
             ('oncekey_state', 'SELECT'), ('oncekey_state', 'UPDATE'),
             ('oncekey_schema', 'SELECT')) AS t (name, rights)
WHERE to_regclass(t.name) IS NOT NULL
"""
_PUBLIC: Final = """
SELECT DISTINCT a.privilege_type
FROM pg_catalog.pg_class c, aclexplode(c.relacl) a
WHERE c.oid = to_regclass('oncekey_records') AND a.grantee = 0
"""
_SNAPSHOTS: Final = """
SELECT pid, coalesce(state, backend_type), extract(epoch FROM clock_timestamp() - xact_start)
FROM pg_catalog.pg_stat_activity
WHERE pid <> pg_backend_pid() AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
    AND (datname = current_database() OR datname IS NULL)
    AND xact_start <= clock_timestamp() - make_interval(secs => %s)
ORDER BY xact_start LIMIT 1
"""


def examine(url: str, report: Report, snapshot_seconds: float) -> bool:
    """Look at the server and the tables. Gives whether they can be used at all.

    Raises:
        StoreError: It can't be reached, or the login is refused.
    """
    options: dict[str, Any] = {}
    address = plain(own_options(url, options))
    with open_sync(url, {"prepare": False}) as store:  # as a pooler may stand between
        store.now()  # says best what keeps one from reaching it
    psycopg = import_module("psycopg")

    def connected() -> Any:
        return psycopg.connect(address, autocommit=True, prepare_threshold=None, connect_timeout=10)

    try:
        with connected() as connection:
            settings = dict(
                connection.execute(
                    "SELECT name, setting FROM pg_catalog.pg_settings WHERE name = ANY (%s)",
                    [list(_SETTINGS)],
                ).fetchall()
            )
            replica = connection.execute("SELECT pg_is_in_recovery()").fetchone()[0]
            usable = _server(settings, replica, report)
            _durability(settings, report)
            _speed(connection, settings, snapshot_seconds, report)
            usable &= _permissions(connection, report)
            with connected() as other:
                usable &= _pooler(connection, other, options.get("prepare", True), report)
    except psycopg.Error as error:
        raise named(error) from error
    return usable and _schema(url, report)


def _server(settings: dict[str, str], replica: bool, report: Report) -> bool:
    old = report.judge(
        "version",
        Severity.WARNING,
        int(settings["server_version_num"]) < OLDEST,
        f"this is PostgreSQL {settings['server_version']}",
        "use PostgreSQL 13 or later",
    )
    standby = report.judge(
        "role",
        Severity.ERROR,
        bool(replica),
        "this server is a standby, which takes no writes",
        "give the address of the primary, or target_session_attrs=read-write with all hosts",
    )
    return not old and not standby


def _durability(settings: dict[str, str], report: Report) -> None:
    for name, lost in (
        ("fsync", "a crash of the machine can damage the whole database"),
        ("full_page_writes", "a crash in the middle of a page can damage it"),
        ("synchronous_commit", "a crash of the server forgets the last answers that were given"),
    ):
        fix = f"ALTER SYSTEM SET {name} = on, and SELECT pg_reload_conf()"
        if name == "synchronous_commit":
            fix += "; it may be set for the database or role too: ALTER DATABASE, ALTER ROLE"
        report.judge(
            "durability", Severity.ERROR, settings[name] == "off", f"{name} is off: {lost}", fix
        )


def _speed(
    connection: Any, settings: dict[str, str], snapshot_seconds: float, report: Report
) -> None:
    _, options = connection.execute(_SCHEMA).fetchone()
    off = settings["autovacuum"] == "off" or "autovacuum_enabled=false" in options
    report.judge(
        "vacuum",
        Severity.WARNING,
        off,
        "autovacuum is off for the server or for oncekey_records: dead rows are never reused, and "
        "the table grows",
        "ALTER SYSTEM SET autovacuum = on; ALTER TABLE oncekey_records RESET (autovacuum_enabled)",
    )
    report.judge(
        "jit",
        Severity.WARNING,
        settings["jit"] == "on" and float(settings["jit_above_cost"]) < CHEAP,
        f"jit is on with jit_above_cost {settings['jit_above_cost']}: compiling a statement takes "
        "many times what it takes to run. The store turns it off on connections of its own, and "
        "can't on yours or behind a pooler",
        "RESET jit_above_cost, or SET jit = off for the role that your transactions run as",
    )
    found = connection.execute(_SNAPSHOTS, [snapshot_seconds]).fetchone()
    shown = "" if found is None else f"process {found[0]} ({found[1]}) for {found[2]:.0f} s"
    report.judge(
        "snapshot",
        Severity.WARNING,
        found is not None,
        f"a transaction is open: {shown}. No row that died since can be vacuumed, and claims get "
        "slower with each",
        "end it (pg_terminate_backend), and set idle_in_transaction_session_timeout",
    )


def _permissions(connection: Any, report: Report) -> bool:
    lacking = [
        f"{right} on {table}" for table, right, has in connection.execute(_GRANTS) if not has
    ]
    barred = report.judge(
        "permissions",
        Severity.ERROR,
        bool(lacking),
        f"this role lacks {', '.join(lacking)}",
        "GRANT SELECT, INSERT, UPDATE, DELETE ON oncekey_records, oncekey_waiters, oncekey_state, "
        "oncekey_schema TO the role",
    )
    public = [row[0] for row in connection.execute(_PUBLIC)]
    report.judge(
        "permissions",
        Severity.WARNING,
        bool(public),
        f"every role has {', '.join(public)} on oncekey_records, which holds answers",
        "REVOKE ALL ON oncekey_records FROM PUBLIC",
    )
    return not barred


def _pooler(one: Any, other: Any, prepare: bool, report: Report) -> bool:
    """Behind a transaction pooler, a session's process changes while another has it."""

    def process(connection: Any) -> int:
        return int(connection.execute("SELECT pg_backend_pid()").fetchone()[0])

    seen = {process(one) for _ in range(3)}  # poolers that take turns
    with other.transaction():  # and those that give back what was used last
        process(other)
        seen.add(process(one))
    moved = len(seen) > 1
    return not report.judge(
        "pooler",
        Severity.ERROR,
        moved and prepare,
        "a transaction pooler stands between: one session was served by different processes, so "
        "that prepared statements and LISTEN fail or are lost",
        "add prepare=false to the URL, and listen=URL of the server itself for quick waits",
    )


def _schema(url: str, report: Report) -> bool:
    try:
        with open_sync(url, {}) as store:
            wrong = "" if store.store_id else "the store has no id"
    except StoreConfigError as error:
        wrong = str(error)
    return not report.judge(
        "schema",
        Severity.ERROR,
        bool(wrong),
        wrong,
        "oncekey migrate --url-env NAME, or undo the change",
    )
