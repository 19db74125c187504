"""What AdCP's transports share: a request to its handler, its answer back. Imports no SDK.

A handler is ``handler(params, caller)``, as ``IdempotencyStore.wrap`` takes it.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from oncekey._core.arguments import guard_of, identity
from oncekey._core.call import is_async
from oncekey._core.placement import UnguardedWarning, users_level
from oncekey.adapters._threads import in_thread
from oncekey.adcp.operations import MUTATING
from oncekey.adcp.profile import is_error, with_envelope
from oncekey.adcp.wire import error_envelope
from oncekey.errors import (
    IdempotencyError,
    IdempotencyScopeError,
    InvalidKeyError,
    OncekeyError,
    PolicyError,
)

__all__ = ["Handler", "answer_to", "check_handlers", "resolved"]

logger = logging.getLogger("oncekey")

Handler = Callable[[dict[str, Any], Any], Any]


class _UnauthenticatedError(IdempotencyError):
    """``caller`` would not have whoever called."""

    code = "AUTH_REQUIRED"
    recovery = "correctable"
    message = "this request needs credentials that this agent accepts"


def check_handlers(handlers: object, caller: object) -> None:
    """Refuse what can't serve, and warn of handlers whose requests would run twice.

    Raises:
        PolicyError: There is no dict of handlers, or no function that says who is calling.
    """
    if not isinstance(handlers, Mapping):
        raise PolicyError("handlers is a dict of each tool's name and its handler")
    if not callable(caller):
        raise PolicyError(f"caller is a function that says who is calling, got {caller!r}")
    guards = {name: guard_of(handler) for name, handler in handlers.items()}
    plain = [name for name, guard in guards.items() if guard is None and name in MUTATING]
    if plain:
        _warn(
            f"{', '.join(plain)}: AdCP has each request that changes something carry an "
            "idempotency_key, and nothing here looks at it, so that a retry runs again. Wrap the "
            'handler: @IdempotencyStore(backend, profile="adcp-3.2").wrap'
        )
    lenient = [
        name
        for name, guard in guards.items()
        if guard is not None and not (guard.rules.require_principal and guard.rules.strict_keys)
    ]
    if lenient:
        _warn(
            f"{', '.join(lenient)}: wrapped by a store of the classic profile, which runs a "
            "request without a caller or a key unguarded. AdCP has it refused: give "
            'IdempotencyStore profile="adcp-3.2"'
        )


def _warn(what: str) -> None:
    filtered = "; if that is meant, filter oncekey.guard.UnguardedWarning"
    warnings.warn(what + filtered, UnguardedWarning, stacklevel=users_level())


async def resolved(value: Any) -> Any:
    """``value``, awaited where that is to be done."""
    return await value if inspect.isawaitable(value) else value


# The caller is told that it can't be served, and not why: that is for the log.
_OWN_AFFAIR: Final = frozenset({"SERVICE_UNAVAILABLE", "CONFIGURATION_ERROR"})


async def answer_to(
    handler: Handler,
    params: dict[str, Any],
    caller: Callable[[], Any | Awaitable[Any]],
    task: str,
    passed_on: tuple[type[Exception], ...] = (),
) -> tuple[dict[str, Any], bool]:
    """What to answer to one request, and whether that is an error.

    Args:
        handler: Sync ones run in a thread.
        params: The request.
        caller: Gives what the handler is told of who is calling.
        task: The name of what is called, for the log.
        passed_on: Errors of the transport's own, which its SDK answers.
    """
    context, who = params.get("context"), None
    try:
        who = await _asked(caller, task)
        if is_async(handler):
            value = await handler(params, who)
        else:
            value = await resolved(await in_thread("tool", handler, params, who))
        answer = _as_json(value)
    except passed_on:
        raise
    except OncekeyError as error:
        if isinstance(error, InvalidKeyError) and (instead := _misnamed(who)) is not None:
            error = instead  # the client can't correct who it is said to be
        envelope = error_envelope(error, context)
        if envelope["adcp_error"]["code"] in _OWN_AFFAIR:
            logger.error("%s could not be carried out: %s", task, error)
        if isinstance(error, IdempotencyScopeError):
            kind = type(who).__name__
            logger.warning(
                "%s was refused: caller= gave %s, which names nobody. For a known caller give "
                "ToolContext(caller_identity=...)",
                *(task, "None" if who is None else f"a {kind}"),
            )
        return envelope, True
    except Exception:
        # Its text may hold anything, so it stays here.
        logger.exception("%s failed", task)
        return error_envelope(Exception(), context), True
    if answer.get("context") is None:
        answer = with_envelope(answer, context, replayed=False)
    if not is_error(answer):
        return answer, False
    answer = {"status": "failed", **answer}
    errors = answer.get("errors")
    if answer.get("adcp_error") is None and isinstance(errors, list) and errors:
        answer["adcp_error"] = errors[0]  # it is looked for in both places
    return answer, True


async def _asked(caller: Callable[[], Any | Awaitable[Any]], task: str) -> Any:
    """Who is calling.

    Raises:
        OncekeyError: ``caller`` would not have them.
    """
    try:
        return await resolved(caller())
    except PermissionError as error:
        logger.warning("%s was refused: caller= raised %r", task, error)
        raise _UnauthenticatedError(task) from error


def _misnamed(who: Any) -> PolicyError | None:
    """The error of whoever wrote ``caller``, if what it gave can't name anybody."""
    try:
        identity(who)
    except InvalidKeyError as error:
        return PolicyError(f"what caller= gave can't name anybody: {error}")
    return None


def _as_json(value: Any) -> dict[str, Any]:
    """An answer as the object that goes over the wire. Fields that a model left out stay out."""
    if hasattr(type(value), "model_dump"):
        value = value.model_dump(mode="json", exclude_none=True)
    return dict(value) if isinstance(value, Mapping) else {"result": value}
