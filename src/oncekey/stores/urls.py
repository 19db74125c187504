"""``connect`` and ``aconnect``: a store from a URL, found by its scheme."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Final

from oncekey.abc import AsyncStore, Store
from oncekey.errors import StoreConfigError

__all__ = ["aconnect", "connect"]

SCHEMES: Final[dict[str, tuple[str, str]]] = {
    # scheme: (module, the extra that brings its driver)
    "memory": ("oncekey.stores.memory", ""),
    "sqlite": ("oncekey.stores.sqlite", ""),
}
GROUP: Final = "oncekey.stores"


def connect(url: str, **options: Any) -> Store:
    """Open a synchronous store.

    Args:
        url: ``memory://``, ``memory://name`` (shared in this process), ``sqlite:///file.db``, or
            the scheme of an installed plug-in.
        **options: What the store's class takes, such as ``durability="normal"``.

    Raises:
        StoreConfigError: The URL or an option is wrong, or no store has that scheme.

    Example:
        >>> from oncekey import connect
        >>> store = connect("memory://")
    """
    opener, rest = _find(url, "open_sync")
    store = _open(opener, url, rest, options)
    if not isinstance(store, Store):
        raise StoreConfigError(f"the plug-in for {_scheme(url)}:// gave no oncekey.abc.Store")
    return store


def aconnect(url: str, **options: Any) -> AsyncStore:
    """Open an asynchronous store. Takes what ``connect`` takes; needs no ``await``."""
    opener, rest = _find(url, "open_async")
    store = _open(opener, url, rest, options)
    if not isinstance(store, AsyncStore):
        raise StoreConfigError(f"the plug-in for {_scheme(url)}:// gave no oncekey.abc.AsyncStore")
    return store


def _scheme(url: str) -> str:
    return url.partition("://")[0]


def _open(opener: Callable[..., object], url: str, rest: str, options: dict[str, Any]) -> object:
    try:
        return opener(rest, dict(options))
    except TypeError as error:
        raise StoreConfigError(f"{_scheme(url)}:// does not take these options: {error}") from error


def _find(url: str, function: str) -> tuple[Callable[..., object], str]:
    if not isinstance(url, str):
        raise StoreConfigError(
            f"a store URL must be a string, got {type(url).__name__}: write memory:// or "
            "sqlite:///file.db"
        )
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if not separator or not scheme:
        raise StoreConfigError("that is not a store URL: write memory:// or sqlite:///file.db")
    known = SCHEMES.get(scheme)
    if known is not None:
        module: Any = import_module(known[0])
    else:
        found = next(iter(entry_points(group=GROUP, name=scheme)), None)
        if found is None:
            names = sorted({*SCHEMES, *(point.name for point in entry_points(group=GROUP))})
            raise StoreConfigError(
                f"no store has the scheme {scheme!r}; there are {', '.join(names)}. Third-party "
                f"stores register a module under the entry point group {GROUP!r}"
            )
        module = found.load()
    opener: Callable[..., object] | None = getattr(module, function, None)
    if opener is None:
        kind, other = ("async", "sync") if function == "open_async" else ("sync", "async")
        raise StoreConfigError(f"the store {scheme}:// has no {kind} form, only {other}")
    return opener, rest
