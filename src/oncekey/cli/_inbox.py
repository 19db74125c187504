"""The inbox that a command is about: that of a gateway's config, or the one beside a store."""

from __future__ import annotations

import argparse
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from oncekey.errors import PolicyError, StoreConfigError
from oncekey.models import Key

if TYPE_CHECKING:
    from oncekey.inbox.abc import AsyncInbox

__all__ = [
    "add_inbox",
    "add_source",
    "ask",
    "check_inbox",
    "config_store",
    "has_inbox",
    "source_key",
]

T = TypeVar("T")


def add_inbox(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and ``--inbox``."""
    parser.add_argument(
        "--config", metavar="FILE", help="a gateway's config: look at its store, and at its inbox"
    )
    parser.add_argument(
        "--inbox", action="store_true", help="the store has a gateway's inbox: look at that, too"
    )


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add ``--source``, with what says where the inbox is."""
    add_inbox(parser)
    parser.add_argument(
        "--source", metavar="NAME", help="KEY is that of an event of this source of the gateway"
    )


def has_inbox(arguments: argparse.Namespace) -> bool:
    """Whether an inbox is meant."""
    return bool(arguments.config or arguments.inbox)


def source_key(arguments: argparse.Namespace) -> Key | None:
    """The key of an event of the source that is named, if one is.

    Raises:
        PolicyError: Where the inbox is was not said, or the key is said in two ways.
    """
    if arguments.source is None:
        return None
    if not has_inbox(arguments):
        raise PolicyError("--source: give --config FILE too, or the inbox's URL and --inbox")
    if arguments.scope or arguments.part or arguments.digest:
        raise PolicyError("--source says whose key it is: leave out --scope, --part and --digest")
    from oncekey.inbox.models import event_key

    return event_key(arguments.source, arguments.key)


def config_store(file: str) -> str:
    """The URL of the store that a config names. Nothing else of it is looked at.

    Raises:
        PolicyError: It can't be read, or names none.
    """
    import tomllib

    from oncekey.server.config import overlay, read_text

    text, _ = read_text(file)
    try:
        given: dict[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        raise PolicyError(f"{file} is no TOML: see oncekey serve --config {file} --check") from None
    overlay(given, os.environ)
    url = given.get("store")
    if not isinstance(url, str) or not url:
        raise PolicyError(f'{file} has no store: write store = "sqlite:///inbox.db"')
    return url


def check_inbox(url: str) -> None:
    """Refuse a file that is not there, before anything makes it.

    Raises:
        StoreConfigError: It is not.
    """
    if url.startswith("sqlite:") and not os.path.exists(url.partition(":///")[2].partition("?")[0]):
        raise StoreConfigError("there is no inbox yet: oncekey serve makes the file")


def ask(url: str, question: Callable[[AsyncInbox], Awaitable[T]]) -> T:
    """What a question to an inbox is answered.

    Raises:
        StoreError: It can't be used.
    """
    import asyncio

    from oncekey.inbox.urls import open_inbox

    async def asked() -> T:
        async with await open_inbox(url) as inbox:
            return await question(inbox)

    return asyncio.run(asked())
