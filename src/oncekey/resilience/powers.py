"""What only some stores can do, passed on by the store around them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Generator
from typing import Any, Final

from oncekey._core.drive import Flow, Op, arun, run
from oncekey.abc import (
    AsyncBrowsable,
    AsyncCountable,
    AsyncSweepable,
    AsyncTransactional,
    Browsable,
    Clock,
    ClockInjectable,
    Countable,
    Loan,
    Store,
    Sweepable,
    Transactional,
    TransactionRecords,
)
from oncekey.drivers._deadlines import Late
from oncekey.errors import StoreError, StoreUnavailableError
from oncekey.models import ClaimReply, Key, Terms
from oncekey.policy import OnOutage
from oncekey.resilience.around import Around
from oncekey.resilience.breaker import Breaker
from oncekey.resilience.fallback import Fallback
from oncekey.resilience.stores import AsyncResilientStore, ResilientStore

__all__ = ["made"]

# What only some stores have, each for itself: what a class has, it is taken to be able to do.


class _Sweeps(Around):
    def sweep(self, limit: int = 1000, now: int | None = None) -> Any:
        return self.store.sweep(limit, now)


class _Sweeping(_Sweeps, Sweepable):
    pass


class _AsyncSweeping(_Sweeps, AsyncSweepable):
    pass


class _Browses(Around):
    def browse(self, cursor: str = "", limit: int = 1000) -> Any:
        return self.store.browse(cursor, limit)

    def find(self, digest: bytes) -> Any:
        return self.store.find(digest)


class _Browsing(_Browses, Browsable):
    pass


class _AsyncBrowsing(_Browses, AsyncBrowsable):
    pass


class _Counting(Around, Countable):
    def count(self, key: Key, window_ms: int) -> tuple[int, int]:
        return run(self._counted(key, window_ms), self.store)


class _AsyncCounting(Around, AsyncCountable):
    async def count(self, key: Key, window_ms: int) -> tuple[int, int]:
        return await arun(self._counted(key, window_ms), self.store)


class _Timed(Around, ClockInjectable):
    def with_clock(self, clock: Clock) -> Any:
        return made(self.store.with_clock(clock), self.breaker, self._fallback, self.on_outage)


class _WatchedRecords:
    """A transaction's records, with the breaker looking on.

    Whatever fails in a transaction gets its name here, so that it is counted here.
    """

    def __init__(self, records: TransactionRecords, breaker: Breaker) -> None:
        self._records = records
        self._breaker = breaker
        self.flavour = records.flavour
        self.complete = records.complete

    def named(self, error: BaseException) -> StoreError:
        said = self._records.named(error)
        if isinstance(said, StoreUnavailableError):
            self._breaker.noticed(said)
        return said

    def claim(
        self, on: Any, key: Key, owner: bytes, fingerprint: bytes, terms: Terms
    ) -> Generator[Any, Any, ClaimReply]:
        given = self._breaker.admit()
        try:
            reply = yield from self._records.claim(on, key, owner, fingerprint, terms)
        except Late as error:  # which gets its name elsewhere
            self._breaker.failed(given, error)
            raise
        except BaseException:
            self._breaker.abandoned(given)
            raise
        self._breaker.succeeded(given)
        return reply


class _Transacts(Around):
    def __init__(
        self, store: Any, breaker: Breaker, fallback: Fallback | None, on_outage: OnOutage
    ) -> None:
        super().__init__(store, breaker, fallback, on_outage)
        self.one_writer: bool = store.one_writer
        self.timeout: float | None = store.timeout

    def _drive(self, flow: Flow[Any]) -> Any:
        return run(flow, self.store) if isinstance(self, Store) else arun(flow, self.store)

    def records(self) -> Any:
        found = self.store.records()
        if not inspect.isawaitable(found):
            return _WatchedRecords(found, self.breaker)
        return self._later(found)

    async def _later(self, found: Awaitable[TransactionRecords]) -> _WatchedRecords:
        return _WatchedRecords(await found, self.breaker)

    def lend(self, loan: Loan) -> Any:
        return self._drive(self._lend(loan))

    def _lend(self, loan: Loan) -> Flow[Any]:
        """A connection that a pool has at hand says nothing of the server, unless it has none."""
        self.breaker.check()
        try:
            return (yield Op("lend", (loan,)))
        except StoreUnavailableError as error:
            self.breaker.noticed(error)
            raise

    def peek(self, key: Key, fingerprint: bytes, terms: Terms) -> Any:
        return self._drive(self._op("peek", key, fingerprint, terms))

    def settled_here(self, key: Key) -> None:
        self.store.settled_here(key)


class _Transacting(_Transacts, Transactional):
    pass


class _AsyncTransacting(_Transacts, AsyncTransactional):
    pass


class _CompletingOn(Around):
    def complete_on(
        self, connection: Any, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> Any:
        return self.store.complete_on(connection, key, owner, fence, answer, terms)


_POWERS: Final[tuple[tuple[type, type], ...]] = (
    (Sweepable, _Sweeping),
    (AsyncSweepable, _AsyncSweeping),
    (Browsable, _Browsing),
    (AsyncBrowsable, _AsyncBrowsing),
    (Countable, _Counting),
    (AsyncCountable, _AsyncCounting),
    (ClockInjectable, _Timed),
)
_TRANSACTIONS: Final[tuple[tuple[type, type], ...]] = (
    (Transactional, _Transacting),
    (AsyncTransactional, _AsyncTransacting),
)


@functools.cache
def _kind(base: type, powers: tuple[type, ...]) -> Any:
    return type(base.__name__, (*powers, base), {"__doc__": base.__doc__, "__module__": __name__})


def made(store: Any, breaker: Breaker, fallback: Fallback | None, on_outage: OnOutage) -> Any:
    """The store around ``store``. One that goes on without it has no transactions."""
    base = ResilientStore if isinstance(store, Store) else AsyncResilientStore
    powers: list[type] = [passed for power, passed in _POWERS if isinstance(store, power)]
    if on_outage == "closed":
        powers += [passed for power, passed in _TRANSACTIONS if isinstance(store, power)]
        if hasattr(store, "complete_on"):
            powers.append(_CompletingOn)
    return _kind(base, tuple(powers))(store, breaker, fallback, on_outage)
