"""``sqlite:///file.db``: the embedded default. Durable, shared by the processes of one machine."""

from __future__ import annotations

from oncekey.stores.sqlite.store import AsyncSQLiteStore, SQLiteStore, open_async, open_sync

__all__ = ["AsyncSQLiteStore", "SQLiteBackend", "SQLiteStore", "open_async", "open_sync"]

SQLiteBackend = AsyncSQLiteStore
"""The former name of ``AsyncSQLiteStore``, which goes on working."""
