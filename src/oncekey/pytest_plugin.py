"""Fixtures for pytest, there wherever oncekey is installed. Nothing is imported before its use."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from oncekey import AsyncMemoryStore, MemoryStore, SQLiteStore
    from oncekey.lab import Lab
    from oncekey.testing import ManualClock, Proxy

__all__ = [
    "oncekey_async_store",
    "oncekey_clock",
    "oncekey_lab",
    "oncekey_proxy",
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


@pytest.fixture
def oncekey_proxy() -> Iterator[Callable[[str], Proxy]]:
    """Makes ``Proxy`` networks before the servers at given URLs; closed with the test."""
    from oncekey.testing import Proxy

    made: list[Proxy] = []

    def make(url: str) -> Proxy:
        made.append(Proxy(url))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()


@pytest.fixture
def oncekey_lab(request: pytest.FixtureRequest) -> type[Lab]:
    """``oncekey.lab.Lab``; ``--oncekey-lab-html FOLDER`` keeps its reports."""
    from oncekey.lab import Lab, LabReport

    folder = request.config.getoption("oncekey_lab_html")

    class Reporting(Lab):
        def run(self, *args: Any, **options: Any) -> LabReport:
            report = super().run(*args, **options)
            if folder:
                os.makedirs(folder, exist_ok=True)
                name = re.sub(r"[^A-Za-z0-9_.-]+", "-", request.node.nodeid)
                report.write_html(os.path.join(folder, f"{name}.html"))
            return report

    return Reporting


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that keeps the laboratory's reports."""
    parser.addoption(
        "--oncekey-lab-html",
        metavar="FOLDER",
        help="write the report of each use of the fixture oncekey_lab into FOLDER",
    )
