"""Where in a handler's arguments the request and its caller are; the request as plain values."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from uuid import UUID

from oncekey._core.call import is_async
from oncekey._core.codec import Codec
from oncekey._core.placement import check_callable
from oncekey._core.whole import whole
from oncekey.errors import BackendMismatchError, InvalidKeyError, InvalidRequestError
from oncekey.models import Scope, check_text, identity_text

__all__ = [
    "NO_CALLER",
    "NO_KEY",
    "Arguments",
    "Callers",
    "Identity",
    "ToolContext",
    "Whose",
    "as_dict",
    "awaited",
    "identity",
    "like",
    "may_give_awaitable",
    "mismatch",
    "name_of",
    "not_awaitable",
]

NO_CALLER = (
    "a request came with an idempotency_key but no caller_identity in its context, so it runs "
    "unguarded. Set context.caller_identity from the verified credentials, or set "
    "require_principal=True to refuse such requests."
)
NO_KEY = (
    "a request came with an idempotency_key that is no text or is empty, so it runs unguarded. "
    "Send text of 1 to 255 characters, or set strict_keys=True to refuse such requests."
)

Identity = str | int | UUID
"""What a principal or a tenant is named by. ``1``, ``"1"`` and a UUID of that text are three."""


@dataclass
class ToolContext:
    """Who is calling. Any object or dict with these names does as well.

    Attributes:
        caller_identity: The authenticated principal, stable and never from the payload: text, an
            integer or a UUID. ``1`` and ``"1"`` are two callers.
        tenant_id: Where principals are unique only within a tenant.
        account_id: What the account that the request names was resolved to, where accounts are part
            of the scope. Without it they are told apart by what the request says.
    """

    caller_identity: Identity | None = None
    tenant_id: Identity | None = None
    account_id: str | None = None


def like(
    handler: Callable[..., Any], guard: Any = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``functools.wraps``, also for mocks, whose name need not be text.

    Args:
        handler: The function.
        guard: Whose keys the wrapper asks, for ``guard_of``.
    """

    def decorate(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        for name in functools.WRAPPER_ASSIGNMENTS:
            with contextlib.suppress(AttributeError, TypeError):
                setattr(wrapper, name, getattr(handler, name))
        made = functools.update_wrapper(wrapper, handler, assigned=())
        if guard is not None:
            vars(made)["_oncekey_guard"] = guard
        return made

    return decorate


def guard_of(handler: Any) -> Any:
    """What guards a handler; ``None``: nothing that is known of, also by a decorator's copy."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    found = getattr(handler, "_oncekey_guard", None)
    if found is None and callable(handler):  # an object that is called
        found = getattr(type(handler).__call__, "_oncekey_guard", None)
    return found


def name_of(handler: Callable[..., Any]) -> str:
    """A handler's own name."""
    name = getattr(handler, "__name__", None)
    return name if isinstance(name, str) else "handler"


class Arguments:
    """Where in a handler's arguments the request and the caller's context are."""

    def __init__(self, handler: Callable[..., Any], operation: str) -> None:
        check_callable(handler)
        self.operation = operation
        self.key_name = f"{operation}: idempotency_key"
        self.codec = Codec.for_function(handler)
        names = [
            name
            for name, parameter in inspect.signature(handler).parameters.items()
            if parameter.kind
            in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        ]
        self.names = names
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
        self.usual_at = sys.maxsize if at is None else at

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The request and the context of one call."""
        if not kwargs and len(args) > self.usual_at:  # as nearly every call is made
            params = args[self.usual_at]
            if type(params) is dict:
                at = self.context_at or 0
                return params, args[at] if len(args) > at else None
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
        if not _looks_like_request(params):  # servers of ``adcp`` pass some requests in parts
            whole = (kwargs.get(name) for name in ("request", "patch"))
            params = next((one for one in whole if _looks_like_request(one)), params)
        context = None
        context_at = self.context_at
        after = None if params_at is None else params_at + 1
        if (
            after is not None
            and len(args) > after
            and self.names[after : after + 1] != [self.context_name]
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


def may_give_awaitable(handler: Callable[..., Any]) -> bool:
    """Whether a function that is not async may be a decorator's around one that is.

    It says so by ``__wrapped__``, or takes any arguments and so says nothing of itself.
    """
    target: Any = handler
    for _ in range(16):
        while isinstance(target, functools.partial):
            target = target.func
        if is_async(target):
            return True
        inner = getattr(target, "__wrapped__", None)
        if inner is None:
            break
        target = inner
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(target).parameters.values()
    return bool(found) and all(parameter.kind in variadic for parameter in found)


def mismatch(name: str, asynchron: bool, store: object) -> BackendMismatchError:
    """What is said of a handler and a store that do not go together."""
    kind = type(store).__name__
    if asynchron:
        return BackendMismatchError(
            f"{name} is async but {kind} is a sync backend: pass AsyncMemoryStore(), "
            "AsyncSQLiteStore('file.db') or aconnect(url)"
        )
    return BackendMismatchError(
        f"{name} is not async but {kind} is an async backend: pass MemoryStore(), "
        "SQLiteStore('file.db') or connect(url), or write async def"
    )


async def awaited(handler: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that may give something to await."""
    value = handler(*args, **kwargs)
    return await value if inspect.isawaitable(value) else value


def not_awaitable(handler: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that must not.

    Raises:
        BackendMismatchError: It does. A coroutine has not begun yet, so nothing was done.
    """
    value = handler(*args, **kwargs)
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise BackendMismatchError(
            "the handler gave something to await, but the backend is a sync one: pass "
            "AsyncMemoryStore(), AsyncSQLiteStore('file.db') or aconnect(url)"
        )
    return value


def _looks_like_request(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        or hasattr(type(value), "model_dump")
        or isinstance(getattr(value, "idempotency_key", None), str)
    )


def as_dict(value: Any, ignore_defaults: bool = False) -> dict[str, Any]:
    """A request as a dict. Of a Pydantic model, the fields that were set: missing is not null.

    The key always counts, also one that the model made itself. With ``ignore_defaults``, a field
    that was set to its default counts as one that was left out.
    """
    if isinstance(value, dict):
        return value
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "model_dump"):
        said = {"exclude_unset": True, **({"exclude_defaults": True} if ignore_defaults else {})}
        found = whole(value, _revealed, **said)
        if isinstance(found, dict):
            if "idempotency_key" not in found and hasattr(value, "idempotency_key"):
                key = value.model_dump(mode="json", include={"idempotency_key"})
                found.update(key or {"idempotency_key": value.idempotency_key})  # or excluded
            return found
    if value is None:
        return {}
    if hasattr(value, "__dict__"):
        return dict(value.__dict__)
    raise InvalidRequestError(
        f"a request must be a dict or a Pydantic model, got {type(value).__name__}"
    )


def _revealed(secret: Any) -> Any:
    return secret.hex() if isinstance(secret, bytes) else secret


class Whose(NamedTuple):
    """Whose a key is."""

    scope: Scope
    payer: str  # whose new keys are counted together


_CALLERS_KEPT: Final = 10_000
_TEXTS: Final = (str, type(None))


class Callers:
    """Who is calling. Who was here before is not made out anew.

    Args:
        join: One text for a tenant and a principal, different for every different pair.
    """

    def __init__(self, join: Callable[..., str]) -> None:
        self._join = join
        self._known: dict[tuple[Any, Any], Whose] = {}

    def known(self, context: Any) -> Whose | None:
        """Whose the keys of a context are. ``None``: it has no authenticated caller.

        Raises:
            InvalidKeyError: It has one who can't be named.
        """
        if type(context) is dict:
            who = context.get("caller_identity"), context.get("tenant_id")
        elif isinstance(context, Mapping):
            return self._made_out(context)
        else:
            who = getattr(context, "caller_identity", None), getattr(context, "tenant_id", None)
        if type(who[0]) is not str or type(who[1]) not in _TEXTS:
            return self._made_out(context)
        found = self._known.get(who)
        if found is None:
            found = self._made_out(context)
            if found is not None:
                if len(self._known) >= _CALLERS_KEPT:
                    self._known.clear()
                self._known[who] = found
        return found

    def _made_out(self, context: Any) -> Whose | None:
        principal, tenant = identity(context)
        if principal is None:
            return None
        agent = self._join(principal) if tenant is None else self._join(tenant, principal)
        return Whose(Scope("request", agent), agent)


def identity(context: Any) -> tuple[Identity | None, Identity | None]:
    """The principal and the tenant of a context: an object or a dict.

    Raises:
        InvalidKeyError: One of them is there but can't name anybody. It is never passed over: two
            callers who differ in nothing else would share their keys.
    """

    def get(source: Any, name: str) -> Any:
        return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)

    def named(source: Any, name: str, what: str = "") -> Identity | None:
        found = None if source is None else get(source, name)
        if found is None or (isinstance(found, str) and not found):
            return None
        what = what or name
        if isinstance(found, str):
            return check_text(found, what)
        if isinstance(found, (int, UUID)):
            identity_text(found, what)
            return found
        raise InvalidKeyError(
            f"{what} must be a str, an int or a UUID, got a {type(found).__name__}: pass the id of "
            "the caller, not the object"
        )

    principal = named(context, "caller_identity")
    if principal is None:
        principal = named(context, "principal_id")
    if principal is None and context is not None:
        principal = named(get(context, "principal"), "id", "principal.id")
    if isinstance(principal, str) and not principal.strip():
        principal = None  # blank: whoever filled it in has found nobody
    return principal, named(context, "tenant_id")
