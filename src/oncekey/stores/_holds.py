"""A lock for each key on a full store, as backends of the ``adcp`` package have it.

Its ``IdempotencyStore`` holds the lock of a key while it looks, runs the handler and stores the
answer. Here the lock is a claim of its own, renewed while it is held, so that it holds between
processes and ends with the process that holds it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from oncekey._core.call import Job, aopen_claim, arecord, guarded, refusal
from oncekey._core.codec import Codec
from oncekey._core.flows import Claim, Plan
from oncekey.abc import AsyncStore, IdempotencyBackend
from oncekey.models import CachedResponse, Key, Scope
from oncekey.policy import Policy

__all__ = ["Holds"]

# A copy waits for as long as its caller does. What is kept of a lock is of no use to anybody.
_PLAN = Plan.of(Policy(ttl=1, lease=30, wait=3600, retry_safe=True))


class Holds(AsyncStore, IdempotencyBackend):
    """What the ``adcp`` package asks of a backend, over ``get`` and ``put``."""

    @asynccontextmanager
    async def hold(self, scope_key: str, key: str) -> AsyncIterator[None]:
        """Hold the lock of a key; others wait for it. The block is cancelled if it is lost."""
        name = Key(Scope("hold", scope_key), key)
        job = Job(name, b"", _PLAN, Codec(), "hold", keeps=lambda value: False)
        claim = await aopen_claim(self, job)
        if not isinstance(claim, Claim):
            raise refusal(claim, job.operation, _PLAN.terms)
        try:
            async with guarded(self, job, claim):
                yield
        finally:
            await arecord(self, job, claim, None)

    async def supports_atomic_hold(self) -> bool:
        """Whether ``hold`` keeps others out, also those in other processes."""
        return True

    async def supports_atomic_put_if_absent(self) -> bool:
        """Whether of several ``put_if_absent`` of one key only one wins."""
        return True

    async def put_if_absent(self, scope_key: str, key: str, entry: CachedResponse) -> bool:
        """Store ``entry`` unless there is a live one. Whether it was stored."""
        async with self.hold(scope_key, key):
            if await self.get(scope_key, key) is not None:
                return False
            await self.put(scope_key, key, entry)
            return True

    async def replace(self, scope_key: str, key: str, entry: CachedResponse) -> None:
        """Store ``entry`` in place of the one that is there. For whoever holds the lock."""
        await self.put(scope_key, key, entry)

    async def current_time(self) -> float:
        """Seconds since 1970 on the clock by which entries end."""
        return await self.now() / 1000
