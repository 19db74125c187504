"""``Once`` and ``AsyncOnce``: one recorded outcome for each key of a function or a block."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import functools
import inspect
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import Token
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from oncekey._core import call as engine
from oncekey._core.codec import Codec
from oncekey._core.flows import Claim, Plan
from oncekey._core.heartbeat import Beat
from oncekey._core.payload import fingerprint
from oncekey._core.transact import (
    AsyncTransaction,
    ErrorAnswer,
    Transaction,
    acall_in_transaction,
    call_in_transaction,
    check_transactional,
)
from oncekey.abc import AsyncStore, Store
from oncekey.errors import BackendMismatchError, InvalidKeyError
from oncekey.models import Key, Scope, Verdict, check_text
from oncekey.policy import Policy
from oncekey.stores.urls import aconnect, connect

__all__ = ["AsyncOnce", "Once", "OpenClaim", "current_claim"]

P = ParamSpec("P")
R = TypeVar("R")
KeySource = str | Callable[..., object]


def current_claim() -> Claim:
    """The claim under which the running handler works: its fence, its attempts, ``check()``.

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


def _key_name(value: object, what: str) -> str:
    """A key from an argument's value: text, or something whose text never changes."""
    if isinstance(value, str):
        return check_text(value, what)
    if isinstance(value, enum.Enum):
        return _key_name(value.value, what)
    if isinstance(value, bool) or not isinstance(value, (int, uuid.UUID, decimal.Decimal, dt.date)):
        raise InvalidKeyError(
            f"{what} is a {type(value).__name__}, which can't be a key: use a string, an integer "
            "or a UUID, or a dotted path to one, such as order.id"
        )
    return check_text(str(value), what)


def _follow(value: Any, path: list[str], what: str) -> Any:
    for part in path:
        missing = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
        if missing is None:
            raise InvalidKeyError(f"{what} has no {part!r}, so there is no key to run it under")
        value = missing
    return value


class _Blueprint:
    """How calls of one function become keys and payloads."""

    def __init__(
        self,
        function: Callable[..., Any],
        key: KeySource,
        ignore: Iterable[str],
        scope: Scope,
        policy: Policy,
    ) -> None:
        self.signature = inspect.signature(function)
        self.operation = getattr(function, "__qualname__", repr(function))
        self.codec = Codec.for_function(function)
        self.plan = Plan.of(policy)
        self.scope = scope
        self.key = key
        names = list(self.signature.parameters)
        left_out = {ignore} if isinstance(ignore, str) else set(ignore)
        if names and names[0] in ("self", "cls"):
            left_out.add(names[0])
        unknown = left_out - set(names)
        if isinstance(key, str):
            root, *self.path = key.split(".")
            if root not in names:
                unknown.add(root)
            self.root = root
            if not self.path:
                left_out.add(root)
        if unknown:
            raise InvalidKeyError(
                f"{self.operation} has no argument {', '.join(sorted(map(repr, unknown)))}; "
                f"it has {', '.join(names) or 'none'}"
            )
        self.payload = [name for name in names if name not in left_out]

    def job(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> engine.Job:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        if isinstance(self.key, str):
            what = f"the key {self.key!r} of {self.operation}"
            name = _key_name(_follow(values[self.root], self.path, what), what)
        else:
            name = _key_name(self.key(*args, **kwargs), f"the key of {self.operation}")
        payload = fingerprint({part: values[part] for part in self.payload})
        return engine.Job(Key(self.scope, name), payload, self.plan, self.codec, self.operation)


def _must_have_key(bare: tuple[object, ...], key: KeySource) -> None:
    if bare or not key:
        raise InvalidKeyError(
            'say which argument is the key: write @once(key="order_id") above the function'
        )


def _scope(scope: str, function: Callable[..., Any] | None) -> Scope:
    if scope or function is None:
        return Scope("once", check_text(scope or "default", "scope"))
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    if "<lambda>" in named.__qualname__:
        raise InvalidKeyError(
            "a lambda has no name to keep its keys apart from others: give scope= to Once, or "
            "write a function with def"
        )
    return Scope("once", "", f"{named.__module__}.{named.__qualname__}")


class OpenClaim:
    """What ``guard()`` hands out: the claim, or the answer that is already there.

    Attributes:
        replayed: The work was done before; ``answer`` is what it gave.
        answer: The stored answer, or what was set in this block.
    """

    def __init__(self, claim: Claim | None, answer: Any = None) -> None:
        self.claim = claim
        self.replayed = claim is None
        self.answer = answer

    @property
    def fence(self) -> int:
        """Rises with every claim of the key. 0 on a replay."""
        return self.claim.fence if self.claim is not None else 0

    @property
    def attempts(self) -> int:
        """How many claims of the key were won so far. 0 on a replay."""
        return self.claim.attempts if self.claim is not None else 0

    @property
    def takeover(self) -> bool:
        """Whether an earlier worker died or hung with this key in hand."""
        return self.claim is not None and self.claim.takeover

    @property
    def lost(self) -> bool:
        """Whether another worker has taken the key over."""
        return self.claim is not None and self.claim.lost

    def check(self) -> None:
        """Raise ``ClaimLostError`` if another worker has taken the key over."""
        if self.claim is not None:
            self.claim.check()


class _Base:
    """What both forms share: the policy, and how options override it."""

    def __init__(self, scope: str, policy: Policy | None, options: dict[str, Any]) -> None:
        self._scope = scope
        self.policy = (policy or Policy()).but(options)

    def _blueprint(
        self,
        function: Callable[..., Any],
        key: KeySource,
        ignore: Iterable[str],
        options: dict[str, Any],
    ) -> _Blueprint:
        scope = _scope(self._scope, function)
        return _Blueprint(function, key, ignore, scope, self.policy.but(options))

    def _block(self, key: str, payload: object, options: dict[str, Any]) -> engine.Job:
        policy = self.policy.but(options)
        mark = b"" if payload is None else fingerprint(payload)
        name = Key(_scope(self._scope, None), _key_name(key, "key"))
        return engine.Job(name, mark, Plan.of(policy), Codec(), "guard")


class Once(_Base):
    """Guards synchronous work: one recorded outcome for each key, replayed to every copy.

    Args:
        store: A ``Store``, or a URL for ``connect``.
        scope: A name that sets keys apart. Decorated functions have one of their own: their
            module and name, so give a scope if they may be renamed while keys live.
        policy: Defaults for all calls; single options may be given instead.

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
        **options: Any,
    ) -> None:
        super().__init__(scope, policy, options)
        self.store = connect(store) if isinstance(store, str) else store
        if not isinstance(self.store, Store):
            raise BackendMismatchError(
                f"Once needs a sync store, got {type(store).__name__}: pass connect(url) or "
                "SQLiteStore(...), or use AsyncOnce"
            )

    def __call__(
        self,
        *bare: object,
        key: KeySource = "",
        ignore: Iterable[str] = (),
        transactional: bool = False,
        on: Any = None,
        **options: Any,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorate a function.

        Args:
            *bare: Nothing: a bare ``@once`` is told what to write.
            key: Which argument is the key: its name, a dotted path into it (``order.id``), or a
                callable that gets the arguments. The other arguments are the payload: the same
                key with another payload is a conflict.
            ignore: Arguments that are not part of the payload, such as a logger.
            transactional: Run the function in a transaction, in which its writes and its answer
                commit together. It writes on ``current_transaction().connection``.
            on: Where that transaction is, if not on the store's own connections.
            **options: Options of ``Policy`` for this function.
        """
        _must_have_key(bare, key)
        if transactional:
            check_transactional(self.store)

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            if engine.is_async(function):
                raise BackendMismatchError(
                    f"{getattr(function, '__qualname__', function)} is async: use AsyncOnce with "
                    "aconnect(url)"
                )
            if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
                raise BackendMismatchError(
                    f"{function.__qualname__} is a generator: return a list, which can be replayed"
                )
            blueprint = self._blueprint(function, key, ignore, options)

            @functools.wraps(function)
            def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
                job = blueprint.job(args, kwargs)
                if transactional:
                    result = call_in_transaction(
                        self.store, on, job, lambda _: function(*args, **kwargs)
                    )
                else:
                    result = engine.call(self.store, job, lambda: function(*args, **kwargs))
                return cast("R", result.value)

            return wrapper

        return decorate

    def transaction(
        self,
        key: str,
        payload: object = None,
        *,
        on: Any = None,
        error_answer: ErrorAnswer | None = None,
        **options: Any,
    ) -> Transaction:
        """Guard a block exactly once: claim, your writes and the answer in one commit.

        Args:
            key: The key.
            payload: What must not change under one key. ``None``: nothing is compared.
            on: Your connection or session, or a pool, engine or sessionmaker to take one from.
                Default: the store's own.
            error_answer: Makes an answer of an error, which is stored with the writes rolled back.
            **options: Options of ``Policy`` for this block.

        Raises:
            TransactionRefusedError: The store has no transactions, or the connection can't be safe.
        """
        check_transactional(self.store)
        return Transaction(self.store, on, self._block(key, payload, options), error_answer)

    def guard(self, key: str, payload: object = None, **options: Any) -> _Guard:
        """Guard a block. It always runs: look at ``replayed`` before you do the work.

        Args:
            key: The key.
            payload: What must not change under one key. ``None``: nothing is compared.
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
        return _Guard(self.store, self._block(key, payload, options))


class _Guard:
    def __init__(self, store: Store, job: engine.Job) -> None:
        self._store = store
        self._job = job
        self._open: OpenClaim | None = None
        self._beat: Beat | None = None
        self._token: Token[Claim] | None = None

    def __enter__(self) -> OpenClaim:
        job = self._job
        claim = engine.open_claim(self._store, job)
        if isinstance(claim, Claim):
            self._beat = Beat(self._store, claim, job.plan)
            self._beat.__enter__()
            self._token = engine.CURRENT.set(claim)
            self._open = OpenClaim(claim)
            return self._open
        if claim.verdict is Verdict.REPLAY:
            return OpenClaim(None, job.codec.decode(claim.answer or b"j"))
        raise engine.refusal(claim, job.operation, job.plan.terms)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        opened = self._open
        if opened is None or opened.claim is None or self._beat is None:
            return
        self._beat.__exit__()
        if self._token is not None:
            engine.CURRENT.reset(self._token)
        if exc is not None:
            engine.give_up(self._store, self._job, opened.claim, exc)
        else:
            engine.record(self._store, self._job, opened.claim, opened.answer)


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
        **options: Any,
    ) -> None:
        super().__init__(scope, policy, options)
        self.store = aconnect(store) if isinstance(store, str) else store
        if not isinstance(self.store, AsyncStore):
            raise BackendMismatchError(
                f"AsyncOnce needs an async store, got {type(store).__name__}: pass aconnect(url) "
                "or SQLiteBackend(...), or use Once"
            )

    def __call__(
        self,
        *bare: object,
        key: KeySource = "",
        ignore: Iterable[str] = (),
        transactional: bool = False,
        on: Any = None,
        **options: Any,
    ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
        """Decorate an async function. See ``Once``."""
        _must_have_key(bare, key)
        if transactional:
            check_transactional(self.store)

        def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
            if not engine.is_async(function):
                raise BackendMismatchError(
                    f"{getattr(function, '__qualname__', function)} is not async: use Once with "
                    "connect(url)"
                )
            blueprint = self._blueprint(function, key, ignore, options)

            @functools.wraps(function)
            async def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
                job = blueprint.job(args, kwargs)
                if transactional:
                    result = await acall_in_transaction(
                        self.store, on, job, lambda _: function(*args, **kwargs)
                    )
                else:
                    result = await engine.acall(self.store, job, lambda: function(*args, **kwargs))
                return cast("R", result.value)

            return wrapper

        return decorate

    def transaction(
        self,
        key: str,
        payload: object = None,
        *,
        on: Any = None,
        error_answer: ErrorAnswer | None = None,
        **options: Any,
    ) -> AsyncTransaction:
        """Guard a block exactly once with ``async with``. See ``Once.transaction``."""
        check_transactional(self.store)
        return AsyncTransaction(self.store, on, self._block(key, payload, options), error_answer)

    def guard(self, key: str, payload: object = None, **options: Any) -> _AsyncGuard:
        """Guard a block with ``async with``. See ``Once.guard``."""
        return _AsyncGuard(self.store, self._block(key, payload, options))


class _AsyncGuard:
    def __init__(self, store: AsyncStore, job: engine.Job) -> None:
        self._store = store
        self._job = job
        self._open: OpenClaim | None = None
        self._guarded: Any = None

    async def __aenter__(self) -> OpenClaim:
        job = self._job
        claim = await engine.aopen_claim(self._store, job)
        if isinstance(claim, Claim):
            self._guarded = engine.guarded(self._store, job, claim)
            await self._guarded.__aenter__()
            self._open = OpenClaim(claim)
            return self._open
        if claim.verdict is Verdict.REPLAY:
            return OpenClaim(None, job.codec.decode(claim.answer or b"j"))
        raise engine.refusal(claim, job.operation, job.plan.terms)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        opened = self._open
        if opened is None or opened.claim is None:
            return
        if exc is None:
            await self._guarded.__aexit__(None, None, None)
            await engine.arecord(self._store, self._job, opened.claim, opened.answer)
            return
        try:
            await self._guarded.__aexit__(exc_type, exc, traceback)
        finally:
            if not isinstance(exc, GeneratorExit):  # then nothing can be awaited any more
                await engine.agive_up(self._store, self._job, opened.claim, exc)
