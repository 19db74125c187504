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
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from oncekey.models import CachedResponse, ClaimReply, Key, Record, Scope, Terms

__all__ = [
    "AsyncHand",
    "AsyncStore",
    "AsyncSweepable",
    "AsyncTransactional",
    "ClockInjectable",
    "Hand",
    "IdempotencyBackend",
    "Markable",
    "Store",
    "Sweepable",
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

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncStore(ABC):
    """An asynchronous store, safe to use from several tasks. Same obligations as ``Store``."""

    poll_seconds: float = 0.25
    """The longest a waiter sleeps between two looks, where nothing wakes it earlier."""

    never_waits: bool = False
    """Whether its methods (but for ``wait``) never give way to other tasks, as in memory."""

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

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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


class Transactional(ABC):
    """A store whose records can change inside a caller's own transaction.

    A *hand* is one such transaction: on a connection that the caller passed, or on one that the
    store took from its own. It is opened, claims the key, is completed or not, and is committed or
    rolled back; in a transaction that was open before, all of that happens in a savepoint, and the
    caller commits.

    Attributes:
        one_writer: Two transactions at once wait for each other, so that one can't be inside
            another.
    """

    one_writer: bool = False

    @abstractmethod
    def hand(self, on: Any) -> Hand:
        """A hand on the caller's connection, session or pool; ``None``: the store's own.

        Raises:
            TransactionRefusedError: That can't be safe; says why.
        """

    @abstractmethod
    def peek(self, key: Key, fingerprint: bytes, terms: Terms) -> ClaimReply | None:
        """What a claim would get if nothing had to be written for it, else ``None``."""

    @abstractmethod
    def settled_here(self, key: Key) -> None:
        """A transaction of this process has ended: wake who waits for ``key``."""


class AsyncTransactional(ABC):
    """The asynchronous form of ``Transactional``."""

    one_writer: bool = False

    @abstractmethod
    def hand(self, on: Any) -> AsyncHand:
        """A hand on the caller's connection, session or pool; ``None``: the store's own.

        Raises:
            TransactionRefusedError: That can't be safe; says why.
        """

    @abstractmethod
    async def peek(self, key: Key, fingerprint: bytes, terms: Terms) -> ClaimReply | None:
        """What a claim would get if nothing had to be written for it, else ``None``."""

    @abstractmethod
    def settled_here(self, key: Key) -> None:
        """A transaction of this process has ended: wake who waits for ``key``."""


class Hand(ABC):
    """One transaction that a claim, the caller's writes and the answer share.

    Attributes:
        target: What the caller writes on: a connection or a session.
        joined: The transaction was open before, and is the caller's to commit.
    """

    target: Any
    joined: bool

    @abstractmethod
    def open(self) -> None:
        """Begin a transaction, or a savepoint in the one that is open."""

    @abstractmethod
    def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        """Claim in this transaction. What another transaction has in hand is in flight at once."""

    @abstractmethod
    def complete(self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms) -> bool:
        """Record the answer in this transaction."""

    @abstractmethod
    def flush(self) -> None:
        """Send what the caller's session still holds back. Its errors are the caller's."""

    @abstractmethod
    def mark(self) -> None:
        """Remember this point."""

    @abstractmethod
    def undo(self) -> None:
        """Roll back to the remembered point."""

    @abstractmethod
    def commit(self) -> None:
        """Commit, or end the savepoint."""

    @abstractmethod
    def rollback(self) -> None:
        """Undo everything since ``open``, and give the connection back."""


class AsyncHand(ABC):
    """The asynchronous form of ``Hand``."""

    target: Any
    joined: bool

    @abstractmethod
    async def open(self) -> None:
        """Begin a transaction, or a savepoint in the one that is open."""

    @abstractmethod
    async def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        """Claim in this transaction. What another transaction has in hand is in flight at once."""

    @abstractmethod
    async def complete(
        self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> bool:
        """Record the answer in this transaction."""

    @abstractmethod
    async def flush(self) -> None:
        """Send what the caller's session still holds back. Its errors are the caller's."""

    @abstractmethod
    async def mark(self) -> None:
        """Remember this point."""

    @abstractmethod
    async def undo(self) -> None:
        """Roll back to the remembered point."""

    @abstractmethod
    async def commit(self) -> None:
        """Commit, or end the savepoint."""

    @abstractmethod
    async def rollback(self) -> None:
        """Undo everything since ``open``, and give the connection back."""


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
