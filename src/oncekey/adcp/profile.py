"""The rules of AdCP for requests: which keys count, whose they are, which answers are kept.

``IdempotencyStore`` follows them in the profile ``adcp-3.2``, and each can be switched on alone.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from oncekey._core.limiter import InsertLimiter, KeyLimit, SharedKeyLimit, SharedLimit
from oncekey.abc import Clock
from oncekey.canonical import canonicalize
from oncekey.errors import InvalidKeyError, InvalidRequestError, PolicyError
from oncekey.models import check_text

__all__ = [
    "STRICT_KEY",
    "Rules",
    "account_parts",
    "is_error",
    "is_stored",
    "keeps_of",
    "no_error",
    "session_parts",
    "with_envelope",
]

INSERT_WINDOWS = ((60 * 60, 60), (300 * 10, 10))  # 60/s over a minute, 300/s over ten seconds
READ_WINDOWS = ((300 * 60, 60), (1500 * 10, 10))  # of handlers that change nothing
STRICT_KEY = re.compile(r"[A-Za-z0-9_.:-]{16,255}\Z")

LimitOf = Callable[[str], KeyLimit | SharedKeyLimit]  # whose keys it counts

_PROFILES: Final = {"classic": False, "adcp-3.2": True}


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules that differ between the profiles; each can be set alone."""

    require_principal: bool
    reject_expired: bool
    limit_inserts: bool
    strict_keys: bool
    mark_replays: bool
    bind_operation: bool

    @classmethod
    def of(cls, profile: str, *chosen: bool | None) -> Rules:
        """The rules of ``profile``, but for those that are chosen.

        Raises:
            PolicyError: There is no such profile.
        """
        if profile not in _PROFILES:
            raise PolicyError(f"profile must be one of {', '.join(_PROFILES)}, got {profile!r}")
        base = _PROFILES[profile]
        return cls(*(base if value is None else value for value in chosen))

    def check_key(self, name: object, operation: str, *, needed: bool) -> None:
        """Refuse a key that these rules don't allow, or that is missing where it is needed.

        Raises:
            InvalidKeyError: Says how keys look.
        """
        if name is None and not needed:
            return
        if not (isinstance(name, str) and STRICT_KEY.match(name)):
            raise InvalidKeyError(
                f"{operation}: idempotency_key is required, 16 to 255 characters out of "
                "A-Z a-z 0-9 _ . : - (a UUID will do)",
                "idempotency_key",
            )

    def limits(self, where: str, clock: Clock) -> tuple[LimitOf, LimitOf] | None:
        """What gives a caller's limit of new keys, and that of handlers that change nothing."""
        if not self.limit_inserts:
            return None
        if where == "shared":
            return _shared("request", INSERT_WINDOWS), _shared("request read", READ_WINDOWS)
        inserts, reads = InsertLimiter(INSERT_WINDOWS, clock), InsertLimiter(READ_WINDOWS, clock)
        return partial(KeyLimit, inserts), partial(KeyLimit, reads)


def _shared(what: str, windows: tuple[tuple[int, int], ...]) -> LimitOf:
    limits = [SharedLimit(f"{what} {seconds}s", (most, seconds)) for most, seconds in windows]
    return partial(SharedKeyLimit, tuple(limits))


_UNSUCCESSFUL = ("failed", "rejected", "canceled", "input-required", "auth-required", "unknown")


def _member(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def field_of(answer: Any, name: str) -> Any:
    """A field of a dict or of a Pydantic model, ``None`` where there is none."""
    if isinstance(answer, Mapping):
        return answer.get(name)
    return getattr(answer, name, None) if hasattr(type(answer), "model_dump") else None


def _text(value: Any) -> Any:
    return getattr(value, "value", value)  # of an enumeration


def is_error(answer: Any) -> bool:
    """Whether an answer, a dict or a Pydantic model, says that the task failed.

    ``errors`` that are all warnings, or that come with a task that was submitted, are advice.
    """
    if field_of(answer, "adcp_error") is not None:
        return True
    if field_of(answer, "is_error") is True or field_of(answer, "isError") is True:
        return True
    status = _text(field_of(answer, "status"))
    if status == "failed":
        return True
    errors = field_of(answer, "errors")
    if not errors or status == "submitted":
        return False
    if not isinstance(errors, Sequence) or isinstance(errors, str):
        return True
    return any(_text(field_of(error, "severity")) != "warning" for error in errors)


def no_error(answer: Any) -> bool:
    """Whether an answer is a success, where nothing else is known of its shape."""
    return not field_of(answer, "errors") and field_of(answer, "adcp_error") is None


def is_stored(answer: Any) -> bool:
    """Whether an answer is a success, which is stored and replayed.

    An error is none, and neither is a task that was rejected or canceled or that waits for input:
    the next request with its key runs again.
    """
    return not is_error(answer) and _text(field_of(answer, "status")) not in _UNSUCCESSFUL


def keeps_of(profile: str) -> Callable[[Any], bool]:
    """What says of an answer whether a store of that profile keeps it."""
    return is_stored if _PROFILES[profile] else no_error


def enveloped(params: dict[str, Any], answer: Any, replayed: bool) -> Any:
    """The answer to a request, with its envelope."""
    return with_envelope(answer, params.get("context"), replayed=replayed)


def with_envelope(answer: Any, context: Any, *, replayed: bool) -> Any:
    """A copy of an answer with ``replayed`` where it is one, and the current ``context``.

    An answer that is neither a dict nor a Pydantic model with these fields stays as it is.
    """
    if isinstance(answer, dict):
        marked = dict(answer)
        if replayed:
            marked["replayed"] = True
            marked.pop("context", None)
        if context is not None:
            marked["context"] = context
        return marked
    if not hasattr(answer, "model_copy"):
        return answer
    kind: Any = type(answer)
    open_to_all = kind.model_config.get("extra") == "allow"
    marks: dict[str, Any] = {"replayed": True} if replayed else {}
    marks["context"] = context
    marks = {name: mark for name, mark in marks.items() if open_to_all or name in kind.model_fields}
    copy = answer.model_copy()
    for name, mark in marks.items():
        try:
            kind.__pydantic_validator__.validate_assignment(copy, name, mark)
        except ValueError:  # frozen, or a field of another kind
            copy = copy.model_copy(update={name: mark})
    return copy


def account_parts(
    params: Mapping[str, Any], context: Any, agent: str, salt: bytes
) -> tuple[str, ...]:
    """What the account of a request adds to the scope of its key.

    The id that the seller has resolved it to, in ``context.account_id``, counts first; then the one
    in the request. An account without an id is named by its brand and operator. Those are easy to
    guess, so what goes into the store is their hash, salted with ``salt`` and the agent.

    Raises:
        InvalidKeyError: The account's id can't be part of a key.
        InvalidRequestError: The account is neither an id nor an object.
    """
    account = _member(context, "account_id")
    if account is None or account == "":
        account = params.get("account")
    if account is None:
        account = params.get("account_id")
        if account is None:
            return ()
    if isinstance(account, Mapping):
        found = account.get("account_id")
        if found is None:
            digest = hmac.new(salt, agent.encode() + b"\0" + canonicalize(account), hashlib.sha256)
            return ("natural", digest.hexdigest())
        account = found
    if not isinstance(account, str):
        raise InvalidRequestError("account must be an id or an object", "account")
    return ("account", check_text(account, "account_id"))


def session_parts(params: Mapping[str, Any], operation: str) -> tuple[str, ...]:
    """What the session of a request adds to the scope of its key, where sessions have their own.

    Raises:
        InvalidKeyError: The session's id can't be part of a key.
    """
    if operation != "si_send_message" or params.get("session_id") is None:
        return ()
    return ("session", check_text(params["session_id"], "session_id"))
