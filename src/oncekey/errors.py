"""Every error oncekey raises. One base class; each message says what to do.

A duplicate is an outcome, not an error: inside, the engine returns values. These
classes are what the outermost shells raise when there is no value to return.
Every name here that ends in ``Error`` is public.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, Self

_EXPLAINED: Final = frozenset({__name__, "oncekey.instrument.audit"})
"""The modules whose errors have a section of their own in ``errors.md``."""
EXPLAINED_END: Final = (
    "call it with the first ones, use another key for other work, or name what may differ in "
    "ignore=[...]"
)
"""How a conflict of a function ends, by which its whole text is known."""


def _rebuild(kind: type[OncekeyError], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class OncekeyError(Exception):
    """Base class of every error that oncekey raises.

    Attributes:
        code: A stable, machine-readable name of what went wrong.
        retryable: Whether the same call may succeed later, unchanged.
        context: The ``context`` of the AdCP request that failed, which its answer gives back.
    """

    code: str = "ONCEKEY_ERROR"
    retryable: bool = False
    context: Any = None
    explained: ClassVar[str] = "OncekeyError"  # the name that ``oncekey explain`` knows it by

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__module__ in _EXPLAINED:  # of another kind, its base is the one that is explained
            cls.explained = cls.__name__

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """An error whose traceback ends with where to read more."""
        error = super().__new__(cls, *args)
        error.__notes__ = [f"Help: oncekey explain {cls.explained}"]
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        # Constructors differ from class to class; the message and the attributes are what counts.
        return _rebuild, (type(self), self.args, self.__dict__)


class PolicyError(OncekeyError, ValueError):
    """An option has a value that can't work: a TTL out of bounds, a lease of zero."""

    code = "INVALID_OPTION"


class InvalidKeyError(OncekeyError, ValueError):
    """An idempotency key, sender or namespace that can't be stored: empty, too long, with a NUL.

    Attributes:
        field: The field of the request that holds it, if that is known.
    """

    code = "INVALID_REQUEST"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InvalidRequestError(OncekeyError, TypeError):
    """A request that is neither a dict nor a Pydantic model, or that its schema refuses.

    Attributes:
        field: Where the fault is, such as ``packages[0].budget``, if that is known.
    """

    code = "INVALID_REQUEST"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class CanonicalJSONError(OncekeyError, ValueError):
    """A value that RFC 8785 canonical JSON can't express.

    Attributes:
        path: Where the value stands, as a JSONPath such as ``$.items[3].price``.
    """

    code = "INVALID_REQUEST"

    def __init__(self, message: str, path: str = "$") -> None:
        super().__init__(f"{message} at {path}")
        self.path = path


class UnsupportedAnswerError(OncekeyError, TypeError):
    """A handler's answer (or its declared type) that can't be stored and given back as it was."""

    code = "UNSUPPORTED_ANSWER"


class AnswerOmittedError(OncekeyError):
    """The work was done, but its answer was not kept, so it can't be replayed.

    The work never runs again for this key. Look the result up where the handler put it.

    Attributes:
        digest: SHA-256 (hex) of the encoded answer, or ``None`` where it could not be encoded.
    """

    code = "ANSWER_OMITTED"

    def __init__(self, message: str, digest: str | None = None) -> None:
        super().__init__(message)
        self.digest = digest


class BackendMismatchError(OncekeyError, TypeError):
    """A sync backend under an async function, or the other way round."""

    code = "BACKEND_MISMATCH"


class ClaimLostError(OncekeyError):
    """This worker's claim was taken over; what it did must not be recorded as the outcome."""

    code = "CLAIM_LOST"


class PermanentError(OncekeyError):
    """Raised by a webhook handler for an event that no retry can help.

    The event counts as handled: its sender gets a 2xx and stops retrying, and it goes to the dead
    letters.
    """

    code = "PERMANENT"


class WebhookDedupOwnershipError(ClaimLostError, RuntimeError):
    """``complete`` or ``release`` was called with a token that does not own the delivery."""

    code = "NOT_OWNER"


class IdempotencyError(OncekeyError):
    """A keyed call that got no answer of its own: conflict, in flight, expired, out of scope.

    None of these ever carries the stored response, the first payload or a fingerprint:
    whoever holds only the key must not be able to read what it protects.

    Attributes:
        operation: The name of the guarded function.
        errors: The error as a list of one ``{"code", "message", "recovery"}`` dict.
        error_codes: The codes of ``errors``.
        recovery: ``correctable``, ``transient`` or ``terminal``.
        retry_after: Whole seconds until a retry makes sense, where that is known.
    """

    code = "IDEMPOTENCY_ERROR"
    recovery = "terminal"
    message = "the call was refused"
    suggestion = ""

    def __init__(
        self,
        operation: str,
        errors: list[Any] | None = None,
        *,
        message: str | None = None,
        suggestion: str | None = None,
        retry_after: int | None = None,
        recovery: str | None = None,
    ) -> None:
        self.operation = operation
        self.message = self.message if message is None else message
        self.suggestion = self.suggestion if suggestion is None else suggestion
        self.retry_after = retry_after
        if recovery is not None:
            self.recovery = recovery
        if errors is None:
            error = {"code": self.code, "message": self.message, "recovery": self.recovery}
            errors = [error if retry_after is None else {**error, "retry_after": retry_after}]
        self.errors = errors
        self.error_codes = [self.code]
        hint = f". {self.suggestion}" if self.suggestion else ""
        # A task queue makes an error anew of its whole text, which must not stand there twice.
        self.operation = operation.removesuffix(f": {self.message}{hint}")
        super().__init__(f"{self.operation}: {self.message}{hint}")


class IdempotencyConflictError(IdempotencyError):
    """The key was used before with another payload."""

    code = "IDEMPOTENCY_CONFLICT"
    recovery = "correctable"
    message = "idempotency_key reused with a different payload"
    suggestion = "Resend the exact first payload, or use a fresh key for a new request"

    def __init__(
        self,
        operation: str,
        errors: list[Any] | None = None,
        agent_id: str | None = None,
        *,
        recovery: str | None = None,
    ) -> None:
        self.agent_id = agent_id
        if not operation.endswith(EXPLAINED_END):
            super().__init__(operation, errors, recovery=recovery)
            return
        # A task queue makes an error anew of its whole text.
        name, _, said = operation.partition(": ")
        super().__init__(name, errors, recovery=recovery)
        message, _, hint = said.partition(". Compared are ")
        self.explain(message, f"Compared are {hint}")

    def explain(self, message: str, suggestion: str) -> None:
        """Say it in the words of whoever was called: a function knows no idempotency_key."""
        self.message, self.suggestion = message, suggestion
        self.args = (f"{self.operation}: {message}. {suggestion}",)


class IdempotencyInFlightError(IdempotencyError):
    """The same call is running right now; ask again after ``retry_after`` seconds."""

    code = "IDEMPOTENCY_IN_FLIGHT"
    recovery = "transient"
    retryable = True
    message = "a call with this idempotency_key is still running"
    suggestion = "Retry with the same key and payload in {} s"

    def __init__(self, operation: str, retry_after: int) -> None:
        hint = self.suggestion.format(retry_after)
        super().__init__(operation, suggestion=hint, retry_after=retry_after)


class IdempotencyRecursionError(IdempotencyInFlightError):
    """A call needs the answer of the very call that it is part of, and would wait for itself.

    Also in tasks and threads that have its context, such as those of ``asyncio.gather`` and
    ``asyncio.to_thread``. No retry helps.
    """

    recovery = "terminal"
    retryable = False
    message = (
        "it is called with a key that it is already running under, further out, and would wait "
        "for itself"
    )
    suggestion = "Call the unguarded function inside, or use another key for the inner step"


class IdempotencyExpiredError(IdempotencyError):
    """The key was used so long ago that its answer is gone; running it again is not safe."""

    code = "IDEMPOTENCY_EXPIRED"
    recovery = "correctable"
    message = "this idempotency_key was used before and its replay window is over"
    suggestion = "Check whether the first call took effect, then use a fresh key"


class IdempotencyScopeError(IdempotencyError):
    """A key came without an authenticated caller, so it can't be scoped to one."""

    code = "INVALID_REQUEST"
    recovery = "correctable"
    message = "idempotency_key requires an authenticated caller"
    suggestion = "Set context.caller_identity from the verified credentials"


class IdempotencyRateLimitedError(IdempotencyError):
    """Too many new keys from one caller."""

    code = "RATE_LIMITED"
    recovery = "transient"
    retryable = True
    message = "too many new idempotency keys from this caller"

    def __init__(self, operation: str, retry_after: int) -> None:
        hint = f"Slow down and retry with the same key in {retry_after} s"
        super().__init__(operation, suggestion=hint, retry_after=retry_after)


class StoreError(OncekeyError):
    """The store could not do what it was asked. Nothing it acknowledged before is lost."""

    code = "STORE_ERROR"


class StoreConfigError(StoreError, ValueError):
    """A URL, option or schema that the store can't work with."""

    code = "STORE_CONFIG"


class StoreUnavailableError(StoreError):
    """The store can't be reached or is too busy right now."""

    code = "STORE_UNAVAILABLE"
    retryable = True


class StoreTimeoutError(StoreUnavailableError):
    """The store did not answer within the deadline of a call.

    Attributes:
        outcome_known: True: the call was not made, nothing changed. False: it may have been
            carried out; the same call by the same owner is safe to repeat.
    """

    code = "STORE_TIMEOUT"
    outcome_known: bool = False

    def __init__(self, message: str, *, outcome_known: bool = False) -> None:
        super().__init__(message)
        self.outcome_known = outcome_known


class StoreCircuitOpenError(StoreUnavailableError):
    """The store was not asked: it has failed time after time, and its breaker is open.

    Attributes:
        retry_after: Whole seconds until the breaker lets a call try the store again.
    """

    code = "STORE_CIRCUIT_OPEN"

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StoreFullError(StoreError):
    """No room for another record: the memory bound, or the disk."""

    code = "STORE_FULL"
    retryable = True


class StoreReadOnlyError(StoreError):
    """The store may be read but not written."""

    code = "STORE_READ_ONLY"


class StoreCorruptError(StoreError):
    """What the store read back is damaged, or is not a store."""

    code = "STORE_CORRUPT"


class StoreClosedError(StoreError):
    """The store was closed before this call."""

    code = "STORE_CLOSED"


class TransactionRefusedError(StoreConfigError):
    """A connection or transaction on which exactly once can't be promised."""

    code = "TRANSACTION_REFUSED"
