"""A store around another, which seals its answers on their way in and opens them on their way out.

``oncekey.encryption`` says how they are sealed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from oncekey.abc import (
    AsyncHand,
    AsyncStore,
    AsyncSweepable,
    AsyncTransactional,
    Clock,
    ClockInjectable,
    Hand,
    Markable,
    Store,
    Sweepable,
    Transactional,
)
from oncekey.errors import StoreConfigError
from oncekey.models import ClaimReply, Key, Record, Scope, Terms
from oncekey.stores._answers import Answers
from oncekey.stores._hands import AsyncTransactions, Transactions

__all__ = ["VERSION", "AsyncEncryptedStore", "EncryptedStore", "sealed_store"]

VERSION: Final = b"\xe1"
"""What a sealed answer starts with. No other does: their tags are letters."""


class Ring(Protocol):
    """What seals and opens: a ``Keyring``."""

    def seal(self, answer: bytes, identity: bytes) -> bytes: ...
    def open(self, sealed: bytes, identity: bytes) -> bytes: ...


class _Seal:
    """Answers of one store, sealed on their way in and opened on their way out."""

    def __init__(self, ring: Ring, tenant: str, allow_plain: bool) -> None:
        self._ring = ring
        self._tenant = len(tenant.encode()).to_bytes(8, "big") + tenant.encode()
        self._allow_plain = allow_plain

    def sealed(self, key: Key, answer: bytes) -> bytes:
        return self._ring.seal(answer, self._tenant + key.digest)

    def opened(self, key: Key, answer: bytes | None) -> bytes | None:
        if answer is None:
            return None  # a mark, or a record without an outcome
        if answer[:1] == VERSION:
            return self._ring.open(answer, self._tenant + key.digest)
        if self._allow_plain:
            return answer
        raise StoreConfigError(
            "this answer is not encrypted. If it was stored before encryption was switched on, "
            "pass allow_plain=True until such answers have expired"
        )

    def reply(self, key: Key, reply: ClaimReply | None) -> ClaimReply | None:
        if reply is None or reply.answer is None:
            return reply
        return reply._replace(answer=self.opened(key, reply.answer))

    def record(self, key: Key, record: Record | None) -> Record | None:
        if record is None or record.answer is None:
            return record
        return record._replace(answer=self.opened(key, record.answer))


def _then(convert: Callable[[Key, Any], Any], key: Key, found: Any) -> Any:
    """``convert`` what a store gave, now or when it is there."""
    if not inspect.isawaitable(found):
        return convert(key, found)
    return _later(convert, key, found)


async def _later(convert: Callable[[Key, Any], Any], key: Key, found: Awaitable[Any]) -> Any:
    return convert(key, await found)


class _Around:
    """A store around another: what both forms share, as calls are passed on as they are."""

    def __init__(self, store: Any, keyring: Ring, allow_plain: bool) -> None:
        self.store = store
        self.keyring = keyring
        self.tenant: str = getattr(store, "tenant", "")
        self.poll_seconds: float = store.poll_seconds
        self._allow_plain = allow_plain
        self._seal = _Seal(keyring, self.tenant, allow_plain)

    def __repr__(self) -> str:
        return f"encrypted({self.store!r}, {self.keyring!r})"

    def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> Any:
        return _then(self._seal.reply, key, self.store.claim(key, owner, fingerprint, terms))

    def complete(self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms) -> Any:
        return self.store.complete(key, owner, fence, self._seal.sealed(key, answer), terms)

    def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> Any:
        return self.store.renew(key, owner, fence, terms)

    def release(self, key: Key, owner: bytes, fence: int | None) -> Any:
        return self.store.release(key, owner, fence)

    def first_seen(self, key: Key, terms: Terms) -> Any:
        return self.store.first_seen(key, terms)

    def read(self, key: Key) -> Any:
        return _then(self._seal.record, key, self.store.read(key))

    def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> Any:
        return self.store.write(key, fingerprint, self._seal.sealed(key, answer), expires_at)

    def now(self) -> Any:
        return self.store.now()

    def wait(self, key: Key, seconds: float) -> Any:
        return self.store.wait(key, seconds)

    def clear(self) -> Any:
        return self.store.clear()


class _SealedHand:
    """A transaction's hand, with its answers sealed and opened. All else is the hand's own."""

    def __init__(self, hand: Hand | AsyncHand, seal: _Seal) -> None:
        self._hand = hand
        self._seal = seal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hand, name)

    def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> Any:
        return _then(self._seal.reply, key, self._hand.claim(key, owner, fingerprint, terms))

    def complete(self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms) -> Any:
        return self._hand.complete(key, owner, fence, self._seal.sealed(key, answer), terms)


class EncryptedStore(_Around, Store):
    """A synchronous store that encrypts its answers. Made by ``encrypted``.

    Attributes:
        store: The store that keeps them. Closing this one closes that one.
        keyring: The keys.
    """

    def close(self) -> None:
        """Close the store that keeps the answers."""
        self.store.close()


class AsyncEncryptedStore(_Around, Answers):
    """An asynchronous store that encrypts its answers. Made by ``encrypted``.

    Attributes:
        store: The store that keeps them. Closing this one closes that one.
        keyring: The keys.
    """

    def __init__(self, store: AsyncStore, keyring: Ring, allow_plain: bool) -> None:
        super().__init__(store, keyring, allow_plain)
        self.never_waits = store.never_waits

    async def delete_expired(self, now_epoch: float | None = None) -> int:
        """Remove every record past its time, where the store can."""
        delete = getattr(self.store, "delete_expired", None)
        removed: int = 0 if delete is None else await delete(now_epoch)
        return removed

    async def aclose(self) -> None:
        """Close the store that keeps the answers."""
        await self.store.aclose()


# What only some stores have, each for itself: what a class has, it is taken to be able to do.


class _Sweeps(_Around):
    def sweep(self, limit: int = 1000, now: int | None = None) -> Any:
        return self.store.sweep(limit, now)


class _Sweeping(_Sweeps, Sweepable):
    pass


class _AsyncSweeping(_Sweeps, AsyncSweepable):
    pass


class _Marking(_Around, Markable):
    def marker(self, scope: Scope, terms: Terms) -> Callable[[str], bool]:
        marker: Callable[[str], bool] = self.store.marker(scope, terms)
        return marker


class _Timed(_Around, ClockInjectable):
    def with_clock(self, clock: Clock) -> Any:
        return sealed_store(self.store.with_clock(clock), self.keyring, self._allow_plain)


class _Transacts(_Around):
    def __init__(self, store: Any, keyring: Ring, allow_plain: bool) -> None:
        super().__init__(store, keyring, allow_plain)
        self.one_writer: bool = store.one_writer

    def hand(self, on: Any) -> Any:
        return _SealedHand(self.store.hand(on), self._seal)

    def peek(self, key: Key, fingerprint: bytes, terms: Terms) -> Any:
        return _then(self._seal.reply, key, self.store.peek(key, fingerprint, terms))

    def settled_here(self, key: Key) -> None:
        self.store.settled_here(key)


class _Transacting(_Transacts, Transactions):
    pass


class _AsyncTransacting(_Transacts, AsyncTransactions):
    pass


class _CompletingOn(_Around):
    def complete_on(
        self, connection: Any, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> Any:
        sealed = self._seal.sealed(key, answer)
        return self.store.complete_on(connection, key, owner, fence, sealed, terms)


# What a store can do beside the contract, and what passes it on.
_POWERS: Final[tuple[tuple[type, type], ...]] = (
    (Sweepable, _Sweeping),
    (AsyncSweepable, _AsyncSweeping),
    (Markable, _Marking),
    (ClockInjectable, _Timed),
    (Transactional, _Transacting),
    (AsyncTransactional, _AsyncTransacting),
)


@functools.cache
def _kind(base: type, powers: tuple[type, ...]) -> Any:
    return type(base.__name__, (*powers, base), {"__doc__": base.__doc__, "__module__": __name__})


def sealed_store(
    store: Store | AsyncStore, keyring: Ring, allow_plain: bool
) -> EncryptedStore | AsyncEncryptedStore:
    """A store around ``store``, that can do what it can."""
    base = EncryptedStore if isinstance(store, Store) else AsyncEncryptedStore
    powers: list[type] = [passed for power, passed in _POWERS if isinstance(store, power)]
    if hasattr(store, "complete_on"):
        powers.append(_CompletingOn)
    made: EncryptedStore | AsyncEncryptedStore = _kind(base, tuple(powers))(
        store, keyring, allow_plain
    )
    return made
