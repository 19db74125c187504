"""Every option, event and command is in the reference, with its true default."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oncekey import (
    AsyncMemoryStore,
    AsyncOnce,
    AsyncPostgresStore,
    AsyncRedisStore,
    AsyncSQLiteStore,
    AsyncWebhookDedup,
    IdempotencyStore,
    InvalidKeyError,
    MemoryStore,
    Once,
    Policy,
    PostgresStore,
    RedisStore,
    SQLiteStore,
    WebhookDedup,
    aconnect,
    connect,
)
from oncekey.http import Settings as HttpSettings
from oncekey.instrument import Event, EventKind
from oncekey.instrument.logging import LEVELS
from oncekey.receiver import ReceiverSettings
from oncekey.resilience import Breaker, resilient
from oncekey.stores.dynamodb import DynamoDBStore

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)

SECTIONS: dict[str, list[Callable[..., Any]]] = {
    "Policy": [Policy],
    "Once and AsyncOnce": [
        Once,
        AsyncOnce,
        Once.__call__,
        AsyncOnce.__call__,
        Once.guard,
        AsyncOnce.guard,
    ],
    "IdempotencyStore": [IdempotencyStore, IdempotencyStore.wrap],
    "WebhookDedup and AsyncWebhookDedup": [
        AsyncWebhookDedup,
        WebhookDedup,
        AsyncWebhookDedup.transaction,
        WebhookDedup.transaction,
        AsyncWebhookDedup.wrap,
        WebhookDedup.wrap,
    ],
    "transaction": [
        PostgresStore.transaction,
        AsyncPostgresStore.transaction,
        SQLiteStore.transaction,
        AsyncSQLiteStore.transaction,
        Once.transaction,
        AsyncOnce.transaction,
    ],
    "Receivers": [ReceiverSettings],
    "The Idempotency-Key header": [HttpSettings],
    "Memory stores": [MemoryStore, AsyncMemoryStore],
    "SQLite stores": [SQLiteStore, AsyncSQLiteStore],
    "PostgreSQL stores": [
        PostgresStore,
        AsyncPostgresStore,
        PostgresStore.create_schema,
        AsyncPostgresStore.create_schema,
    ],
    "Redis stores": [RedisStore, AsyncRedisStore],
    "DynamoDB stores": [DynamoDBStore],
    "connect and aconnect": [connect, aconnect],
    "resilient": [resilient, Breaker],
}
# Whose ``key`` has a default only so that leaving it out gets an error that says what to write.
KEYED = (Once.__call__, AsyncOnce.__call__)
CASES = [(section, owner) for section, owners in SECTIONS.items() for owner in owners]


def tables(page: str) -> dict[str, list[list[str]]]:
    """The table rows of a page under each of its second-level headings."""
    parts = HEADING.split((REFERENCE / page).read_text("utf-8"))
    return {
        heading.strip("`"): [
            [cell.strip() for cell in line.strip("|").split(" | ")]
            for line in body.splitlines()
            if line.startswith("| `")
        ]
        for heading, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def options(owner: Callable[..., Any]) -> dict[str, Any]:
    """The parameters that a user can give, with their defaults."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = {
        name: parameter.default
        for name, parameter in inspect.signature(owner).parameters.items()
        if name != "self" and parameter.kind not in variadic
    }
    return {**found, "key": inspect.Parameter.empty} if owner in KEYED else found


def shown(default: object) -> object:
    """What the default column says for a default."""
    if default is inspect.Parameter.empty:
        return "required"
    if default in (time.time, time.monotonic):
        return f"time.{default.__name__}"  # type: ignore[attr-defined]
    return default.__name__ if inspect.isfunction(default) else default


def parsed(cell: str) -> object:
    text = cell.strip("`")
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@pytest.mark.parametrize(
    "section, owner", CASES, ids=[getattr(owner, "__qualname__", "") for _, owner in CASES]
)
def test_options_are_documented(section: str, owner: Callable[..., Any]) -> None:
    """Each option has a row in its section, and the row's default is the real one."""
    rows: dict[str, list[object]] = {}
    for name, default, *_ in tables("settings.md")[section]:
        rows.setdefault(name.strip("`"), []).append(parsed(default))
    for name, default in options(owner).items():
        assert name in rows, f"{name} is not in settings.md under {section}"
        assert shown(default) in rows[name], f"the default of {name} is {default!r}"


@pytest.mark.parametrize("once", [Once("memory://"), AsyncOnce("memory://")], ids=["sync", "async"])
def test_decorator_requires_a_key(once: Once | AsyncOnce) -> None:
    """The table says that the decorator's key is required: leaving it out is refused."""
    with pytest.raises(InvalidKeyError, match="key="):
        once()


@pytest.mark.parametrize("section", SECTIONS)
def test_no_other_options_are_documented(section: str) -> None:
    """What the tables name exists."""
    known = {name for owner in SECTIONS[section] for name in options(owner)}
    documented = {row[0].strip("`") for row in tables("settings.md")[section]}
    assert documented <= known


def test_event_kinds_are_documented() -> None:
    """The table of kinds is the enumeration, with the level that each is logged at."""
    rows = {row[0].strip("`"): row[-1] for row in tables("events.md")["Kinds"]}
    names = {40: "error", 30: "warning", 20: "info"}
    assert rows == {kind.value: names.get(LEVELS.get(kind, 10), "debug") for kind in EventKind}


def test_event_fields_are_documented() -> None:
    """The table of fields is the dataclass."""
    rows = [row[0].strip("`") for row in tables("events.md")["Fields"]]
    assert rows == [field.name for field in dataclasses.fields(Event)]


def test_commands_are_documented() -> None:
    """Every command and option that ``--help`` lists is on the page."""

    def listed(*arguments: str) -> str:
        command = [sys.executable, "-m", "oncekey", *arguments, "--help"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    page = (REFERENCE / "cli.md").read_text("utf-8")
    commands = re.findall(r"^    (\w+)(?:  |$)", listed(), re.MULTILINE)
    assert commands
    for name in commands:
        assert f"## `oncekey {name} " in page
        for option in re.findall(r"--[a-z][\w-]*", listed(name)):
            assert f"`{option}`" in page, f"{option} of {name}"
    for option in re.findall(r"--[a-z][\w-]*", listed()):
        assert f"`{option}`" in page
