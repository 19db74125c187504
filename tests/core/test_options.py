"""Options that are given singly: type checkers see the names and types that the settings have."""

from __future__ import annotations

import dataclasses
import inspect
import sqlite3
from typing import Any

import pytest

from oncekey import IdempotencyStore, SQLiteStore, ToolContext
from oncekey.http.options import SettingsOptions
from oncekey.http.settings import Settings
from oncekey.policy import Policy, PolicyOptions
from oncekey.receiver.options import ReceiverOptions
from oncekey.receiver.settings import ReceiverSettings


@pytest.mark.parametrize(
    "options, settings",
    [
        (PolicyOptions, Policy),
        (ReceiverOptions, ReceiverSettings),
        (SettingsOptions, Settings),
    ],
)
def test_typed_options_are_those_of_the_settings(options: Any, settings: Any) -> None:
    """An option that is added to the one and not to the other fails here."""
    named = {one.name: one.type for one in dataclasses.fields(settings) if one.init}

    assert {name: kind.__forward_arg__ for name, kind in options.__annotations__.items()} == named
    assert not options.__required_keys__


def test_a_transactional_handler_shows_no_tx(tmp_path: Any) -> None:
    """Whoever makes a form or a schema of the handler's signature asks nobody for a ``tx``."""
    with SQLiteStore(tmp_path / "a.db") as store:
        shop = IdempotencyStore(store)

        @shop.wrap(transactional=True)
        def order(params: dict[str, Any], context: Any = None, *, tx: Any) -> str:
            assert isinstance(tx.connection, sqlite3.Connection)
            return "done"

        assert list(inspect.signature(order).parameters) == ["params", "context"]
        assert order({"idempotency_key": "k"}, ToolContext("a")) == "done"
