"""Exactly once: the claim, the caller's writes and the answer in one transaction.

Nobody but the transaction itself sees its claim before it commits, so there is no lease to keep
and nothing to take over: a crash at any point leaves all of it or nothing. A copy that comes
meanwhile finds the key in another's hand at once; it waits without a connection.

Here are the two shells, which make the calls that the flow in ``transaction_flow.py`` asks for, and
the doors to them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Final, Generic, TypeVar, cast

from oncekey._core import drive as driving
from oncekey._core.block import OnlyAsync, OnlySync
from oncekey._core.call import (
    Job,
    Result,
)
from oncekey._core.codec import Codec
from oncekey._core.drive import Pause, adrive, drive
from oncekey._core.fingerprint import fingerprint
from oncekey._core.flows import (
    Plan,
)
from oncekey._core.in_hand import in_hand
from oncekey._core.sources import C
from oncekey._core.switch import switched
from oncekey._core.tasks import deaf, in_background, uncancelled
from oncekey._core.transaction_flow import (
    Ask,
    Block,
    ErrorAnswer,
    Step,
    Steps,
    Tx,
    Whole,
    current_transaction,
    in_transaction,
    open_keys,
)
from oncekey.abc import AsyncStore, AsyncTransactional, Store, Transactional
from oncekey.drivers import check_world, is_drivers
from oncekey.drivers._deadlines import Deadline, Late, acall_in_time, call_in_time, in_time
from oncekey.errors import (
    OncekeyError,
    PolicyError,
    TransactionRefusedError,
)
from oncekey.models import Key, Scope, check_text
from oncekey.policy import Policy, PolicyOptions

__all__ = [
    "AsyncTransaction",
    "ErrorAnswer",
    "Transaction",
    "Tx",
    "acall_in_transaction",
    "call_in_transaction",
    "check_on",
    "check_transactional",
    "current_transaction",
    "in_transaction",
    "job_for",
    "switched",
    "takes_parameter",
]

T = TypeVar("T")


class Transaction(OnlySync, Block, Generic[C]):
    """``with store.transaction(...)``: see the store's method."""

    awaits = False

    def _whole(self, flow: Steps[T]) -> Steps[T]:
        return flow  # nothing can come between but an interrupt, which is thrown into it

    def _do(self, step: Step) -> Any:
        """Make the call that a flow asks for."""
        if isinstance(step, Ask):
            return step.call(*step.args)
        if isinstance(step, Pause):
            driving._must_not_stall()
            return self._store.wait(step.key, step.seconds)
        deadline = None if self._seconds is None else Deadline(self._seconds)
        call: Any = step  # of the driver, with its arguments
        try:
            if deadline is None or self._connection is None:
                return call[0](*call[1:])
            return call_in_time(self._connection.raw, deadline, *call)
        except Exception as error:
            if not isinstance(error, Late) and not is_drivers(error):
                raise
            self._raise(error, deadline)

    def _abandon(self) -> None:
        """Leave nothing open, wherever an interrupt came. What is settled stays as it is."""
        try:
            if self._claim is not None:
                self._claim.ended = True
            self._leave()
            here = (id(self._store), self._digest)
            if self._tx is not None and here in open_keys.get():  # set, and not noted yet
                open_keys.set(open_keys.get() - {here})
            drive(self._roll_back(), self._do)
        finally:
            in_hand.give(self._store, self._digest, self._hold)
        self.__class__ = Transaction  # pyright: ignore[reportAttributeAccessIssue]

    def __enter__(self) -> Tx[C]:
        self.__class__ = _OpenTransaction  # pyright: ignore[reportAttributeAccessIssue]
        try:
            return self._opened(drive(self._enter_flow(), self._do))
        except BaseException:
            self._abandon()
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._leave()
            drive(self._exit_flow(exc), self._do)
        except BaseException:
            self._abandon()
            raise
        self.__class__ = Transaction  # pyright: ignore[reportAttributeAccessIssue]


class _OpenTransaction(Transaction[C]):
    """One that is under way. Only it has a finalizer: an interrupt that came in one is lost."""

    def __del__(self) -> None:
        self._abandon()  # interrupted before the first step of __exit__


class AsyncTransaction(OnlyAsync, Block, Generic[C]):
    """``async with store.transaction(...)``: see the store's method."""

    awaits = True

    def _whole(self, flow: Steps[T]) -> Steps[T]:
        return (yield Whole(flow))  # type: ignore[no-any-return]

    async def _do(self, step: Step) -> Any:
        """Make the call that a flow asks for, and await it."""
        if isinstance(step, Whole):
            return await self._uncancelled(adrive(step.flow, self._do))
        if isinstance(step, Ask):
            return await step.call(*step.args)
        if isinstance(step, Pause):
            return await self._store.wait(step.key, step.seconds)
        connection = self._connection
        deadline = None if self._seconds is None else Deadline(self._seconds)
        try:
            if deadline is None:
                return await step[0](*step[1:])
            if connection is not None:
                if connection.watch is not None:
                    return await connection.watch.call(deadline, *step)
                return await acall_in_time(connection.raw, deadline, *step)
            async with in_time(deadline):
                return await step[0](*step[1:])
        except OncekeyError:
            raise
        except Exception as error:  # noqa: BLE001 - it is raised, by its name
            self._raise(error, deadline)

    def _thrown_away(self, error: BaseException) -> None:
        """A generator was closed inside the block, where nothing can be awaited."""
        in_hand.give(self._store, self._digest, self._hold)
        work = adrive(self._exit_flow(error), self._do)
        try:
            in_background(work)
        except RuntimeError:  # its loop is gone too: the server rolls back
            work.close()

    async def _settle(self, error: BaseException | None) -> Result | None:
        """The outcome is decided whatever happens to this task meanwhile."""
        return await self._uncancelled(adrive(self._exit_flow(error), self._do))

    def _uncancelled(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Let a cancellation come after the work: nobody could tell how far it went."""
        connection = self._connection
        return (deaf if connection is not None and connection.never_cancels else uncancelled)(work)

    async def __aenter__(self) -> Tx[C]:
        return self._opened(await adrive(self._enter_flow(), self._do))

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()
        if isinstance(exc, GeneratorExit):
            self._thrown_away(exc)
            return
        await self._settle(exc)


# The doors to it


def takes_parameter(handler: Callable[..., Any], name: str) -> bool:
    """Whether ``handler`` has a parameter of that name."""
    return name in inspect.signature(handler).parameters


def check_on(on: Any, transactional: bool) -> None:
    """Raise if a connection was passed that nothing would be written on."""
    if on is not None and not transactional:
        raise PolicyError(
            "on= needs transactional=True: without it your writes and the record are not one "
            "commit, and after a crash the work may be done again"
        )


def check_transactional(store: Any, on: Any = None, transactional: bool = True) -> None:
    """Raise unless ``store`` can share a transaction, with ``on`` if that is known already.

    If none is wanted, raise for ``on`` alone.
    """
    check_on(on, transactional)
    if not transactional:
        return
    if not isinstance(store, (Transactional, AsyncTransactional)):
        if why := getattr(store, "no_transactions", ""):
            raise TransactionRefusedError(why)
        raise TransactionRefusedError(
            f"{type(store).__name__} has no transactions to share: use a PostgreSQL or SQLite "
            "store on the database that your own tables are in"
        )
    if on is not None:
        check_world(on, isinstance(store, AsyncStore))


@functools.lru_cache(maxsize=256)
def _plan(options: tuple[tuple[str, Any], ...]) -> Plan:
    policy = Policy().but(dict(options))
    policy.check_transactional()
    return Plan.of(policy)


@functools.lru_cache(maxsize=256)
def _scope(name: str) -> Scope:
    return Scope("once", check_text(name or "default", "scope"))


_ANY: Final = Codec(Any)


def job_for(key: str, payload: object, scope: str, returns: Any, options: PolicyOptions) -> Job:
    """The same record as ``Once(store, scope=scope).guard(key, payload)``."""
    name = Key(_scope(scope), check_text(key, "key"))
    mark = b"" if payload is None else fingerprint(payload)
    codec = _ANY if returns is None else Codec(returns)
    return Job(name, mark, _plan(tuple(options.items())), codec, "transaction")


def call_in_transaction(
    store: Store,
    on: Any,
    job: Job,
    handler: Callable[[Tx], Any],
    error_answer: ErrorAnswer | None = None,
) -> Result:
    """Run ``handler`` in a transaction if nobody else did, else give its stored answer back."""
    block = Transaction(store, on, job, error_answer)
    block._raises = False
    try:
        tx = block.__enter__()
        if tx.replayed:
            block.__class__ = Transaction
            return Result(tx.answer, True)
        try:
            tx.answer = handler(tx)
        except BaseException as error:
            block._leave()
            result = drive(block._exit_flow(error), block._do)
            if result is None:
                raise
        else:
            block._leave()
            result = cast("Result", drive(block._exit_flow(None), block._do))
    except BaseException:
        block._abandon()
        raise
    block.__class__ = Transaction
    return result


async def acall_in_transaction(
    store: AsyncStore,
    on: Any,
    job: Job,
    handler: Callable[[Tx], Awaitable[Any]],
    error_answer: ErrorAnswer | None = None,
) -> Result:
    """Run ``handler`` in a transaction if nobody else did, else give its stored answer back."""
    block = AsyncTransaction(store, on, job, error_answer)
    block._raises = False
    tx = await block.__aenter__()
    if tx.replayed:
        return Result(tx.answer, True)
    try:
        try:
            tx.answer = await handler(tx)
        finally:
            block._leave()
    except GeneratorExit as error:
        block._thrown_away(error)
        raise
    except BaseException as error:
        failed = await block._settle(error)
        if failed is None:
            raise
        return failed
    return cast("Result", await block._settle(None))
