"""What a store must do: ``Store`` and ``AsyncStore``, proven by ``oncekey.conformance``.

The obligations, for every method that changes a record:

* **Who may win.** Of any number of concurrent claims of one key, from any thread, process or
  machine that shares the store, exactly one wins while its lease runs.
* **What must be atomic.** Reading the record, deciding by the tables in
  ``oncekey.transitions`` and writing the result are one step that nobody can come between.
* **Whose clock counts.** The store's: a server's own, else the machine's or an injected one. The
  caller's clock never decides.
* **What a reply means.** Once a method has returned, its change survives whatever the store says
  that it survives. A method that raises may or may not have made its change, and calling it again
  with the same owner must be safe.
* **Fences rise.** Every win of a key has a higher fence than any before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

from oncekey.errors import StoreError
from oncekey.models import ClaimReply, Entry, Key, Page, Record, Scope, Terms

if TYPE_CHECKING:
    from oncekey._cached import CachedResponse
    from oncekey._core.sources import AsyncSource, C, Source
    from oncekey._core.transact import AsyncTransaction, Transaction
    from oncekey.policy import PolicyOptions

__all__ = [
    "AsyncBrowsable",
    "AsyncCountable",
    "AsyncStore",
    "AsyncSweepable",
    "AsyncTransactional",
    "Browsable",
    "ClockInjectable",
    "Countable",
    "IdempotencyBackend",
    "Loan",
    "Markable",
    "Store",
    "Sweepable",
    "TransactionRecords",
    "Transactional",
]

Clock = Callable[[], float]


class Store(ABC):
    """A synchronous store. Safe to use from several threads and after a fork."""

    poll_seconds: float = 0.25
    """The longest a waiter sleeps between two looks, where nothing wakes it earlier."""

    never_waits: bool = False
    """Whether its methods (but for ``wait``) give an answer at once, as in memory."""

    @abstractmethod
    def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        """Try to become the one that runs. ``owner`` is fresh for every call, never reused."""

    @abstractmethod
    def complete(self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms) -> bool:
        """Record the outcome. False: this owner no longer holds the key, nothing was written."""

    @abstractmethod
    def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        """Count the lease from now. False: the claim is lost."""

    @abstractmethod
    def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        """Give the key back without an outcome. The record stays, so that fences keep rising."""

    @abstractmethod
    def first_seen(self, key: Key, terms: Terms) -> bool:
        """Mark the key. True exactly once in ``terms.ttl_ms``."""

    @abstractmethod
    def read(self, key: Key) -> Record | None:
        """The record as it stands, also when it is expired, or ``None``."""

    @abstractmethod
    def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> None:
        """Put a completed record, over whatever is there. ``expires_at`` is epoch milliseconds."""

    @abstractmethod
    def now(self) -> int:
        """Milliseconds since 1970 on the clock that decides."""

    @abstractmethod
    def clear(self) -> None:
        """Remove every record. For tests."""

    @abstractmethod
    def close(self) -> None:
        """Give back what this store opened. Closing twice does nothing."""

    def wait(self, key: Key, seconds: float) -> None:
        """Sleep until ``key`` may have changed, at most ``seconds``. Waking early is fine."""
        import time

        time.sleep(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncStore(ABC):
    """An asynchronous store, safe to use from several tasks. Same obligations as ``Store``."""

    poll_seconds: float = 0.25
    """The longest a waiter sleeps between two looks, where nothing wakes it earlier."""

    never_waits: bool = False
    """Whether its methods (but for ``wait``) never give way to other tasks, as in memory."""

    at_once: Store | None = None
    """The same records for plain calls, where ``never_waits`` and there is such a way."""

    @abstractmethod
    async def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        """Try to become the one that runs. ``owner`` is fresh for every call, never reused."""

    @abstractmethod
    async def complete(
        self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> bool:
        """Record the outcome. False: this owner no longer holds the key, nothing was written."""

    @abstractmethod
    async def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        """Count the lease from now. False: the claim is lost."""

    @abstractmethod
    async def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        """Give the key back without an outcome. The record stays, so that fences keep rising."""

    @abstractmethod
    async def first_seen(self, key: Key, terms: Terms) -> bool:
        """Mark the key. True exactly once in ``terms.ttl_ms``."""

    @abstractmethod
    async def read(self, key: Key) -> Record | None:
        """The record as it stands, also when it is expired, or ``None``."""

    @abstractmethod
    async def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> None:
        """Put a completed record, over whatever is there. ``expires_at`` is epoch milliseconds."""

    @abstractmethod
    async def now(self) -> int:
        """Milliseconds since 1970 on the clock that decides."""

    @abstractmethod
    async def clear(self) -> None:
        """Remove every record. For tests."""

    @abstractmethod
    async def aclose(self) -> None:
        """Give back what this store opened. Closing twice does nothing."""

    async def wait(self, key: Key, seconds: float) -> None:
        """Sleep until ``key`` may have changed, at most ``seconds``. Waking early is fine."""
        import asyncio

        await asyncio.sleep(seconds)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


class Sweepable(ABC):
    """A store that removes records past their time. It also sweeps by itself, in small steps."""

    @abstractmethod
    def sweep(self, limit: int = 1000, now: int | None = None) -> int:
        """Remove at most about ``limit`` records that are past their time. Gives how many."""


class AsyncSweepable(ABC):
    """The asynchronous form of ``Sweepable``."""

    @abstractmethod
    async def sweep(self, limit: int = 1000, now: int | None = None) -> int:
        """Remove at most about ``limit`` records that are past their time. Gives how many."""


class Browsable(ABC):
    """A store whose records an operator can look through. Keys are known by their digests.

    Neither method gives an answer away, or holds up those who claim: a page is a short look.
    """

    @abstractmethod
    def browse(self, cursor: str = "", limit: int = 1000) -> Page:
        """Records in the store's own order, after ``cursor``; looks at about ``limit`` of them.

        Each record that is there throughout is in some page, and may be in two. A page may be
        empty before the last.

        Raises:
            StoreConfigError: ``cursor`` is not from a page of this store.
        """

    @abstractmethod
    def find(self, digest: bytes) -> Entry | None:
        """The record of the key with that digest."""


class AsyncBrowsable(ABC):
    """The asynchronous form of ``Browsable``."""

    @abstractmethod
    async def browse(self, cursor: str = "", limit: int = 1000) -> Page:
        """Records in the store's own order, after ``cursor``; looks at about ``limit`` of them."""

    @abstractmethod
    async def find(self, digest: bytes) -> Entry | None:
        """The record of the key with that digest."""


class Countable(ABC):
    """A store that can count for all who share it."""

    @abstractmethod
    def count(self, key: Key, window_ms: int) -> tuple[int, int]:
        """Count one under ``key``: how many that are in this window, and milliseconds to its end.

        A window begins with the first that is counted in it, and counting is one atomic step. A
        count that is repeated after a lost reply may count twice.
        """


class AsyncCountable(ABC):
    """The asynchronous form of ``Countable``."""

    @abstractmethod
    async def count(self, key: Key, window_ms: int) -> tuple[int, int]:
        """Count one under ``key``: how many in this window, and milliseconds to its end."""


class Loan:
    """A connection that a store lends for one transaction.

    Whoever borrows makes it, and the store notes in it what it takes as it takes it: should an
    interrupt come between, the borrower knows what to give back.

    Attributes:
        source: The connection, or a pool or engine that has one.
        close: Takes ``source`` back; called again it does nothing. ``None``: nothing to take back.
    """

    source: Any = None
    close: Callable[[Any], Any] | None = None


class _Transactions(ABC):
    """A store whose records can change inside a transaction of somebody else's.

    The store says what to send there, in ``TransactionRecords``, and lends a connection where the
    caller has none. Who begins and commits is ``transaction()``.

    Attributes:
        one_writer: Two transactions at once wait for each other, so that one can't be inside
            another.
        timeout: Seconds that one step of a transaction may take, and getting a connection.
            ``None``: as long as it takes.
    """

    one_writer: bool = False
    timeout: Any = None

    @abstractmethod
    def records(self) -> Any:
        """The ``TransactionRecords`` for one transaction; awaited in an asynchronous store."""

    @abstractmethod
    def lend(self, loan: Loan) -> Any:
        """Note a connection in ``loan``, for one transaction; awaited in an asynchronous store.

        Raises:
            TransactionRefusedError: The store has none to lend; says why.
        """

    @abstractmethod
    def peek(self, key: Key, fingerprint: bytes, terms: Terms) -> Any:
        """What a claim would get if nothing had to be written for it, else ``None``.

        Awaited in an asynchronous store.
        """

    @abstractmethod
    def settled_here(self, key: Key) -> None:
        """A transaction of this process has ended: wake who waits for ``key``."""


class Transactional(_Transactions):
    """A synchronous store that can take part in transactions."""

    @overload
    def transaction(
        self,
        key: str,
        payload: object = None,
        *,
        on: Source[C],
        scope: str = "",
        error_answer: Callable[[Exception], Any] | None = None,
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
        scope: str = "",
        error_answer: Callable[[Exception], Any] | None = None,
        returns: Any = None,
        **options: Unpack[PolicyOptions],
    ) -> Transaction[C]: ...
    def transaction(
        self,
        key: str,
        payload: object = None,
        *,
        on: Any = None,
        scope: str = "",
        error_answer: Callable[[Exception], Any] | None = None,
        returns: Any = None,
        **options: Unpack[PolicyOptions],
    ) -> Transaction[Any]:
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
        from oncekey._core.transact import Transaction, job_for, switched

        return Transaction(
            switched(self), on, job_for(key, payload, scope, returns, options), error_answer
        )


class AsyncTransactional(_Transactions):
    """An asynchronous store that can take part in transactions."""

    @overload
    def transaction(
        self,
        key: str,
        payload: object = None,
        *,
        on: AsyncSource[C],
        scope: str = "",
        error_answer: Callable[[Exception], Any] | None = None,
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
        scope: str = "",
        error_answer: Callable[[Exception], Any] | None = None,
        returns: Any = None,
        **options: Unpack[PolicyOptions],
    ) -> AsyncTransaction[C]: ...
    def transaction(
        self,
        key: str,
        payload: object = None,
        *,
        on: Any = None,
        scope: str = "",
        error_answer: Callable[[Exception], Any] | None = None,
        returns: Any = None,
        **options: Unpack[PolicyOptions],
    ) -> AsyncTransaction[Any]:
        """Claim ``key``, write, and record the answer in one commit, with ``async with``.

        Takes what the sync store's ``transaction`` takes, with asynchronous connections.
        """
        from oncekey._core.transact import AsyncTransaction, job_for, switched

        job = job_for(key, payload, scope, returns, options)
        return AsyncTransaction(switched(self), on, job, error_answer)


class TransactionRecords(ABC):
    """A store's records inside one transaction: what to send, and what the rows mean.

    Its methods are generators, so that they are the same for sync and async connections: ``rows =
    yield from on.execute(sql, args)`` runs a statement on the connection that they are given.

    Attributes:
        flavour: Which databases it is for: ``postgresql`` or ``sqlite``.
    """

    flavour: str

    @abstractmethod
    def claim(
        self, on: Any, key: Key, owner: bytes, fingerprint: bytes, terms: Terms
    ) -> Generator[Any, Any, ClaimReply]:
        """Claim in this transaction. What another transaction has in hand is in flight at once.

        ``on.joined`` says that the transaction was open before.
        """

    @abstractmethod
    def complete(
        self, on: Any, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> Generator[Any, Any, bool]:
        """Record the answer in this transaction."""

    @abstractmethod
    def named(self, error: BaseException) -> StoreError:
        """An error of the driver's with a name, a reason and a fix."""


class Markable(ABC):
    """A store whose ``first_seen`` never waits, so that it can be had as a plain, fast function."""

    @abstractmethod
    def marker(self, scope: Scope, terms: Terms) -> Callable[[str], bool]:
        """``first_seen`` for the keys of one scope: give it a key's name.

        The function raises ``InvalidKeyError`` for a name that can't be a key.
        """


class ClockInjectable(ABC):
    """A store without a server's clock: it takes the machine's, or one that is passed in."""

    @abstractmethod
    def with_clock(self, clock: Clock) -> Self:
        """The same records, seen by another clock (seconds since 1970)."""


class IdempotencyBackend(ABC):
    """The small public contract: answers by scope and key.

    A subclass with only these three methods works under ``IdempotencyStore`` and
    ``WebhookDedupStore``. It can't claim, so that concurrent duplicates are held apart within one
    process only; a warning says so once. Subclass ``AsyncStore`` as well for the full guarantee.
    The arguments are passed by position, so that ``scope_key`` may as well be ``principal_id``.
    """

    @abstractmethod
    async def get(self, scope_key: str, key: str) -> CachedResponse | None:
        """The live entry, or ``None`` if it is missing or expired."""

    @abstractmethod
    async def put(self, scope_key: str, key: str, entry: CachedResponse) -> None:
        """Store ``entry``, over any entry that is there."""

    @abstractmethod
    async def delete_expired(self, now_epoch: float | None = None) -> int:
        """Remove entries that expired by ``now_epoch`` (default: now). Gives how many."""
