"""What a batch of calls asks of PostgreSQL, and what the rows mean. Knows nothing of drivers."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final, NamedTuple

from oncekey._core import transitions
from oncekey.errors import StoreError, StoreUnavailableError
from oncekey.models import ClaimReply, Key, Record, Scope, State, Terms, Verdict
from oncekey.stores._batching import Job
from oncekey.stores.postgres.statements import Statements

__all__ = [
    "Contention",
    "Statement",
    "claim_arguments",
    "claim_reply",
    "complete_arguments",
    "hidden",
    "is_fence",
    "run_jobs",
]

TRIES: Final = 5
BUSY_MS: Final = 1000  # how long a transaction that has a key in hand is given, as it has no lease

Rows = Sequence[Sequence[Any]]


class Contention(StoreUnavailableError):
    """Calls of one batch got in another's way: each may succeed alone."""


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


def _releases_last(group: tuple[tuple[str, Terms | None], list[Job]]) -> bool:
    return group[0][0] == "release"


def run_jobs(home: Statements, tenant: str, jobs: Iterable[Job]) -> Steps:
    """The statements for ``jobs``; fills each of them in.

    Releases go last: one may be of a claim of the same batch, whose caller has gone.

    Calls of one kind and one set of terms share a statement. Of several for one key only the first
    is sent where the others' answers follow from its own, else they get a statement of their own.
    """
    groups: dict[tuple[str, Terms | None], list[Job]] = {}
    for job in jobs:
        last = job.args[-1]
        groups.setdefault((job.method, last if type(last) is Terms else None), []).append(job)
    for (kind, terms), group in sorted(groups.items(), key=_releases_last):
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
            yield from _send(home, tenant, kind, terms, order)
            for job, lead in also:
                job.error = lead.error
                if lead.error is None:
                    job.result = _FOLLOW[kind](lead.result)
            rest = later


def _label(scope: Scope) -> str:
    """A scope as every database can store it, whatever its encoding."""
    label = scope.label
    return label if label.isascii() else f"sha256:{scope.hash}"


def _send(
    home: Statements,
    tenant: str,
    kind: str,
    terms: Terms | None,
    jobs: list[Job],
    tries: int = 1,
) -> Steps:
    keys = [job.args[0] for job in jobs]
    digests = [key.digest for key in keys]
    asked, rest = _BUILD[kind](tenant, jobs, terms)
    columns = [digests, [_label(key.scope) for key in keys], *asked]
    text = "read" if kind == "peek" else kind
    if len(jobs) == 1:
        statement = Statement(home.one[text], [tenant, *(column[0] for column in columns), *rest])
    else:
        statement = Statement(home.many[text], [tenant, *columns, *rest])
    try:
        rows = yield statement
    except StoreUnavailableError as error:
        if not isinstance(error, Contention):
            _fail(jobs, error)
        elif len(jobs) > 1:
            for job in jobs:
                yield from _send(home, tenant, kind, terms, [job])
        elif tries < TRIES:  # nothing was done: a fresh statement sees what was in the way
            yield from _send(home, tenant, kind, terms, jobs, tries + 1)
        else:
            _fail(jobs, error)
    except StoreError as error:
        if len(jobs) > 1:  # one bad call must not take its neighbours down
            for job in jobs:
                yield from _send(home, tenant, kind, terms, [job])
        else:
            _fail(jobs, error)
    else:
        found = {row[0]: row for row in rows}
        read = _READ[kind]
        for job, digest in zip(jobs, digests, strict=True):
            row = found.get(digest)
            try:
                job.result = read(job, row)
            except StoreError as error:
                job.error = error


def _fail(jobs: list[Job], error: StoreError) -> None:
    for job in jobs:
        job.error = copy.copy(error)
        job.error.__cause__ = error.__cause__


# What is asked after keys and scopes, a list for each column; and the arguments after that.


def _locks(tenant: str, jobs: list[Job]) -> list[int]:
    return [lock_number(tenant, job.args[0].digest) for job in jobs]


def _column(jobs: list[Job], number: int) -> list[Any]:
    return [job.args[number] for job in jobs]


Built = tuple[list[list[Any]], list[Any]]


def _claim_terms(terms: Terms) -> list[Any]:
    return [terms.lease_ms, terms.ttl_ms, terms.skew_ms, terms.remember_ms, terms.sticky]


def _claim(tenant: str, jobs: list[Job], terms: Any) -> Built:
    return [_column(jobs, 1), _column(jobs, 2), _locks(tenant, jobs)], _claim_terms(terms)


def _mark(tenant: str, jobs: list[Job], terms: Any) -> Built:
    return [_locks(tenant, jobs)], [terms.ttl_ms, terms.skew_ms, terms.remember_ms]


def _complete(tenant: str, jobs: list[Job], terms: Any) -> Built:
    columns = [_column(jobs, 1), _column(jobs, 2), _locks(tenant, jobs), _column(jobs, 3)]
    return columns, [terms.ttl_ms, terms.skew_ms + terms.remember_ms, terms.sticky]


def _renew(tenant: str, jobs: list[Job], terms: Any) -> Built:
    columns = [_column(jobs, 1), _column(jobs, 2), _locks(tenant, jobs)]
    return columns, [terms.lease_ms, terms.ttl_ms, terms.sticky]


def _release(tenant: str, jobs: list[Job], terms: Any) -> Built:
    return [_column(jobs, 1), _column(jobs, 2), _locks(tenant, jobs)], []


def _read(tenant: str, jobs: list[Job], terms: Any) -> Built:
    return [], []


_BUILD: Final[dict[str, Callable[[str, list[Job], Any], Built]]] = {
    "claim": _claim,
    "mark": _mark,
    "complete": _complete,
    "renew": _renew,
    "release": _release,
    "read": _read,
    "peek": _read,
}


# Rows


def claim_reply(row: Sequence[Any], owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
    """What a row of the claim statement says to the owner that asked."""
    _, state, holder, fence, bound, left, late, attempts, takeover, answer = row[:10]
    if state is None:
        return ClaimReply(Verdict.IN_FLIGHT, 0, BUSY_MS, 0, None)
    same = bound == fingerprint or not bound or not fingerprint
    if state == State.PENDING and holder == owner and same:
        return ClaimReply(Verdict.WON, fence, terms.lease_ms, attempts, None, takeover)
    if state != State.PENDING:
        left = 0
    if state == State.COMPLETED and late and terms.remember_ms:
        verdict = Verdict.EXPIRED
    elif not same:
        verdict = Verdict.CONFLICT
    elif state == State.COMPLETED:
        return ClaimReply(Verdict.REPLAY, fence, 0, attempts, answer)
    else:
        verdict = Verdict.IN_FLIGHT
    return ClaimReply(verdict, fence, left, attempts, None)


def _claimed(job: Job, row: Sequence[Any] | None) -> ClaimReply:
    _, owner, fingerprint, terms = job.args
    if row is None:
        raise hidden(job.args[0])
    return claim_reply(row, owner, fingerprint, terms)


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


def _first(job: Job, row: Sequence[Any] | None) -> bool:
    if row is None:
        return False
    if row[1] is None:
        raise _busy()
    return True


def _record(job: Job, row: Sequence[Any] | None) -> Record | None:
    if row is None:
        return None
    return Record(State(row[1]), *row[2:10])


def _peeked(job: Job, row: Sequence[Any] | None) -> ClaimReply | None:
    """What a claim would get if nothing had to be written for it."""
    record = _record(job, row)
    if record is None or row is None:
        return None
    _, fingerprint, terms = job.args
    reply, change = transitions.claim(record, b"", fingerprint, terms, row[10])
    return None if change is not None or reply.verdict is Verdict.WON else reply


_READ: Final[dict[str, Callable[[Job, Sequence[Any] | None], Any]]] = {
    "claim": _claimed,
    "mark": _first,
    "complete": _first,
    "renew": _first,
    "release": _first,
    "read": _record,
    "peek": _peeked,
}


def _follow_claim(reply: ClaimReply) -> ClaimReply:
    """What the same claim of another owner gets, a moment after the one that was sent."""
    if reply.verdict is not Verdict.WON:
        return reply
    return ClaimReply(Verdict.IN_FLIGHT, reply.fence, reply.lease_ms, reply.attempts, None)


_FOLLOW: Final[dict[str, Callable[[Any], Any]]] = {
    "claim": _follow_claim,
    "mark": lambda first: False,
    "read": lambda record: record,
    "peek": lambda reply: reply,
}


# Inside a caller's transaction


def claim_arguments(
    tenant: str, key: Key, owner: bytes, fingerprint: bytes, terms: Terms
) -> list[Any]:
    """What ``claim_in`` takes for one key, but for the store's id and whose transaction it is."""
    digest = key.digest
    asked = [digest, _label(key.scope), owner, fingerprint, lock_number(tenant, digest)]
    return [tenant, *asked, *_claim_terms(terms)]


def complete_arguments(
    tenant: str, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
) -> list[Any]:
    """What the statement ``complete`` takes for one key."""
    digest = key.digest
    asked = [digest, _label(key.scope), owner, fence, lock_number(tenant, digest), answer]
    return [tenant, *asked, terms.ttl_ms, terms.skew_ms + terms.remember_ms, terms.sticky]
