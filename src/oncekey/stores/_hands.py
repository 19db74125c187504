"""A link to a caller's connection and a store's own statements, put together: a hand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Protocol

from oncekey._core.call import Job, _uncancelled
from oncekey._core.codec import Codec
from oncekey._core.flows import Plan
from oncekey._core.payload import fingerprint
from oncekey._core.transact import AsyncTransaction, ErrorAnswer, Transaction
from oncekey.abc import AsyncHand, AsyncTransactional, Hand, Transactional
from oncekey.drivers._deadlines import Deadline, Late, alimited, end, in_time, limited
from oncekey.errors import (
    OncekeyError,
    StoreError,
    StoreReadOnlyError,
    TransactionRefusedError,
)
from oncekey.models import ClaimReply, Key, Scope, Terms, check_text
from oncekey.policy import Policy
from oncekey.stores._async_links import AsyncLink
from oncekey.stores._links import Link, is_drivers, raw_connection

__all__ = ["AsyncSqlHand", "AsyncTransactions", "Book", "SqlHand", "Transactions", "driver_error"]

Steps = Generator[tuple[str, list[Any]], list[Any], Any]


class Book(Protocol):
    """How a store keeps its records on a connection that is not its own."""

    flavour: str

    def claim(
        self, joined: bool, key: Key, owner: bytes, fingerprint: bytes, terms: Terms
    ) -> Steps: ...
    def complete(
        self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> Steps: ...
    def named(self, error: BaseException) -> StoreError: ...


def _checked(link: Any, book: Book) -> None:
    if link.flavour != book.flavour:
        raise TransactionRefusedError(
            f"this connection is to {link.flavour}, the store is {book.flavour}: only what lies in "
            "one database commits together"
        )


def driver_error(error: BaseException) -> BaseException:
    """What the driver raised, out of what SQLAlchemy or Django made of it."""
    inner = getattr(error, "orig", None)
    if inner is not None:
        error = inner
    if type(error).__module__.startswith(("django.", "sqlalchemy.")):
        error = error.__cause__ or error
    return error


def _named(book: Book, error: Exception) -> Exception:
    """What to raise for an error: a caller's own mistake stays as it is."""
    cause = driver_error(error)
    if str(getattr(cause, "sqlstate", None) or "").startswith("23"):
        return error  # a constraint of the caller's, checked at the commit
    foreign = type(cause).__module__.startswith(("django.", "sqlalchemy."))
    if foreign and type(cause).__name__ != "TimeoutError":
        return TransactionRefusedError(f"this can't be used for a transaction: {cause}")
    return book.named(cause)


FLUSHES = 12  # what an ORM sends at the end is the caller's own work: it gets so many times as long


class _Timed:
    """What the sync and the async hand have in common: how long a step may take.

    A step that is late ends the connection, and with it the transaction: what it did is undone,
    unless it was the commit.
    """

    _link: Any = None
    _book: Any = None
    left = False

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout

    def _deadline(self, sent: bool = False, times: int = 1) -> Deadline | None:
        if self._timeout is None:
            return None
        deadline = Deadline(self._timeout * times)
        deadline.sent = sent
        return deadline

    def _raw(self) -> Any:
        timed = self._timeout is not None and self._link is not None
        return raw_connection(self._link) if timed else None

    def _failed(self, error: Exception, raw: Any, deadline: Deadline | None) -> Exception:
        """What to raise. A connection that is not the caller's is left if another may do better."""
        if isinstance(error, Late) and deadline is not None:
            failed: Exception = deadline.missed()
        else:
            failed = _named(self._book, error)
        dead = isinstance(error, Late) or isinstance(failed, StoreReadOnlyError)
        if dead and getattr(self._link, "_close", None):
            self.left = True
            end(raw)
        return failed


class SqlHand(_Timed, Hand):
    """A hand on a synchronous connection."""

    def __init__(
        self, link: Callable[[], Link], book: Callable[[], Book], timeout: float | None = None
    ) -> None:
        super().__init__(timeout)
        self._make_link = link
        self._make_book = book
        self.joined = False

    def open(self) -> None:
        self._book = self._make_book()
        self._link = link = self._do(self._make_link)
        try:
            _checked(link, self._book)
            self._do(link.begin)
        except BaseException:
            link.rollback()  # as far as it had begun
            raise
        self.joined = link.joined
        self.target = link.target

    def _do(self, call: Callable[..., Any], *args: Any, sent: bool = False) -> Any:
        raw, deadline = self._raw(), self._deadline(sent)
        try:
            with limited(raw, deadline):
                return call(*args)
        except Exception as error:
            if not isinstance(error, Late) and not is_drivers(error):
                raise
            raise self._failed(error, raw, deadline) from error

    def _drive(self, steps: Steps) -> Any:
        try:
            step = next(steps)
            while True:
                step = steps.send(self._do(self._link.execute, *step))
        except StopIteration as stop:
            return stop.value

    def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        steps = self._book.claim(self.joined, key, owner, fingerprint, terms)
        reply: ClaimReply = self._drive(steps)
        return reply

    def complete(self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms) -> bool:
        self._link.must_be_open()
        return bool(self._drive(self._book.complete(key, owner, fence, answer, terms)))

    def flush(self) -> None:
        with limited(self._raw(), self._deadline(times=FLUSHES)):
            self._link.flush()

    def mark(self) -> None:
        self._do(self._link.savepoint)

    def undo(self) -> None:
        self._do(self._link.undo)

    def commit(self) -> None:
        self._do(self._link.commit, sent=True)

    def rollback(self) -> None:
        if self._link is not None:
            self._do(self._link.rollback)


async def _in_time(
    raw: Any, deadline: Deadline | None, call: Callable[..., Coroutine[Any, Any, Any]], *args: Any
) -> Any:
    async with alimited(raw, deadline):
        return await call(*args)


class AsyncSqlHand(_Timed, AsyncHand):
    """A hand on an asynchronous connection."""

    def __init__(
        self,
        link: Callable[[], Awaitable[AsyncLink]],
        book: Callable[[], Awaitable[Book]],
        timeout: float | None = None,
    ) -> None:
        super().__init__(timeout)
        self._make_link = link
        self._make_book = book
        self.joined = False

    async def open(self) -> None:
        self._book = await self._make_book()
        deadline = self._deadline()
        try:
            async with in_time(deadline):
                self._link = link = await self._make_link()  # waiting for a pool may be cancelled
        except OncekeyError:
            raise
        except Exception as error:
            if isinstance(error, Late | TimeoutError) and deadline is not None:
                raise deadline.missed() from None
            raise _named(self._book, error) from error
        try:
            _checked(link, self._book)
            await self._do(link.begin)
        except BaseException:
            await _uncancelled(link.rollback())  # as far as it had begun
            raise
        self.joined = link.joined
        self.target = link.target

    async def _do(
        self, call: Callable[..., Coroutine[Any, Any, Any]], *args: Any, sent: bool = False
    ) -> Any:
        # Never cancelled halfway: nobody could tell whether a BEGIN or COMMIT went through.
        raw, deadline = self._raw(), self._deadline(sent)
        try:
            return await _uncancelled(_in_time(raw, deadline, call, *args))
        except OncekeyError:
            raise
        except Exception as error:
            raise self._failed(error, raw, deadline) from error

    async def _drive(self, steps: Steps) -> Any:
        try:
            step = next(steps)
            while True:
                step = steps.send(await self._do(self._link.execute, *step))
        except StopIteration as stop:
            return stop.value

    async def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        steps = self._book.claim(self.joined, key, owner, fingerprint, terms)
        reply: ClaimReply = await self._drive(steps)
        return reply

    async def complete(
        self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> bool:
        self._link.must_be_open()
        return bool(await self._drive(self._book.complete(key, owner, fence, answer, terms)))

    async def flush(self) -> None:
        deadline = self._deadline(times=FLUSHES)
        await _uncancelled(_in_time(self._raw(), deadline, self._link.flush))

    async def mark(self) -> None:
        await self._do(self._link.savepoint)

    async def undo(self) -> None:
        await self._do(self._link.undo)

    async def commit(self) -> None:
        await self._do(self._link.commit, sent=True)

    async def rollback(self) -> None:
        if self._link is not None:
            await self._do(self._link.rollback)


def _job(key: str, payload: object, scope: str, returns: Any, options: dict[str, Any]) -> Job:
    """The same record as ``Once(store, scope=scope).guard(key, payload)``."""
    name = Key(Scope("once", check_text(scope or "default", "scope")), check_text(key, "key"))
    mark = b"" if payload is None else fingerprint(payload)
    return Job(name, mark, Plan.of(Policy().but(options)), Codec(returns or Any), "transaction")


class Transactions(Transactional):
    """``transaction()`` for a synchronous store."""

    def transaction(
        self,
        key: str,
        payload: object = None,
        *,
        on: Any = None,
        scope: str = "",
        error_answer: ErrorAnswer | None = None,
        returns: Any = None,
        **options: Any,
    ) -> Transaction:
        """Claim ``key``, write what you write, and record the answer: all in one commit.

        The block always runs: look at ``replayed`` first. An error in it rolls back everything.

        Args:
            key: The key.
            payload: What must not change under one key. ``None``: nothing is compared.
            on: Your connection or session, or a pool, engine or sessionmaker to take one from.
                Default: the store's own. In a transaction that is open already the block joins
                in by a savepoint: you commit, and a copy in flight is an error at once.
            scope: A name that sets keys apart.
            error_answer: Makes an answer of an error: it is stored, with the block's writes rolled
                back, and replayed; the error still reaches you. ``None`` from it: store nothing.
            returns: The answer's type, if it is or has a Pydantic model or a dataclass.
            **options: Options of ``Policy``.

        Raises:
            IdempotencyError: Conflict, in flight past the wait, or expired.
            TransactionRefusedError: That connection can't be safe; says why.
            StoreError: The database failed. Where the outcome of a commit is unknown, retry with
                the same key: it is replayed, or done.
        """
        return Transaction(self, on, _job(key, payload, scope, returns, options), error_answer)


class AsyncTransactions(AsyncTransactional):
    """``transaction()`` for an asynchronous store."""

    def transaction(
        self,
        key: str,
        payload: object = None,
        *,
        on: Any = None,
        scope: str = "",
        error_answer: ErrorAnswer | None = None,
        returns: Any = None,
        **options: Any,
    ) -> AsyncTransaction:
        """Claim ``key``, write, and record the answer in one commit, with ``async with``.

        Takes what the sync store's ``transaction`` takes, with asynchronous connections.
        """
        return AsyncTransaction(self, on, _job(key, payload, scope, returns, options), error_answer)
