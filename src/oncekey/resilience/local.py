"""What this process knows of keys while their store is away: a bounded table by the same rules.

What runs is never dropped while its lease does; of what is done, the least recently used goes
first.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from oncekey._core.transitions import Event, claim, mark, settle
from oncekey.errors import StoreFullError
from oncekey.models import ClaimReply, Key, Record, State, Terms

__all__ = ["LocalRecords"]


class LocalRecords:
    """Records by the digests of their keys. Safe to use from several threads.

    Args:
        entries: How many, at most.
        clock: Seconds since 1970.
        lapsed: Told of each claim that is dropped, or taken over, because its lease is over.
    """

    def __init__(
        self,
        entries: int,
        clock: Callable[[], float] = time.time,
        lapsed: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self._most = entries
        self._clock = clock
        self._lapsed = lapsed
        self._running: dict[bytes, Record] = {}
        self._done: OrderedDict[bytes, tuple[Record, Terms]] = OrderedDict()
        self._lock = threading.Lock()

    def fork(self) -> None:
        """In a child: a lock of its own, and nothing that runs."""
        self._lock = threading.Lock()
        self._running.clear()

    def now_us(self) -> int:
        """Microseconds since 1970, as this table counts them."""
        return int(self._clock() * 1_000_000)

    def __contains__(self, key: Key) -> bool:
        return bool(self._done or self._running) and (
            key.digest in self._done or key.digest in self._running
        )

    def __len__(self) -> int:
        return len(self._running) + len(self._done)

    def get(self, key: Key) -> Record | None:
        """The record, if there is one."""
        found = self._done.get(key.digest)
        return found[0] if found is not None else self._running.get(key.digest)

    def found(self, key: Key) -> tuple[Record | None, Terms | None]:
        """The record, and its terms if it is done. Both of one moment."""
        with self._lock:
            found = self._done.get(key.digest)
            return found if found is not None else (self._running.get(key.digest), None)

    def held(self, key: Key) -> Record | None:
        """The record of what runs here, or of a mark: the store can't know either better."""
        with self._lock:
            return self._held(key.digest)

    def _held(self, digest: bytes) -> Record | None:
        record = self._of(digest)
        if record is None or self._is_over(record):
            return None
        return record if record.state is State.PENDING or not record.owner else None

    def _is_over(self, record: Record, grace_ms: int = 0) -> bool:
        """Whether it says nothing any more: a claim past its lease, a mark past its window."""
        if record.owner and record.state is not State.PENDING:
            return False
        until = record.lease_until if record.state is State.PENDING else record.expires_at
        return self.now_us() // 1000 >= until + grace_ms

    def copy(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply | None:
        """Decide a claim by what is held here, in one step. ``None``: nothing is, or it is won."""
        with self._lock:
            record = self._held(key.digest)
            if record is None:
                return None
            now = self.now_us()
            reply, written = claim(record, owner, fingerprint, terms, now)
        return reply if written is None else None

    def lapse(self, digest: bytes, owner: bytes | None = None, grace_ms: int = 0) -> bool:
        """Forget what is over. False: it is not.

        Args:
            digest: Of its key.
            owner: Only if it is this one's.
            grace_ms: For how long it must be over.
        """
        with self._lock:
            record = self._of(digest)
            if record is None:
                return True
            if not self._is_over(record, grace_ms) or owner not in (None, record.owner):
                return False
            self._done.pop(digest, None)
            self._end(digest, record)
            return True

    def _end(self, digest: bytes, record: Record) -> None:
        if self._running.pop(digest, None) is not None:
            self._lapsed(record)

    def runs(self, key: Key, owner: bytes) -> bool:
        """Whether this owner has claimed the key here."""
        record = self._running.get(key.digest)
        return record is not None and record.owner == owner

    def running(self) -> list[Record]:
        """What runs."""
        return list(self._running.values())

    def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        """Decide a claim.

        Raises:
            StoreFullError: As much runs as there is room for.
        """
        with self._lock:
            now = self.now_us()
            found = self._of(key.digest)
            reply, record = claim(found, owner, fingerprint, terms, now)
            if record is not None:
                if found is not None and found.owner != owner:
                    self._end(key.digest, found)
                if len(self._running) >= self._most and key.digest not in self._running:
                    self._make_room()
                self._done.pop(key.digest, None)
                self._running[key.digest] = record
                self._fit()
        return reply

    def _make_room(self) -> None:
        """Forget claims that got no outcome: nothing else ends them."""
        for digest, record in list(self._running.items()):
            if self._is_over(record):
                self._end(digest, record)
        if len(self._running) >= self._most:
            raise StoreFullError(
                f"{self._most} calls run without the store already: raise entries="
            )

    def complete(self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms) -> bool:
        """Record an outcome."""
        with self._lock:
            return self._settle(key, Event.COMPLETE, owner, fence, terms, answer)

    def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        """Count a lease from now."""
        with self._lock:
            return self._settle(key, Event.RENEW, owner, fence, terms)

    def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        """Give a key back. Nothing is kept of it here: the store knows no claim of it."""
        with self._lock:
            record = self._running.get(key.digest)
            if record is None or record.owner != owner:
                return False
            if fence is not None and fence != record.fence:
                return False
            del self._running[key.digest]
        return True

    def _settle(
        self,
        key: Key,
        event: Event,
        owner: bytes,
        fence: int,
        terms: Terms,
        answer: bytes | None = None,
    ) -> bool:
        now = self.now_us() // 1000
        held, record = settle(self._of(key.digest), event, owner, fence, terms, now, answer)
        if record is not None and record.state is State.COMPLETED:
            self._running.pop(key.digest, None)
            self._keep(key.digest, record, terms)
        elif record is not None:
            self._running[key.digest] = record
        return held

    def put(self, key: Key, record: Record, terms: Terms) -> None:
        """Take over an outcome of a claim that the store has given."""
        with self._lock:
            self._running.pop(key.digest, None)
            self._keep(key.digest, record, terms)

    def mark(self, key: Key, terms: Terms) -> bool:
        """Decide a first-seen call."""
        with self._lock:
            found = self._of(key.digest)
            record = mark(found, terms, self.now_us())
            if record is None:
                return False
            if found is not None:
                self._end(key.digest, found)
            self._keep(key.digest, record, terms)
        return True

    def drop(self, digest: bytes, owner: bytes) -> None:
        """Forget what is done: the store has it. Not if it is another owner's by now."""
        with self._lock:
            found = self._done.get(digest)
            if found is not None and found[0].owner in (owner, b""):
                del self._done[digest]

    def _of(self, digest: bytes) -> Record | None:
        found = self._done.get(digest)
        if found is not None:
            self._done.move_to_end(digest)
            return found[0]
        return self._running.get(digest)

    def _keep(self, digest: bytes, record: Record, terms: Terms) -> None:
        self._done[digest] = record, terms
        self._done.move_to_end(digest)
        self._fit()

    def _fit(self) -> None:
        while self._done and len(self._done) + len(self._running) > self._most:
            self._done.popitem(last=False)
