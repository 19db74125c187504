"""The small backend contract on the records of a full store: ``get``, ``put`` and a lock a key.

The ``adcp`` package's ``IdempotencyStore`` holds the lock of a key while it looks, runs the handler
and stores the answer. Here the lock is a claim of its own, renewed while it is held, so that it
holds between processes and ends with the process that holds it.
"""

# The engine is imported where it is used: it takes longer to import than all of a memory store.

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from oncekey.abc import AsyncStore, IdempotencyBackend
from oncekey.errors import AnswerOmittedError
from oncekey.models import Key, Scope, State

if TYPE_CHECKING:
    from oncekey._cached import CachedResponse
    from oncekey._core.call import Job

__all__ = ["Answers", "request_key"]


def request_key(scope_key: str, key: str) -> Key:
    """The record that request-side answers of ``scope_key`` are kept under."""
    return Key(Scope("request", scope_key), key)


@functools.cache
def _lock() -> Job:
    """What it is to hold a lock. Whose lock is put in for each."""
    from oncekey._core.call import Job
    from oncekey._core.codec import Codec
    from oncekey._core.flows import Plan
    from oncekey.policy import Policy

    # A copy waits for as long as its caller does. What is kept of a lock is of no use to anybody.
    plan = Plan.of(Policy(ttl=1, lease=30, wait=3600, retry_safe=True))
    nobodys = Key(Scope("hold", ""), "")
    return Job(nobodys, b"", plan, Codec(), "hold", keeps=lambda value: False)


class Answers(AsyncStore, IdempotencyBackend):
    """The small backend contract, for stores that have the large one."""

    async def get(
        self,
        scope_key: str | None = None,
        key: str | None = None,
        *,
        principal_id: str | None = None,
    ) -> CachedResponse | None:
        """The live entry, or ``None``: missing, expired, pending, or its body was omitted.

        ``principal_id`` is another name for ``scope_key``.
        """
        from oncekey._cached import CachedResponse
        from oncekey._core.codec import decode_json, exact_end

        record = await self.read(_named(scope_key, key, principal_id))
        if record is None or record.state is not State.COMPLETED or record.answer is None:
            return None
        if record.expires_at <= await self.now():
            return None
        try:
            response = decode_json(record.answer)
        except AnswerOmittedError:
            return None
        ends = exact_end(record.answer)
        return CachedResponse(
            record.fingerprint.decode(),
            response,
            record.expires_at / 1000 if ends is None else ends,
        )

    async def put(
        self,
        scope_key: str | None = None,
        key: str | None = None,
        entry: CachedResponse | None = None,
        *,
        principal_id: str | None = None,
    ) -> None:
        """Store ``entry``, over any entry that is there.

        ``principal_id`` is another name for ``scope_key``.

        Raises:
            UnsupportedAnswerError: ``entry.response`` is not made of JSON values.
        """
        from oncekey._core.codec import json_answer

        name = _named(scope_key, key, principal_id)
        if entry is None:
            raise TypeError("put needs an entry: pass a CachedResponse")
        ends = entry.expires_at_epoch
        expires_at = round(ends * 1000)
        # Records end at a millisecond. What else the entry's time says stands with its answer.
        answer = json_answer(entry.response, None if expires_at / 1000 == ends else ends)
        await self.write(name, entry.payload_hash.encode(), answer, expires_at)

    @asynccontextmanager
    async def hold(self, scope_key: str, key: str) -> AsyncIterator[None]:
        """Hold the lock of a key; others wait for it. The block is cancelled if it is lost."""
        from oncekey._core import call as engine

        job = _lock()._replace(key=Key(Scope("hold", scope_key), key))
        claim = await engine.aopen_claim(self, job)
        if not isinstance(claim, engine.Claim):
            raise engine.refusal(claim, job.operation, job.plan.terms)
        try:
            async with engine.guarded(self, job, claim):
                yield
        finally:
            await engine.arecord(self, job, claim, None)

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


def _named(scope_key: str | None, key: str | None, principal_id: str | None) -> Key:
    """The record that is meant, by either name of its owner."""
    scope = scope_key if principal_id is None else principal_id
    if scope is None or key is None or None not in (scope_key, principal_id):
        raise TypeError("pass a key and either scope_key or principal_id")
    return request_key(scope, key)
