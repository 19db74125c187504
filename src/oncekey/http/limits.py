"""How much one caller may put into the store. Counted in this process, not in the store."""

from __future__ import annotations

import logging
import time

from oncekey._core.call import Job
from oncekey._core.drive import Flow, Op
from oncekey._core.flows import Claim
from oncekey._core.limiter import InsertLimiter
from oncekey.http.problems import Refusal
from oncekey.http.settings import Settings
from oncekey.policy import milliseconds

__all__ = ["Limits"]

logger = logging.getLogger("oncekey")

WARN_AGAIN = 60.0  # seconds


class Limits:
    """New keys of a caller, and bytes that are stored, of a caller and of all."""

    def __init__(self, settings: Settings) -> None:
        keys = settings.max_new_keys
        self._keys = None if keys is None else InsertLimiter((keys,), time.monotonic)
        # What is stored longer ago than the time to live is gone.
        lasts = max(1, milliseconds(settings.ttl, "ttl") // 1000)
        self._bytes = _budget(settings.max_caller_bytes, lasts)
        self._total = _budget(settings.max_total_bytes, lasts)
        self._none = 0 in (settings.max_caller_bytes, settings.max_total_bytes)
        self._warn_at = 0.0

    def wait(self, job: Job) -> int | None:
        """Seconds until the caller may make a new key; ``None``: it may."""
        return None if self._keys is None else self._keys.retry_after(_payer(job))

    def check(self, job: Job, wait: int) -> Flow[None]:
        """Let a request pass that has an old key, where new ones have to wait.

        Raises:
            Refusal: It has a new one.
        """
        known = yield Op("read", (job.key,))
        if known is None:
            raise Refusal(
                "rate-limited",
                "Too many new keys. Send the same request again later; retries of earlier "
                "requests are answered.",
                retry_after=wait,
            )

    def count(self, job: Job, claim: Claim) -> None:
        """Take note of a key that was won, if it is a new one."""
        if self._keys is not None and claim.attempts == 1:
            self._keys.count(_payer(job))

    def fits(self, job: Job, size: int) -> bool:
        """Whether a body of this size may be stored; it is then counted."""
        own, total = self._bytes, self._total
        if not self._none and (own is None or own.admit(_payer(job), size) is None):
            if total is None or total.admit("", size) is None:
                return True
            if own is not None:
                own.count(_payer(job), -size)
        now = time.monotonic()
        if now >= self._warn_at:
            self._warn_at = now + WARN_AGAIN
            logger.warning(
                "answers are stored without their bodies: a caller (scope %s) or all of them "
                "have stored as much as max_caller_bytes and max_total_bytes allow",
                job.key.scope.hash,
            )
        return False


def _payer(job: Job) -> str:
    """Whose it is, at whatever host: a caller may name any number of those."""
    return job.key.scope.parts[2]


def _budget(most: int | None, seconds: int) -> InsertLimiter | None:
    return None if most is None else InsertLimiter(((most, seconds),), time.monotonic)
