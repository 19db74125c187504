"""The operations: what each asks of the server, and what the reply means.

A job's arguments start with the digest of its key and its terms; jobs of one operation with the
same terms go to the server as one call of a script, for many keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from oncekey._core.transitions import mark
from oncekey.errors import StoreCorruptError
from oncekey.models import ClaimReply, ClaimVerdict, Terms
from oncekey.stores._batching import Job
from oncekey.stores.redis.lua import load_script
from oncekey.stores.redis.record import GRACE_MS, decode

__all__ = [
    "CLAIM",
    "CLEAR",
    "COMPLETE",
    "LONE_MARK",
    "MARK",
    "NOW",
    "READ",
    "RELEASE",
    "RENEW",
    "WATCH",
    "WRITE",
    "Op",
    "Scripted",
    "command",
]

_VERDICTS: Final = (
    ClaimVerdict.WON,
    ClaimVerdict.REPLAY,
    ClaimVerdict.IN_FLIGHT,
    ClaimVerdict.CONFLICT,
    ClaimVerdict.EXPIRED,
)
_WON: Final = ClaimVerdict.WON
_ONE: Final = b"1"[0]
_new: Final = tuple.__new__  # a named tuple without its keyword machinery, for every win


def bulk(value: bytes) -> bytes:
    """One argument on the wire."""
    return b"$%d\r\n%b\r\n" % (len(value), value)


def command(*args: bytes) -> bytes:
    """One command on the wire."""
    return b"*%d\r\n" % len(args) + b"".join(map(bulk, args))


def _numbers(*values: int) -> bytes:
    return b"".join([bulk(b"%d" % value) for value in values])


class Op:
    """What a store can ask of the server. One of each.

    Attributes:
        replies: How many replies come.
        settles: Whether those who wait for the key are to look again.
    """

    replies = 1
    settles = False

    def __init__(self, name: str) -> None:
        self.name = name

    def pack(self, key_head: bytes, jobs: Sequence[Job], again: bool, source: bool) -> bytes:
        """What is sent. ``key_head``: the start of a key on the wire, up to the digest.

        ``again``: it may have been sent before. ``source``: the server does not know the script.
        """
        raise NotImplementedError

    def take(self, jobs: Sequence[Job], reply: Any) -> None:
        """Give each job its part of the reply."""
        raise NotImplementedError

    def changed(self, job: Job) -> bool:
        """Whether this job's result promises that something was written."""
        return False

    def undo(self, job: Job) -> bytes | None:
        """The owner to release if too few replicas confirm what this job did."""
        return None


class Scripted(Op):
    """An operation that is a script. Subclasses say what its arguments and replies are."""

    each = 1  # how many arguments a key has
    shared = 0  # how many come before those

    def __init__(self, name: str) -> None:
        super().__init__(name)
        script = load_script(name)
        self._known = b"$7\r\nEVALSHA\r\n%b" % bulk(script.sha)
        self._source = b"$4\r\nEVAL\r\n%b" % bulk(script.source)

    @staticmethod
    @lru_cache(1)
    def head(terms: Any, again: bool) -> bytes:
        """The arguments that the keys of a call share. Cached, as a program has few policies."""
        return b""

    def args(self, job: Job) -> bytes:
        """The arguments of one key."""
        raise NotImplementedError

    def pack(self, key_head: bytes, jobs: Sequence[Job], again: bool, source: bool) -> bytes:
        """One call of the script for the keys of ``jobs``."""
        count = len(jobs)
        pieces = [
            b"*%d\r\n%b$%d\r\n%d\r\n"
            % (
                3 + self.shared + count * (1 + self.each),
                self._source if source else self._known,
                len(str(count)),
                count,
            )
        ]
        for job in jobs:
            pieces.append(b"%b%b\r\n" % (key_head, job.args[0]))  # noqa: PERF401 - no frame of its own
        pieces.append(self.head(jobs[0].args[1], again))
        if self.each:
            pieces.extend(map(self.args, jobs))
        return b"".join(pieces)

    def take(self, jobs: Sequence[Job], reply: Any) -> None:
        """1 for all, or a digit for each."""
        if reply == 1:
            for job in jobs:
                job.result = True
            return
        for job, digit in zip(jobs, reply, strict=True):
            job.result = digit == _ONE

    def changed(self, job: Job) -> bool:
        """Whether it held."""
        return bool(job.result)


class _Claim(Scripted):
    """Arguments: digest, terms, owner, fingerprint."""

    each, shared = 2, 5

    @staticmethod
    @lru_cache(256)
    def head(terms: Terms, again: bool) -> bytes:
        return _numbers(
            terms.lease_ms, terms.ttl_ms, terms.skew_ms, terms.remember_ms, terms.sticky
        )

    def args(self, job: Job) -> bytes:
        _, _, owner, fingerprint = job.args
        return b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(owner), owner, len(fingerprint), fingerprint)

    def take(self, jobs: Sequence[Job], reply: Any) -> None:
        for job, item in zip(jobs, reply, strict=True):
            if type(item) is int:  # the fence of a first win
                won = (_WON, item, job.args[1].lease_ms, 1, None, False, False)
                job.result = _new(ClaimReply, won)
            else:
                verdict, fence, left, attempts, answer, takeover = item
                job.result = ClaimReply(
                    _VERDICTS[verdict], fence, left, attempts, answer, takeover == 1
                )

    def changed(self, job: Job) -> bool:
        return bool(job.result.verdict is _WON)

    def undo(self, job: Job) -> bytes | None:
        return job.args[2]  # type: ignore[no-any-return]


class _Complete(Scripted):
    """Arguments: digest, terms, owner, fence, answer."""

    each, shared = 3, 4
    settles = True

    @staticmethod
    @lru_cache(256)
    def head(terms: Terms, again: bool) -> bytes:
        return _numbers(terms.ttl_ms, terms.skew_ms, terms.remember_ms, terms.sticky)

    def args(self, job: Job) -> bytes:
        _, _, owner, fence, answer = job.args
        return b"$%d\r\n%b\r\n$8\r\n%b\r\n$%d\r\n%b\r\n" % (
            len(owner),
            owner,
            fence.to_bytes(8, signed=True),
            len(answer),
            answer,
        )


class _Renew(Scripted):
    """Arguments: digest, terms, owner, fence."""

    each, shared = 2, 3

    @staticmethod
    @lru_cache(256)
    def head(terms: Terms, again: bool) -> bytes:
        return _numbers(terms.lease_ms, terms.ttl_ms, terms.sticky)

    def args(self, job: Job) -> bytes:
        _, _, owner, fence = job.args
        return bulk(owner) + bulk(b"%d" % fence)


class _Release(Scripted):
    """Arguments: digest, None, owner, fence or None."""

    each, shared = 2, 1
    settles = True

    @staticmethod
    @lru_cache(256)
    def head(terms: Any, again: bool) -> bytes:
        return b"$1\r\n%d\r\n" % again

    def args(self, job: Job) -> bytes:
        _, _, owner, fence = job.args
        return bulk(owner) + bulk(b"" if fence is None else b"%d" % fence)


class _Mark(Scripted):
    """Arguments: digest, terms, token. By its token a mark that is sent again is known."""

    each, shared = 1, 3

    @staticmethod
    @lru_cache(256)
    def head(terms: Terms, again: bool) -> bytes:
        return _numbers(terms.ttl_ms, terms.skew_ms, terms.remember_ms)

    def args(self, job: Job) -> bytes:
        return bulk(job.args[2])

    def undo(self, job: Job) -> bytes | None:
        return job.args[2]  # type: ignore[no-any-return]


class _LoneMark(Op):
    """A mark without a script, which costs a server less. ``take`` may leave it undecided."""

    replies = 4

    def pack(self, key_head: bytes, jobs: Sequence[Job], again: bool, source: bool) -> bytes:
        digest, terms, token = jobs[0].args
        key = b"%b%b\r\n" % (key_head, digest)
        return (
            b"*6\r\n$3\r\nSET\r\n%b$17\r\nS%b\r\n$2\r\nNX\r\n$2\r\nPX\r\n%b"
            b"*2\r\n$3\r\nGET\r\n%b*2\r\n$4\r\nPTTL\r\n%b*1\r\n$4\r\nTIME\r\n"
        ) % (key, token, _numbers(terms.ttl_ms + GRACE_MS), key, key)

    def take(self, jobs: Sequence[Job], reply: Any) -> None:
        """``None`` as the result: a script has to look."""
        done, raw, left, clock = reply
        job = jobs[0]
        _, terms, token = job.args
        job.result = None
        if done == b"OK" or raw == b"S" + token:
            job.result = True
        elif raw is not None and not any(isinstance(one, BaseException) for one in reply[1:]):
            # What a key was found to be decides, also where memory was too full to try to set it.
            now_us = int(clock[0]) * 1_000_000 + int(clock[1])
            try:
                found = decode(raw, now_us // 1000 + left - GRACE_MS)
            except StoreCorruptError as error:
                job.error = error
                return
            if mark(found, terms, now_us) is None:
                job.result = False


class _Write(Scripted):
    """Arguments: digest, None, fingerprint, answer, expires_at."""

    each = 3
    settles = True

    def args(self, job: Job) -> bytes:
        _, _, fingerprint, answer, expires_at = job.args
        return bulk(fingerprint) + bulk(answer) + bulk(b"%d" % expires_at)

    def take(self, jobs: Sequence[Job], reply: Any) -> None:
        for job in jobs:
            job.result = None

    def changed(self, job: Job) -> bool:
        return True


class _Watch(Scripted):
    """Arguments: digest, None, inbox."""

    def args(self, job: Job) -> bytes:
        return bulk(job.args[2])

    def changed(self, job: Job) -> bool:
        return False


class _Read(Scripted):
    """Arguments: digest, None."""

    each = 0

    def take(self, jobs: Sequence[Job], reply: Any) -> None:
        for job, raw in zip(jobs, reply, strict=True):
            try:
                job.result = None if raw is None else decode(raw)
            except StoreCorruptError as error:
                job.error = error

    def changed(self, job: Job) -> bool:
        return False


class _Now(Op):
    """Arguments: none that count."""

    def pack(self, key_head: bytes, jobs: Sequence[Job], again: bool, source: bool) -> bytes:
        return b"*1\r\n$4\r\nTIME\r\n"

    def take(self, jobs: Sequence[Job], reply: Any) -> None:
        for job in jobs:
            job.result = int(reply[0]) * 1000 + int(reply[1]) // 1000


CLAIM: Final = _Claim("claim")
COMPLETE: Final = _Complete("complete")
RENEW: Final = _Renew("renew")
RELEASE: Final = _Release("release")
MARK: Final = _Mark("mark")
LONE_MARK: Final = _LoneMark("mark")
WRITE: Final = _Write("write")
WATCH: Final = _Watch("watch")
READ: Final = _Read("read")
NOW: Final = _Now("now")
CLEAR: Final = Op("clear")
