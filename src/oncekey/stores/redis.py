"""``redis://``: Redis and Valkey, alone, behind Sentinel, or as a Cluster."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, Final

from oncekey._core.forks import Forking, watch_forks
from oncekey.abc import Store
from oncekey.errors import StoreClosedError, StoreConfigError, StoreError
from oncekey.models import ClaimReply, Key, Record, Terms
from oncekey.stores._answers import Answers
from oncekey.stores._redis_aio import AsyncLink
from oncekey.stores._redis_check import CHECKS
from oncekey.stores._redis_engine import Engine, Options
from oncekey.stores._redis_inbox import AllWaiters, AsyncInbox, Inbox
from oncekey.stores._redis_link import SyncLanes
from oncekey.stores._redis_ops import (
    CLAIM,
    CLEAR,
    COMPLETE,
    MARK,
    NOW,
    READ,
    RELEASE,
    RENEW,
    WATCH,
    WRITE,
    Op,
)
from oncekey.stores._redis_target import STORE_OPTIONS, Target, from_client, from_url, parse_query

__all__ = ["RedisBackend", "RedisStore"]

_NUMBERS: Final = {"min_replicas": int, "replica_timeout": float, "timeout": float}


class _Setup:
    """The arguments of a store, checked."""

    def __init__(
        self,
        client_or_url: Any,
        *,
        is_async: bool,
        prefix: str,
        min_replicas: int,
        replica_timeout: float,
        check: str,
        timeout: float,
    ) -> None:
        if not isinstance(prefix, str) or not prefix or not prefix.isprintable():
            raise StoreConfigError("prefix must be a non-empty string of printable characters")
        if check not in CHECKS:
            raise StoreConfigError(f"check must be 'warn', 'refuse' or 'off', got {check!r}")
        if isinstance(min_replicas, bool) or not isinstance(min_replicas, int) or min_replicas < 0:
            raise StoreConfigError(f"min_replicas must be a number from 0, got {min_replicas!r}")
        for name, value in (("replica_timeout", replica_timeout), ("timeout", timeout)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise StoreConfigError(f"{name} must be seconds above 0, got {value!r}")
        self.options = Options(
            prefix=prefix.encode() + b":",
            min_replicas=min_replicas,
            replica_ms=max(1, round(replica_timeout * 1000)),
            check=check,
        )
        self.target: Target = (
            from_url(client_or_url, is_async=is_async, timeout=timeout)
            if isinstance(client_or_url, str)
            else from_client(client_or_url, is_async=is_async, timeout=timeout)
        )
        # A server that waits for its replicas answers that much later.
        self.patience = self.target.timeout + (replica_timeout if min_replicas else 0)


class RedisStore(Store):
    """The synchronous Redis store.

    Promises: atomic for everybody who uses the server, by its clock. What an acknowledged change
    survives is up to the server, and no setting makes Redis keep it under all circumstances:

    * A crash forgets what was not on disk: with ``appendfsync everysec`` about the last second,
      with ``always`` nothing, without ``appendonly`` everything since the last snapshot.
    * Replication is asynchronous. A fail-over can forget acknowledged changes, and then a
      duplicate runs. With ``min_replicas`` a change that too few replicas confirm is refused,
      which makes that much rarer; a partition at the wrong moment can still do it.
    * A server that evicts keys (any ``maxmemory-policy`` but ``noeviction``) forgets claims.

    Where none of this may happen use PostgreSQL or SQLite.

    Threads that call at the same time share one round trip. Works after a fork. Records expire by
    themselves, a minute after their time.

    Args:
        client_or_url: ``redis://user:password@host:6379/0``, ``rediss://`` for TLS,
            ``unix:///path.sock?db=0``, ``redis+cluster://host1:6379,host2:6379``,
            ``redis+sentinel://host1:26379,host2:26379/service?db=0``; or a ``redis.Redis``,
            ``redis.RedisCluster`` or Sentinel's ``master_for``. The settings of a client are
            used, its connections are not: the store opens and closes its own.
        prefix: What the names of all keys start with. Stores with the same prefix share records.
        min_replicas: How many replicas must confirm a change before it is acknowledged.
        replica_timeout: Seconds to wait for them.
        check: What to do about a server that may lose records: ``warn``, ``refuse`` or ``off``.
        timeout: Seconds after which a server that does not answer is given up.

    Raises:
        StoreConfigError: An argument is wrong, or the package ``redis`` is missing.

    Example:
        >>> from oncekey.stores.redis import RedisStore
        >>> store = RedisStore("redis://localhost:6379/0")
        >>> store.close()
    """

    poll_seconds = 0.25

    def __init__(
        self,
        client_or_url: Any,
        *,
        prefix: str = "oncekey",
        min_replicas: int = 0,
        replica_timeout: float = 1.0,
        check: str = "warn",
        timeout: float = 5.0,
    ) -> None:
        setup = _Setup(
            client_or_url,
            is_async=False,
            prefix=prefix,
            min_replicas=min_replicas,
            replica_timeout=replica_timeout,
            check=check,
            timeout=timeout,
        )
        layout = setup.target.layout()
        self._lanes = SyncLanes(setup.target, Engine(layout, setup.options), setup.patience)
        self._inbox = Inbox(setup.target, layout, setup.options.prefix)
        self._closed = False
        weakref.finalize(self, self._inbox.end)

    def _do(self, op: Op, *args: Any) -> Any:
        if self._closed:
            raise StoreClosedError("this Redis store is closed: connect again")
        return self._lanes.submit(op, args)

    def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        """See ``Store``. One round trip, also for a replay."""
        reply: ClaimReply = self._do(CLAIM, key.digest, terms, owner, fingerprint)
        return reply

    def complete(self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms) -> bool:
        """See ``Store``. Works when the server's memory is full."""
        held: bool = self._do(COMPLETE, key.digest, terms, owner, fence, answer)
        self._inbox.waiters.wake(key.digest)
        return held

    def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        """See ``Store``. Works when the server's memory is full."""
        held: bool = self._do(RENEW, key.digest, terms, owner, fence)
        return held

    def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        """See ``Store``. Works when the server's memory is full."""
        held: bool = self._do(RELEASE, key.digest, None, owner, fence)
        self._inbox.waiters.wake(key.digest)
        return held

    def first_seen(self, key: Key, terms: Terms) -> bool:
        """See ``Store``. One round trip, for the first as for a duplicate."""
        first: bool = self._do(MARK, key.digest, terms)
        return first

    def read(self, key: Key) -> Record | None:
        """See ``Store``."""
        record: Record | None = self._do(READ, key.digest, None)
        return record

    def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> None:
        """See ``Store``."""
        self._do(WRITE, key.digest, None, fingerprint, answer, expires_at)
        self._inbox.waiters.wake(key.digest)

    def now(self) -> int:
        """See ``Store``. The server's clock."""
        now: int = self._do(NOW, b"", None)
        return now

    def wait(self, key: Key, seconds: float) -> None:
        """See ``Store``. Wakes at once for changes of any process, and holds no connection."""
        digest, inbox = key.digest, self._inbox

        def settled() -> bool:
            try:
                found = bool(self._do(WATCH, digest, None, inbox.word))
            except StoreClosedError:
                raise
            except StoreError:
                return False  # the next claim will say what is wrong
            inbox.open()
            return found

        inbox.waiters.wait(digest, seconds, settled)

    def clear(self) -> None:
        """Remove every record under the prefix. For tests."""
        self._do(CLEAR, b"", None)

    def close(self) -> None:
        """Close the connections that this store opened; never those of a client it was given."""
        if not self._closed:
            self._closed = True
            self._inbox.close()
            self._lanes.close()


class _Loop:
    """What a backend has in one event loop."""

    def __init__(self, setup: _Setup, waiters: AllWaiters) -> None:
        layout = setup.target.layout()
        self.link = AsyncLink(setup.target, Engine(layout, setup.options), setup.patience)
        self.inbox = AsyncInbox(setup.target, layout, waiters, setup.options.prefix)
        self.link.before_close(self.inbox.aclose)


_inherited: list[Any] = []  # connections of parent processes: dropped, never closed


class RedisBackend(Answers, Forking):
    """The asynchronous Redis store; ``RedisStore`` is its synchronous twin.

    Promises what ``RedisStore`` promises, and says there what Redis can't. Calls of one tick of the
    event loop share one round trip, and those that come while it is under way share the next.
    Works in several event loops, each with connections of its own.

    Args:
        client_or_url: A URL as for ``RedisStore``; or a ``redis.asyncio.Redis``,
            ``redis.asyncio.RedisCluster`` or Sentinel's ``master_for``, whose settings are used.
        prefix: What the names of all keys start with. Stores with the same prefix share records.
        min_replicas: How many replicas must confirm a change before it is acknowledged.
        replica_timeout: Seconds to wait for them.
        check: What to do about a server that may lose records: ``warn``, ``refuse`` or ``off``.
        timeout: Seconds after which a server that does not answer is given up.

    Raises:
        StoreConfigError: An argument is wrong, or the package ``redis`` is missing.
    """

    poll_seconds = 0.25

    def __init__(
        self,
        client_or_url: Any,
        *,
        prefix: str = "oncekey",
        min_replicas: int = 0,
        replica_timeout: float = 1.0,
        check: str = "warn",
        timeout: float = 5.0,
    ) -> None:
        self._setup = _Setup(
            client_or_url,
            is_async=True,
            prefix=prefix,
            min_replicas=min_replicas,
            replica_timeout=replica_timeout,
            check=check,
            timeout=timeout,
        )
        self._loops: dict[asyncio.AbstractEventLoop, _Loop] = {}
        self._waiters = AllWaiters()
        self._closed = False
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        """Start over: closing what is the parent's would speak on its connections."""
        _inherited.append(self._loops)
        self._loops = {}
        self._waiters = AllWaiters()

    def _here(self) -> _Loop:
        """What belongs to the running loop."""
        loop = asyncio.get_running_loop()
        found = self._loops.get(loop)
        if found is None:
            if self._closed:
                raise StoreClosedError("this Redis store is closed: connect again")
            for other in list(self._loops):
                if other.is_closed():
                    self._loops.pop(other, None)
            found = self._loops[loop] = _Loop(self._setup, self._waiters)
        return found

    def _do(self, op: Op, *args: Any) -> asyncio.Future[Any]:
        found = self._loops.get(asyncio.get_running_loop())
        return (found or self._here()).link.submit(op, args)

    async def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        """See ``AsyncStore``. One round trip, also for a replay."""
        reply: ClaimReply = await self._do(CLAIM, key.digest, terms, owner, fingerprint)
        return reply

    async def complete(
        self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> bool:
        """See ``AsyncStore``. Works when the server's memory is full."""
        held: bool = await self._do(COMPLETE, key.digest, terms, owner, fence, answer)
        self._waiters.wake(key.digest)
        return held

    async def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        """See ``AsyncStore``. Works when the server's memory is full."""
        held: bool = await self._do(RENEW, key.digest, terms, owner, fence)
        return held

    async def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        """See ``AsyncStore``. Works when the server's memory is full."""
        held: bool = await self._do(RELEASE, key.digest, None, owner, fence)
        self._waiters.wake(key.digest)
        return held

    async def first_seen(self, key: Key, terms: Terms) -> bool:
        """See ``AsyncStore``. One round trip, for the first as for a duplicate."""
        first: bool = await self._do(MARK, key.digest, terms)
        return first

    async def read(self, key: Key) -> Record | None:
        """See ``AsyncStore``."""
        record: Record | None = await self._do(READ, key.digest, None)
        return record

    async def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> None:
        """See ``AsyncStore``."""
        await self._do(WRITE, key.digest, None, fingerprint, answer, expires_at)
        self._waiters.wake(key.digest)

    async def now(self) -> int:
        """See ``AsyncStore``. The server's clock."""
        now: int = await self._do(NOW, b"", None)
        return now

    async def wait(self, key: Key, seconds: float) -> None:
        """See ``AsyncStore``. Wakes at once for changes of any process, and holds no connection."""
        digest, here = key.digest, self._here()
        looking: asyncio.Task[None] | None = None

        async def look() -> None:
            try:
                found = await self._do(WATCH, digest, None, here.inbox.word)
            except StoreError:
                return  # the next claim will say what is wrong
            here.inbox.open()
            if found:
                self._waiters.wake(digest)

        def start() -> bool:
            nonlocal looking
            looking = asyncio.create_task(look())
            return False

        try:
            await self._waiters.wait_async(digest, seconds, start)
        finally:
            if looking is not None:
                looking.cancel()

    async def delete_expired(self, now_epoch: float | None = None) -> int:
        """Nothing is left to do: Redis removes records by itself. Gives 0."""
        return 0

    async def clear(self) -> None:
        """Remove every record under the prefix. For tests."""
        await self._do(CLEAR, b"", None)

    async def aclose(self) -> None:
        """Finish what is queued, then close the connections that this store opened.

        Those of other event loops are closed there, or when those loops end.
        """
        self._closed = True
        loops, self._loops = self._loops, {}
        here = asyncio.get_running_loop()
        for loop, found in loops.items():
            if loop is here:
                await found.link.aclose()
            elif loop.is_running():
                asyncio.run_coroutine_threadsafe(found.link.aclose(), loop)


def _options(url: str, options: dict[str, Any]) -> dict[str, Any]:
    """The store's options, those in the URL's query among them."""
    for name, value in parse_query(url).items():
        if name not in STORE_OPTIONS:
            continue
        kind = _NUMBERS.get(name, str)
        try:
            options.setdefault(name, kind(value))
        except ValueError:
            raise StoreConfigError(f"{name} must be a number, got {value!r}") from None
    return options


def open_sync(url: str, options: dict[str, Any]) -> RedisStore:
    """``redis://`` and its relatives."""
    return RedisStore(url, **_options(url, options))


def open_async(url: str, options: dict[str, Any]) -> RedisBackend:
    """``redis://`` and its relatives."""
    return RedisBackend(url, **_options(url, options))
