"""What goes on without the store: a bounded table and a journal, shared by the guards of a process.

All of it that never waits for the store but by the steps of a flow.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from oncekey._core.drive import Flow, Op
from oncekey._core.flows import new_owner
from oncekey._core.forks import Forking, watch_forks
from oncekey._core.transitions import claim
from oncekey.errors import StoreFullError
from oncekey.instrument.events import EventKind, emit
from oncekey.models import ClaimReply, ClaimVerdict, Key, Record, State, Terms
from oncekey.resilience.findings import Findings
from oncekey.resilience.journal import Entry, Journal, pages
from oncekey.resilience.local import LocalRecords
from oncekey.resilience.reconcile import (
    Reconciled,
    Reconciling,
    findings_in,
    settle_entry,
    store_name,
)

__all__ = ["Fallback"]

logger = logging.getLogger("oncekey")

T = TypeVar("T")
TRY_AGAIN: Final = 5.0  # seconds after a reconciliation that failed, or never began


class _Recent(Generic[T]):
    """What was put last, by some id. Two generations, so that it never grows."""

    LIMIT: Final = 4096

    def __init__(self) -> None:
        self._new: dict[bytes, T] = {}
        self._old: dict[bytes, T] = {}

    def put(self, name: bytes, value: T) -> None:
        if len(self._new) >= self.LIMIT:
            self._old, self._new = self._new, {}
        self._new[name] = value

    def get(self, name: bytes) -> T | None:
        found = self._new.get(name)
        return self._old.get(name) if found is None else found

    def drop(self, name: bytes) -> None:
        self._new.pop(name, None)
        self._old.pop(name, None)


class Fallback(Forking):
    """Claims, outcomes and marks of one store's keys while it is away.

    Args:
        store: The store.
        directory: Where the journals are.
        entries: How many keys are known here, at most.
        journal_bytes: How large a journal may grow.
        steps: What flows do with a journal: as it is done in threads, or in event loops.
    """

    def __init__(
        self,
        store: Any,
        directory: Path,
        entries: int,
        journal_bytes: int,
        steps: Callable[[Journal], Any],
    ) -> None:
        self.directory = directory
        self.findings: Findings = findings_in(directory)
        self._name = store_name(store)
        me = weakref.ref(self)  # else the two would keep each other alive, and the journal's file
        self._local = LocalRecords(entries, lapsed=lambda record: _lapsed(me(), record))
        self._journal = Journal(directory, self._name, journal_bytes)
        self._steps = steps(self._journal)
        # Payloads by owner, as a completion does not say: of claims that the store has given, and
        # of claims made here that lapsed, whose owners may live yet.
        self._won: _Recent[bytes] = _Recent()
        self._ended: _Recent[bytes] = _Recent()
        self._given: _Recent[Record] = _Recent()  # by key: what runs here that the store has given
        self.running: dict[bytes, Entry] = {}  # by owner: what must be in the file that is written
        self._reconciling = False
        self._look_at = 0.0
        self._sweep_at = 0.0
        # Journals of processes before this one are looked for once.
        self.unsettled = next(pages(directory), None) is not None
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        """A file and locks of our own. What runs is the parent's, and so is what it reconciles."""
        self._journal.fork()
        self._local.fork()
        self.running.clear()
        self._given = _Recent()
        self._reconciling = False

    def close(self) -> None:
        """Give the journal to whoever reconciles it."""
        self._journal.turn(self._carried)
        self.findings.close()

    def _carried(self) -> list[Entry]:
        """What goes along to the next file."""
        entries = list(self.running.values())
        return [entry for entry in entries if self._local.runs(entry.key, entry.owner)]

    def lapsed(self, record: Record) -> None:
        """A claim got no outcome within its lease: it was interrupted, or its thread stands still.

        Its line in the journal stays without one, so that the next reconciliation tells of it.
        """
        self.running.pop(record.owner, None)
        self._ended.put(record.owner, record.fingerprint)
        self.unsettled = True

    @property
    def restless(self) -> bool:
        """Whether there is, or will be, something to reconcile."""
        return self.unsettled or self._reconciling or bool(self.running)

    # What is known here

    def knows(self, key: Key) -> bool:
        """Whether something of this key is known here that the store may not know."""
        return key in self._local

    def runs(self, key: Key, owner: bytes) -> bool:
        """Whether this owner has claimed the key without the store."""
        return self._local.runs(key, owner)

    def read(self, key: Key) -> Record | None:
        """The record as it is known here."""
        return self._local.get(key)

    def held(self, key: Key) -> Record | None:
        """The record of what runs here, or of a mark that was made here."""
        return self._local.held(key) if key in self._local else None

    def copy(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply | None:
        """What a claim of such a key is answered. ``None``: it is not decided here."""
        if key not in self._local:
            return None
        reply = self._local.copy(key, owner, fingerprint, terms)
        if reply is not None:
            self._bypassed(key, reply.verdict.value)
        return reply

    def marked(self, key: Key) -> bool:
        """Whether a mark of such a key is a copy."""
        known = self.held(key) is not None
        if known:
            self._bypassed(key, ClaimVerdict.REPLAY.value)
        return known

    def lost(self, key: Key, owner: bytes) -> bool:
        """Whether this owner's claim was made here, and is another one's by now."""
        record = self._local.get(key) if self._ended.get(owner) is not None else None
        return record is not None and record.owner != owner

    def won(
        self, key: Key, owner: bytes, fingerprint: bytes, reply: ClaimReply, terms: Terms
    ) -> None:
        """Take note of a claim that the store has given."""
        self._won.put(owner, fingerprint)
        until = self._local.now_us() // 1000 + terms.lease_ms
        ends = until + terms.ttl_ms
        fields = (State.PENDING, owner, reply.fence, fingerprint, until, ends, ends, reply.attempts)
        self._given.put(key.digest, Record(*fields, None))

    def renewed(self, key: Key, owner: bytes, terms: Terms) -> None:
        """Such a claim lives: it was renewed, or would have been if the store were there."""
        given = self._given.get(key.digest)
        if given is not None and given.owner == owner:
            until = self._local.now_us() // 1000 + terms.lease_ms
            self._given.put(key.digest, given._replace(lease_until=until))

    def settled(self, key: Key, owner: bytes) -> None:
        """Such a claim is over."""
        given = self._given.get(key.digest)
        if given is not None and given.owner == owner:
            self._given.drop(key.digest)

    def _beside(
        self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms
    ) -> ClaimReply | None:
        """What a claim is answered whose key has run here since before the store went away."""
        given = self._given.get(key.digest)
        if given is None or given.owner == owner or key in self._local:
            return None
        reply, written = claim(given, owner, fingerprint, terms, self._local.now_us())
        return reply if written is None else None

    # While the store is away

    def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> Flow[ClaimReply]:
        """Claim without the store. Whoever wins is in the journal before it runs."""
        beside = self._beside(key, owner, fingerprint, terms)
        reply = beside or self._local.claim(key, owner, fingerprint, terms)
        if reply.verdict is not ClaimVerdict.WON:
            self._bypassed(key, reply.verdict.value)
            return reply
        entry = _entry("claim", key, owner, reply.fence, fingerprint, terms)
        self.running[owner] = entry
        try:
            yield Op("append", (entry,), self._steps)
        except BaseException as error:
            self.running.pop(owner, None)
            self._local.release(key, owner, reply.fence)
            yield from self._take_back(entry, error)
            raise
        self._bypassed(key, "claim")
        return reply

    def _take_back(self, entry: Entry, error: BaseException) -> Flow[None]:
        """Say of an entry that nothing came of it: whoever was cut off may have written it."""
        if not isinstance(error, (StoreFullError, GeneratorExit)):
            with contextlib.suppress(StoreFullError):
                yield Op("append", (entry._replace(what="free"),), self._steps)

    def complete(
        self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> Flow[bool]:
        """Record an outcome without the store: of a claim made here, or of one that it gave."""
        here = self._local.runs(key, owner)
        record = self._local.get(key)
        if here and record is not None:
            fingerprint = record.fingerprint
        elif (record is not None and record.state is State.PENDING) or self.lost(key, owner):
            return False  # somebody else runs it here by now, or has
        else:
            fingerprint = self._won.get(owner) or self._ended.get(owner) or b""
        entry = _entry("done", key, owner, fence, fingerprint, terms, answer)
        yield Op("append", (entry,), self._steps)
        self.running.pop(owner, None)
        self.settled(key, owner)
        self.unsettled = True
        if here:
            return self._local.complete(key, owner, fence, answer, terms)
        ends = entry.at + terms.ttl_ms
        fields = (State.COMPLETED, owner, fence, fingerprint, 0, ends, ends, 1, answer)
        self._local.put(key, Record(*fields), terms)
        self._bypassed(key, "complete")
        return True

    def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        """Count the lease from now."""
        return self._local.renew(key, owner, fence, terms)

    def release(self, key: Key, owner: bytes, fence: int | None) -> Flow[bool]:
        """Give back a key that was claimed here."""
        entry = self.running.get(owner)
        if entry is not None:
            yield Op("append", (entry._replace(what="free"),), self._steps)
            self.running.pop(owner, None)
        return self._local.release(key, owner, fence)

    def mark(self, key: Key, terms: Terms) -> Flow[bool]:
        """Mark a key without the store."""
        first = self._local.mark(key, terms)
        if first:
            entry = _entry("mark", key, new_owner(), 0, b"", terms)
            try:
                yield Op("append", (entry,), self._steps)
            except BaseException as error:
                self._local.drop(key.digest, b"")
                yield from self._take_back(entry, error)
                raise
            self.unsettled = True
        self._bypassed(key, "first_seen" if first else ClaimVerdict.REPLAY.value)
        return first

    def _bypassed(self, key: Key, operation: str) -> None:
        emit(EventKind.BYPASS, key, operation)

    # When it is back

    def settle(self, key: Key) -> Flow[bool]:
        """Put what is known here of one key into the store, before the store is asked of it.

        False: it runs here still, or is a mark, so that this table decides. A claim whose lease is
        over, or a mark whose window is, decides nothing once the store answers.
        """
        record, terms = self._local.found(key)
        if record is None:
            return True
        if terms is None or not record.owner:
            yield Op("now", ())
            return self._local.lapse(key.digest)
        entry = _entry(
            "done", key, record.owner, record.fence, record.fingerprint, terms, record.answer
        )
        # What slipped is told when the journal is reconciled.
        yield from settle_entry(entry._replace(at=record.expires_at - terms.ttl_ms))
        self._local.drop(key.digest, record.owner)
        return True

    def look_again(self) -> None:
        """The store is back: try at once what failed before."""
        self._look_at = 0.0

    def due(self) -> bool:
        """Whether a reconciliation should begin now. The one that is told True should do it."""
        now = time.monotonic()
        if not self.unsettled and now >= self._sweep_at:
            self._sweep_at = now + TRY_AGAIN
            self._end_lapsed()
        if not self.unsettled or self._reconciling or now < self._look_at:
            return False
        self._look_at = now + TRY_AGAIN  # if it is cut off before it begins, another one may
        return True

    def _end_lapsed(self) -> None:
        """End claims that nobody asks for any more. One that lives is renewed within a lease."""
        for entry in list(self.running.values()):
            self._local.lapse(entry.digest, entry.owner, entry.terms.lease_ms)

    def reconcile(self) -> Flow[Reconciled]:
        """Reconcile this process's journal, and those that nobody holds."""
        while self._reconciling:
            yield Op("pause", (), self._steps)
        return (yield from self.reconcile_due())

    def reconcile_due(self) -> Flow[Reconciled]:
        """The same, for whoever ``due`` was true for."""
        if self._reconciling:
            return Reconciled()
        try:
            self._reconciling = True
            self._end_lapsed()
            self.unsettled = False
            yield Op("turn", (self._carried,), self._steps)
            work = Reconciling(self.directory, self._name, self.findings, self._forget)
            made = yield from work.all()
            self._look_at = 0.0
            if made.files:
                logger.warning("reconciled what went on without the store: %s", made)
            return made
        except BaseException:
            self.unsettled = True
            self._look_at = time.monotonic() + TRY_AGAIN
            raise
        finally:
            self._reconciling = False

    def _forget(self, entry: Entry) -> None:
        self._local.drop(entry.digest, entry.owner)


def _lapsed(here: Fallback | None, record: Record) -> None:
    if here is not None:
        here.lapsed(record)


def _entry(
    what: str,
    key: Key,
    owner: bytes,
    fence: int,
    fingerprint: bytes,
    terms: Terms,
    answer: bytes | None = None,
) -> Entry:
    at = int(time.time() * 1000)
    scope = key.scope
    return Entry(
        what,
        key.digest,
        scope.label,
        scope.hash,
        owner,
        fence,
        fingerprint,
        terms,
        at,
        answer,
    )
