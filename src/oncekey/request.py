"""``IdempotencyStore``: the first answer to a keyed request, replayed to every retry."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar, overload

from oncekey._core import call as engine
from oncekey._core.arguments import Arguments, as_dict, identity
from oncekey._core.flows import Plan
from oncekey._core.limiter import InsertLimiter
from oncekey._core.transact import (
    ErrorAnswer,
    Tx,
    acall_in_transaction,
    call_in_transaction,
    check_transactional,
    takes_parameter,
)
from oncekey.abc import AsyncStore, Clock, ClockInjectable, IdempotencyBackend, Store
from oncekey.canonical import canonical_json_sha256, sha256_hex
from oncekey.errors import (
    BackendMismatchError,
    IdempotencyRateLimitedError,
    IdempotencyScopeError,
    InvalidKeyError,
    PolicyError,
)
from oncekey.models import Key, Scope, check_text
from oncekey.policy import Policy
from oncekey.stores.legacy import as_async_store, join_scope

__all__ = ["IdempotencyStore", "ToolContext"]

MIN_TTL_SECONDS = 3600
MAX_TTL_SECONDS = 604_800
MAX_KEY = 255
SKEW_SECONDS = 60
REMEMBER_SECONDS = 604_800
INSERT_WINDOWS = ((60 * 60, 60), (300 * 10, 10))  # 60/s over a minute, 300/s over ten seconds
STRICT_KEY = re.compile(r"[A-Za-z0-9_.:-]{16,255}\Z")

F = TypeVar("F", bound=Callable[..., Any])
HashFunction = Callable[[dict[str, Any]], str]
_How = tuple[str | None, bool, Any, ErrorAnswer | None]


@dataclass
class ToolContext:
    """Who is calling. Any object or dict with these names does as well.

    Attributes:
        caller_identity: The authenticated principal, stable and never from the payload.
        tenant_id: Where principals are unique only within a tenant.
    """

    caller_identity: str | None = None
    tenant_id: str | None = None


@dataclass(frozen=True, slots=True)
class _Rules:
    """The rules that differ between the profiles; each can be set alone."""

    require_principal: bool
    reject_expired: bool
    limit_inserts: bool
    strict_keys: bool
    mark_replays: bool
    bind_operation: bool


PROFILES: Final[dict[str, _Rules]] = {
    "classic": _Rules(False, False, False, False, False, False),
    "adcp-3.2": _Rules(True, True, True, True, True, True),
}


class IdempotencyStore:
    """Makes handlers of keyed requests run once and replays their answers.

    The key is ``params["idempotency_key"]``, scoped to the authenticated caller in ``context``. A
    retry with the same payload gets the stored answer; another payload is a conflict; a copy that
    comes while the first runs waits for its answer. Only success is stored: an exception, or an
    answer with ``errors`` or ``adcp_error``, leaves the key free.

    Args:
        backend: A store; async handlers need an async one, sync handlers a sync one.
        ttl_seconds: How long answers are replayed: one hour to seven days.
        hash_fn: The payload's fingerprint.
        clock: Seconds since 1970, for stores without a server's clock.
        profile: ``classic``, or ``adcp-3.2``, which switches the six rules below on.
        require_principal: A key without an authenticated caller is an error, not unguarded.
        reject_expired: A key whose window is over is an error, not a fresh request. Within 60
            seconds past the window it still replays.
        limit_inserts: At most 60 new keys a second over a minute and 300 over ten seconds, for
            each caller and process.
        strict_keys: A key is required, 16 to 255 characters out of ``A-Za-z0-9_.:-``.
        mark_replays: Replays carry ``replayed: true`` and the current request's ``context``.
        bind_operation: The handler's name is part of the payload, the account part of the scope.
        on_in_flight: ``wait`` for the first call's answer, or ``reject`` at once.
        wait_seconds: How long to wait.
        lease_seconds: How long a dead worker's claim holds.
        in_flight_max_seconds: How long a live one may keep its claim.
        max_answer_bytes: Larger answers are not kept; the call still counts as done.
        raise_on_persist_error: Raise if an answer could not be stored, instead of a warning.

    Raises:
        ValueError: ``ttl_seconds`` is out of bounds, or another option is.

    Example:
        >>> import asyncio
        >>> from oncekey import IdempotencyStore, MemoryBackend, ToolContext
        >>> idempotency = IdempotencyStore(MemoryBackend(), ttl_seconds=86400)
        >>> class Seller:
        ...     @idempotency.wrap
        ...     async def create_media_buy(self, params, context=None):
        ...         return {"media_buy_id": "mb-1"}
        >>> caller = ToolContext(caller_identity="buyer-acme")
        >>> asyncio.run(Seller().create_media_buy({"idempotency_key": "k-1"}, caller))
        {'media_buy_id': 'mb-1'}
    """

    def __init__(
        self,
        backend: IdempotencyBackend | AsyncStore | Store,
        ttl_seconds: int = 86_400,
        hash_fn: HashFunction = canonical_json_sha256,
        *,
        clock: Clock = time.time,
        profile: str = "classic",
        require_principal: bool | None = None,
        reject_expired: bool | None = None,
        limit_inserts: bool | None = None,
        strict_keys: bool | None = None,
        mark_replays: bool | None = None,
        bind_operation: bool | None = None,
        on_in_flight: Literal["wait", "reject"] = "wait",
        wait_seconds: float = 60,
        lease_seconds: float | None = None,
        in_flight_max_seconds: int | None = None,
        max_answer_bytes: int = 1_048_576,
        raise_on_persist_error: bool = False,
    ) -> None:
        if not MIN_TTL_SECONDS <= ttl_seconds <= MAX_TTL_SECONDS:
            raise PolicyError(
                f"ttl_seconds must be in [{MIN_TTL_SECONDS}, {MAX_TTL_SECONDS}] (one hour to seven "
                f"days), got {ttl_seconds}"
            )
        if profile not in PROFILES:
            raise PolicyError(f"profile must be one of {', '.join(PROFILES)}, got {profile!r}")
        if on_in_flight not in ("wait", "reject"):
            raise PolicyError(f"on_in_flight must be 'wait' or 'reject', got {on_in_flight!r}")
        base = PROFILES[profile]
        self.rules = _Rules(
            *(
                getattr(base, name) if value is None else value
                for name, value in (
                    ("require_principal", require_principal),
                    ("reject_expired", reject_expired),
                    ("limit_inserts", limit_inserts),
                    ("strict_keys", strict_keys),
                    ("mark_replays", mark_replays),
                    ("bind_operation", bind_operation),
                )
            )
        )
        self.backend = backend
        self.ttl_seconds = ttl_seconds
        self.raise_on_persist_error = raise_on_persist_error
        self._hash_fn = hash_fn
        leased = lease_seconds is not None or in_flight_max_seconds is not None
        self._states_lease = leased or profile != "classic"
        self.in_flight_max_seconds = (
            3600 if in_flight_max_seconds is None else in_flight_max_seconds
        )
        self._plan = Plan.of(
            Policy(
                ttl=ttl_seconds,
                lease=30 if lease_seconds is None else lease_seconds,
                wait=wait_seconds if on_in_flight == "wait" else 0,
                max_run=self.in_flight_max_seconds,
                max_answer_bytes=max_answer_bytes,
                skew=SKEW_SECONDS if self.rules.reject_expired else 0,
                remember_expired=REMEMBER_SECONDS if self.rules.reject_expired else 0,
            )
        )
        self._limiter = InsertLimiter(INSERT_WINDOWS, clock) if self.rules.limit_inserts else None
        self._missing_principal_warned = False
        store = backend
        if not isinstance(store, Store):
            store = as_async_store(store, "IdempotencyStore")
        if clock is not time.time and isinstance(store, ClockInjectable):
            store = store.with_clock(clock)
        self._store: Store | AsyncStore = store

    def capability(self) -> dict[str, Any]:
        """What to declare under ``adcp.idempotency`` in a capabilities response."""
        declared: dict[str, Any] = {"supported": True, "replay_ttl_seconds": self.ttl_seconds}
        if self._states_lease:
            declared["in_flight_max_seconds"] = self.in_flight_max_seconds
        return declared

    @overload
    def wrap(self, handler: F) -> F: ...
    @overload
    def wrap(
        self,
        *,
        operation: str | None = None,
        transactional: bool = False,
        on: Any = None,
        error_answer: ErrorAnswer | None = None,
    ) -> Callable[[F], F]: ...
    def wrap(
        self,
        handler: Callable[..., Any] | None = None,
        *,
        operation: str | None = None,
        transactional: bool = False,
        on: Any = None,
        error_answer: ErrorAnswer | None = None,
    ) -> Callable[..., Any]:
        """Decorate ``handler(self, params, context=None, ...)``, sync or async, method or function.

        ``params`` is a dict or a Pydantic model. What the handler returns on the first call is what
        it returned; a replay gives an equal object of the same type.

        Args:
            handler: The function.
            operation: Its name in errors and comparisons. Default: the function's own.
            transactional: Run the handler in a transaction of the backend's database, in which
                its writes, the claim and the answer commit together: exactly once. A handler with
                a parameter ``tx`` gets the transaction there, others by ``current_transaction()``;
                write on ``tx.connection``. An error, or an answer that says ``errors``, rolls all
                of it back.
            on: Where the transaction is, if not on the backend's own connections: a pool, engine or
                sessionmaker, or a function that gives the current connection or session.
            error_answer: With ``transactional``: makes an answer of an exception, which is stored
                and given to the caller, with the handler's writes rolled back.

        Raises:
            BackendMismatchError: A sync handler over an async backend, or the other way round.
            TransactionRefusedError: ``transactional`` on a backend without transactions.
        """
        if isinstance(handler, (staticmethod, classmethod)):
            raise BackendMismatchError(
                "put wrap closest to the function: @staticmethod or @classmethod above @store.wrap"
            )
        how: _How = (operation, transactional, on, error_answer)
        if handler is None:
            return functools.partial(self._wrap, how=how)
        return self._wrap(handler, how=how)

    def _wrap(self, handler: Callable[..., Any], *, how: _How) -> Callable[..., Any]:
        operation, transactional, on, error_answer = how
        name = operation or str(getattr(handler, "__name__", "handler"))
        request = Arguments(handler, name)
        store = self._store
        takes_tx = transactional and takes_parameter(handler, "tx")
        if transactional:
            check_transactional(store)
        if engine.is_async(handler):
            if not isinstance(store, AsyncStore):
                raise BackendMismatchError(
                    f"{name} is async but {type(store).__name__} is a sync backend: pass "
                    "MemoryBackend(), SQLiteBackend('file.db') or aconnect(url)"
                )

            @functools.wraps(handler)
            async def asynchronous(*args: Any, **kwargs: Any) -> Any:
                params, job = self._prepare(request, args, kwargs)
                if job is None:
                    self._must_guard(transactional, name)
                    return await handler(*args, **kwargs)
                wait = self._wait(job)
                if wait is not None and await store.read(job.key) is None:
                    raise IdempotencyRateLimitedError(name, wait)
                with self._counted(job, handler) as runs:
                    if transactional:
                        result = await acall_in_transaction(
                            store,
                            on,
                            job,
                            lambda tx: runs(
                                *args, **({**kwargs, "tx": tx} if takes_tx else kwargs)
                            ),
                            error_answer,
                        )
                    else:
                        result = await engine.acall(store, job, lambda: runs(*args, **kwargs))
                return self._answer(params, result)

            return asynchronous
        if not isinstance(store, Store):
            raise BackendMismatchError(
                f"{name} is not async but {type(store).__name__} is an async backend: pass "
                "MemoryStore(), SQLiteStore('file.db') or connect(url)"
            )

        @functools.wraps(handler)
        def synchronous(*args: Any, **kwargs: Any) -> Any:
            params, job = self._prepare(request, args, kwargs)
            if job is None:
                self._must_guard(transactional, name)
                return handler(*args, **kwargs)
            wait = self._wait(job)
            if wait is not None and store.read(job.key) is None:
                raise IdempotencyRateLimitedError(name, wait)
            with self._counted(job, handler) as runs:
                if transactional:
                    result = call_in_transaction(
                        store,
                        on,
                        job,
                        lambda tx: runs(*args, **_plus_tx(kwargs, tx, takes_tx)),
                        error_answer,
                    )
                else:
                    result = engine.call(store, job, lambda: runs(*args, **kwargs))
            return self._answer(params, result)

        return synchronous

    @staticmethod
    def _must_guard(transactional: bool, operation: str) -> None:
        """A transactional handler has no transaction to run in without a key and a caller."""
        if transactional:
            raise InvalidKeyError(
                f"{operation} is transactional, so every request needs an idempotency_key and an "
                "authenticated caller in its context"
            )

    def _prepare(
        self, request: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], engine.Job | None]:
        """The request as a dict, and what to do once. No job: nothing to guard it with."""
        raw, context = request.find(args, kwargs)
        params = as_dict(raw)
        name = params.get("idempotency_key")
        operation = request.operation
        if self.rules.strict_keys:
            if not isinstance(name, str) or not STRICT_KEY.match(name):
                raise InvalidKeyError(
                    f"{operation}: idempotency_key is required, 16 to 255 characters out of "
                    "A-Z a-z 0-9 _ . : - (a UUID will do)"
                )
        elif not isinstance(name, str) or not name:
            return params, None
        check_text(name, f"{operation}: idempotency_key", MAX_KEY)
        scope = self._scope(params, context)
        if scope is None:
            if self.rules.require_principal:
                raise IdempotencyScopeError(operation)
            self._warn_missing_principal_once()
            return params, None
        mark = self._hash_fn(params)
        if len(mark) > 255:
            mark = hashlib.sha256(mark.encode()).hexdigest()
        if self.rules.bind_operation:
            mark = hashlib.sha256(join_scope(operation, mark).encode()).hexdigest()
        job = engine.Job(
            Key(Scope("request", scope), name),
            mark.encode(),
            self._plan,
            request.codec,
            operation,
            self._keeps,
            self.raise_on_persist_error,
        )
        return params, job

    def _scope(self, params: dict[str, Any], context: Any) -> str | None:
        principal, tenant = identity(context)
        if principal is None:
            return None
        for part, what in ((principal, "caller_identity"), (tenant, "tenant_id")):
            if part is not None:
                check_text(part, what)
        if self.rules.bind_operation and params.get("account") is not None:
            account = params["account"]
            if not isinstance(account, str):
                found = account.get("account_id") if isinstance(account, Mapping) else None
                account = found if isinstance(found, str) else sha256_hex(as_dict(account))
            return join_scope(tenant or "", principal, "account", account)
        return join_scope(principal) if tenant is None else join_scope(tenant, principal)

    def _wait(self, job: engine.Job) -> int | None:
        """Seconds until this caller may make a new key; known keys are never held up."""
        return None if self._limiter is None else self._limiter.retry_after(job.key.scope.label)

    @contextlib.contextmanager
    def _counted(
        self, job: engine.Job, handler: Callable[..., Any]
    ) -> Iterator[Callable[..., Any]]:
        """Count a new key before it is claimed, and give that back if the handler did not run."""
        limiter = self._limiter
        if limiter is None:
            yield handler
            return
        ran = False

        def runs(*args: Any, **kwargs: Any) -> Any:
            nonlocal ran
            ran = True
            return handler(*args, **kwargs)

        limiter.count(job.key.scope.label)
        try:
            yield runs
        finally:
            if not ran:
                limiter.count(job.key.scope.label, -1)

    def _keeps(self, value: Any) -> bool:
        """Whether an answer is a success, and so is stored."""
        errors = _field(value, "errors")
        return not errors and _field(value, "adcp_error") is None

    def _answer(self, params: dict[str, Any], result: engine.Result) -> Any:
        if not self.rules.mark_replays:
            return result.value
        value = result.value
        current = params.get("context")
        if isinstance(value, dict):
            value = dict(value)  # the handler's own object stays as it was
            if result.replayed:
                value["replayed"] = True
                value.pop("context", None)
            if current is not None:
                value["context"] = current
            return value
        copy = getattr(value, "model_copy", None)
        if copy is None:
            return value
        update: dict[str, Any] = {}
        fields = getattr(type(value), "model_fields", {})
        extra = getattr(type(value), "model_config", {}).get("extra") == "allow"
        if result.replayed and ("replayed" in fields or extra):
            update["replayed"] = True
        if "context" in fields or extra:
            update["context"] = current
        return copy(update=update) if update else value

    def _warn_missing_principal_once(self) -> None:
        if self._missing_principal_warned:
            return
        self._missing_principal_warned = True
        warnings.warn(
            "a request came with an idempotency_key but no caller_identity in its context, so it "
            "runs unguarded. Set context.caller_identity from the verified credentials, or set "
            "require_principal=True to refuse such requests. This is said once for each store.",
            UserWarning,
            stacklevel=4,
        )


def _plus_tx(kwargs: dict[str, Any], tx: Tx, wanted: bool) -> dict[str, Any]:
    return {**kwargs, "tx": tx} if wanted else kwargs


def _field(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(name)
    return getattr(value, name, None) if hasattr(type(value), "model_dump") else None
