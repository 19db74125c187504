"""``connect`` and ``aconnect``: schemes, options, plug-ins, and errors that name the fix."""

from __future__ import annotations

import pathlib
import types
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from oncekey import AsyncSQLiteStore, MemoryBackend, MemoryStore, SQLiteStore, aconnect, connect
from oncekey.errors import StoreConfigError
from oncekey.stores import urls


def test_schemes_find_their_store(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """memory and sqlite give the sync and the async class; paths are relative or absolute."""
    monkeypatch.chdir(tmp_path)
    assert isinstance(connect("memory://"), MemoryStore)
    assert isinstance(aconnect("memory://"), MemoryBackend)
    with connect("sqlite:///here.db") as store:
        assert isinstance(store, SQLiteStore)
        assert store.path == str(tmp_path / "here.db")
    with connect(f"sqlite:///{tmp_path}/there.db") as store:
        assert isinstance(store, SQLiteStore)
        assert store.path == str(tmp_path / "there.db")


async def test_options_come_from_the_url_or_the_call(tmp_path: pathlib.Path) -> None:
    """Query and keywords set options; keywords win."""
    url = f"sqlite:///{tmp_path}/x.db?durability=normal&commit=inline&busy_timeout=2.5"
    async with aconnect(url, busy_timeout=3) as store:
        assert isinstance(store, AsyncSQLiteStore)
        assert store._database.durability == "normal"
        assert store._database.busy_timeout == 3


@pytest.mark.parametrize(
    "url, message",
    [
        ("", "not a store URL"),
        ("file.db", "not a store URL"),
        ("://x", "not a store URL"),
        ("oracle://x", "there are dynamodb, memory, postgres"),
        ("sqlite://file.db", "sqlite:///file.db"),
        ("sqlite:///", "names no file"),
        ("sqlite:///x.db?durabilty=full", "no option 'durabilty'"),
        ("sqlite:///:memory:", "memory://"),
    ],
)
def test_a_wrong_url_names_the_fix(url: str, message: str) -> None:
    """Every wrong URL is a StoreConfigError that says what to write."""
    with pytest.raises(StoreConfigError, match=message):
        connect(url)


def test_other_things_than_urls_are_named(tmp_path: pathlib.Path) -> None:
    """An unset variable, a path where a URL belongs, and the other way round."""
    with pytest.raises(StoreConfigError, match="must be a string, got None:"):
        connect(None)  # type: ignore[arg-type]
    with pytest.raises(StoreConfigError, match=r"pass it to connect\(\)"):
        SQLiteStore("sqlite:///file.db")
    with pytest.raises(StoreConfigError, match="is a directory"):
        SQLiteStore(tmp_path)
    with pytest.raises(StoreConfigError, match="memory://name"):
        connect("memory:///x")
    assert isinstance(connect("Memory://"), MemoryStore)


def test_a_wrong_option_is_named() -> None:
    """An option that the store does not take is an error, not a TypeError from inside."""
    with pytest.raises(StoreConfigError, match="max_entrys"):
        connect("memory://", max_entrys=5)
    with pytest.raises(ValueError, match="max_entries"):
        connect("memory://", max_entries=0)


def test_third_parties_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point gives a scheme; a plug-in with one form says that the other is missing."""
    plugin = types.SimpleNamespace(
        open_sync=lambda url, options: MemoryStore(url.partition("://")[2], **options)
    )

    class Point:
        name = "mine"

        def load(self) -> Any:
            return plugin

    def found(*, group: str, name: str | None = None) -> list[Any]:
        assert group == "oncekey.stores"
        return [Point()] if name in (None, "mine") else []

    monkeypatch.setattr(urls, "entry_points", found)
    assert isinstance(connect("mine://x", max_entries=5), MemoryStore)
    with pytest.raises(StoreConfigError, match="no async form"):
        aconnect("mine://x")
    with pytest.raises(StoreConfigError, match="there are dynamodb, memory, mine, postgres"):
        connect("yours://x")
    plugin.open_sync = lambda url, options: object()
    with pytest.raises(StoreConfigError, match=r"no oncekey\.abc\.Store"):
        connect("mine://x")
    real = EntryPoint("mine", "types", "oncekey.stores")
    assert real.name == Point.name
    assert real.load() is types
