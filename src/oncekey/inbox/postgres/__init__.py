"""An inbox in PostgreSQL: many nodes, no leader, nothing else to run."""

from __future__ import annotations

from oncekey.inbox.postgres.inbox import AsyncPostgresInbox, open_url

__all__ = ["AsyncPostgresInbox", "open_url"]
