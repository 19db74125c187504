"""The Redis stores, and the options that they take."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING, Any, Final

from oncekey._core.flows import new_owner
from oncekey._core.forks import Forking, watch_forks
from oncekey.abc import Store
from oncekey.errors import StoreClosedError, StoreConfigError, StoreError
from oncekey.models import ClaimReply, Key, Record, Terms
from oncekey.stores._answers import Answers
from oncekey.stores.redis.address import STORE_OPTIONS, parse_query, target_of
from oncekey.stores.redis.batch import Batches, Options
from oncekey.stores.redis.browsing import AsyncBrowsing, Browsing
from oncekey.stores.redis.check import CHECKS
from oncekey.stores.redis.counting import AsyncCounting, Counting
from oncekey.stores.redis.inbox import AllWaiters, AsyncInbox, Inbox
from oncekey.stores.redis.loop import LoopLanes
from oncekey.stores.redis.operations import (
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
from oncekey.stores.redis.threads import ThreadLanes

__all__ = ["AsyncRedisStore", "RedisBackend", "RedisStore", "open_async", "open_sync"]

_NUMBERS: Final = {"min_replicas": int, "replica_timeout": float, "timeout": float}


class _Calls:
    """What both stores can do. ``_do`` gives the result, or something to await for it."""

    poll_seconds = 0.25
    _is_async = False

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
        if not isinstance(prefix, str) or not prefix or not prefix.isprintable():
            raise StoreConfigError("prefix must be a non-empty string of printable characters")
        if check not in CHECKS:
            raise StoreConfigError(f"check must be 'warn', 'refuse' or 'off', got {check!r}")
        if isinstance(min_replicas, bool) or not isinstance(min_replicas, int) or min_replicas < 0:
            raise StoreConfigError(f"min_replicas must be a number from 0, got {min_replicas!r}")
        for name, value in (("replica_timeout", replica_timeout), ("timeout", timeout)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise StoreConfigError(f"{name} must be seconds above 0, got {value!r}")
        replica_ms = max(1, round(replica_timeout * 1000))
        self._options = Options(prefix.encode() + b":", min_replicas, replica_ms, check)
        self._target = target_of(client_or_url, is_async=self._is_async, timeout=timeout)
        # A server that waits for its replicas answers that much later.
        self._patience = self._target.timeout + (replica_timeout if min_replicas else 0)
        self._waiters = AllWaiters()
        self._closed = False
        self._open()

    def _open(self) -> None:
        raise NotImplementedError

    def _do(self, op: Op, *args: Any) -> Any:
        raise NotImplementedError

    def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> Any:
        """See ``Store``. One round trip, also for a replay."""
        return self._do(CLAIM, key.digest, terms, owner, fingerprint)

    def complete(self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms) -> Any:
        """See ``Store``. Works when the server's memory is full."""
        return self._do(COMPLETE, key.digest, terms, owner, fence, answer)

    def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> Any:
        """See ``Store``. Works when the server's memory is full."""
        return self._do(RENEW, key.digest, terms, owner, fence)

    def release(self, key: Key, owner: bytes, fence: int | None) -> Any:
        """See ``Store``. Works when the server's memory is full."""
        return self._do(RELEASE, key.digest, None, owner, fence)

    def first_seen(self, key: Key, terms: Terms) -> Any:
        """See ``Store``. One round trip, for the first as for a duplicate."""
        return self._do(MARK, key.digest, terms, new_owner())

    def read(self, key: Key) -> Any:
        """See ``Store``."""
        return self._do(READ, key.digest, None)

    def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> Any:
        """See ``Store``."""
        return self._do(WRITE, key.digest, None, fingerprint, answer, expires_at)

    def now(self) -> Any:
        """See ``Store``. The server's clock."""
        return self._do(NOW, b"", None)

    def clear(self) -> Any:
        """Remove every record under the prefix. For tests."""
        return self._do(CLEAR, b"", None)


class RedisStore(Browsing, Counting, _Calls, Store):
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

    if TYPE_CHECKING:  # what the calls give in this world

        def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply: ...
        def complete(
            self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
        ) -> bool: ...
        def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool: ...
        def release(self, key: Key, owner: bytes, fence: int | None) -> bool: ...
        def first_seen(self, key: Key, terms: Terms) -> bool: ...
        def read(self, key: Key) -> Record | None: ...
        def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> None: ...
        def now(self) -> int: ...
        def clear(self) -> None: ...

    def _open(self) -> None:
        topology = self._target.topology()
        batches = Batches(topology, self._options, self._waiters)
        self._lanes = ThreadLanes(self._target, batches, self._patience)
        self._inbox = Inbox(self._target, topology, self._waiters, self._options.prefix)
        weakref.finalize(self, self._inbox.end)

    def _do(self, op: Op, *args: Any) -> Any:
        if self._closed:
            raise StoreClosedError("this Redis store is closed: connect again")
        return self._lanes.submit(op, args)

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

        self._waiters.used = True
        self._waiters.wait(digest, seconds, settled)

    def close(self) -> None:
        """Close the connections that this store opened; never those of a client it was given."""
        if not self._closed:
            self._closed = True
            self._inbox.close()
            self._lanes.close()


class _Loop:
    """What an async store has in one event loop."""

    def __init__(self, store: AsyncRedisStore) -> None:
        target, options, waiters = store._target, store._options, store._waiters
        topology = target.topology()
        batches = Batches(topology, options, waiters)
        self.lanes = LoopLanes(target, batches, store._patience)
        self.inbox = AsyncInbox(target, topology, waiters, options.prefix)
        self.lanes.before_close(self.inbox.aclose)


_inherited: list[Any] = []  # connections of parent processes: dropped, never closed


class AsyncRedisStore(AsyncBrowsing, AsyncCounting, _Calls, Answers, Forking):
    """The asynchronous Redis store; ``RedisStore`` is its synchronous twin.

    Promises what ``RedisStore`` promises, takes its arguments (a client must be one of
    ``redis.asyncio``), and says there what Redis can't. Calls of one tick of the event loop share
    one round trip, and those that come while it is under way share the next. Works in several
    event loops, each with connections of its own.
    """

    _is_async = True

    if TYPE_CHECKING:  # what the calls give in this world

        async def claim(
            self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms
        ) -> ClaimReply: ...
        async def complete(
            self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
        ) -> bool: ...
        async def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool: ...
        async def release(self, key: Key, owner: bytes, fence: int | None) -> bool: ...
        async def first_seen(self, key: Key, terms: Terms) -> bool: ...
        async def read(self, key: Key) -> Record | None: ...
        async def write(
            self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int
        ) -> None: ...
        async def now(self) -> int: ...
        async def clear(self) -> None: ...

    def _open(self) -> None:
        self._loops: dict[asyncio.AbstractEventLoop, _Loop] = {}
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        """Start over: closing what is the parent's would speak on its connections."""
        _inherited.append(self._loops)
        self._loops = {}
        self._waiters.reset()

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
            found = self._loops[loop] = _Loop(self)
        return found

    async def _do(self, op: Op, *args: Any) -> Any:
        found = self._loops.get(asyncio.get_running_loop())
        return await (found or self._here()).lanes.submit(op, args)

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

        self._waiters.used = True
        try:
            await self._waiters.wait_async(digest, seconds, start)
        finally:
            if looking is not None:
                looking.cancel()

    async def delete_expired(self, now_epoch: float | None = None) -> int:
        """Nothing is left to do: Redis removes records by itself. Gives 0."""
        return 0

    async def aclose(self) -> None:
        """Finish what is queued, then close the connections that this store opened.

        Those of other event loops are closed there, or when those loops end.
        """
        self._closed = True
        loops, self._loops = self._loops, {}
        here = asyncio.get_running_loop()
        for loop, found in loops.items():
            if loop is here:
                await found.lanes.aclose()
            elif loop.is_running():
                asyncio.run_coroutine_threadsafe(found.lanes.aclose(), loop)


RedisBackend = AsyncRedisStore  # the name in the documents that oncekey follows


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


def open_async(url: str, options: dict[str, Any]) -> AsyncRedisStore:
    """``redis://`` and its relatives."""
    return AsyncRedisStore(url, **_options(url, options))
