"""Every inbox does what the contract says."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.servers.fixtures_pg import Databases

from oncekey.inbox import AsyncInbox, open_inbox
from oncekey.inbox.conformance import CHECKS, conform


@pytest.mark.parametrize("check", CHECKS)
async def test_sqlite_conforms(check: str, tmp_path: Path) -> None:
    """An inbox in a file passes the suite."""

    async def opened(node: str) -> AsyncInbox:
        return await open_inbox(f"sqlite:///{tmp_path / 'inbox.db'}", node=node)

    await conform(opened, check)


@pytest.mark.parametrize("check", CHECKS)
async def test_postgres_conforms(check: str, postgres: Databases) -> None:
    """An inbox in PostgreSQL passes the suite."""
    url = postgres.database()
    await (await open_inbox(url, create=True)).aclose()

    async def opened(node: str) -> AsyncInbox:
        return await open_inbox(url, node=node)

    await conform(opened, check)
