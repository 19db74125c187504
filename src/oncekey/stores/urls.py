"""``connect`` and ``aconnect``: a store from a URL, found by its scheme."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Final

from oncekey.abc import AsyncStore, Store
from oncekey.errors import StoreConfigError
from oncekey.policy import did_you_mean

__all__ = ["aconnect", "connect", "what_is"]

_STORES: Final = {  # the module in oncekey.stores: the schemes of its URLs
    "memory": "memory",
    "sqlite": "sqlite",
    "postgres": "postgresql postgres postgresql+psycopg postgresql+asyncpg",
    "redis": "redis rediss redis+cluster rediss+cluster redis+sentinel rediss+sentinel "
    "valkey valkeys unix",
    "dynamodb": "dynamodb",
}
SCHEMES: Final = {scheme: store for store, names in _STORES.items() for scheme in names.split()}
_EXTRAS: Final = ("postgres", "redis", "dynamodb")  # extras, and the stores that need them
GROUP: Final = "oncekey.stores"
_OTHER_DRIVERS: Final = {
    "postgresql+psycopg2": "postgresql+psycopg",
    "postgresql+pg8000": "postgresql+psycopg",
    "postgresql+aiopg": "postgresql+asyncpg",
}


def connect(url: str, **options: Any) -> Store:
    """Open a synchronous store.

    Args:
        url: ``memory://``, ``memory://name`` (shared in this process), ``sqlite:///file.db``,
            ``postgresql://user@host/database``, ``redis://host:6379/0`` (also ``redis+cluster``,
            ``redis+sentinel`` and ``unix``), ``dynamodb://table?region=eu-west-1``, or the scheme
            of an installed plug-in.
        **options: What the store's class takes, such as ``durability="normal"``.

    Raises:
        StoreConfigError: The URL or an option is wrong, or no store has that scheme.

    Example:
        >>> from oncekey import connect
        >>> store = connect("memory://")
    """
    store = _open(_find(url, "open_sync"), url, options)
    if not isinstance(store, Store):
        raise StoreConfigError(f"the plug-in for {_scheme(url)}:// gave no oncekey.abc.Store")
    return store


def aconnect(url: str, **options: Any) -> AsyncStore:
    """Open an asynchronous store. Takes what ``connect`` takes; needs no ``await``."""
    store = _open(_find(url, "open_async"), url, options)
    if not isinstance(store, AsyncStore):
        raise StoreConfigError(f"the plug-in for {_scheme(url)}:// gave no oncekey.abc.AsyncStore")
    return store


def _scheme(url: str) -> str:
    return url.partition("://")[0].lower()


def _open(opener: Callable[..., object], url: str, options: dict[str, Any]) -> object:
    try:
        return opener(url, dict(options))
    except ModuleNotFoundError as error:
        extra = SCHEMES.get(_scheme(url))
        if extra not in _EXTRAS:
            raise
        raise StoreConfigError(
            f"{_scheme(url)}:// needs the package {error.name}, which is not installed: run "
            f"pip install 'oncekey[{extra}]'"
        ) from error
    except TypeError as error:
        told = _unknown_option(error) or f"does not take these options: {error}"
        raise StoreConfigError(f"{_scheme(url)}:// {told}") from error


def _unknown_option(error: TypeError) -> str:
    """The option that a class of ours does not have, with the nearest that it has."""
    read = re.match(r"\w+\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if read is None or place is None:
        return ""
    # Where it was raised somebody made an instance: of one of the classes of that module.
    called = [one for one in place.tb_frame.f_globals.values() if isinstance(one, type)]
    made = [getattr(one, "__init__") for one in called]  # noqa: B009 - mypy knows better
    taken = {
        name
        for one in made
        if read.group(0).startswith(f"{one.__qualname__}(")
        for name, parameter in inspect.signature(one).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    near = did_you_mean(read.group(1), sorted(taken))
    return f"has no option {read.group(1)!r}{near} {', '.join(sorted(taken))}" if taken else ""


def what_is(given: object) -> str:
    """What was given in place of a store, with what is the matter with it."""
    if isinstance(given, str):
        return "a URL, which goes to connect(url) or aconnect(url) first"
    if given is None:
        return "None (is the environment variable set that it comes from?)"
    return type(given).__name__


_SHAPES: Final = "memory://, sqlite:///file.db, postgresql://host/db or redis://host:6379/0"


def _find(url: str, function: str) -> Callable[..., object]:
    if not isinstance(url, str):
        unset = ". Is the environment variable set that it comes from?" if url is None else ""
        raise StoreConfigError(
            f"a store URL must be a string, got {'None' if url is None else type(url).__name__}: "
            f"write {_SHAPES}{unset}"
        )
    scheme = _scheme(url)
    if "://" not in url or not re.fullmatch(r"[a-z0-9+.-]+", scheme):
        raise StoreConfigError(f"that is not a store URL: write {_SHAPES}")
    known = SCHEMES.get(scheme)
    if known is not None:
        module: Any = import_module(f"{GROUP}.{known}")
    else:
        found = next(iter(entry_points(group=GROUP, name=scheme)), None)
        if found is None:
            names = sorted({*SCHEMES, *(point.name for point in entry_points(group=GROUP))})
            if scheme in _OTHER_DRIVERS:
                raise StoreConfigError(
                    f"{scheme}:// names a driver that oncekey does not use: write "
                    f"{_OTHER_DRIVERS[scheme]}://, and run pip install 'oncekey[postgres]'"
                )
            raise StoreConfigError(
                f"no store has the scheme {scheme!r}{did_you_mean(scheme, names)} "
                f"{', '.join(names)}. Third-party stores register a module under the entry point "
                f"group {GROUP!r}"
            )
        module = found.load()
    opener: Callable[..., object] | None = getattr(module, function, None)
    if opener is None:
        kind, other = ("async", "sync") if function == "open_async" else ("sync", "async")
        raise StoreConfigError(f"the store {scheme}:// has no {kind} form, only {other}")
    return opener
