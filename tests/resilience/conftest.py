"""SQLite stores that can be taken away, and servers that can be stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oncekey import AsyncSQLiteStore, SQLiteStore
from oncekey.errors import StoreTimeoutError
from oncekey.models import Key, Scope, Terms

TERMS = Terms(lease_ms=30_000, ttl_ms=86_400_000)
ASKED = ("claim", "complete", "renew", "release", "first_seen", "read", "write", "now")


def key(name: object) -> Key:
    """A key of the tests' own scope."""
    return Key(Scope("once", "outage"), str(name))


class Away:
    """Says of the stores on one file whether they answer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.on = False

    def begin(self) -> None:
        """From now on they don't."""
        self.on = True

    def end(self) -> None:
        """They do again."""
        self.on = False

    def check(self) -> None:
        """Fail as a store does that gets no answer."""
        if self.on:
            raise StoreTimeoutError("no answer")


class Switched(SQLiteStore):
    """A store that is away when it is told so."""

    away: Away

    def lend(self, loan: Any) -> None:
        self.away.check()
        super().lend(loan)


class AsyncSwitched(AsyncSQLiteStore):
    """The async form."""

    away: Away


def _switch(kind: Any, name: str, real: Any) -> None:
    def asked(self: Any, *args: Any, **options: Any) -> Any:
        self.away.check()
        return real(self, *args, **options)

    async def aasked(self: Any, *args: Any, **options: Any) -> Any:
        self.away.check()
        return await real(self, *args, **options)

    setattr(kind, name, aasked if kind is AsyncSwitched else asked)


for _name in ASKED:
    _switch(Switched, _name, getattr(SQLiteStore, _name))
    _switch(AsyncSwitched, _name, getattr(AsyncSQLiteStore, _name))


@pytest.fixture
def away(tmp_path: Path) -> Away:
    """The outage of ``opened`` and ``aopened``."""
    return Away(tmp_path / "keys.db")


@pytest.fixture
def opened(away: Away) -> Iterator[Any]:
    """A sync store."""
    with Switched(str(away.path)) as store:
        store.away = away
        yield store
        away.end()


@pytest.fixture
def aopened(away: Away) -> AsyncSwitched:
    """The async form."""
    store = AsyncSwitched(str(away.path))
    store.away = away
    return store
