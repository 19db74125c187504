"""Waking waiters when another process is done: one subscription for all keys.

Every store (and event loop) has an inbox, a channel of its own. Whoever waits for a key leaves the
inbox's id with the record; whoever settles the record sends the key's digest to the ids it finds.
Nothing is sent for keys that nobody waits for, and nobody hears of keys of others. What is lost
with a connection is found by looking again, as without it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Generator
from typing import Any, Final, Literal, NamedTuple

from oncekey._core.drive import adrive, drive
from oncekey._core.forks import Forking, watch_forks
from oncekey.errors import StoreError
from oncekey.stores._waiters import Waiters
from oncekey.stores.redis.address import Target
from oncekey.stores.redis.errors import driver
from oncekey.stores.redis.operations import command
from oncekey.stores.redis.topology import Topology

__all__ = ["AllWaiters", "AsyncInbox", "Inbox"]

QUIET: Final = 20.0  # seconds without a message after which the connection is tried
PAUSE: Final = 0.5  # seconds between two tries to subscribe


class AllWaiters(Waiters):
    """Waiters that can all be woken at once: after a time in which messages were lost.

    Attributes:
        used: Whether anybody ever waited.
    """

    used = False

    def wake_all(self) -> None:
        """Wake everybody."""
        for key in list(self._waiting):
            self.wake(key)

    def reset(self) -> None:
        """Forget everybody: they are in the parent process."""
        super().__init__()


class _Step(NamedTuple):
    """What a listener wants done with its one connection.

    ``open`` it to an address, in place of what was open; ``write`` a command; ``read`` a reply, for
    so many seconds, or as long as a server may take; close it and ``pause``.
    """

    what: Literal["open", "write", "read", "pause"]
    value: Any = None


class _Subscription:
    """What threads and event loops share: who listens, for whom, and how."""

    def __init__(
        self, target: Target, topology: Topology, waiters: AllWaiters, prefix: bytes
    ) -> None:
        self.waiters = waiters
        self._target = target
        self._topology = topology
        self._prefix = prefix
        self._broken = (driver().exceptions.RedisError, OSError, StoreError, TimeoutError)
        self._start_over()

    def _start_over(self) -> None:
        self._id = os.urandom(8)
        self._subscribed = False
        self._connection: Any = None

    @property
    def word(self) -> bytes:
        """What to leave with a record: the id, or nothing while the subscription does not stand."""
        return self._id if self._subscribed else b""

    def _listen(self) -> Generator[_Step, Any, None]:
        """Subscribe at one server after the other. All are woken when that stands, and falls."""
        channel = self._prefix + b"inbox:" + self._id
        for turn in itertools.count():
            stood = False
            try:
                masters = self._topology.masters()
                yield _Step("open", masters[turn % len(masters)])
                yield _Step("write", command(b"SUBSCRIBE", channel))
                yield _Step("read")
                stood = self._subscribed = True
                self.waiters.wake_all()  # to leave word
                while True:
                    message = yield _Step("read", QUIET)
                    if message is None:
                        yield _Step("write", command(b"PING"))
                        message = yield _Step("read")
                    if message[:2] == [b"message", channel]:
                        self.waiters.wake(bytes(message[2]))
            except self._broken:
                pass
            finally:
                self._subscribed = False
                self.waiters.wake_all()  # they may have missed something: let them look
            yield _Step("pause", 0.05 if stood else PAUSE)


class _Ended(BaseException):
    """The store was closed."""


class Inbox(_Subscription, Forking):
    """For threads: a thread of our own listens, from the first wait on until the store closes."""

    def _start_over(self) -> None:
        super()._start_over()
        self._starting = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        """Nobody listens in the child, and the channel is the parent's."""
        self.waiters.reset()
        self._start_over()

    def open(self) -> None:
        """Subscribe. Everybody is woken when that stands, to leave word then."""
        if self._thread is not None:
            return
        with self._starting:
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(
                    target=self._run, name="oncekey-redis-inbox", daemon=True
                )
                self._thread.start()

    def end(self) -> None:
        """Tell the thread to end."""
        self._ended.set()
        connection = self._connection
        if connection is not None:
            connection.disconnect()  # its read returns at once
        self.waiters.wake_all()

    def close(self) -> None:
        """End the thread and wait for it."""
        self.end()
        with self._starting:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._target.timeout)

    def _run(self) -> None:
        try:
            drive(self._listen(), self._step)
        except _Ended:
            pass
        except Exception:
            if not self._ended.is_set():  # else closed from another thread, in the midst of a read
                raise
        finally:
            self._close_connection()

    def _step(self, step: _Step) -> Any:
        if self._ended.is_set():
            raise _Ended
        what, value = step
        if what == "read":
            if value and not self._connection.can_read(timeout=value):
                return None
            return self._connection.read_response()
        if what == "write":
            return self._connection.send_packed_command([value], check_health=False)
        self._close_connection()
        if what == "open":
            self._connection = self._target.connection(value, False, self._target.timeout)
        else:
            self._ended.wait(value)
        return None

    def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()


class AsyncInbox(_Subscription):
    """For one event loop: a task listens, from the first wait on until the loop or store ends."""

    _task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Subscribe. Everybody is woken when that stands, to leave word then."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def aclose(self) -> None:
        """End the task."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))

    async def _run(self) -> None:
        try:
            await adrive(self._listen(), self._step)
        finally:
            await self._close_connection()

    async def _step(self, step: _Step) -> Any:
        what, value = step
        if what == "read" and value:
            return await self._connection.read_response(timeout=value)
        if what in ("read", "write"):
            async with asyncio.timeout(self._target.timeout):
                if what == "read":
                    return await self._connection.read_response()
                return await self._connection.send_packed_command([value], check_health=False)
        await self._close_connection()
        if what == "open":
            self._connection = self._target.connection(value, False, None)
        else:
            await asyncio.sleep(value)
        return None

    async def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)
