"""Connections of an inbox, through asyncpg, and their errors with names."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from oncekey.errors import StoreClosedError, StoreConfigError, StoreError
from oncekey.stores.postgres.addresses import need, own_options, plain
from oncekey.stores.postgres.errors import bad_address, named, unreadable

__all__ = ["Pool", "shown_url"]

_MOST: Final = 8  # connections: one that ingests, one that finishes, and some for people
_MISSING: Final = ("42P01", "42703", "42883", "3F000")


def shown_url(url: str) -> str:
    """A URL without its password and options."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    user = parts.netloc.rpartition("@")[0].partition(":")[0]
    return urlunsplit((parts.scheme, f"{user}@{host}" if user else host, parts.path, "", ""))


class Pool:
    """A pool of one event loop."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self._closed = False

    @classmethod
    async def open(cls, url: str, timeout: float) -> Pool:
        """Reach the server.

        Raises:
            StoreError: It can't be reached, or refuses us.
        """
        need("asyncpg")
        import asyncpg

        options: dict[str, Any] = {}
        address = own_options(plain(url), options)
        if options.pop("tenant", ""):
            raise StoreConfigError("an inbox has no tenants: give each a database or a schema")
        prepare = options.pop("prepare", True)
        timeout = options.pop("timeout", timeout)
        try:
            pool = await asyncpg.create_pool(
                address,
                min_size=1,
                max_size=_MOST,
                command_timeout=timeout,
                timeout=timeout,
                statement_cache_size=200 if prepare else 0,
                server_settings={"application_name": "oncekey-inbox"},
            )
        except Exception as error:
            if unreadable(error) and not isinstance(error, StoreError):
                raise bad_address() from None
            raise named(error) from error
        return cls(pool)

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        """One connection, whose errors have names."""
        if self._closed:
            raise StoreClosedError("this inbox is closed: open it again")
        try:
            async with self.pool.acquire() as connection:
                yield connection
        except StoreError:
            raise
        except Exception as error:
            if getattr(error, "sqlstate", None) in _MISSING:
                raise StoreConfigError(
                    "the tables of the inbox are missing or too old in this database and "
                    "search_path: run 'oncekey migrate --inbox URL', or call set_up() on the inbox"
                ) from error
            if isinstance(error, OSError) or hasattr(error, "sqlstate") or _asyncpg(error):
                raise named(error) from error
            raise

    async def fetch(self, sql: str, *args: Any) -> list[Any]:
        """The rows of one statement, in a transaction of its own."""
        async with self.connection() as connection:
            return list(await connection.fetch(sql, *args))

    async def close(self) -> None:
        """Wait for what is under way, then close."""
        if not self._closed:
            self._closed = True
            await self.pool.close()


def _asyncpg(error: BaseException) -> bool:
    return type(error).__module__.startswith("asyncpg")
