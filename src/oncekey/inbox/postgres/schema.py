"""The tables of an inbox in PostgreSQL: made, checked, and cut into days."""

from __future__ import annotations

from typing import Any, Final

from oncekey.errors import StoreConfigError, StoreError
from oncekey.inbox.models import ID_SHIFT
from oncekey.inbox.postgres.pool import Pool
from oncekey.stores._sql import load_migrations, load_statements
from oncekey.stores.postgres.schema import statements
from oncekey.stores.postgres.store import AsyncPostgresStore

__all__ = ["SQL", "add_days", "check", "drop_days", "set_up"]

SQL: Final = load_statements("statements.sql", "oncekey.inbox.postgres")
MIGRATIONS: Final = load_migrations("oncekey.inbox.postgres")
NEWEST: Final = MIGRATIONS[-1][0]
DAY: Final = 86_400_000
AHEAD: Final = 7  # days that have their partition before they come
_PARTS: Final = {"event": "id", "attempt": "event", "duplicate": "event"}
_FIX: Final = "run 'oncekey migrate --inbox URL', or call set_up() on the inbox"
_FEW: Final = 10_000  # unfinished events of a day that are moved; with more the day stays


async def set_up(pool: Pool) -> None:
    """Make the tables or bring them up to date, those of the keys too.

    Raises:
        StoreConfigError: They are newer than this oncekey, or we may not make them.
    """
    store = AsyncPostgresStore(pool.pool)
    try:
        await store.create_schema()
    finally:
        await store.aclose()
    async with pool.connection() as connection, connection.transaction():
        await connection.fetch(SQL["lock_versions"])
        await connection.execute(SQL["create_versions"])
        found = await connection.fetchval(SQL["version"])
        if found > NEWEST:
            raise _newer(found)
        for version, script in MIGRATIONS:
            if version > found:
                for statement in statements(script):
                    await connection.execute(statement)
                await connection.execute(SQL["add_version"], version)
    await add_days(pool)


def _newer(found: int) -> StoreConfigError:
    return StoreConfigError(
        f"the inbox in this database has schema version {found}, this oncekey knows {NEWEST}: "
        "upgrade oncekey, or use another database"
    )


async def check(pool: Pool) -> None:
    """Raise unless the tables are there, and of this version.

    Raises:
        StoreConfigError: They are missing, older or newer: says what to run.
    """
    keys, inbox = (await pool.fetch(SQL["tables"]))[0]
    if not keys or not inbox:
        what = "tables of an inbox" if keys else "tables of oncekey"
        raise StoreConfigError(f"this database has no {what} yet: {_FIX}")
    found = (await pool.fetch(SQL["version"]))[0][0]
    if found > NEWEST:
        raise _newer(found)
    if found < NEWEST:
        raise StoreConfigError(
            f"the inbox in this database has schema version {found}, this oncekey needs {NEWEST}: "
            f"{_FIX}"
        )


def _bounds(day: int) -> dict[str, Any]:
    return {"day": day, "first": day * DAY << ID_SHIFT, "end": (day + 1) * DAY << ID_SHIFT}


async def add_days(pool: Pool) -> None:
    """Make the partitions of today and of the days to come, where they are not there yet."""
    now = (await pool.fetch(SQL["now"]))[0][0]
    days = range(now // DAY, now // DAY + AHEAD + 1)
    have = {row[0] for row in await pool.fetch(SQL["days"])}
    for day in days:
        if day in have:
            continue
        try:
            async with pool.connection() as connection, connection.transaction():
                await connection.execute("SET LOCAL lock_timeout = '500ms'")
                await connection.fetch(SQL["lock_versions"])
                if day not in {row[0] for row in await connection.fetch(SQL["days"])}:
                    for table in _PARTS:
                        text = SQL["add_day"].format(table=table, **_bounds(day))
                        await connection.execute(text)
        except StoreError:
            # Busy, or events of that day are in the rest already: they stay there, and work.
            continue


async def drop_days(pool: Pool, cutoff: int) -> int:
    """Drop the days that ended before ``cutoff``. Gives about how many events went."""
    removed = 0
    for row in await pool.fetch(SQL["days"]):
        bounds = _bounds(row[0])
        if (row[0] + 1) * DAY > cutoff:
            break
        wanted = await pool.fetch(SQL["wanted_in"], bounds["first"], bounds["end"])
        if wanted[0][0] > _FEW:
            continue
        size = await pool.fetch(SQL["estimate"], f"oncekey_inbox_event_d{row[0]}")
        try:
            await _drop(pool, bounds)
        except StoreError:
            break  # somebody reads it: nobody is to wait for us, so the next round tries again
        removed += max(int(size[0][0]) - wanted[0][0], 0)
    return removed


async def _drop(pool: Pool, bounds: dict[str, Any]) -> None:
    """Drop a day; what is not finished of it moves to the rest."""
    async with pool.connection() as connection, connection.transaction():
        await connection.execute("SET LOCAL lock_timeout = '300ms'")
        await connection.execute(SQL["lock_day"].format(**bounds))
        for table, column in _PARTS.items():
            text = SQL["save_rows"].format(table=table, column=column, **bounds)
            await connection.execute(text)
        await connection.execute(SQL["close_day"].format(**bounds))
        if await connection.fetchval(SQL["left_out"], bounds["first"], bounds["end"]):
            raise StoreError("an event of that day was queued again: it stays until the next look")
        for table in _PARTS:
            await connection.execute(SQL["drop_day"].format(table=table, **bounds))
        for table in _PARTS:
            await connection.execute(SQL["put_back"].format(table=table))


async def prune_rest(pool: Pool, end: int) -> int:
    """Remove old finished events that are in no day's partition, in small steps."""
    removed = 0
    while True:
        gone = len(await pool.fetch(SQL["prune_rest"], end))
        removed += gone
        if gone < 1000:
            break
    for table in ("attempt", "duplicate"):
        await pool.fetch(SQL["prune_history"].format(table=table), end)
    return removed
