"""Errors that servers of the ``adcp`` package know as their own, where that package is in use."""

from __future__ import annotations

import functools
import sys
from typing import Any

from oncekey.adcp.wire import error_envelope
from oncekey.errors import OncekeyError

__all__ = ["for_adcp_package"]


class _Told(dict[str, Any]):
    """An error on the wire, read by key and, as the models of the ``adcp`` package are, by name."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@functools.cache
def _twin(kind: type[OncekeyError], theirs: type[Exception]) -> Any:
    """A class that is both. It pickles as ours: where that is read theirs may not be there."""

    def reduce(self: OncekeyError) -> Any:
        make, (_, *state) = OncekeyError.__reduce__(self)
        return make, (kind, *state)

    own = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce__": reduce}
    return type(kind.__name__, (kind, theirs), own)


def for_adcp_package(error: OncekeyError) -> None:
    """Make ``error`` one of the ``adcp`` package's as well, where that is in use.

    Its servers know their own errors only: of any other they tell the client no code, and over MCP
    the whole text. What they read is what ``error_envelope`` says, and nothing else.
    """
    peer = sys.modules.get("adcp.exceptions")
    base = getattr(peer, "ADCPTaskError", None)
    if base is None or isinstance(error, base):
        return
    told = _Told(error_envelope(error)["adcp_error"])
    kind: Any = type(error)
    theirs: Any = getattr(
        peer, kind.__name__, base
    )  # IdempotencyConflictError is there by that name
    error.__class__ = _twin(kind, theirs if issubclass(theirs, base) else base)
    error.__dict__.update(
        {"operation": "", "agent_id": None, "agent_uri": None, "retry_after": None}
        | error.__dict__
        | {"message": told["message"], "suggestion": None, "errors": [told]}
        | {"error_codes": [told["code"]], "retry_after": told.get("retry_after")}
    )
