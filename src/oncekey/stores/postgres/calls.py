"""What calls ask of PostgreSQL, and what the rows mean: in batches, and in a caller's transaction.

What is sent is yielded, and its rows are sent back: how drivers do that is no matter here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final, NamedTuple

from oncekey._core import transitions
from oncekey.abc import TransactionRecords
from oncekey.drivers import ended_refused
from oncekey.errors import StoreError, StoreUnavailableError, TransactionRefusedError
from oncekey.models import ClaimReply, ClaimVerdict, Key, Record, State, Terms
from oncekey.stores._batching import Job
from oncekey.stores.postgres.errors import Contention, named
from oncekey.stores.postgres.statements import Statements

__all__ = [
    "PgTransactionRecords",
    "Recent",
    "Statement",
    "is_fence",
    "run_jobs",
]

TRIES: Final = 5
_WON: Final = ClaimVerdict.WON
BUSY_MS: Final = 1000  # how long a transaction that has a key in hand is given, as it has no lease

Rows = Sequence[Sequence[Any]]


class Statement(NamedTuple):
    """One statement to send, and its arguments in the order of their numbers."""

    sql: str
    args: list[Any]


Steps = Generator[Statement, Rows, None]


def is_fence(fence: int | None) -> bool:
    """Whether a number can be a fence at all: a forged token may hold any."""
    return fence is None or -(2**63) <= fence < 2**63


def lock_number(tenant: str, digest: bytes) -> int:
    """The number of a key's advisory lock: the start of its digest, another for each tenant."""
    if tenant:
        digest = hashlib.sha256(tenant.encode() + digest).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


# Which calls go together


class Recent:
    """What the last calls were like. It decides what is looked for first, never what is found.

    Attributes:
        in_a_row: The last claims: so many were for new keys or, below 0, for known ones.
        batches: Of what kinds of call the last batch had mostly new keys, and of which it had not.
        transactions: Whether the last claim in a transaction was for a new key.
    """

    __slots__ = ("batches", "in_a_row", "transactions")

    def __init__(self) -> None:
        self.in_a_row = 0
        self.batches: dict[str, bool] = {}
        self.transactions = True

    def claimed(self, reply: ClaimReply) -> bool:
        """Take note of a claim. True: it was won."""
        row = self.in_a_row
        if reply.verdict is _WON:
            self.in_a_row = row + 1 if row > 0 else 1
            return True
        self.in_a_row = row - 1 if row < 0 else -1
        return False


def run_jobs(
    home: Statements, tenant: str, jobs: Sequence[Job], recent: Recent | None = None
) -> Steps:
    """The statements for ``jobs``; fills each of them in."""
    if len(jobs) > 1:
        return _share(home, tenant, jobs, recent or Recent())
    kind, which = jobs[0].method, _ALONE
    if kind == "claim" and recent is not None:
        row = recent.in_a_row
        which = _FRESH if row >= SURE else _LOOK if row <= -SURE else _ALONE
    return _send(home, tenant, kind, jobs, which)


def _releases_last(group: tuple[tuple[str, Terms | None], list[Job]]) -> bool:
    return group[0][0] == "release"


def _share(home: Statements, tenant: str, jobs: Iterable[Job], recent: Recent) -> Steps:
    """Calls of one kind and one set of terms share a statement.

    Of several for one key only the first is sent where the others' answers follow from its own,
    else they get a statement of their own. Releases go last: one may be of a claim of the same
    batch, whose caller has gone.
    """
    new = recent.batches
    groups: dict[tuple[str, Terms | None], list[Job]] = {}
    for job in jobs:
        last = job.args[-1]
        groups.setdefault((job.method, last if type(last) is Terms else None), []).append(job)
    for (kind, _), group in sorted(groups.items(), key=_releases_last):
        rest = group
        while rest:
            first: dict[bytes, Job] = {}
            also: list[tuple[Job, Job]] = []
            later: list[Job] = []
            for job in rest:
                lead = first.setdefault(job.args[0].digest, job)
                if lead is job:
                    continue
                if kind in ("mark", "read") or (
                    kind in ("claim", "peek") and lead.args[-2] == job.args[-2]
                ):
                    also.append((job, lead))
                else:
                    later.append(job)
            # In the order of their keys, so that no two batches lock them in opposite orders.
            order = [first[digest] for digest in sorted(first)]
            if len(order) == 1:
                yield from _send(home, tenant, kind, order, _ALONE)
            else:
                yield from _send(home, tenant, kind, order, _NEW if new.get(kind, True) else _KNOWN)
                new[kind] = 2 * sum(_is_new(job) for job in order) >= len(order)
            for job, lead in also:
                job.error = lead.error
                if lead.error is None:
                    job.result = _FOLLOW[kind](lead.result)
            rest = later


def _is_new(job: Job) -> bool:
    result = None if job.error is not None else job.result
    return result is True or (type(result) is ClaimReply and result.verdict is ClaimVerdict.WON)


def _follow_claim(reply: ClaimReply) -> ClaimReply:
    """What the same claim of another owner gets, a moment after the one that was sent."""
    if reply.verdict is not ClaimVerdict.WON:
        return reply
    return ClaimReply(ClaimVerdict.IN_FLIGHT, reply.fence, reply.lease_ms, reply.attempts, None)


_FOLLOW: Final[dict[str, Callable[[Any], Any]]] = {
    "claim": _follow_claim,
    "mark": lambda first: False,
    "read": lambda record: record,
    "peek": lambda reply: reply,
}


# One statement

# Which statement is for a kind of call, where that is not the one of its name.
_KNOWN: Final = {"peek": "read"}
_NEW: Final = {"peek": "read", "claim": "claim_new", "mark": "mark_new"}
_ALONE: Final = {"peek": "read", "mark": "mark_new"}
_FRESH: Final = {"claim": "claim_fresh"}
_LOOK: Final = {"claim": "claim_known"}
SURE: Final = 4  # so many claims in a row of one sort, and the next is taken to be of it


@functools.lru_cache(maxsize=256)
def _terms(kind: str, terms: Any) -> tuple[Any, ...]:
    """The arguments that come after what is asked: of the terms, where there are any."""
    if kind == "claim":
        return terms.lease_ms, terms.ttl_ms, terms.skew_ms, terms.remember_ms, terms.sticky
    if kind == "mark":
        return terms.ttl_ms, terms.skew_ms, terms.remember_ms
    if kind == "complete":
        return terms.ttl_ms, terms.skew_ms + terms.remember_ms, terms.sticky
    return (terms.lease_ms, terms.ttl_ms, terms.sticky) if kind == "renew" else ()


def _asked(tenant: str, kind: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call asks: its key, the scope as every database can store it, and what else."""
    key: Key = args[0]
    digest, label = key.digest, key.scope.label
    if not label.isascii():
        label = f"sha256:{key.scope.hash}"
    if kind in _LOOKS:
        return digest, label
    lock = lock_number(tenant, digest)
    if kind in ("mark", "look"):
        return digest, label, lock
    return digest, label, args[1], args[2], lock, *args[3:-1]


def _statement(texts: Statements, tenant: str, kind: str, name: str, jobs: Sequence[Job]) -> Any:
    last = jobs[0].args[-1]
    terms = _terms(kind, last) if type(last) is Terms else ()
    if len(jobs) == 1:
        return Statement(texts.one[name], [tenant, *_asked(tenant, kind, jobs[0].args), *terms])
    columns = zip(*[_asked(tenant, kind, job.args) for job in jobs], strict=True)
    return Statement(texts.many[name], [tenant, *map(list, columns), *terms])


def _send(
    home: Statements,
    tenant: str,
    kind: str,
    jobs: Sequence[Job],
    which: dict[str, str],
    tries: int = 1,
) -> Steps:
    try:
        rows = yield _statement(home, tenant, kind, which.get(kind, kind), jobs)
    except StoreError as error:
        busy = isinstance(error, Contention)
        if len(jobs) > 1 and (busy or not isinstance(error, StoreUnavailableError)):
            for job in jobs:  # one bad call must not take its neighbours down
                yield from _send(home, tenant, kind, [job], _KNOWN)
        elif busy and tries < TRIES:  # nothing was done: a fresh statement sees what was in the way
            yield from _send(home, tenant, kind, jobs, _KNOWN, tries + 1)
        else:
            _fail(jobs, error)
        return
    read = _READ.get(kind)
    if len(jobs) == 1 and rows:
        jobs[0].result = read(rows[0], *jobs[0].args[1:]) if read is not None else rows[0][1]
        if kind == "complete" and rows[0][-1]:
            with contextlib.suppress(StoreError):  # it is done: who is not told looks for itself
                yield Statement(home.sql["announce"], [tenant, jobs[0].args[0].digest])
        return
    found = {row[0]: row for row in rows}
    left = []
    for job in jobs:
        row = found.get(job.args[0].digest)
        if row is not None:
            job.result = read(row, *job.args[1:]) if read is not None else row[1]
        elif kind in _LOOKS:
            job.result = None
        else:
            left.append(job)
    if left and which.get(kind, kind) != kind:  # not new after all: there is something to take over
        yield from _send(home, tenant, kind, left, _KNOWN, tries)
    elif left:
        yield from _look(home, tenant, kind, left, tries)


def _fail(jobs: Sequence[Job], error: StoreError) -> None:
    for job in jobs:
        job.error = copy.copy(error)
        job.error.__cause__ = error.__cause__


# Rows


def claim_reply(row: Sequence[Any], owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
    """What a row of the claim statement says to the owner that asked."""
    _, state, holder, fence, bound, left, late, attempts, takeover, answer = row[:10]
    if state is None:
        return _BUSY
    same = bound == fingerprint or not bound or not fingerprint
    if state == 0 and holder == owner and same:
        return ClaimReply(ClaimVerdict.WON, fence, terms.lease_ms, attempts, None, takeover)
    if state != 0:
        left = 0
    if state == 1 and late and terms.remember_ms:
        verdict = ClaimVerdict.EXPIRED
    elif not same:
        verdict = ClaimVerdict.CONFLICT
    elif state == 1:
        return ClaimReply(ClaimVerdict.REPLAY, fence, 0, attempts, answer)
    else:
        verdict = ClaimVerdict.IN_FLIGHT
    return ClaimReply(verdict, fence, left, attempts, None)


_BUSY: Final = ClaimReply(ClaimVerdict.IN_FLIGHT, 0, BUSY_MS, 0, None)


def hidden(key: Key) -> StoreError:
    """The error for a record that the server did not show."""
    return StoreError(
        f"PostgreSQL gave no row for a key of scope {key.scope.hash}: a row-level security policy "
        "or a trigger hides it from this role. Let the role see its own rows"
    )


def _busy() -> StoreUnavailableError:
    return StoreUnavailableError(
        "a transaction has this key in hand right now: try again when it has ended"
    )


def _record(row: Sequence[Any]) -> Record:
    return Record(State(row[1]), *row[2:10])


def _peeked(row: Sequence[Any], fingerprint: bytes, terms: Terms) -> ClaimReply | None:
    """What a claim would get if nothing had to be written for it."""
    reply, change = transitions.claim(_record(row), b"", fingerprint, terms, row[10])
    return None if change is not None or reply.verdict is ClaimVerdict.WON else reply


# What the row of a call means; of others, its second column is the answer.
_READ: Final[dict[str, Callable[..., Any]]] = {
    "claim": claim_reply,
    "read": _record,
    "peek": _peeked,
}
_LOOKS: Final = frozenset({"read", "peek"})


# No row


def _look(home: Statements, tenant: str, kind: str, jobs: list[Job], tries: int) -> Steps:
    """Find out why calls got no row: a transaction is in the way, or was, or they hold nothing."""
    try:
        columns = zip(*[_asked(tenant, "look", job.args) for job in jobs], strict=True)
        rows = yield Statement(home.many["look"], [tenant, *map(list, columns)])
    except StoreError as error:
        _fail(jobs, error)
        return
    found = {row[0]: row[1:] for row in rows}
    again = []
    for job in jobs:
        free, *record = found[job.args[0].digest]
        if not free and kind == "claim":
            job.result = _BUSY
        elif not free:
            job.error = _busy()
        elif kind in ("claim", "mark") or _is_held(job, State.PENDING, record):
            again.append(job)
        else:  # a completion that is on record already: its first reply was lost
            job.result = kind == "complete" and _is_held(job, State.COMPLETED, record)
    if again and tries < TRIES:
        yield from _send(home, tenant, kind, again, _KNOWN, tries + 1)
    else:
        for job in again:
            job.error = hidden(job.args[0]) if kind in ("claim", "mark") else _busy()


def _is_held(job: Job, state: State, record: list[Any]) -> bool:
    """Whether a record is in this state by the owner and the fence of a call."""
    _, owner, fence = job.args[:3]
    return record[:2] == [state, owner] and (fence is None or record[2] == fence)


# Inside a caller's transaction


class PgTransactionRecords(TransactionRecords):
    """What another transaction has in hand is busy, never waited for."""

    flavour = "postgresql"

    def __init__(self, home: Statements, tenant: str, store_id: str, recent: Recent) -> None:
        self._home = home
        self._tenant = tenant
        self._store_id = store_id
        self._recent = recent
        self._transaction = ""

    def claim(
        self, on: Any, key: Key, owner: bytes, fingerprint: bytes, terms: Terms
    ) -> Generator[Any, Any, ClaimReply]:
        asked = _asked(self._tenant, "claim", (key, owner, fingerprint, terms))
        args = [self._tenant, *asked, *_terms("claim", terms)]
        joined: bool = on.joined
        args += [self._store_id, joined]
        if self._recent.transactions:
            rows = yield from on.execute(self._home.claim_in_new, args)
            if rows:
                fence, self._transaction = rows[0]
                return ClaimReply(_WON, fence, terms.lease_ms, 1, None)
        rows = yield from on.execute(self._home.claim_in, args)
        if not rows:
            raise hidden(key)
        row = rows[0]
        store_id, isolation, transaction = row[10:]
        if store_id != self._store_id:
            raise TransactionRefusedError(
                "this connection is to another database, or another schema, than the store's: the "
                "claim would not protect your writes. Use a store on the same database"
                + on.elsewhere
            )
        if row[1] is None and joined and isolation not in ("read committed", "read uncommitted"):
            raise TransactionRefusedError(
                f"this transaction is {isolation}: it can't see what others committed since it "
                "began, and oncekey can't begin it anew. Open it as READ COMMITTED, or let "
                "oncekey open it: pass a connection without an open transaction"
            )
        self._transaction = transaction
        reply = claim_reply(row, owner, fingerprint, terms)
        self._recent.transactions = reply.verdict is _WON
        return reply

    def complete(
        self, on: Any, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> Generator[Any, Any, bool]:
        asked = _asked(self._tenant, "complete", (key, owner, fence, answer, terms))
        args = [self._tenant, *asked, *_terms("complete", terms), self._transaction]
        rows = yield from on.execute(self._home.complete_in, args)
        if not rows:
            rows = yield from on.execute(self._home.sql["transaction"], [])
            if rows[0][0] != self._transaction:
                raise ended_refused("connection")
            return False
        if rows[0][3]:
            yield from on.execute(self._home.sql["announce"], [self._tenant, key.digest])
        return True

    def named(self, error: BaseException) -> StoreError:
        return named(error)
