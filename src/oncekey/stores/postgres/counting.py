"""Counting in PostgreSQL: a counter is a record that is done, and its attempts are the count.

No table of its own: tenants, row-level security, partitions and sweeping are those of records.
"""

from __future__ import annotations

from typing import Any

from oncekey.abc import AsyncCountable, Countable
from oncekey.models import Key

__all__ = ["AsyncCounting", "Counting"]


class Counting(Countable):
    """For the sync store."""

    tenant: str
    _fetch: Any

    def count(self, key: Key, window_ms: int) -> tuple[int, int]:
        """See ``Countable``. One statement; those who count under one key wait for each other."""
        rows = self._fetch("count", [self.tenant, key.digest, key.scope.label, window_ms])
        return int(rows[0][0]), int(rows[0][1])


class AsyncCounting(AsyncCountable):
    """For the async store."""

    tenant: str
    _fetch: Any

    async def count(self, key: Key, window_ms: int) -> tuple[int, int]:
        """See ``AsyncCountable``."""
        rows = await self._fetch("count", [self.tenant, key.digest, key.scope.label, window_ms])
        return int(rows[0][0]), int(rows[0][1])
