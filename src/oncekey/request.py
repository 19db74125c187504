"""``IdempotencyStore``: the first answer to a keyed request, replayed to every retry."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Unpack, overload

from oncekey._core import call as engine
from oncekey._core.arguments import (
    NO_CALLER,
    NO_KEY,
    Arguments,
    Callers,
    ToolContext,
    Whose,
    as_dict,
    awaited,
    identity,
    like,
    may_give_awaitable,
    mismatch,
    name_of,
    not_awaitable,
)
from oncekey._core.drive import arun, run
from oncekey._core.flows import Plan
from oncekey._core.handlers import F, R, WrapOptions, without_tx
from oncekey._core.limiter import KeyLimit, SharedKeyLimit, check_limits
from oncekey._core.schema import Validate, check_schema, check_validator
from oncekey._core.switch import switched
from oncekey._core.transact import (
    ErrorAnswer,
    acall_in_transaction,
    call_in_transaction,
    check_transactional,
    in_transaction,
    takes_parameter,
)
from oncekey.abc import AsyncStore, Clock, ClockInjectable, IdempotencyBackend, Store
from oncekey.adcp.peer import for_adcp_package
from oncekey.adcp.profile import Rules, account_parts, enveloped, keeps_of, session_parts
from oncekey.canonical import canonical_json_sha256
from oncekey.errors import (
    BackendMismatchError,
    IdempotencyScopeError,
    InvalidKeyError,
    OncekeyError,
    PolicyError,
)
from oncekey.models import Key, Scope, check_text
from oncekey.policy import JournalPath, OnCancel, OnOutage, Policy, check_on_cancel, check_seconds
from oncekey.stores.legacy import LegacyStore, as_async_store, join_scope

__all__ = ["IdempotencyStore", "ToolContext"]

MIN_TTL_SECONDS = 3600
MAX_TTL_SECONDS = 604_800
MAX_KEY = 255
SKEW_SECONDS = 60
REMEMBER_SECONDS = 604_800


@dataclass(frozen=True, slots=True)
class _How:
    """The options of one ``wrap``."""

    operation: str | None
    validate: Validate | None
    read_only: bool
    transactional: bool
    on: Any
    error_answer: ErrorAnswer | None
    finishing: set[asyncio.Task[Any]] | None
    plan: Plan


Guarded = Callable[[engine.Job, Callable[..., Any], Any, Any], Any]


class IdempotencyStore:
    """Makes handlers of keyed requests run once and replays their answers.

    The key is ``params["idempotency_key"]``, scoped to the authenticated caller in ``context``. A
    retry with the same payload gets the stored answer; another payload is a conflict; a copy that
    comes while the first runs waits for its answer. Only success is stored: an exception, or an
    answer with ``errors`` or ``adcp_error``, leaves the key free. Under ``adcp-3.2`` so does a
    ``status`` of a task that failed, was rejected or waits for input, and ``errors`` that are only
    warnings do not.

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
            each caller.
        limits: Where that is counted: in each ``process`` by itself; or ``shared``, by the store
            for all that use it, which PostgreSQL and Redis can.
        strict_keys: A key is required, 16 to 255 characters out of ``A-Za-z0-9_.:-``.
        mark_replays: Replays carry ``replayed: true``; every answer and error carries the current
            request's ``context``.
        bind_operation: The handler's name is part of the payload, the account part of the scope,
            and for ``si_send_message`` the session too.
        account_salt: A secret with which accounts that are named by brand and operator are hashed
            into the scope. The same in every process; a new one makes their keys new.
        on_in_flight: ``wait`` for the first call's answer, or ``reject`` at once.
        wait_seconds: How long to wait.
        lease_seconds: How long a dead worker's claim holds. Default: 30.
        in_flight_max_seconds: How long a live one may keep its claim. Default: an hour.
        max_answer_bytes: Larger answers are not kept; the call still counts as done.
        compress_above: Longer answers are compressed with zlib in the store. ``None``: none is.
        raise_on_persist_error: Raise if an answer could not be stored, instead of a warning.
        on_cancel: What becomes of an async handler whose caller is cancelled: a client that hung
            up, a timeout. ``finish``: it goes on in a task of its own and its answer is stored, so
            that the retry gets it; at most for ``in_flight_max_seconds``. ``lease``: it is
            cancelled, and as what it did is unknown, the key is held until its lease ends.
            ``release``: it is cancelled and the key is free at once, for what may run twice.
        ignore_defaults: A field of a Pydantic request that is set to its default equals one that
            is left out.
        on_outage: A call whose store can't answer is an error: ``closed``; or it runs, to be
            reconciled later: ``open``. ``None``: as the store says, see ``resilient``.
        journal: The directory from which it is reconciled.

    Raises:
        ValueError: ``ttl_seconds`` is out of bounds, or another option is.

    Example:
        >>> import asyncio
        >>> from oncekey import IdempotencyStore, AsyncMemoryStore, ToolContext
        >>> idempotency = IdempotencyStore(AsyncMemoryStore(), ttl_seconds=86400)
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
        hash_fn: Callable[[dict[str, Any]], str] = canonical_json_sha256,
        *,
        clock: Clock = time.time,
        profile: str = "classic",
        require_principal: bool | None = None,
        reject_expired: bool | None = None,
        limit_inserts: bool | None = None,
        limits: Literal["process", "shared"] = "process",
        strict_keys: bool | None = None,
        mark_replays: bool | None = None,
        bind_operation: bool | None = None,
        account_salt: str | bytes = b"",
        on_in_flight: Literal["wait", "reject"] = "wait",
        wait_seconds: float = 60,
        lease_seconds: float | None = None,
        in_flight_max_seconds: int | None = None,
        max_answer_bytes: int = 1_048_576,
        compress_above: int | None = None,
        raise_on_persist_error: bool = False,
        on_cancel: OnCancel = "finish",
        ignore_defaults: bool = False,
        on_outage: OnOutage | None = None,
        journal: JournalPath | None = None,
    ) -> None:
        # Long: a line for each of two dozen options, and then one or two for what it sets.
        check_seconds(ttl_seconds=ttl_seconds, wait_seconds=wait_seconds)
        if not MIN_TTL_SECONDS <= ttl_seconds <= MAX_TTL_SECONDS:
            raise PolicyError(
                f"ttl_seconds must be in [{MIN_TTL_SECONDS}, {MAX_TTL_SECONDS}] (one hour to seven "
                f"days), got {ttl_seconds}"
            )
        self.rules = Rules.of(
            profile,
            require_principal,
            reject_expired,
            limit_inserts,
            strict_keys,
            mark_replays,
            bind_operation,
        )
        if on_in_flight not in ("wait", "reject"):
            raise PolicyError(f"on_in_flight must be 'wait' or 'reject', got {on_in_flight!r}")
        self.on_cancel: OnCancel = check_on_cancel(on_cancel)
        self.ignore_defaults = ignore_defaults
        self._finishing: set[asyncio.Task[Any]] = set()
        check_seconds(lease_seconds=lease_seconds, in_flight_max_seconds=in_flight_max_seconds)
        longest = 3600 if in_flight_max_seconds is None else in_flight_max_seconds
        lease = min(30, longest) if lease_seconds is None else lease_seconds
        if not lease <= longest <= ttl_seconds:
            raise PolicyError(
                f"in_flight_max_seconds must be between lease_seconds ({lease}) and ttl_seconds "
                f"({ttl_seconds}), got {longest}"
            )
        self.backend, self.ttl_seconds, self._hash_fn = backend, ttl_seconds, hash_fn
        self.raise_on_persist_error = raise_on_persist_error
        leased = lease_seconds is not None or in_flight_max_seconds is not None
        self._states_lease, self.in_flight_max_seconds = leased or profile != "classic", longest
        self._salt = account_salt.encode() if isinstance(account_salt, str) else account_salt
        self._keeps = keeps_of(profile)
        plan = Plan.of(
            Policy(
                ttl=ttl_seconds,
                lease=lease,
                wait=wait_seconds if on_in_flight == "wait" else 0,
                max_run=self.in_flight_max_seconds,
                max_answer_bytes=max_answer_bytes,
                compress_above=compress_above,
                skew=SKEW_SECONDS if self.rules.reject_expired else 0,
                remember_expired=REMEMBER_SECONDS if self.rules.reject_expired else 0,
            )
        )
        # Callers were told of ttl_seconds: an answer may be kept longer, but not for less.
        self._plan = replace(plan, ttl_bounds=(plan.terms.ttl_ms, 604_800_000))
        self._limits = self.rules.limits(limits, clock)
        self._warned, self._callers = set[str](), Callers(join_scope)
        store = backend
        if not isinstance(store, Store):
            store = as_async_store(store, "IdempotencyStore")
        if self.rules.reject_expired and isinstance(store, LegacyStore):
            raise BackendMismatchError(
                f"{type(backend).__name__} has only get and put, so a key that it dropped looks "
                "like one that it never saw: pass one of oncekey's stores, or reject_expired=False"
            )
        if clock is not time.time and isinstance(store, ClockInjectable):
            store = store.with_clock(clock)
        if on_outage is not None or journal is not None:
            from oncekey.resilience.outage import seen_by

            store = seen_by(store, on_outage, journal)
        self._store: Store | AsyncStore = switched(store)
        check_limits(limits, self._store)

    def capability(self) -> dict[str, Any]:
        """What to declare under ``adcp.idempotency`` in a capabilities response."""
        declared: dict[str, Any] = {"supported": True, "replay_ttl_seconds": self.ttl_seconds}
        if self._states_lease:
            declared["in_flight_max_seconds"] = self.in_flight_max_seconds
        return declared

    async def drain(self, seconds: float = 30) -> int:
        """Wait for handlers that go on without their caller, before the loop ends.

        Args:
            seconds: For how long, at most.

        Returns:
            How many are still running. They are cut off with the loop, and their keys are held
            until their leases end.
        """
        loop = asyncio.get_running_loop()
        mine = [task for task in self._finishing if task.get_loop() is loop]
        return len((await asyncio.wait(mine, timeout=seconds))[1]) if mine else 0

    @overload
    def wrap(self, handler: F) -> F: ...
    @overload
    def wrap(
        self, *, transactional: Literal[True], **options: Unpack[WrapOptions]
    ) -> Callable[[Callable[..., R]], Callable[..., R]]: ...
    @overload
    def wrap(
        self,
        *,
        transactional: Literal[False] = False,
        on_cancel: OnCancel | None = None,
        **options: Unpack[WrapOptions],
    ) -> Callable[[F], F]: ...
    def wrap(
        self,
        handler: Callable[..., Any] | None = None,
        *,
        operation: str | None = None,
        validate: Validate | None = None,
        read_only: bool = False,
        transactional: bool = False,
        on: Any = None,
        error_answer: ErrorAnswer | None = None,
        on_cancel: OnCancel | None = None,
    ) -> Callable[..., Any]:
        """Decorate ``handler(self, params, context=None, ...)``, sync or async, method or function.

        ``params`` is a dict or a Pydantic model. What the handler returns on the first call is what
        it returned; a replay gives an equal object of the same type.

        Args:
            handler: The function.
            operation: Its name in errors and comparisons. Default: the function's own.
            validate: What a request must pass before the store is touched: a Pydantic model, or a
                function that raises ValueError or TypeError. What it refuses is an
                ``InvalidRequestError``.
            read_only: The handler changes nothing, so that its requests need no key. Its keys have
                limits of their own: 300 a second over a minute and 1500 over ten seconds.
            transactional: Run the handler in a transaction of the backend's database, in which
                its writes, the claim and the answer commit together: exactly once. A handler with
                a parameter ``tx`` gets the transaction there, others by ``current_transaction()``;
                write on ``tx.connection``. An error, or an answer that says ``errors``, rolls all
                of it back.
            on: Where the transaction is, if not on the backend's own connections: a pool, engine or
                sessionmaker, or a function that gives the current connection or session.
            error_answer: With ``transactional``: makes an answer of an exception, which is stored
                and given to the caller, with the handler's writes rolled back.
            on_cancel: What becomes of the handler if its caller is cancelled. Default: as the store
                says; ``release`` with ``read_only``. A transaction is always rolled back.

        Raises:
            BackendMismatchError: A sync handler over an async backend, or the other way round.
            TransactionRefusedError: ``transactional`` on a backend without transactions.
            PolicyError: ``on_cancel`` with ``transactional``; or ``on`` without it.
        """
        if isinstance(handler, (staticmethod, classmethod)):
            raise BackendMismatchError(
                "put wrap closest to the function: @staticmethod or @classmethod above @store.wrap"
            )
        if transactional and on_cancel is not None:
            told = "a cancelled transaction is rolled back, nothing was done: leave on_cancel out"
            raise PolicyError(told)
        default: OnCancel = "release" if read_only else self.on_cancel
        then = default if on_cancel is None else check_on_cancel(on_cancel)
        plan = replace(self._plan, retry_safe=True) if then == "release" else self._plan
        finishing = self._finishing if then == "finish" else None
        check_validator(validate)
        how = _How(operation, validate, read_only, transactional, on, error_answer, finishing, plan)
        if handler is None:
            return functools.partial(self._wrap, how=how)
        return self._wrap(handler, how=how)

    def _wrap(self, handler: Callable[..., Any], *, how: _How) -> Callable[..., Any]:
        name = how.operation or name_of(handler)
        request = Arguments(handler, name)
        store = self._store
        takes_tx = how.transactional and takes_parameter(handler, "tx")
        check_transactional(store, how.on, how.transactional)
        asynchron, target = engine.is_async(handler), handler
        if not asynchron and may_give_awaitable(handler):
            asynchron = isinstance(store, AsyncStore)
            target = functools.partial(awaited if asynchron else not_awaitable, handler)
        if asynchron is not isinstance(store, AsyncStore):
            raise mismatch(name, asynchron, store)
        plain: Any = engine.acall if asynchron else engine.call
        in_tx: Any = acall_in_transaction if asynchron else call_in_transaction

        def inside(job: engine.Job, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            return in_tx(
                store,
                how.on,
                job,
                lambda tx: call(*args, **({**kwargs, "tx": tx} if takes_tx else kwargs)),
                how.error_answer,
            )

        # The result of a call, or something to await for it.
        guarded: Guarded = inside if how.transactional else functools.partial(plain, store)
        form = self._asynchronous if asynchron else self._synchronous
        made = like(handler, self)(form(request, how, target, guarded))
        return without_tx(made) if takes_tx else made

    # The two forms of a call. All that they decide is decided in what they call.

    def _asynchronous(
        self, request: Arguments, how: _How, target: Callable[..., Any], guarded: Guarded
    ) -> Callable[..., Any]:
        store: Any = self._store

        async def asynchronous(*args: Any, **kwargs: Any) -> Any:
            raw, context = request.find(args, kwargs)
            params = raw if type(raw) is dict else as_dict(raw, self.ignore_defaults)
            try:
                job, limit = self._prepare(request, how, params, context)
                if job is None:
                    result = await target(*args, **kwargs), False
                elif limit is None:
                    result = await guarded(job, target, args, kwargs)
                else:
                    if limit.may_be_reached():
                        await arun(limit.check(job.key, request.operation), store)
                    with limit.counting(target) as counted:
                        result = await guarded(job, counted, args, kwargs)
            except OncekeyError as error:
                self._echo(error, params)
                raise
            return enveloped(params, *result) if self.rules.mark_replays else result[0]

        return asynchronous

    def _synchronous(
        self, request: Arguments, how: _How, target: Callable[..., Any], guarded: Guarded
    ) -> Callable[..., Any]:
        store: Any = self._store

        def synchronous(*args: Any, **kwargs: Any) -> Any:
            raw, context = request.find(args, kwargs)
            params = raw if type(raw) is dict else as_dict(raw, self.ignore_defaults)
            try:
                job, limit = self._prepare(request, how, params, context)
                if job is None:
                    result = target(*args, **kwargs), False
                elif limit is None:
                    result = guarded(job, target, args, kwargs)
                else:
                    if limit.may_be_reached():
                        run(limit.check(job.key, request.operation), store)
                    with limit.counting(target) as counted:
                        result = guarded(job, counted, args, kwargs)
            except OncekeyError as error:
                self._echo(error, params)
                raise
            return enveloped(params, *result) if self.rules.mark_replays else result[0]

        return synchronous

    def _prepare(
        self, request: Arguments, how: _How, params: dict[str, Any], context: Any
    ) -> tuple[engine.Job | None, KeyLimit | SharedKeyLimit | None]:
        """What to do once, and the limit that holds for it. No job: it just runs, unguarded."""
        name = params.get("idempotency_key")
        operation, rules = request.operation, self.rules
        if rules.strict_keys:
            rules.check_key(name, operation, needed=not how.read_only)
        if how.validate is not None:
            check_schema(how.validate, params, operation)
        whose = None
        if isinstance(name, str) and name:
            if len(name) > MAX_KEY or not name.isprintable():  # which a NUL is not
                check_text(name, request.key_name, MAX_KEY)
            if rules.bind_operation:  # then it differs with the request
                whose = self._whose(params, context, operation)
            else:
                whose = self._callers.known(context)
            if whose is None:
                if rules.require_principal:
                    raise IdempotencyScopeError(operation)
                self._warn_once(NO_CALLER)
        elif name is not None:
            self._warn_once(NO_KEY)
        if whose is None or not isinstance(name, str):
            if how.transactional:  # it has no transaction to run in without a key and a caller
                raise InvalidKeyError(
                    f"{operation} is transactional, so every request needs an idempotency_key and "
                    "an authenticated caller in its context",
                    "idempotency_key",
                )
            return None, None
        mark = self._hash_fn(params)
        if len(mark) > 255:
            mark = hashlib.sha256(mark.encode()).hexdigest()
        if rules.bind_operation:
            mark = hashlib.sha256(join_scope(operation, mark).encode()).hexdigest()
        # A transaction of the caller's ends with the caller.
        finishing = None if how.finishing is None or in_transaction() else how.finishing
        fields = (
            Key(whose.scope, name),
            mark.encode(),
            how.plan,
            request.codec,
            operation,
            self._keeps,
            self.raise_on_persist_error,
            finishing,
        )
        job: engine.Job = tuple.__new__(engine.Job, fields)  # for each request: a call less
        return job, None if self._limits is None else self._limits[how.read_only](whose.payer)

    def _whose(self, params: dict[str, Any], context: Any, operation: str) -> Whose | None:
        """Whose the key is where accounts and sessions have keys of their own."""
        agent = self._callers.known(context)
        if agent is None:
            return None
        account = account_parts(params, context, agent.payer, self._salt)
        session = session_parts(params, operation)
        if not account and not session:
            return agent
        principal, tenant = identity(context)
        first = ("" if tenant is None else tenant, "" if principal is None else principal)
        scope = Scope("request", join_scope(*first, *account, *session))
        return Whose(scope, join_scope(*first, *account))

    def _echo(self, error: OncekeyError, params: dict[str, Any]) -> None:
        """The current request's context goes along with its error, to whichever server answers."""
        if self.rules.mark_replays:
            error.context = params.get("context")
        for_adcp_package(error)

    def _warn_once(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(f"{what} This is said once for each store.", UserWarning, stacklevel=4)
