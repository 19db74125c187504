"""``Once`` and ``AsyncOnce``: one recorded outcome for each key of a function or a block."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, overload

from oncekey._core import call as engine
from oncekey._core import drive
from oncekey._core.at_hand import FunctionAnswers, acached, cached
from oncekey._core.binding import (
    Binding,
    KeySource,
    PerCallKeyWarning,
    block_scope,
    function_scope,
    key_name,
    names,
)
from oncekey._core.block import AsyncBlock, Block, OpenClaim
from oncekey._core.closures import SharedKeysWarning
from oncekey._core.codec import Codec
from oncekey._core.fingerprint import fingerprint
from oncekey._core.flows import Claim, Plan
from oncekey._core.notes import PendingCall
from oncekey._core.placement import FRESH, UnguardedWarning, check_placed, refuse_generators
from oncekey._core.switch import GuardingOffWarning, switched
from oncekey._core.transact import (
    AsyncTransaction,
    ErrorAnswer,
    Transaction,
    acall_in_transaction,
    call_in_transaction,
    check_transactional,
)
from oncekey.abc import AsyncStore, Store
from oncekey.errors import BackendMismatchError, IdempotencyConflictError, InvalidKeyError
from oncekey.models import Key
from oncekey.policy import JournalPath, OnOutage, Policy, PolicyOptions
from oncekey.stores.urls import aconnect, connect, what_is

if TYPE_CHECKING:
    from oncekey._core.sources import AsyncSource, C, Source

__all__ = [
    "AsyncOnce",
    "Claim",
    "GuardingOffWarning",
    "Once",
    "OpenClaim",
    "PendingCall",
    "PerCallKeyWarning",
    "SharedKeysWarning",
    "UnguardedWarning",
    "current_claim",
]

P = ParamSpec("P")
R = TypeVar("R")


def current_claim() -> Claim:
    """The claim under which the running handler works: its fence, its attempts, ``check()``.

    The handler of a guard, of ``IdempotencyStore``, of a webhook receiver or behind a middleware.

    Raises:
        LookupError: No guarded call is running here.
    """
    claim = engine.CURRENT.get(None)
    if claim is None:
        raise LookupError(
            "no guarded call is running here: current_claim() is for the code inside a function "
            "that Once, AsyncOnce or IdempotencyStore guards"
        )
    return claim


class _Base:
    """What both forms share: the policy, and how options override it."""

    store: Any

    def __init__(self, scope: str, policy: Policy | None, options: PolicyOptions) -> None:
        self._scope = scope
        self.policy = (policy or Policy()).but(options)

    def _see(self, on_outage: OnOutage | None, journal: JournalPath | None) -> None:
        """See the store as this guard's word for outages says, and the environment's switch."""
        if on_outage is not None or journal is not None:
            from oncekey.resilience.outage import seen_by

            self.store = seen_by(self.store, on_outage, journal)
        self.store = switched(self.store)

    def bind(
        self,
        function: Callable[..., Any],
        key: KeySource,
        ignore: Iterable[str],
        options: PolicyOptions,
        name: str | None = "",
    ) -> Binding:
        """How calls of ``function`` are done once. Raises if it can't be guarded here."""
        known = sys.getrefcount(function) > FRESH  # by somebody beside the decorator
        check_placed(function, known)
        self._check(function)
        scope = function_scope(self._scope, function, name)
        made = Binding(function, key, ignore, scope, self.policy.but(options))
        inner = inspect.unwrap(function)
        if getattr(inner, "__code__", None) is not None and name == "":
            made.alone = names.take(self.store, scope, inner)
        return made

    def runner(
        self, transactional: bool, on: Any, options: PolicyOptions | None = None
    ) -> Callable[..., Any]:
        """What runs a job: gives the result, or something to await for it.

        It takes the job, the function and its arguments, as a tuple and a dict.

        Raises:
            TransactionRefusedError: ``transactional``, and the store has no transactions.
            PolicyError: An option is not for transactions; or ``on`` is for nothing else.
        """
        check_transactional(self.store, on, transactional)
        if not transactional:
            return functools.partial(self._call, self.store)
        self.policy.but(options or {}).check_transactional()
        call = functools.partial(self._call_in_transaction, self.store, on)

        def run(job: engine.Job, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            return call(job, lambda _: function(*args, **kwargs))

        return run

    def _decorator(
        self,
        bare: tuple[object, ...],
        key: KeySource,
        name: str | None,
        ignore: Iterable[str],
        options: PolicyOptions,
        run: Callable[..., Any],
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        if bare or not key:
            raise InvalidKeyError(
                'say which argument is the key: write @once(key="order_id") above the function'
            )

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            binding = self.bind(function, key, ignore, options, name)
            policy = self.policy.but(options)
            if policy.cache_entries and not getattr(self.store, "off", False):
                answers = FunctionAnswers(policy.cache_entries, policy.cache_seconds, policy.ttl)
                at_hand = self._cached(run, answers)
                return functools.wraps(function)(self._wrapper(binding, at_hand, function))
            return functools.wraps(function)(self._wrapper(binding, run, function))

        return decorate

    # What the two forms differ in.
    _call: Callable[..., Any]
    _call_in_transaction: Callable[..., Any]
    _cached: Callable[..., Any]

    def _check(self, function: Callable[..., Any]) -> None:
        raise NotImplementedError

    def _wrapper(
        self, binding: Binding, run: Callable[..., Any], function: Callable[..., Any]
    ) -> Callable[..., Any]:
        raise NotImplementedError

    def _block(
        self,
        key: str,
        payload: object,
        options: PolicyOptions,
        returns: Any = None,
        transactional: bool = False,
    ) -> engine.Job:
        policy = self.policy.but(options)
        if transactional:
            policy.check_transactional()
        mark = b"" if payload is None else fingerprint(payload)
        name = Key(block_scope(self._scope), key_name(key, "key"))
        codec = Codec(returns or Any)
        codec.errors = policy.replay_errors
        return engine.Job(name, mark, Plan.of(policy), codec, "guard")


class Once(_Base):
    """Guards synchronous work: one recorded outcome for each key, replayed to every copy.

    Args:
        store: A ``Store``, or a URL for ``connect``.
        scope: A name that sets keys apart: those of blocks, and those of functions beside the
            function's own name.
        policy: Defaults for all calls; single options may be given instead.
        on_outage: What becomes of a call whose store can't answer. ``closed``: it is an error.
            ``open``: it runs without the store, which is made whole from the journal later; what
            that can lose is in the documentation. ``None``: as the store says, which is ``closed``
            unless ``resilient`` was told otherwise.
        journal: The journal's directory, for ``open``.

    Example:
        >>> from oncekey import Once
        >>> once = Once("memory://")
        >>> @once(key="order_id")
        ... def charge(order_id: str, amount: int) -> dict:
        ...     return {"order": order_id, "charged": amount}
        >>> charge("o-1", 5) == charge("o-1", 5)
        True
    """

    def __init__(
        self,
        store: Store | str,
        *,
        scope: str = "",
        policy: Policy | None = None,
        on_outage: OnOutage | None = None,
        journal: JournalPath | None = None,
        **options: Unpack[PolicyOptions],
    ) -> None:
        super().__init__(scope, policy, options)
        self.store = connect(store) if isinstance(store, str) else store
        if not isinstance(self.store, Store):
            raise BackendMismatchError(
                f"Once needs a sync store, got {what_is(store)}: pass connect(url) or "
                "SQLiteStore(...), or use AsyncOnce"
            )
        self._see(on_outage, journal)

    def __call__(
        self,
        *bare: object,
        key: KeySource = "",
        name: str | None = "",
        ignore: Iterable[str] = (),
        transactional: bool = False,
        on: Any = None,
        **options: Unpack[PolicyOptions],
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorate a function.

        Args:
            *bare: Nothing: a bare ``@once`` is told what to write.
            key: Which argument is the key: its name, a dotted path into it (``order.id``), a list
                of such names or paths, or a callable that gets the arguments. The other arguments
                are the payload: the same key with another payload is a conflict.
            name: What keeps the keys of this function apart from those of others with the same
                scope. Default: its module and name, so give one if it may be renamed or moved
                while keys live. Functions with one name share their keys. ``None``: there is no
                name, and the scope's keys are shared with its blocks and other such functions.
            ignore: Arguments that are not part of the payload, such as a logger. ``self``: objects
                share their keys; without that word the key must tell them apart.
            transactional: Run the function in a transaction, in which its writes and its answer
                commit together. It writes on ``current_transaction().connection``.
            on: Where that transaction is, if not on the store's own connections.
            **options: Options of ``Policy`` for this function.

        Raises:
            InvalidKeyError: There is no such argument; or another function, or another object's
                method, would have the same keys.
            PolicyError: It is no function, or a route or task already: the guard belongs below.
        """
        run = self.runner(transactional, on, options)
        return self._decorator(bare, key, name, ignore, options, run)

    _call = staticmethod(engine.call)
    _call_in_transaction = staticmethod(call_in_transaction)
    _cached = staticmethod(cached)

    def _wrapper(
        self, binding: Binding, run: Callable[..., Any], function: Callable[..., Any]
    ) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            job = binding.job(args, kwargs)
            try:
                return run(job, function, args, kwargs).value
            except IdempotencyConflictError as error:
                drive.run(binding.explain(error, job), self.store)
                raise

        return wrapper

    def _check(self, function: Callable[..., Any]) -> None:
        refuse_generators(function)
        if engine.is_async(function):
            raise BackendMismatchError(
                f"{getattr(function, '__qualname__', function)} is async: use AsyncOnce with "
                "aconnect(url)"
            )

    @overload
    def transaction(
        self,
        key: str,
        payload: object = None,
        *,
        on: Source[C],
        error_answer: ErrorAnswer | None = None,
        returns: Any = None,
        **options: Unpack[PolicyOptions],
    ) -> Transaction[C]: ...
    @overload
    def transaction(
        self,
        key: str,
        payload: object = None,
        *,
        on: C | None = None,
        error_answer: ErrorAnswer | None = None,
        returns: Any = None,
        **options: Unpack[PolicyOptions],
    ) -> Transaction[C]: ...
    def transaction(
        self,
        key: str,
        payload: object = None,
        *,
        on: Any = None,
        error_answer: ErrorAnswer | None = None,
        returns: Any = None,
        **options: Unpack[PolicyOptions],
    ) -> Transaction[Any]:
        """Guard a block exactly once: claim, your writes and the answer in one commit.

        Args:
            key: The key.
            payload: What must not change under one key. ``None``: nothing is compared.
            on: Your connection or session, or a pool, engine or sessionmaker to take one from.
                Default: the store's own.
            error_answer: Makes an answer of an error, which is stored with the writes rolled back.
            returns: The answer's type, if it is or has a Pydantic model or a dataclass.
            **options: Options of ``Policy`` for this block.

        Raises:
            TransactionRefusedError: The store has no transactions, or the connection can't be safe.
        """
        check_transactional(self.store)
        return Transaction(
            self.store, on, self._block(key, payload, options, returns, True), error_answer
        )

    def guard(
        self,
        key: str,
        payload: object = None,
        *,
        returns: Any = None,
        **options: Unpack[PolicyOptions],
    ) -> Block:
        """Guard a block. It always runs: look at ``replayed`` before you do the work.

        Args:
            key: The key.
            payload: What must not change under one key. ``None``: nothing is compared.
            returns: The answer's type, if it is or has a Pydantic model or a dataclass.
            **options: Options of ``Policy`` for this block.

        Example:
            >>> from oncekey import Once
            >>> once = Once("memory://")
            >>> with once.guard("invoice-7") as claim:
            ...     if not claim.replayed:
            ...         claim.answer = "sent"
            >>> claim.answer
            'sent'
        """
        return Block(self.store, self._block(key, payload, options, returns))


class AsyncOnce(_Base):
    """Guards asynchronous work. Takes what ``Once`` takes, with an async store.

    Example:
        >>> import asyncio
        >>> from oncekey import AsyncOnce
        >>> once = AsyncOnce("memory://")
        >>> @once(key="order_id")
        ... async def charge(order_id: str, amount: int) -> dict:
        ...     return {"order": order_id, "charged": amount}
        >>> asyncio.run(charge("o-1", 5))
        {'order': 'o-1', 'charged': 5}
    """

    def __init__(
        self,
        store: AsyncStore | str,
        *,
        scope: str = "",
        policy: Policy | None = None,
        on_outage: OnOutage | None = None,
        journal: JournalPath | None = None,
        **options: Unpack[PolicyOptions],
    ) -> None:
        super().__init__(scope, policy, options)
        self.store = aconnect(store) if isinstance(store, str) else store
        if not isinstance(self.store, AsyncStore):
            raise BackendMismatchError(
                f"AsyncOnce needs an async store, got {what_is(store)}: pass aconnect(url) "
                "or AsyncSQLiteStore(...), or use Once"
            )
        self._see(on_outage, journal)

    def __call__(
        self,
        *bare: object,
        key: KeySource = "",
        name: str | None = "",
        ignore: Iterable[str] = (),
        transactional: bool = False,
        on: Any = None,
        **options: Unpack[PolicyOptions],
    ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Coroutine[Any, Any, R]]]:
        """Decorate an async function. See ``Once``."""
        run = self.runner(transactional, on, options)
        return self._decorator(bare, key, name, ignore, options, run)

    _call = staticmethod(engine.acall)
    _call_in_transaction = staticmethod(acall_in_transaction)
    _cached = staticmethod(acached)

    def _wrapper(
        self, binding: Binding, run: Callable[..., Any], function: Callable[..., Any]
    ) -> Callable[..., Any]:
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            job = binding.job(args, kwargs)
            try:
                return (await run(job, function, args, kwargs)).value
            except IdempotencyConflictError as error:
                await drive.arun(binding.explain(error, job), self.store)
                raise

        return wrapper

    def _check(self, function: Callable[..., Any]) -> None:
        refuse_generators(function)
        if not engine.is_async(function):
            raise BackendMismatchError(
                f"{getattr(function, '__qualname__', function)} is not async: use Once with "
                "connect(url)"
            )

    @overload
    def transaction(
        self,
        key: str,
        payload: object = None,
        *,
        on: AsyncSource[C],
        error_answer: ErrorAnswer | None = None,
        returns: Any = None,
        **options: Unpack[PolicyOptions],
    ) -> AsyncTransaction[C]: ...
    @overload
    def transaction(
        self,
        key: str,
        payload: object = None,
        *,
        on: C | None = None,
        error_answer: ErrorAnswer | None = None,
        returns: Any = None,
        **options: Unpack[PolicyOptions],
    ) -> AsyncTransaction[C]: ...
    def transaction(
        self,
        key: str,
        payload: object = None,
        *,
        on: Any = None,
        error_answer: ErrorAnswer | None = None,
        returns: Any = None,
        **options: Unpack[PolicyOptions],
    ) -> AsyncTransaction[Any]:
        """Guard a block exactly once with ``async with``. See ``Once.transaction``."""
        check_transactional(self.store)
        return AsyncTransaction(
            self.store, on, self._block(key, payload, options, returns, True), error_answer
        )

    def guard(
        self,
        key: str,
        payload: object = None,
        *,
        returns: Any = None,
        **options: Unpack[PolicyOptions],
    ) -> AsyncBlock:
        """Guard a block with ``async with``. See ``Once.guard``."""
        return AsyncBlock(self.store, self._block(key, payload, options, returns))
