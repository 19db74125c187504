"""Stores that let every call run and keep nothing, for when guarding is turned off.

Each says so: a warning where the guard is made, a line in the log and an event for each call.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import time
import warnings
from collections.abc import Generator
from typing import Any, Final

from oncekey._core.placement import users_level
from oncekey._core.switch import OFF, VARIABLE, GuardingOffWarning
from oncekey.abc import (
    AsyncCountable,
    AsyncStore,
    AsyncTransactional,
    Countable,
    Loan,
    Store,
    Transactional,
)
from oncekey.instrument.events import EventKind, emit
from oncekey.models import ClaimReply, ClaimVerdict, Key, Record, Terms

__all__ = ["unguarded"]

logger = logging.getLogger("oncekey")
_fences: Final = itertools.count(1)


def _runs(key: Key) -> ClaimReply:
    """Every claim is won. It is never silent."""
    logger.warning(
        "a call runs unguarded, and so will its copies: %s=%s (scope=%s key=%s)",
        VARIABLE,
        OFF,
        key.scope.hash,
        key.shown,
    )
    emit(EventKind.BYPASS, key, "claim")
    return ClaimReply(ClaimVerdict.WON, next(_fences), 0, 1, None)


class _Unguarded:
    """What both forms share.

    Attributes:
        inner: The store that is not asked.
    """

    off = True
    never_waits = True

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.tenant: str = getattr(inner, "tenant", "")
        self.one_writer: bool = getattr(inner, "one_writer", False)
        self.timeout: Any = getattr(inner, "timeout", None)
        self.no_transactions: str = getattr(inner, "no_transactions", "")

    def __repr__(self) -> str:
        return f"unguarded({self.inner!r})"

    def settled_here(self, key: Key) -> None:
        """See ``Transactional``."""

    def lend(self, loan: Loan) -> Any:
        """See ``Transactional``."""
        return self.inner.lend(loan)


class _UnguardedStore(_Unguarded, Store, Countable):
    """A synchronous one."""

    def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        return _runs(key)

    def complete(self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms) -> bool:
        return True

    def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        return True

    def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        return True

    def first_seen(self, key: Key, terms: Terms) -> bool:
        return _runs(key).verdict is ClaimVerdict.WON

    def read(self, key: Key) -> Record | None:
        return None

    def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> None:
        pass

    def now(self) -> int:
        return int(time.time() * 1000)

    def count(self, key: Key, window_ms: int) -> tuple[int, int]:
        return 1, window_ms

    def clear(self) -> None:
        pass

    def close(self) -> None:
        self.inner.close()


class _AsyncUnguardedStore(_Unguarded, AsyncStore, AsyncCountable):
    """An asynchronous one."""

    async def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        return _runs(key)

    async def complete(
        self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> bool:
        return True

    async def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        return True

    async def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        return True

    async def first_seen(self, key: Key, terms: Terms) -> bool:
        return _runs(key).verdict is ClaimVerdict.WON

    async def read(self, key: Key) -> Record | None:
        return None

    async def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> None:
        pass

    async def now(self) -> int:
        return int(time.time() * 1000)

    async def count(self, key: Key, window_ms: int) -> tuple[int, int]:
        return 1, window_ms

    async def clear(self) -> None:
        pass

    async def aclose(self) -> None:
        await self.inner.aclose()


# Transactions: the effects need their database all the same, and commit as they would.


class _Records:
    """The records of one transaction: none."""

    def __init__(self, records: Any) -> None:
        self.flavour = records.flavour
        self.named = records.named

    def claim(
        self, on: Any, key: Key, owner: bytes, fingerprint: bytes, terms: Terms
    ) -> Generator[Any, Any, ClaimReply]:
        yield from ()
        return _runs(key)

    def complete(
        self, on: Any, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> Generator[Any, Any, bool]:
        yield from ()
        return True


class _UnguardedDatabase(_UnguardedStore, Transactional):
    """A synchronous one with transactions."""

    def records(self) -> _Records:
        return _Records(self.inner.records())

    def peek(self, key: Key, fingerprint: bytes, terms: Terms) -> None:
        return None


class _AsyncUnguardedDatabase(_AsyncUnguardedStore, AsyncTransactional):
    """An asynchronous one with transactions."""

    async def records(self) -> _Records:
        found = self.inner.records()
        return _Records(await found if inspect.isawaitable(found) else found)

    async def peek(self, key: Key, fingerprint: bytes, terms: Terms) -> None:
        return None


@functools.cache
def _kind(kind: type) -> Any:
    if issubclass(kind, Store):
        return _UnguardedDatabase if issubclass(kind, Transactional) else _UnguardedStore
    database = issubclass(kind, AsyncTransactional)
    return _AsyncUnguardedDatabase if database else _AsyncUnguardedStore


def unguarded(store: Any) -> Any:
    """A store in the place of ``store`` that lets every call run. Warns."""
    if isinstance(store, _Unguarded):
        return store
    warnings.warn(
        f"guarding is off ({VARIABLE}={OFF}): every copy of a call runs, and nothing is recorded. "
        "Never where others depend on it",
        GuardingOffWarning,
        stacklevel=users_level(),
    )
    kind: Any = type(store)
    return _kind(kind)(store)
