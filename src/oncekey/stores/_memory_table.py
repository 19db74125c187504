"""The records of a memory store: many small dicts, packed records, expiry in small steps."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Final, cast

from oncekey._core import transitions
from oncekey._core.forks import Forking, watch_forks
from oncekey.abc import Clock
from oncekey.errors import PolicyError, StoreClosedError, StoreFullError
from oncekey.models import ClaimReply, ClaimVerdict, Key, Record, Scope, State, Terms, check_text
from oncekey.stores._waiters import Waiters

__all__ = ["SHARDS", "Slot", "Table", "completed", "pack", "replay", "unpack"]

SHARDS: Final = 1021  # a prime: the low bits of a hash are what each dict places its keys by
SHORT_SCOPES: Final = 65_536
GRACE_MS: Final = 60_000  # records outlive their time by this, so that clocks may differ a little

# A settled record is one bytes object: the garbage collector never looks at it, and nobody can
# change it. Fence, expiry, purge time, attempts, state, lengths of owner and fingerprint; then
# owner, fingerprint and answer.
_HEAD = struct.Struct("<qqqIBBH?")
_HEAD_BYTES: Final = _HEAD.size
_pack_head, _unpack_head = _HEAD.pack, _HEAD.unpack_from
_PURGE_AT = struct.Struct("<q")
_PURGE_OFFSET: Final = 16
_STATES: Final = tuple(State)
_COMPLETED: Final = State.COMPLETED
_REPLAY: Final = ClaimVerdict.REPLAY

Slot = int | bytes | Record  # a first-seen mark (its expiry), a settled record, a pending one


def pack(record: Record) -> bytes:
    state, owner, fence, mark, _, expires_at, purge_at, attempts, answer = record
    sizes = len(owner), len(mark), answer is not None
    head = _pack_head(fence, expires_at, purge_at, attempts, state, *sizes)
    return b"".join((head, owner, mark, answer or b""))


def unpack(slot: Slot) -> Record:
    kind = type(slot)
    if kind is Record:
        return slot  # type: ignore[return-value]
    if kind is int:
        expires_at = cast("int", slot)
        fence = transitions.mark_fence(expires_at)
        return Record(State.COMPLETED, b"", fence, b"", 0, expires_at, expires_at, 1, None)
    raw: bytes = slot  # type: ignore[assignment]
    fence, expires_at, purge_at, attempts, state, owners, prints, answered = _unpack_head(raw)
    cut = _HEAD_BYTES + owners
    end = cut + prints
    answer = raw[end:] if answered else None
    owner, mark = raw[_HEAD_BYTES:cut], raw[cut:end]
    fields = (_STATES[state], owner, fence, mark, 0, expires_at, purge_at, attempts, answer)
    return tuple.__new__(Record, fields)


def completed(
    slot: Slot | None, owner: bytes, fence: int, answer: bytes, terms: Terms, now: int
) -> bytes | None:
    """What most completions write: ``settle`` and ``pack`` in one. ``None``: the tables decide."""
    if type(slot) is not Record:
        return None
    _, holder, held, mark, _, expires_at, _, attempts, _ = slot  # pending: others are packed
    if held != fence or holder != owner:
        return None
    _, ttl_ms, skew_ms, remember_ms, sticky = terms
    if not sticky:
        expires_at = now + ttl_ms
    purge_at = expires_at + skew_ms + remember_ms
    sizes = len(owner), len(mark), True
    head = _pack_head(fence, expires_at, purge_at, attempts, _COMPLETED, *sizes)
    return head + owner + mark + answer


def replay(raw: bytes, fingerprint: bytes, terms: Terms, now: int) -> ClaimReply | None:
    """What most copies get, straight from a packed record. ``None``: the tables decide."""
    fence, expires_at, _, attempts, state, owners, prints, answered = _unpack_head(raw)
    if state != _COMPLETED or now >= expires_at + terms.skew_ms:
        return None
    cut = _HEAD_BYTES + owners
    end = cut + prints
    if prints and raw[cut:end] != fingerprint and fingerprint:
        return None
    fields = (_REPLAY, fence, 0, attempts, raw[end:] if answered else None, False, False)
    return tuple.__new__(ClaimReply, fields)


def _purge_at(slot: Slot) -> int:
    kind = type(slot)
    if kind is int:
        return slot  # type: ignore[return-value]
    if kind is bytes:
        return int(_PURGE_AT.unpack_from(slot, _PURGE_OFFSET)[0])  # type: ignore[arg-type]
    return slot.purge_at  # type: ignore[union-attr]


class Table(Forking):
    """The records of one memory store; sync and async faces share it.

    A new key goes in with ``dict.setdefault``, which is one step for all threads, so that the
    commonest path takes no lock. Whatever changes or removes a record holds the lock. A dict is
    never replaced, as somebody may be about to insert into it.
    """

    def __init__(self, max_entries: int) -> None:
        if max_entries < 1:
            raise PolicyError(f"max_entries must be at least 1, got {max_entries}")
        self.max_entries = max_entries
        self.closed = False
        self.shards: list[dict[str, Slot]] = [{} for _ in range(SHARDS)]
        self.limits = [0] * SHARDS  # how far each dict may grow before somebody looks after it
        self.sweep_at = [64] * SHARDS  # how far it may grow before it is swept
        self.unreserved = max_entries  # room that no limit has taken yet
        self.look_again_at = 0
        self.users = 0
        self.scopes: dict[bytes, str] = {}
        self.after_fork_in_child()
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        """Fresh locks: another thread of the parent may have held the old ones."""
        self.lock = threading.Lock()
        self.waiters = Waiters()

    @property
    def count(self) -> int:
        """How many records there are, expired ones that were not swept yet included."""
        return sum(map(len, self.shards))

    def name(self, key: Key) -> str:
        """The dict key of ``key``: exact, and short for the first scopes that come."""
        scope = self.scopes.get(key.scope.prefix)
        if scope is None:
            scope = self.new_scope(key.scope.prefix)
        return scope + key.name

    def new_scope(self, prefix: bytes) -> str:
        with self.lock:
            if len(self.scopes) < SHORT_SCOPES:
                return self.scopes.setdefault(prefix, f"{len(self.scopes):x}|")
        # Scopes past that number keep their full name: a scope never has two names, and the
        # table of short ones stays bounded.
        return prefix.decode() + "|"

    def marker(self, scope: Scope, terms: Terms, clock: Clock) -> Callable[[str], bool]:
        """First-seen for the keys of one scope, with all that does not change looked up once."""
        prefix = self.name(Key(scope, ""))
        shards, limits, ttl_ms = self.shards, self.limits, terms.ttl_ms
        get_ident = threading.get_ident
        home = get_ident()
        now = expires_at = 0
        since = until = 0.0

        def first_seen(key: str) -> bool:
            # Calls of one millisecond share the arithmetic and one int object for the expiry.
            nonlocal now, expires_at, since, until
            moment = clock()
            if not since <= moment < until:
                now = int(moment * 1000)
                since, until = moment, (now + 1) / 1000
                expires_at = now + ttl_ms
            name = prefix + key
            place = hash(name) % SHARDS
            slots = shards[place]
            slot = slots.get(name)
            if slot is not None and type(slot) is int and now < slot:
                return False
            if not key or len(key) > 255 or not key.isascii() or "\0" in key:
                check_text(key, "idempotency_key")
            # An object that no other thread has: setdefault gives it back only if it went in.
            mark = expires_at if get_ident() == home else int(str(expires_at))
            if slot is None:
                if len(slots) >= limits[place]:
                    self.make_room(place, now)
                if slots.setdefault(name, mark) is mark:
                    return True
            return self.mark_again(slots, name, mark, terms, now)

        return first_seen

    def mark_again(
        self, slots: dict[str, Slot], name: str, mark: int, terms: Terms, now: int
    ) -> bool:
        """First-seen where a record is there already: it may be past its time."""
        with self.lock:
            slot = slots.get(name)
            if slot is None:  # swept meanwhile: others may insert at this very moment
                return slots.setdefault(name, mark) is mark
            record = transitions.mark(unpack(slot), terms, now * 1000)
            if record is None:
                return False
            # A fence that is ahead of the clock must not be forgotten.
            bare = record.fence == transitions.mark_fence(mark)
            slots[name] = mark if bare else pack(record)
            return True

    def write(self, key: Key, record: Record, now: int) -> None:
        name = self.name(key)
        place = hash(name) % SHARDS
        slots = self.shards[place]
        if name not in slots and len(slots) >= self.limits[place]:
            self.make_room(place, now)
        with self.lock:
            packed = pack(record)
            old = slots.setdefault(name, packed)
            if old is not packed:
                fence = max(unpack(old).fence + 1, record.fence)
                slots[name] = pack(record._replace(fence=fence))
        self.waiters.wake(name)

    def read(self, key: Key) -> Record | None:
        name = self.name(key)
        slot = self.shards[hash(name) % SHARDS].get(name)
        return None if slot is None else unpack(slot)

    def settled(self, key: Key) -> bool:
        """Whether there is nothing to wait for."""
        record = self.read(key)
        return record is None or record.state is not State.PENDING

    def make_room(self, place: int, now: int) -> None:
        """Let one dict grow: sweep it if that is due, then reserve room for it.

        A dict holds a few thousand records at five million in all, so that this takes a
        millisecond or so at the worst, and each record pays for a look or two.
        """
        if self.closed:
            raise StoreClosedError("this memory store is closed: connect again")
        with self.lock:
            slots = self.shards[place]
            if len(slots) >= self.sweep_at[place]:
                self.sweep_shard(place, now - GRACE_MS)
            if len(slots) < self.limits[place]:
                return
            if self.unreserved == 0 and (now < self.look_again_at or not self.find_room(now)):
                raise StoreFullError(
                    f"the memory store holds {self.max_entries} live records, its max_entries: "
                    "raise max_entries, shorten the TTL, or use sqlite:///file.db. No live "
                    "record is evicted"
                )
            more = max(1, min(64 + len(slots) // 2, self.unreserved // (2 * SHARDS)))
            self.limits[place] += more
            self.unreserved -= more

    def find_room(self, now: int) -> bool:
        """All room is reserved: take back what is unused, and what expired records hold."""
        for removing in (False, True):
            if removing:
                for place in range(SHARDS):
                    self.sweep_shard(place, now)
            self.limits[:] = map(len, self.shards)
            self.unreserved = max(0, self.max_entries - sum(self.limits))
            if self.unreserved:
                return True
        self.look_again_at = now + 1000  # looking through everything takes a while
        return False

    def sweep_shard(self, place: int, cutoff: int) -> int:
        slots = self.shards[place]
        dead = [name for name, slot in list(slots.items()) if _purge_at(slot) <= cutoff]
        for name in dead:
            del slots[name]
        self.sweep_at[place] = 64 + len(slots) + len(slots) // 2
        return len(dead)

    def sweep(self, limit: int | None, cutoff: int) -> int:
        # Here, as events take longer to import than all of a memory store.
        from oncekey.instrument.events import EventKind, emit, listening

        removed, oldest = 0, cutoff
        for place in range(SHARDS):
            with self.lock:  # given back between dicts, so that claims get through
                if listening():
                    oldest = min([oldest, *map(_purge_at, self.shards[place].values())])
                removed += self.sweep_shard(place, cutoff)
            if limit is not None and removed >= limit:
                break
        if removed:
            lag = (cutoff - oldest) / 1000
            emit(EventKind.SWEPT, None, "sweep", count=removed, store="memory", lateness=lag)
        return removed

    def close(self) -> None:
        """Forget every record once the last of those who share this table has closed."""
        self.users -= 1
        if self.users <= 0:
            self.closed = True
            self.clear()

    def clear(self) -> None:
        with self.lock:
            for slots in self.shards:
                slots.clear()
            self.limits[:] = [0] * SHARDS
            self.unreserved = self.max_entries
            self.look_again_at = 0
