"""The state machine: one table for claims, one for settling. No clock, no I/O.

Every store decides through these tables or, where the decision is a statement on a server,
is held to them by the conformance suite. Nothing else may change a record's state.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Final

from oncekey.models import ClaimReply, ClaimVerdict, Record, State, Terms

__all__ = [
    "CLAIMS",
    "SETTLEMENTS",
    "Act",
    "Event",
    "Situation",
    "claim",
    "first",
    "mark",
    "mark_fence",
    "settle",
    "situate",
]


class Situation(IntEnum):
    """What a claim finds, on the store's clock."""

    ABSENT = auto()
    RELEASED = auto()
    MINE = auto()  # pending, by this very call: its first answer was lost
    LIVE = auto()  # pending, another owner, lease running
    LAPSED = auto()  # pending, another owner, lease over
    DONE = auto()  # completed, within its time to live (and skew)
    TOMBSTONE = auto()  # completed, past its time, still remembered as expired
    GONE = auto()  # past its time and not to be remembered


class Act(IntEnum):
    """What the store writes."""

    NOTHING = auto()
    TAKE = auto()  # new owner, higher fence, one more attempt
    EXTEND = auto()  # same owner and fence, lease counted from now


class Event(IntEnum):
    """What an owner does with its claim."""

    COMPLETE = auto()
    RENEW = auto()
    RELEASE = auto()


CLAIMS: Final[dict[tuple[Situation, bool], tuple[ClaimVerdict, Act]]] = {
    # (situation, same payload): (verdict, what is written)
    (Situation.ABSENT, True): (ClaimVerdict.WON, Act.TAKE),
    (Situation.ABSENT, False): (ClaimVerdict.WON, Act.TAKE),
    (Situation.RELEASED, True): (ClaimVerdict.WON, Act.TAKE),
    (Situation.RELEASED, False): (ClaimVerdict.WON, Act.TAKE),  # sticky: a conflict, see claim()
    (Situation.MINE, True): (ClaimVerdict.WON, Act.EXTEND),
    (Situation.MINE, False): (ClaimVerdict.CONFLICT, Act.NOTHING),
    (Situation.LIVE, True): (ClaimVerdict.IN_FLIGHT, Act.NOTHING),
    (Situation.LIVE, False): (ClaimVerdict.CONFLICT, Act.NOTHING),
    (Situation.LAPSED, True): (ClaimVerdict.WON, Act.TAKE),
    (Situation.LAPSED, False): (ClaimVerdict.CONFLICT, Act.NOTHING),
    (Situation.DONE, True): (ClaimVerdict.REPLAY, Act.NOTHING),
    (Situation.DONE, False): (ClaimVerdict.CONFLICT, Act.NOTHING),
    (Situation.TOMBSTONE, True): (ClaimVerdict.EXPIRED, Act.NOTHING),
    (Situation.TOMBSTONE, False): (ClaimVerdict.EXPIRED, Act.NOTHING),
    (Situation.GONE, True): (ClaimVerdict.WON, Act.TAKE),
    (Situation.GONE, False): (ClaimVerdict.WON, Act.TAKE),
}

# What an owner's event turns a state into; owner and fence must match, else it is fenced off.
# A pair that is missing is refused. Completing twice is true, so that a lost reply can be retried.
SETTLEMENTS: Final[dict[tuple[State, Event], State]] = {
    (State.PENDING, Event.COMPLETE): State.COMPLETED,
    (State.COMPLETED, Event.COMPLETE): State.COMPLETED,
    (State.PENDING, Event.RENEW): State.PENDING,
    (State.PENDING, Event.RELEASE): State.RELEASED,
}


# Looked up once: in 3.11 a member of an enum costs more to reach than the decision takes.
_PENDING, _COMPLETED = State.PENDING, State.COMPLETED
_RENEW, _RELEASE = Event.RENEW, Event.RELEASE
_WON, _REPLAY = ClaimVerdict.WON, ClaimVerdict.REPLAY
_DONE, _TAKE, _EXTEND = Situation.DONE, Act.TAKE, Act.EXTEND
# The same tables by number, which costs no hash.
_DECISIONS: Final = (
    ((_WON, _TAKE),) * 2,  # situations count from 1
    *((CLAIMS[situation, False], CLAIMS[situation, True]) for situation in Situation),
)
_TARGETS: Final = tuple(
    (None, *(SETTLEMENTS.get((state, event)) for event in Event)) for state in State
)
_new = tuple.__new__  # named tuples without their keyword machinery, for the paths of every key


def situate(record: Record | None, owner: bytes, now: int, terms: Terms) -> Situation:
    """Say what ``record`` is to a claimer at ``now``."""
    if record is None:
        return Situation.ABSENT
    state = record.state
    if state is _COMPLETED:
        if now < record.expires_at + terms.skew_ms:
            return _DONE
        if terms.remember_ms and now < record.purge_at:
            return Situation.TOMBSTONE
        return Situation.GONE
    if state is _PENDING:
        if record.owner == owner:
            return Situation.MINE
        if now < record.lease_until:
            return Situation.LIVE
        return Situation.LAPSED if now < record.expires_at else Situation.GONE
    return Situation.RELEASED if now < record.expires_at else Situation.GONE


def claim(
    record: Record | None, owner: bytes, fingerprint: bytes, terms: Terms, now_us: int
) -> tuple[ClaimReply, Record | None]:
    """Decide a claim. Gives the reply and the record to write, if any.

    A record without a fingerprint has no payload bound to it: it equals any.
    """
    if record is None:
        return first(owner, fingerprint, terms, now_us)
    now = now_us // 1000
    situation = situate(record, owner, now, terms)
    same = record.fingerprint == fingerprint or not record.fingerprint or not fingerprint
    verdict, act = _DECISIONS[situation][same]
    if situation is Situation.RELEASED and terms.sticky and not same:
        verdict, act = ClaimVerdict.CONFLICT, Act.NOTHING
    if act is _TAKE:
        if situation is Situation.GONE:
            record = record._replace(expires_at=0)  # nothing of its window is inherited
        return _take(record, owner, fingerprint, terms, now_us)
    if act is _EXTEND:
        record = _extend(record, terms, now)
        return ClaimReply(verdict, record.fence, terms.lease_ms, record.attempts, None), record
    answer = record.answer if verdict is _REPLAY else None
    left = record.lease_until - now if record.state is _PENDING else 0
    fields = (verdict, record.fence, max(0, left), record.attempts, answer, False, False)
    return _new(ClaimReply, fields), None


def first(owner: bytes, fingerprint: bytes, terms: Terms, now_us: int) -> tuple[ClaimReply, Record]:
    """Win a key that nobody has: the reply, and the record to write."""
    now = now_us // 1000
    lease_ms, ttl_ms, _, _, sticky = terms
    until = now + lease_ms
    expires_at = purge_at = until + ttl_ms
    if sticky:
        expires_at = now + ttl_ms
        purge_at = max(until, expires_at)
    fields = (_PENDING, owner, now_us, fingerprint, until, expires_at, purge_at, 1, None)
    reply = _new(ClaimReply, (_WON, now_us, lease_ms, 1, None, False, False))
    return reply, _new(Record, fields)


def _take(
    old: Record, owner: bytes, fingerprint: bytes, terms: Terms, now_us: int
) -> tuple[ClaimReply, Record]:
    reply, record = first(owner, fingerprint, terms, now_us)
    # Monotone whatever the clock does: a fence never goes back while the record is known.
    fence, attempts = max(old.fence + 1, now_us), old.attempts + 1
    takeover = old.state is _PENDING
    if terms.sticky and old.expires_at > now_us // 1000:  # retries don't extend the window
        bound = old.fingerprint or fingerprint
        purge_at = max(record.lease_until, old.expires_at)
        record = record._replace(expires_at=old.expires_at, purge_at=purge_at, fingerprint=bound)
    reply = reply._replace(fence=fence, attempts=attempts, takeover=takeover)
    return reply, record._replace(fence=fence, attempts=attempts)


def _extend(record: Record, terms: Terms, now: int) -> Record:
    """Count the lease from now. The record stays for as long as its lease runs, at the least."""
    lease_until, expires_at = now + terms.lease_ms, record.expires_at
    if not terms.sticky:
        expires_at = max(expires_at, lease_until + terms.ttl_ms)
    return record._replace(
        lease_until=lease_until, expires_at=expires_at, purge_at=max(expires_at, lease_until)
    )


def settle(
    record: Record | None,
    event: Event,
    owner: bytes,
    fence: int | None,
    terms: Terms,
    now: int,
    answer: bytes | None = None,
) -> tuple[bool, Record | None]:
    """Decide what an owner does. Gives whether it held, and the record to write, if any.

    ``fence`` may be ``None`` for a release only: a caller that never learnt its fence, because
    it was cancelled while it claimed, still owns the claim by its unique owner id.
    """
    if record is None:
        return False, None
    state, holder, held_fence, fingerprint, _, expires_at, _, attempts, _ = record
    if holder != owner or (fence is not None and held_fence != fence):
        return False, None
    target = _TARGETS[state][event]
    if target is None:
        return False, None
    if event is _RENEW:
        return True, _extend(record, terms, now)
    if event is _RELEASE:
        return True, record._replace(state=target, lease_until=now)
    if state is _COMPLETED:
        return True, None
    if not terms.sticky:
        expires_at = now + terms.ttl_ms
    purge_at = expires_at + terms.skew_ms + terms.remember_ms
    fields = (target, owner, held_fence, fingerprint, 0, expires_at, purge_at, attempts, answer)
    return True, _new(Record, fields)


def mark_fence(expires_at: int) -> int:
    """The fence of a first-seen mark that ends at ``expires_at``."""
    return expires_at * 1000 - 1


def mark(record: Record | None, terms: Terms, now_us: int) -> Record | None:
    """Decide a first-seen call: the record to write if the key is new, else ``None``."""
    now = now_us // 1000
    situation = situate(record, b"", now, terms)
    if situation not in (Situation.ABSENT, Situation.RELEASED, Situation.LAPSED, Situation.GONE):
        return None
    expires_at = now + terms.ttl_ms
    # Nobody owns a mark. Its fence lies past this moment and below any win after its window, so
    # that a store need not keep it beside the expiry.
    fence = mark_fence(expires_at)
    if record is not None:
        fence = max(record.fence + 1, fence)
    return Record(State.COMPLETED, b"", fence, b"", 0, expires_at, expires_at, 1, None)
