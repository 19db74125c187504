"""A store around another, which seals its answers on their way in and opens them on their way out.

``oncekey.encryption`` says how they are sealed.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import inspect
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Final, Protocol

from oncekey._core.codec import REMOVED
from oncekey.abc import (
    AsyncBrowsable,
    AsyncCountable,
    AsyncStore,
    AsyncSweepable,
    AsyncTransactional,
    Browsable,
    Clock,
    ClockInjectable,
    Countable,
    Loan,
    Markable,
    Store,
    Sweepable,
    Transactional,
    TransactionRecords,
)
from oncekey.errors import StoreConfigError, StoreCorruptError
from oncekey.models import ClaimReply, ClaimVerdict, Key, Record, Scope, Terms
from oncekey.stores._answers import Answers

__all__ = ["VERSION", "AsyncEncryptedStore", "EncryptedStore", "encrypted_store"]

VERSION: Final = b"\xe1"
"""What a sealed answer starts with. No other does: their tags are letters."""


class Ring(Protocol):
    """What seals and opens: a ``Keyring``."""

    def seal(self, answer: bytes, identity: bytes) -> bytes: ...
    def open(self, sealed: bytes, identity: bytes) -> bytes: ...


MARKED: Final = b"\x01"
"""What a sealed text starts with that has the mark of its payload. Others start with a letter."""
MARK_BYTES: Final = 16
ANY_PAYLOAD: Final = bytes(MARK_BYTES)


def _mark(fingerprint: bytes) -> bytes:
    """What stands for a payload's fingerprint in a sealed text. Nothing, if there is none."""
    return hashlib.sha256(fingerprint).digest()[:MARK_BYTES] if fingerprint else ANY_PAYLOAD


class _Seal:
    """Answers of one store, sealed on their way in and opened on their way out.

    The fingerprint of the payload is sealed with its answer: whoever can write to the table and
    empties the stored one can't have the answer replayed to another payload.
    """

    def __init__(self, ring: Ring, tenant: str, allow_plain: bool) -> None:
        self._ring = ring
        self._tenant = len(tenant.encode()).to_bytes(8, "big") + tenant.encode()
        self._allow_plain = allow_plain

    def sealed(self, key: Key, fingerprint: bytes, answer: bytes) -> bytes:
        return self._ring.seal(MARKED + _mark(fingerprint) + answer, self._tenant + key.digest)

    def opened(self, key: Key, answer: bytes, fingerprint: bytes, any_payload: bool) -> bytes:
        """The answer, if it belongs to the payload with that fingerprint.

        One that was sealed without a payload belongs to any; and with ``any_payload`` a caller
        without one gets any.
        """
        if answer[:1] == VERSION:
            text = self._ring.open(answer, self._tenant + key.digest)
            if text[:1] != MARKED:
                return text  # sealed before there were marks
            mark, answer = text[1 : 1 + MARK_BYTES], text[1 + MARK_BYTES :]
            given = _mark(fingerprint)
            free = mark == ANY_PAYLOAD or (any_payload and given == ANY_PAYLOAD)
            if not free and not hmac.compare_digest(mark, given):
                raise StoreCorruptError(
                    "a stored answer belongs to another payload: the fingerprint in its record was "
                    "changed"
                )
            return answer
        if self._allow_plain:
            return answer
        raise StoreConfigError(
            "this answer is not encrypted. If it was stored before encryption was switched on, "
            "pass allow_plain=True until such answers have expired"
        )

    def reply(self, fingerprint: bytes, key: Key, reply: ClaimReply | None) -> ClaimReply | None:
        if reply is None or reply.verdict is not ClaimVerdict.REPLAY:
            return reply
        if reply.answer is not None:
            return reply._replace(answer=self.opened(key, reply.answer, fingerprint, True))
        # A mark has none either. It counts as done, and whoever wants its answer is refused.
        return reply if self._allow_plain else reply._replace(answer=REMOVED)

    def record(self, key: Key, record: Record | None) -> Record | None:
        if record is None or record.answer is None:
            return record
        return record._replace(answer=self.opened(key, record.answer, record.fingerprint, False))


class _Fingerprints:
    """With which payloads claims were won, by their owners: a completion does not say.

    Two generations, so that it never grows: what is in neither is read from the store.
    """

    LIMIT: Final = 4096

    def __init__(self) -> None:
        self._new: dict[bytes, bytes] = {}
        self._old: dict[bytes, bytes] = {}

    def put(self, owner: bytes, fingerprint: bytes) -> None:
        if len(self._new) >= self.LIMIT:
            self._old, self._new = self._new, {}
        self._new[owner] = fingerprint

    def get(self, owner: bytes) -> bytes | None:
        found = self._new.get(owner)
        return self._old.get(owner) if found is None else found


def _then(convert: Callable[[Key, Any], Any], key: Key, found: Any) -> Any:
    """``convert`` what a store gave, now or when it is there."""
    if not inspect.isawaitable(found):
        return convert(key, found)
    return _later(convert, key, found)


async def _later(convert: Callable[[Key, Any], Any], key: Key, found: Awaitable[Any]) -> Any:
    made = convert(key, await found)
    return await made if inspect.isawaitable(made) else made


class _Claims:
    """Claims and completions on a store, with sealed answers."""

    def __init__(self, store: Any, seal: _Seal) -> None:
        self._store = store
        self._seal = seal
        self._won = _Fingerprints()

    def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> Any:
        def replied(key: Key, reply: ClaimReply) -> Any:
            if reply.verdict is ClaimVerdict.WON:
                self._won.put(owner, fingerprint)
                return reply
            return self._seal.reply(fingerprint, key, reply)

        return _then(replied, key, self._store.claim(key, owner, fingerprint, terms))

    def complete(
        self,
        finish: Callable[..., Any],
        key: Key,
        owner: bytes,
        fence: int,
        answer: bytes,
        *more: Any,
    ) -> Any:
        """``finish`` a claim, with the answer sealed for the payload that it was won with."""
        fingerprint = self._won.get(owner)
        if fingerprint is not None:
            return finish(key, owner, fence, self._seal.sealed(key, fingerprint, answer), *more)

        def found(key: Key, record: Record | None) -> Any:
            held = b"" if record is None else record.fingerprint
            return finish(key, owner, fence, self._seal.sealed(key, held, answer), *more)

        return _then(found, key, self._store.read(key))


class _Around:
    """A store around another: what both forms share, as calls are passed on as they are."""

    def __init__(self, store: Any, keyring: Ring, allow_plain: bool) -> None:
        self.store = store
        self.keyring = keyring
        self.tenant: str = getattr(store, "tenant", "")
        self.poll_seconds: float = store.poll_seconds
        self.never_waits: bool = store.never_waits
        self._allow_plain = allow_plain
        self._seal = _Seal(keyring, self.tenant, allow_plain)
        self._claims = _Claims(store, self._seal)

    def __repr__(self) -> str:
        return f"encrypted({self.store!r}, {self.keyring!r})"

    def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> Any:
        return self._claims.claim(key, owner, fingerprint, terms)

    def complete(self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms) -> Any:
        return self._claims.complete(self.store.complete, key, owner, fence, answer, terms)

    def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> Any:
        return self.store.renew(key, owner, fence, terms)

    def release(self, key: Key, owner: bytes, fence: int | None) -> Any:
        return self.store.release(key, owner, fence)

    def first_seen(self, key: Key, terms: Terms) -> Any:
        return self.store.first_seen(key, terms)

    def read(self, key: Key) -> Any:
        return _then(self._seal.record, key, self.store.read(key))

    def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> Any:
        sealed = self._seal.sealed(key, fingerprint, answer)
        return self.store.write(key, fingerprint, sealed, expires_at)

    def now(self) -> Any:
        return self.store.now()

    def wait(self, key: Key, seconds: float) -> Any:
        return self.store.wait(key, seconds)

    def clear(self) -> Any:
        return self.store.clear()


class _SealedRecords:
    """A transaction's records, with their answers sealed and opened."""

    def __init__(self, records: TransactionRecords, seal: _Seal) -> None:
        self._records = records
        self._seal = seal
        self._fingerprint = b""
        self.flavour = records.flavour
        self.named = records.named

    def claim(
        self, on: Any, key: Key, owner: bytes, fingerprint: bytes, terms: Terms
    ) -> Generator[Any, Any, ClaimReply | None]:
        self._fingerprint = fingerprint
        reply = yield from self._records.claim(on, key, owner, fingerprint, terms)
        return self._seal.reply(fingerprint, key, reply)

    def complete(
        self, on: Any, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> Generator[Any, Any, bool]:
        sealed = self._seal.sealed(key, self._fingerprint, answer)
        return (yield from self._records.complete(on, key, owner, fence, sealed, terms))


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


class _Browses(_Around):
    def browse(self, cursor: str = "", limit: int = 1000) -> Any:
        return self.store.browse(cursor, limit)  # no answers in it

    def find(self, digest: bytes) -> Any:
        return self.store.find(digest)


class _Counts(_Around):
    def count(self, key: Key, window_ms: int) -> Any:
        return self.store.count(key, window_ms)


class _Counting(_Counts, Countable):
    pass


class _AsyncCounting(_Counts, AsyncCountable):
    pass


class _Browsing(_Browses, Browsable):
    pass


class _AsyncBrowsing(_Browses, AsyncBrowsable):
    pass


class _Marking(_Around, Markable):
    def marker(self, scope: Scope, terms: Terms) -> Callable[[str], bool]:
        marker: Callable[[str], bool] = self.store.marker(scope, terms)
        return marker


class _Timed(_Around, ClockInjectable):
    def with_clock(self, clock: Clock) -> Any:
        return encrypted_store(self.store.with_clock(clock), self.keyring, self._allow_plain)


class _Transacts(_Around):
    def __init__(self, store: Any, keyring: Ring, allow_plain: bool) -> None:
        super().__init__(store, keyring, allow_plain)
        self.one_writer: bool = store.one_writer
        self.timeout: float | None = store.timeout

    def records(self) -> Any:
        found = self.store.records()
        if not inspect.isawaitable(found):
            return _SealedRecords(found, self._seal)
        return self._later_records(found)

    async def _later_records(self, found: Awaitable[TransactionRecords]) -> _SealedRecords:
        return _SealedRecords(await found, self._seal)

    def lend(self, loan: Loan) -> Any:
        return self.store.lend(loan)

    def peek(self, key: Key, fingerprint: bytes, terms: Terms) -> Any:
        opened = functools.partial(self._seal.reply, fingerprint)
        return _then(opened, key, self.store.peek(key, fingerprint, terms))

    def settled_here(self, key: Key) -> None:
        self.store.settled_here(key)


class _Transacting(_Transacts, Transactional):
    pass


class _AsyncTransacting(_Transacts, AsyncTransactional):
    pass


class _CompletingOn(_Around):
    def complete_on(
        self, connection: Any, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> Any:
        finish = functools.partial(self.store.complete_on, connection)
        return self._claims.complete(finish, key, owner, fence, answer, terms)


# What a store can do beside the contract, and what passes it on.
_POWERS: Final[tuple[tuple[type, type], ...]] = (
    (Sweepable, _Sweeping),
    (AsyncSweepable, _AsyncSweeping),
    (Browsable, _Browsing),
    (Countable, _Counting),
    (AsyncCountable, _AsyncCounting),
    (AsyncBrowsable, _AsyncBrowsing),
    (Markable, _Marking),
    (ClockInjectable, _Timed),
    (Transactional, _Transacting),
    (AsyncTransactional, _AsyncTransacting),
)


@functools.cache
def _kind(base: type, powers: tuple[type, ...]) -> Any:
    return type(base.__name__, (*powers, base), {"__doc__": base.__doc__, "__module__": __name__})


def encrypted_store(
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
