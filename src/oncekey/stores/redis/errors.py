"""Errors with a name and a fix: by class and by the code word of a reply, never by its prose."""

from __future__ import annotations

import ssl
from importlib import import_module
from typing import Any, Final

from oncekey.errors import (
    StoreConfigError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    StoreTimeoutError,
    StoreUnavailableError,
)

__all__ = ["ReplyError", "UnsentError", "code_of", "driver", "known", "unreachable"]


class ReplyError(Exception):
    """An error that the server replied with. Its first word is the code."""


class UnsentError(TimeoutError):
    """No connection was to be had in time, so that nothing was sent."""


# redis-py takes the code off the replies that it has a class for.
_CODES: Final = {
    "NoScriptError": "NOSCRIPT",
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "NoPermissionError": "NOPERM",
    "AuthenticationError": "NOAUTH",
    "AuthenticationWrongNumberOfArgsError": "NOAUTH",
    "AuthorizationError": "NOAUTH",
    "ExternalAuthProviderError": "NOAUTH",
    "MovedError": "MOVED",
    "AskError": "ASK",
    "TryAgainError": "TRYAGAIN",
    "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN",
    "BusyLoadingError": "LOADING",
}

# fmt: off
_KNOWN: Final[dict[str, tuple[type[StoreError], str]]] = {
    "OOM": (StoreFullError, """is at its maxmemory, so that no new key can be written (owners can
        still complete and release theirs): raise it with CONFIG SET maxmemory, or free memory"""),
    "READONLY": (StoreReadOnlyError, """is a read-only replica: connect to the master, or by
        redis+sentinel:// so that it is found"""),
    "NOPERM": (StoreConfigError, """does not permit this user what the store needs: run
        ACL SETUSER name ~PREFIX:* resetchannels &PREFIX:* +@read +@write +@scripting +@pubsub
        +@connection +time +info +wait, with the store's prefix; in a Cluster also +cluster|slots
        +asking"""),
    "NOAUTH": (StoreConfigError, """refused the user name or password: write
        redis://user:password@host, with special characters percent-encoded"""),
    "WRONGTYPE": (StoreCorruptError, """has a key under this store's prefix that holds no record of
        oncekey: delete it, or choose another prefix for what writes there"""),
    "MISCONF": (StoreUnavailableError, """can't write to its disk and refuses changes: look at its
        log and disk space"""),
    "NOREPLICAS": (StoreUnavailableError, """has fewer replicas than its min-replicas-to-write and
        refuses changes: start them, or lower it"""),
}
# fmt: on
_ALIKE: Final = {"WRONGPASS": "NOAUTH", "BADRECORD": "WRONGTYPE"}
_PASSING: Final = ("LOADING", "BUSY", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "MOVED", "ASK")


def driver(module: str = "redis") -> Any:
    """The package ``redis``, or a module of it.

    Raises:
        StoreConfigError: It is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise StoreConfigError(
            f"a Redis store needs the package {error.name}, which is not installed: run "
            "pip install 'oncekey[redis]'"
        ) from error


def code_of(error: BaseException) -> str:
    """The code word of an error reply, such as ``OOM``; empty for other errors."""
    for kind in type(error).__mro__:
        if kind.__name__ in _CODES:
            return _CODES[kind.__name__]
        if kind.__name__ in ("ResponseError", "ReplyError"):
            return str(error).partition(" ")[0]
    return ""


def known(error: BaseException, where: str) -> StoreError | None:
    """The error of a reply, or ``None`` where its code says nothing."""
    code = code_of(error)
    if code in _PASSING:
        return StoreUnavailableError(f"{where} can't answer right now ({code}): try again")
    kind, told = _KNOWN.get(_ALIKE.get(code, code), (None, ""))
    return None if kind is None else kind(f"{where} {' '.join(told.split())}")


def unreachable(error: BaseException, where: str) -> StoreError:
    """The error of a connection that could not be made, broke, or took too long."""
    found = known(error, where)
    if found is not None:
        return found
    if isinstance(error, UnsentError):
        return StoreTimeoutError(
            f"{where} can't be reached: {error}. Nothing was sent. Make sure that it runs and that "
            "the address is right, then try again",
            outcome_known=True,
        )
    if isinstance(error, TimeoutError):
        return StoreTimeoutError(
            f"{where} gave {error}, and may have carried the call out or not: try again, which is "
            "safe. If it is only slow, raise timeout"
        )
    if any(isinstance(one, ssl.SSLError) for one in (error, error.__cause__, error.__context__)):
        return StoreUnavailableError(
            f"{where} could not be spoken to by TLS: {str(error)[:200]}. Pass ssl_ca_certs= with "
            "the file of the authority that signed its certificate, and the host name that the "
            "certificate is for; for a server without TLS write redis://"
        )
    # What the driver says may hold the address, never the password.
    reason = str(error)[:200].rstrip(".")
    return StoreUnavailableError(
        f"{where} can't be reached: {type(error).__name__}: {reason}. Make sure that it runs and "
        "that the address is right, then try again"
    )
