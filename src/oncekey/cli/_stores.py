"""The store that a command is about: its URL as an argument, or from the environment."""

from __future__ import annotations

import argparse
import os
import re
import sys

from oncekey.errors import PolicyError, StoreConfigError

__all__ = [
    "add_store",
    "add_url_env",
    "existing_store",
    "from_environment",
    "redacted",
    "store_url",
]

_WORDS = re.compile(r"(://[^/?#]*:)[^@/?#]*@")
_SECRET = re.compile(r"([?&](?:password|passwd|sslpassword|token|secret)=)[^&#]*", re.IGNORECASE)


def add_store(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add ``URL`` and ``--url-env``. ``optional``: the command can do without a store."""
    parser.add_argument("url", metavar="URL", nargs="?", help="the store, as for connect()")
    add_url_env(parser)
    parser.set_defaults(store_optional=optional)


def add_url_env(parser: argparse.ArgumentParser) -> None:
    """Add ``--url-env``."""
    parser.add_argument(
        "--url-env", metavar="NAME", help="the environment variable that holds the store's URL"
    )


def store_url(arguments: argparse.Namespace) -> str:
    """The URL of the store.

    Raises:
        PolicyError: There is none, there are two, or the variable is not set.
        StoreConfigError: It is to have an inbox, and there is no file.
    """
    url = _given_url(arguments)
    if getattr(arguments, "config", None) or getattr(arguments, "inbox", False):
        from oncekey.cli._inbox import check_inbox

        check_inbox(url)
    return url


def existing_store(arguments: argparse.Namespace) -> str:
    """The URL of the store, which is there: for commands that look at it, or change records of it.

    Raises:
        PolicyError: There is none, there are two, or the variable is not set.
        StoreConfigError: It is a file, and there is no such file. It is not made here: what was
            meant is another one, in which all may not be well.
    """
    url = store_url(arguments)
    if url.startswith("sqlite://"):
        path = url.partition("://")[2].partition("?")[0].removeprefix("/")
        if path and not os.path.isfile(path):
            raise StoreConfigError(
                f"there is no file {path}: a store makes it when it is opened first"
            )
    return url


def _given_url(arguments: argparse.Namespace) -> str:
    config = getattr(arguments, "config", None)
    if config:
        if arguments.url or arguments.url_env:
            raise PolicyError("--config says where the store is: leave out its URL and --url-env")
        from oncekey.cli._inbox import config_store

        return config_store(config)
    if arguments.url and arguments.url_env:
        raise PolicyError("give the store's URL or --url-env, not both")
    if arguments.url_env:
        return from_environment("--url-env", arguments.url_env)
    if not arguments.url:
        raise PolicyError(
            "which store? Give its URL, or --url-env NAME for one in an environment variable"
        )
    url: str = arguments.url
    if redacted(url) != url:
        print(
            "oncekey: the URL has a password in it, which others on this machine can read in the "
            "list of processes: put it into an environment variable, and give --url-env NAME",
            file=sys.stderr,
        )
    return url


def from_environment(option: str, name: str) -> str:
    """The value of an environment variable that an option names.

    Raises:
        PolicyError: It is not set.
    """
    value = os.environ.get(name)
    if not value:
        # Not named: it may be the secret itself, typed where its variable's name belongs.
        raise PolicyError(
            f"{option} takes the name of an environment variable, and the one given is not set"
        )
    return value


def redacted(url: str) -> str:
    """A URL without the secrets in it, to be shown."""
    return _SECRET.sub(r"\1***", _WORDS.sub(r"\1***@", url))
