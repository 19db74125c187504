"""The URL of a PostgreSQL store: what of it is ours, and what is the driver's."""

from __future__ import annotations

import importlib.util
from difflib import get_close_matches
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from oncekey.errors import StoreConfigError

__all__ = ["chosen_driver", "driver_of", "need", "own_options", "place_of", "plain"]


_OWN: Final = ("tenant", "prepare", "timeout", "listen")


def need(package: str) -> None:
    """Raise unless a driver is installed."""
    if importlib.util.find_spec(package) is None:
        raise StoreConfigError(
            f"the PostgreSQL store needs {package}: run pip install 'oncekey[postgres]'"
        )


def driver_of(url: str) -> str | None:
    """The driver that a URL's scheme names."""
    return url.partition("://")[0].partition("+")[2] or None


def chosen_driver(source: Any, driver: str | None) -> str:
    """The driver of an asynchronous store: the one that is asked for, or asyncpg if it is there."""
    if driver is None and isinstance(source, str):
        driver = driver_of(source)
    if driver is None:
        driver = "asyncpg" if importlib.util.find_spec("asyncpg") else "psycopg"
    if driver not in ("asyncpg", "psycopg"):
        raise StoreConfigError(
            f"driver must be 'asyncpg' or 'psycopg', got {driver!r}: write postgresql+psycopg:// "
            "or postgresql+asyncpg://"
        )
    need(driver)
    if driver == "asyncpg" and isinstance(source, str) and "://" not in source:
        raise StoreConfigError(
            "asyncpg takes a URL, not key=value pairs: write postgresql://user@host/database, "
            "or pass driver='psycopg'"
        )
    return driver


def plain(url: Any) -> Any:
    """A URL as drivers know it; what is none is left as it is."""
    if not isinstance(url, str):
        return url
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.partition("+")[0].lower() not in ("postgresql", "postgres"):
        if "=" in url and not separator:
            return url  # a connection string of key=value pairs
        raise StoreConfigError(
            "that is not a PostgreSQL URL: write postgresql://user:password@host:5432/database"
        )
    return f"postgresql://{rest}"


def own_options(url: str, options: dict[str, Any]) -> str:
    """Take our own options out of the URL's query; the driver gets the rest."""
    address, _, query = url.partition("?")  # no more is taken apart than must be
    rest = []
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name == "tenant":
            options.setdefault(name, value)
        elif name == "prepare":
            if value not in ("true", "false"):
                raise StoreConfigError(f"prepare must be true or false, got {value!r}")
            options.setdefault(name, value == "true")
        elif name == "timeout":
            try:
                options.setdefault(name, float(value))
            except ValueError:
                raise StoreConfigError(f"timeout must be seconds, got {value!r}") from None
        elif name == "listen":
            options.setdefault(name, False if value == "false" else value)
        else:
            near = get_close_matches(name, _OWN, 1, 0.75)
            if near:  # the driver would say of it only that the address can't be read
                raise StoreConfigError(f"the URL has {name}=: did you mean {near[0]}=?")
            rest.append((name, value))
    return address + (f"?{urlencode(rest, quote_via=quote)}" if rest else "")


def place_of(url: str) -> str:
    """Where a URL leads, to be shown: its host, port and database, and nothing else of it."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return ""
    if not host:  # a socket, or in the query: the driver's own text has to do
        return ""
    return f" at {host}:{port or 5432}, database {parts.path[1:] or '(the default)'},"
