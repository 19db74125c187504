"""Counting on Redis: a counter is a record that is done, and its attempts are the count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from oncekey.abc import AsyncCountable, Countable
from oncekey.models import Key
from oncekey.stores._batching import Job
from oncekey.stores.redis.operations import Scripted, bulk

__all__ = ["COUNT", "AsyncCounting", "Counting"]


class _Count(Scripted):
    """Arguments: digest, None, window in milliseconds."""

    def args(self, job: Job) -> bytes:
        return bulk(b"%d" % job.args[2])

    def take(self, jobs: Sequence[Job], reply: Any) -> None:
        for job, (count, left) in zip(jobs, reply, strict=True):
            job.result = int(count), int(left)

    def changed(self, job: Job) -> bool:
        return False  # what a fail-over forgets of a count is no loss that anybody was promised


COUNT: Final = _Count("count")


class Counting(Countable):
    """For the sync store."""

    _do: Any

    def count(self, key: Key, window_ms: int) -> tuple[int, int]:
        """See ``Countable``. One round trip, shared with others that come at the same time."""
        counted: tuple[int, int] = self._do(COUNT, key.digest, None, window_ms)
        return counted


class AsyncCounting(AsyncCountable):
    """For the async store."""

    _do: Any

    async def count(self, key: Key, window_ms: int) -> tuple[int, int]:
        """See ``AsyncCountable``."""
        counted: tuple[int, int] = await self._do(COUNT, key.digest, None, window_ms)
        return counted
