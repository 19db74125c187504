"""Where in a handler's arguments the request and its caller are; the request as plain values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from oncekey._core.codec import Codec
from oncekey.errors import InvalidRequestError

__all__ = ["Arguments", "as_dict", "identity"]


class Arguments:
    """Where in a handler's arguments the request and the caller's context are."""

    def __init__(self, handler: Callable[..., Any], operation: str) -> None:
        self.operation = operation
        self.codec = Codec.for_function(handler)
        names = [
            name
            for name, parameter in inspect.signature(handler).parameters.items()
            if parameter.kind
            in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        ]
        first = 1 if names and names[0] in ("self", "cls") else 0
        self.params_at: int | None = None
        if "params" in names:
            self.params_at = names.index("params")
        elif len(names) > first:
            self.params_at = first
        at = self.params_at
        self.params_name = names[at] if at is not None else "params"
        self.context_name = next((n for n in ("context", "ctx") if n in names), "context")
        if self.context_name in names:
            self.context_at: int | None = names.index(self.context_name)
        else:
            self.context_at = None if at is None else at + 1

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The request and the context of one call."""
        params, params_at = None, self.params_at
        if self.params_name in kwargs:
            params = kwargs[self.params_name]
        elif "params" in kwargs:
            params = kwargs["params"]
        elif params_at is not None and len(args) > params_at:
            params = args[params_at]
        elif params_at is None:  # *args: the first that looks like a request
            params_at = next((i for i, a in enumerate(args[:2]) if _looks_like_request(a)), None)
            params = None if params_at is None else args[params_at]
        context = None
        context_at = self.context_at
        after = None if params_at is None else params_at + 1
        if (
            after is not None
            and len(args) > after
            and not _looks_like_request(params)
            and _looks_like_request(args[after])
        ):  # a method whose first argument has another name than self
            params, context_at = args[after], after + 1
        if context_at is None and params_at is not None:
            context_at = params_at + 1
        for name in (self.context_name, "context", "ctx"):
            if name in kwargs:
                return params, kwargs[name]
        if context_at is not None and len(args) > context_at:
            context = args[context_at]
        return params, context


def _looks_like_request(value: object) -> bool:
    return isinstance(value, Mapping) or hasattr(type(value), "model_dump")


def as_dict(value: Any) -> dict[str, Any]:
    """A request as a dict. Of a Pydantic model, the fields that were set: missing is not null."""
    if isinstance(value, dict):
        return value
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "model_dump"):
        dumped = value.model_dump(mode="json", exclude_unset=True)
        if isinstance(dumped, dict):
            # JSON mode masks secrets, and all masked secrets are alike: compare the real ones.
            return cast("dict[str, Any]", _revealed(dumped, value.model_dump(exclude_unset=True)))
    if value is None:
        return {}
    if hasattr(value, "__dict__"):
        return dict(value.__dict__)
    raise InvalidRequestError(
        f"a request must be a dict or a Pydantic model, got {type(value).__name__}"
    )


def _revealed(dumped: Any, real: Any) -> Any:
    if isinstance(dumped, dict) and isinstance(real, dict):
        return {name: _revealed(dumped[name], real.get(name)) for name in dumped}
    if isinstance(dumped, list) and isinstance(real, list) and len(dumped) == len(real):
        return [_revealed(*pair) for pair in zip(dumped, real, strict=True)]
    reveal = getattr(real, "get_secret_value", None)
    if reveal is None:
        return dumped
    secret = reveal()
    return secret.hex() if isinstance(secret, bytes) else secret


def identity(context: Any) -> tuple[str | None, str | None]:
    """The principal and the tenant of a context: an object or a dict."""
    if context is None:
        return None, None

    def get(source: Any, name: str) -> Any:
        return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)

    def text(value: Any) -> str | None:
        return value if isinstance(value, str) and value else None

    principal = text(get(context, "caller_identity")) or text(get(context, "principal_id"))
    if principal is None:
        holder = get(context, "principal")
        principal = None if holder is None else text(get(holder, "id"))
    return principal, text(get(context, "tenant_id"))
