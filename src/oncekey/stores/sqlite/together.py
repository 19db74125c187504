"""Calls of one commit that are all of one kind, and of keys that nobody had: one statement for all.

That costs half of what a statement for each does, and is what comes in most commits. The statement
says how many rows it wrote, not which: if not all of them, it is undone, each call is made by
itself, and this is not tried again until a commit of new keys has gone by.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, Final

from oncekey._core import transitions
from oncekey.errors import StoreError
from oncekey.models import ClaimReply, ClaimVerdict
from oncekey.stores._batching import Job
from oncekey.stores._sql import load_statements

__all__ = ["Together"]

_SQL: Final = load_statements("statements.sql", "oncekey.stores.sqlite")
Rows = tuple[list[tuple[Any, ...]], Any]  # and what each call gets if all are new


class Together:
    """Makes the calls of a commit by one statement, where it can."""

    def __init__(self) -> None:
        self._last: Sequence[Job] = ()  # of a commit that was made one by one
        self._all_new = True  # so were the keys of the last that could have gone together

    def made(self, on: sqlite3.Cursor, jobs: Sequence[Job], begin: Callable[..., None]) -> bool:
        """Make all of ``jobs``, in the transaction that is open. False: nothing was done.

        ``begin``: Begins to write on a connection, for a call that came at that time.
        """
        if self._last:
            self._all_new, self._last = all(map(_is_new, self._last)), ()
        kind = jobs[0].method
        sql, rows_of = _KINDS.get(kind.__name__, (None, None))
        if rows_of is None or any(job.method is not kind for job in jobs):
            return False
        if not self._all_new:
            self._last = jobs
            return False
        try:
            rows, results = rows_of(jobs)
            if on.executemany(sql, rows).rowcount == len(jobs):
                for job, result in zip(jobs, results, strict=True):
                    job.result = result
                return True
        except (StoreError, ValueError, TypeError, ArithmeticError):
            pass  # of one of them, which gets it when it is made by itself
        self._last = jobs
        on.execute("ROLLBACK")
        begin(on.connection, jobs[0].begun)
        return False


def _is_new(job: Job) -> bool:
    result = None if job.error is not None else job.result
    return result is True or (type(result) is ClaimReply and result.verdict is ClaimVerdict.WON)


def _marks(jobs: Sequence[Job]) -> Rows:
    """See ``Database.mark``."""
    rows = []
    ends: tuple[int, ...] = ()
    last_terms = last_clock = None
    for job in jobs:
        key, terms, clock = job.args
        if terms is not last_terms or clock is not last_clock:
            last_terms, last_clock = terms, clock
            expires_at = int(clock() * 1_000_000) // 1000 + terms.ttl_ms
            ends = (transitions.mark_fence(expires_at), expires_at, expires_at)
        rows.append((key.digest, key.scope.label, *ends))
    return rows, repeat(True, len(rows))


def _claims(jobs: Sequence[Job]) -> Rows:
    """See ``Database.claim``."""
    rows, replies = [], []
    for job in jobs:
        key, owner, fingerprint, terms, clock = job.args
        now_us = int(clock() * 1_000_000)
        reply, record = transitions.claim(None, owner, fingerprint, terms, now_us)
        rows.append((key.digest, key.scope.label, *record))  # type: ignore[misc]
        replies.append(reply)
    return rows, replies


_KINDS: Final[dict[str, Any]] = {
    "mark": (_SQL["mark"], _marks),
    "claim": (_SQL["insert"], _claims),
}
