"""An inbox in a SQLite file: one machine, nothing else to run."""

from __future__ import annotations

from oncekey.inbox.sqlite.inbox import AsyncSQLiteInbox, open_url

__all__ = ["AsyncSQLiteInbox", "open_url"]
