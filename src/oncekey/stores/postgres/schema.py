"""The schema in PostgreSQL: its migrations, and a look at the start that names what is wrong."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from importlib.resources import files
from typing import Any, Final, NamedTuple

from oncekey.errors import StoreConfigError
from oncekey.stores.postgres.calls import Statement
from oncekey.stores.postgres.statements import SQL, Statements, statements_in

__all__ = ["MIGRATIONS", "Migration", "check", "migrate", "printed", "script"]

COLUMNS: Final = {
    "fence": "bigint",
    "lease_until": "bigint",
    "expires_at": "bigint",
    "purge_at": "bigint",
    "attempts": "integer",
    "state": "smallint",
    "takeover": "boolean",
    "tenant": "text C",
    "key": "bytea",
    "scope": "text C",
    "owner": "bytea",
    "fingerprint": "bytea",
    "answer": "bytea",
}
_ROW_SECURITY: Final = """
ALTER TABLE {table} ENABLE ROW LEVEL SECURITY;
ALTER TABLE {table} FORCE ROW LEVEL SECURITY;
CREATE POLICY oncekey_tenant ON {table}
    USING (tenant = current_user) WITH CHECK (tenant = current_user);
"""
_STORAGE = re.compile(r"\) (WITH \(\s*fillfactor = 70,.*?\));", re.DOTALL)


class Migration(NamedTuple):
    """One script. ``pre`` is safe while the old code runs, ``post`` once only the new code does."""

    version: int
    step: str
    name: str
    sql: str


def _load() -> list[Migration]:
    found = []
    for item in files("oncekey.stores.postgres").joinpath("migrations").iterdir():
        match = re.fullmatch(r"(\d+)_(\w+)\.(pre|post)\.sql", item.name)
        if match is not None:
            text = item.read_text("utf-8")
            found.append(Migration(int(match[1]), match[3], match[2], text))
    return sorted(found, key=lambda one: (one.version, one.step != "pre"))


MIGRATIONS: Final = _load()


def script(migration: Migration, partitions: int = 0, row_security: bool = False) -> str:
    """The SQL of a migration, with the options that concern making the table."""
    sql = migration.sql
    if migration.version != 1 or migration.step != "pre":
        return sql
    if partitions:
        if not 2 <= partitions <= 1024:
            raise StoreConfigError(f"partitions must be 2 to 1024, got {partitions}")
        match = _STORAGE.search(sql)
        storage = match[1] if match else ""
        parts = "".join(
            f"CREATE TABLE oncekey_records_{number} PARTITION OF oncekey_records\n"
            f"    FOR VALUES WITH (MODULUS {partitions}, REMAINDER {number}) {storage};\n"
            for number in range(partitions)
        )
        sql = _STORAGE.sub(") PARTITION BY HASH (key);\n\n" + parts, sql)
    if row_security:
        # On the partitions too: a policy of the whole table does not hold for a part of it.
        leaves = [f"oncekey_records_{number}" for number in range(partitions)]
        for table in ("oncekey_records", *leaves, "oncekey_waiters"):
            sql += _ROW_SECURITY.format(table=table)
    return sql


def printed(step: str | None = None, partitions: int = 0, row_security: bool = False) -> str:
    """Everything that ``migrate`` would do to an empty database, to be run by other means."""
    parts = [SQL["create_versions"] + ";\n"]
    for one in MIGRATIONS:
        if step in (None, one.step):
            parts.append(f"-- {one.version:03d} {one.name} ({one.step})\n")
            parts.append(script(one, partitions, row_security).rstrip() + "\n")
            parts.append(
                "INSERT INTO oncekey_schema (version, step) "
                f"VALUES ({one.version}, '{one.step}');\n"
            )
    return "\n".join(parts)


def statements(sql: str) -> list[str]:
    """The statements of a script, without its comments."""
    lines = [line for line in sql.splitlines() if not line.lstrip().startswith("--")]
    return [part.strip() for part in "\n".join(lines).split(";\n") if part.strip(" ;\n")]


Steps = Generator[Statement, Sequence[Sequence[Any]], list[Migration]]


def migrate(
    step: str | None = None,
    partitions: int = 0,
    row_security: bool = False,
    migrations: Sequence[Migration] | None = None,
) -> Steps:
    """Bring the schema up to date, inside a transaction, one at a time. Gives what was done.

    Args:
        step: ``pre``, ``post`` or both.
        partitions: Make the table with so many hash partitions. 0: not partitioned.
        row_security: Let each role see only the rows whose tenant is its name.
        migrations: Others than our own, in tests.
    """
    if step not in (None, "pre", "post"):
        raise StoreConfigError(f"step must be 'pre', 'post' or left out, got {step!r}")
    done = []
    yield Statement(SQL["lock_versions"], [])
    yield Statement(SQL["create_versions"], [])
    rows = yield Statement(SQL["versions"], [])
    have = {(int(row[0]), str(_text(row[1]))) for row in rows}
    for migration in MIGRATIONS if migrations is None else migrations:
        if (migration.version, migration.step) in have:
            continue
        if step is not None and migration.step != step:
            continue
        for sql in statements(script(migration, partitions, row_security)):
            yield Statement(sql, [])
        yield Statement(SQL["add_version"], [migration.version, migration.step])
        done.append(migration)
    return done


def _text(value: Any) -> Any:
    """A value as text, also where psycopg gives bytes: a database without an encoding."""
    if isinstance(value, (list, tuple)):
        return [_text(one) for one in value]
    return value.decode() if isinstance(value, bytes) else value


_FIX: Final = "run 'oncekey migrate URL', or call create_schema() on the store"


def _check_tables(
    there: list[bool], columns: list[str], primary: list[str] | None, unlogged: bool
) -> None:
    """Raise unless the tables are there, and are what they were made as."""
    names = ("oncekey_records", "oncekey_waiters", "oncekey_state", "oncekey_schema")
    missing = [name for name, found in zip(names, there, strict=True) if not found]
    if missing:
        raise StoreConfigError(
            f"no table {', '.join(missing)} in this database and search_path: {_FIX}"
        )
    have = dict(column.split(" ", 1) for column in columns)
    drift = [
        f"column {name} is {have[name]}, not {kind}" if name in have else f"no column {name}"
        for name, kind in COLUMNS.items()
        if have.get(name) != kind
    ]
    if list(primary or ()) != ["tenant", "key"]:
        drift.append("the primary key is not (tenant, key)")
    if unlogged:
        drift.append("the table is UNLOGGED, so that a crash of the server empties it")
    if drift:
        raise StoreConfigError(
            f"oncekey_records has drifted: {'; '.join(drift)}. Undo that, or {_FIX} on a "
            "fresh table"
        )


def check(
    tenant: str,
) -> Generator[Statement, Sequence[Sequence[Any]], tuple[str, Statements]]:
    """Look at the schema. Gives the store's id, and the statements for where its tables are.

    Raises:
        StoreConfigError: Something is missing or has drifted; names what, and the fix.
    """
    rows = yield Statement(SQL["inspect"], [])
    found = [_text(value) for value in rows[0]]
    secured, unlogged, role, schema = found[6:]
    _check_tables(found[:4], found[4], found[5], unlogged)
    home = statements_in(schema)
    done = yield Statement(home.sql["versions"], [])
    have_versions = {(int(row[0]), str(_text(row[1]))) for row in done}
    lacking = [one for one in MIGRATIONS if one.step == "pre" and one[:2] not in have_versions]
    if lacking:
        raise StoreConfigError(f"the schema lacks {lacking[0].name} ({lacking[0].version}): {_FIX}")
    newest = MIGRATIONS[-1].version
    if any(version > newest and step == "post" for version, step in have_versions):
        raise StoreConfigError(
            f"the schema was finished for a newer oncekey than this (which knows version {newest})"
            ": upgrade oncekey"
        )
    if secured and tenant != role:
        raise StoreConfigError(
            f"row-level security is on, so this role may use tenant={role!r} only, but the store "
            f"has tenant={tenant!r}: pass tenant={role!r}"
        )
    rows = yield Statement(home.sql["store_id"], [])
    if not rows:
        raise StoreConfigError(f"the table oncekey_state is empty: {_FIX} on a fresh database")
    return str(_text(rows[0][0])), home
