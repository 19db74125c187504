"""A request checked against its schema, before anything is looked up for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oncekey.errors import InvalidRequestError, OncekeyError, PolicyError

__all__ = ["Validate", "check_schema", "check_validator"]

Validate = Callable[[Any], object] | type
"""A Pydantic model, or a function that raises ValueError or TypeError for a malformed request."""


def check_validator(validate: Validate | None) -> None:
    """Refuse what can't be called.

    Raises:
        PolicyError: It can't: the caller would be told of that as a fault of its own.
    """
    if validate is not None and not callable(getattr(validate, "model_validate", validate)):
        raise PolicyError(
            f"validate must be a Pydantic model or a function, got {type(validate).__name__}"
        )


def check_schema(validate: Validate, params: dict[str, Any], operation: str) -> None:
    """Refuse a malformed request, in words that hold no value of it.

    Raises:
        InvalidRequestError: ``validate`` refused it.
    """
    check: Any = getattr(validate, "model_validate", validate)
    try:
        check(params)
    except OncekeyError:
        raise
    except (ValueError, TypeError) as error:
        pydantic: Any = error
        if not callable(getattr(error, "errors", None)):
            raise InvalidRequestError(f"{operation}: {error}") from error
        found = pydantic.errors(include_input=False)
        faults = [(_place(fault["loc"]), fault["msg"]) for fault in found]
        said = "; ".join(f"{place}: {message}" for place, message in faults[:3])
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        # Not chained: the text of a Pydantic error holds the values, which then reach the logs.
        raise InvalidRequestError(f"{operation}: {said}{more}", faults[0][0] or None) from None


def _place(parts: tuple[str | int, ...]) -> str:
    """``packages[0].budget`` for where Pydantic says that a fault is."""
    text = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in parts)
    return text.removeprefix(".")
