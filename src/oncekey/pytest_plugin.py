"""Fixtures for pytest, there wherever oncekey is installed. Nothing is imported before its use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from oncekey import AsyncMemoryStore, MemoryStore, SQLiteStore
    from oncekey.testing import ManualClock

__all__ = [
    "oncekey_async_store",
    "oncekey_clock",
    "oncekey_sqlite",
    "oncekey_store",
    "webhook_kit",
]


@pytest.fixture
def oncekey_clock() -> ManualClock:
    """A clock that stands still until the test moves it."""
    from oncekey.testing import ManualClock

    return ManualClock()


@pytest.fixture
def oncekey_store(oncekey_clock: ManualClock) -> Iterator[MemoryStore]:
    """An empty memory store on ``oncekey_clock``, for sync code."""
    from oncekey import MemoryStore

    with MemoryStore(clock=oncekey_clock) as store:
        yield store


@pytest.fixture
def oncekey_async_store(oncekey_clock: ManualClock) -> AsyncMemoryStore:
    """An empty memory store on ``oncekey_clock``, for async code."""
    from oncekey import AsyncMemoryStore

    return AsyncMemoryStore(clock=oncekey_clock)  # holds nothing that has to be closed


@pytest.fixture
def oncekey_sqlite(oncekey_clock: ManualClock, tmp_path: Path) -> Iterator[SQLiteStore]:
    """An empty SQLite store on ``oncekey_clock``, in the test's own folder; has transactions."""
    from oncekey import SQLiteStore

    with SQLiteStore(tmp_path / "oncekey.db", clock=oncekey_clock) as store:
        yield store


@pytest.fixture
def webhook_kit() -> Any:
    """``oncekey.testing``: signed samples, deliveries, crashes, recordings and storms."""
    import oncekey.testing

    return oncekey.testing
