"""What ``IdempotencyStore.wrap`` makes of a handler that gets a ``tx``: callers don't pass one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

if TYPE_CHECKING:
    from oncekey._core.schema import Validate
    from oncekey._core.transaction_flow import ErrorAnswer

__all__ = ["F", "R", "WrapOptions", "without_tx"]

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")


class WrapOptions(TypedDict, total=False):
    """The options of ``wrap`` that all handlers have, for type checkers."""

    operation: str | None
    validate: Validate | None
    read_only: bool
    on: Any
    error_answer: ErrorAnswer | None


def without_tx(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with a signature that has no ``tx``, for whoever makes calls or schemas of it."""
    signature = inspect.signature(wrapper)
    shown = [one for name, one in signature.parameters.items() if name != "tx"]
    vars(wrapper)["__signature__"] = signature.replace(parameters=shown)
    return wrapper
