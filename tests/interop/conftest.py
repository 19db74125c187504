"""Servers for the sellers and backends under test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind that the reference seller runs on."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'seller.db'}"
    databases: Any = request.getfixturevalue("postgres")
    url: str = databases.database()
    return url
