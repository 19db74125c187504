"""Looking through the records of a PostgreSQL store."""

from __future__ import annotations

from typing import Any

from oncekey.abc import AsyncBrowsable, Browsable
from oncekey.models import Entry, Page
from oncekey.stores._browsing import after_digest, bounded, entry_of, page_by_digest

__all__ = ["AsyncBrowsing", "Browsing"]


class Browsing(Browsable):
    """For the sync store."""

    tenant: str
    _fetch: Any

    def browse(self, cursor: str = "", limit: int = 1000) -> Page:
        """See ``Browsable``. Records of this tenant, in the order of the digests."""
        most = bounded(limit)
        rows = self._fetch("browse", [self.tenant, after_digest(cursor), most])
        return page_by_digest(rows, most)

    def find(self, digest: bytes) -> Entry | None:
        """See ``Browsable``."""
        rows = self._fetch("find", [self.tenant, digest])
        return entry_of(rows[0]) if rows else None


class AsyncBrowsing(AsyncBrowsable):
    """For the async store."""

    tenant: str
    _fetch: Any

    async def browse(self, cursor: str = "", limit: int = 1000) -> Page:
        """See ``AsyncBrowsable``. Records of this tenant, in the order of the digests."""
        most = bounded(limit)
        rows = await self._fetch("browse", [self.tenant, after_digest(cursor), most])
        return page_by_digest(rows, most)

    async def find(self, digest: bytes) -> Entry | None:
        """See ``AsyncBrowsable``."""
        rows = await self._fetch("find", [self.tenant, digest])
        return entry_of(rows[0]) if rows else None
