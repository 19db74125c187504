"""The operations: how a call becomes the arguments of a script, and what the reply means.

A job's arguments start with the digest of its key and its terms; jobs of one operation with the
same terms go to the server as one call of the script, for many keys.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from oncekey._core.transitions import mark
from oncekey.errors import StoreCorruptError
from oncekey.models import ClaimReply, Terms, Verdict
from oncekey.stores._batching import Job
from oncekey.stores._redis_record import GRACE_MS, decode
from oncekey.stores.lua import Script, load_script

__all__ = [
    "CLAIM",
    "CLEAR",
    "CLOSE",
    "COMPLETE",
    "MARK",
    "NOW",
    "READ",
    "RELEASE",
    "RENEW",
    "WATCH",
    "WRITE",
    "Op",
    "Scripted",
    "bulk",
    "command",
]

_VERDICTS: Final = (
    Verdict.WON,
    Verdict.REPLAY,
    Verdict.IN_FLIGHT,
    Verdict.CONFLICT,
    Verdict.EXPIRED,
)
_ONE: Final = b"1"[0]
_WON: Final = Verdict.WON
_new: Final = tuple.__new__  # a named tuple without its keyword machinery, for every win


def bulk(value: bytes) -> bytes:
    """One argument on the wire."""
    return b"$%d\r\n%b\r\n" % (len(value), value)


def command(*args: bytes) -> bytes:
    """One command on the wire."""
    return b"*%d\r\n" % len(args) + b"".join(map(bulk, args))


class Op:
    """What a store can ask of the server. One of each."""

    def __init__(self, name: str) -> None:
        self.name = name

    def undo(self, job: Job, token: bytes) -> tuple[bytes, bytes] | None:
        """Key and owner to release if too few replicas confirm what this job did."""
        return None

    def changed(self, job: Job) -> bool:
        """Whether this job's result promises that something was written."""
        return False


class Scripted(Op):
    """An operation that is a script. Subclasses say what its arguments and replies are."""

    each = 1  # how many arguments a key has
    shared = 0  # how many come before those

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.script: Script = load_script(name)

    def head(self, terms: Terms | None, token: bytes, again: bool) -> bytes:
        """The arguments that the keys of a call share.

        ``token`` is the batch's own; ``again``: the call may have been made before.
        """
        return b""

    def args(self, job: Job) -> bytes:
        """The arguments of one key."""
        raise NotImplementedError

    def results(self, jobs: list[Job], reply: Any) -> None:
        """Give each job its part of the reply: 1 for all, or a digit for each."""
        if reply == 1:
            for job in jobs:
                job.result = True
            return
        for job, digit in zip(jobs, reply, strict=True):
            job.result = digit == _ONE

    def changed(self, job: Job) -> bool:
        """Whether it held."""
        return bool(job.result)

    def call(self, key_head: bytes, jobs: list[Job], token: bytes, again: bool) -> bytes:
        """One call of the script for the keys of ``jobs``."""
        count = len(jobs)
        pieces = [
            b"*%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n$%d\r\n%d\r\n"
            % (
                3 + self.shared + count * (1 + self.each),
                self.script.sha,
                len(str(count)),
                count,
            )
        ]
        pieces += [b"%b%b\r\n" % (key_head, job.args[0]) for job in jobs]
        pieces.append(self.head(jobs[0].args[1], token, again))
        if self.each:
            pieces += map(self.args, jobs)
        return b"".join(pieces)


def _numbers(*values: int) -> bytes:
    return b"".join([bulk(b"%d" % value) for value in values])


@lru_cache(256)  # a program has few policies
def _claim_numbers(terms: Terms) -> bytes:
    return _numbers(terms.lease_ms, terms.ttl_ms, terms.skew_ms, terms.remember_ms, terms.sticky)


@lru_cache(256)
def _complete_numbers(terms: Terms) -> bytes:
    return _numbers(terms.ttl_ms, terms.skew_ms, terms.remember_ms, terms.sticky)


@lru_cache(256)
def _mark_numbers(terms: Terms) -> bytes:
    return _numbers(terms.ttl_ms, terms.skew_ms, terms.remember_ms)


class _Claim(Scripted):
    """Arguments: digest, terms, owner, fingerprint."""

    each, shared = 2, 5

    def head(self, terms: Terms | None, token: bytes, again: bool) -> bytes:
        assert terms is not None  # noqa: S101 - every claim has them
        return _claim_numbers(terms)

    def args(self, job: Job) -> bytes:
        _, _, owner, fingerprint = job.args
        return b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(owner), owner, len(fingerprint), fingerprint)

    def results(self, jobs: list[Job], reply: Any) -> None:
        for job, item in zip(jobs, reply, strict=True):
            if type(item) is int:
                job.result = _new(
                    ClaimReply, (_WON, item, job.args[1].lease_ms, 1, None, False, False)
                )
            else:
                verdict, fence, left, attempts, answer, takeover = item
                job.result = ClaimReply(
                    _VERDICTS[verdict], fence, left, attempts, answer, takeover == 1
                )

    def changed(self, job: Job) -> bool:
        return bool(job.result.verdict is _WON)

    def undo(self, job: Job, token: bytes) -> tuple[bytes, bytes] | None:
        return job.args[0], job.args[2]


class _Complete(Scripted):
    """Arguments: digest, terms, owner, fence, answer."""

    each, shared = 3, 4

    def head(self, terms: Terms | None, token: bytes, again: bool) -> bytes:
        assert terms is not None  # noqa: S101
        return _complete_numbers(terms)

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

    def head(self, terms: Terms | None, token: bytes, again: bool) -> bytes:
        assert terms is not None  # noqa: S101
        return _numbers(terms.lease_ms, terms.ttl_ms, terms.sticky)

    def args(self, job: Job) -> bytes:
        _, _, owner, fence = job.args
        return bulk(owner) + bulk(b"%d" % fence)


class _Release(Scripted):
    """Arguments: digest, None, owner, fence or None."""

    each, shared = 2, 1

    def head(self, terms: Terms | None, token: bytes, again: bool) -> bytes:
        return b"$1\r\n%d\r\n" % again

    def args(self, job: Job) -> bytes:
        _, _, owner, fence = job.args
        return bulk(owner) + bulk(b"" if fence is None else b"%d" % fence)


class _Mark(Scripted):
    """Arguments: digest, terms. All marks of a call have one token: no key is among them twice."""

    each, shared = 0, 4

    def head(self, terms: Terms | None, token: bytes, again: bool) -> bytes:
        assert terms is not None  # noqa: S101
        return _mark_numbers(terms) + bulk(token)

    def undo(self, job: Job, token: bytes) -> tuple[bytes, bytes] | None:
        return job.args[0], token

    def plain(self, key: bytes, job: Job, token: bytes) -> bytes:
        """One key without a script, which costs a lone call less: four replies."""
        keep = b"%d" % (job.args[1].ttl_ms + GRACE_MS)
        name = bulk(key)
        return (
            b"*6\r\n$3\r\nSET\r\n%b$17\r\nS%b\r\n$2\r\nNX\r\n$2\r\nPX\r\n%b"
            b"*2\r\n$3\r\nGET\r\n%b*2\r\n$4\r\nPTTL\r\n%b*1\r\n$4\r\nTIME\r\n"
        ) % (name, token, bulk(keep), name, name)

    def decide(self, job: Job, token: bytes, replies: list[Any]) -> bool:
        """Take the four replies of ``plain``. False: a script has to look, or an error stands.

        Raises:
            StoreCorruptError: Something else has this key.
        """
        done, raw, left, clock = replies
        if done == b"OK" or raw == b"S" + token:
            job.result = True
            return True
        if raw is None or any(isinstance(reply, BaseException) for reply in replies[1:]):
            return False
        now_us = int(clock[0]) * 1_000_000 + int(clock[1])
        # What a key was found to be decides, also where memory was too full to try to set it.
        job.result = False
        return mark(decode(raw, now_us // 1000 + left - GRACE_MS), job.args[1], now_us) is None


class _Write(Scripted):
    """Arguments: digest, None, fingerprint, answer, expires_at."""

    each = 3

    def args(self, job: Job) -> bytes:
        _, _, fingerprint, answer, expires_at = job.args
        return bulk(fingerprint) + bulk(answer) + bulk(b"%d" % expires_at)


class _Watch(Scripted):
    """Arguments: digest, None, inbox."""

    def args(self, job: Job) -> bytes:
        return bulk(job.args[2])

    def changed(self, job: Job) -> bool:
        return False


class _Read(Scripted):
    """Arguments: digest, None."""

    each = 0

    def results(self, jobs: list[Job], reply: Any) -> None:
        for job, raw in zip(jobs, reply, strict=True):
            try:
                job.result = None if raw is None else decode(raw)
            except StoreCorruptError as error:
                job.error = error

    def changed(self, job: Job) -> bool:
        return False


class _Now(Op):
    """Arguments: none."""

    def result(self, job: Job, reply: Any) -> None:
        seconds, microseconds = reply
        job.result = int(seconds) * 1000 + int(microseconds) // 1000


CLAIM: Final = _Claim("claim")
COMPLETE: Final = _Complete("complete")
RENEW: Final = _Renew("renew")
RELEASE: Final = _Release("release")
MARK: Final = _Mark("mark")
WRITE: Final = _Write("write")
WATCH: Final = _Watch("watch")
READ: Final = _Read("read")
NOW: Final = _Now("now")
CLEAR: Final = Op("clear")
CLOSE: Final = Op("close")
