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
from typing import Any, Final

from oncekey._core.forks import Forking, watch_forks
from oncekey.errors import StoreError
from oncekey.stores._redis_errors import driver
from oncekey.stores._redis_layout import Layout
from oncekey.stores._redis_ops import command
from oncekey.stores._redis_target import Target
from oncekey.stores._waiters import Waiters

__all__ = ["AllWaiters", "AsyncInbox", "Inbox"]

QUIET: Final = 20.0  # seconds without a message after which the connection is tried
PAUSE: Final = 0.5  # seconds between two tries to subscribe
_PING: Final = command(b"PING")


class AllWaiters(Waiters):
    """Waiters that can all be woken at once: after a time in which messages were lost."""

    def wake_all(self) -> None:
        """Wake everybody."""
        for key in list(self._waiting):
            self.wake(key)


def _digest(message: Any, channel: bytes) -> bytes | None:
    """The key that a message is about."""
    if isinstance(message, list) and len(message) == 3 and message[0] == b"message":
        return bytes(message[2]) if message[1] == channel else None
    return None


class Inbox(Forking):
    """For threads: a thread of our own listens, from the first wait on until the store closes."""

    def __init__(self, target: Target, layout: Layout, prefix: bytes) -> None:
        self._target = target
        self._layout = layout
        self._prefix = prefix
        self._broken = (driver().exceptions.RedisError, OSError, StoreError)
        self._reset()
        watch_forks(self)

    def _reset(self) -> None:
        self.id = os.urandom(8)
        self.waiters = AllWaiters()
        self._starting = threading.Lock()
        self._subscribed = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._connection: Any = None

    def after_fork_in_child(self) -> None:
        """Nobody listens in the child, and the channel is the parent's."""
        self._reset()

    @property
    def word(self) -> bytes:
        """What to leave with a record: the id, or nothing while the subscription does not stand."""
        return self.id if self._subscribed.is_set() else b""

    def open(self) -> None:
        """Subscribe. Everybody is woken when that stands, to leave word then."""
        if self._thread is not None:
            return
        with self._starting:
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(
                    target=self._listen, name="oncekey-redis-inbox", daemon=True
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

    def _listen(self) -> None:
        channel = self._prefix + b"inbox:" + self.id
        ended, subscribed, waiters = self._ended, self._subscribed, self.waiters
        for turn in itertools.count():
            try:
                masters = self._layout.masters()
                self._receive(masters[turn % len(masters)], channel)
            except self._broken:
                pass
            except Exception:
                if not ended.is_set():  # else closed from another thread, in the midst of a read
                    raise
            finally:
                stood = subscribed.is_set()
                subscribed.clear()
                waiters.wake_all()  # they may have missed something: let them look
            if ended.wait(0.05 if stood else PAUSE):
                return

    def _receive(self, address: Any, channel: bytes) -> None:
        connection = self._target.connection(address, False, self._target.timeout)
        self._connection = connection
        try:
            if self._ended.is_set():
                return
            connection.send_packed_command([command(b"SUBSCRIBE", channel)], check_health=False)
            connection.read_response()
            self._subscribed.set()
            self.waiters.wake_all()
            while not self._ended.is_set():
                if not connection.can_read(timeout=QUIET):
                    connection.send_packed_command([_PING], check_health=False)
                digest = _digest(connection.read_response(), channel)
                if digest is not None:
                    self.waiters.wake(digest)
        finally:
            self._connection = None
            connection.disconnect()


class AsyncInbox:
    """For one event loop: a task listens, from the first wait on until the loop or store ends."""

    def __init__(self, target: Target, layout: Layout, waiters: AllWaiters, prefix: bytes) -> None:
        self.id = os.urandom(8)
        self._target = target
        self._layout = layout
        self._waiters = waiters
        self._channel = prefix + b"inbox:" + self.id
        self._broken = (driver().exceptions.RedisError, OSError, StoreError, TimeoutError)
        self._subscribed = False
        self._task: asyncio.Task[None] | None = None

    @property
    def word(self) -> bytes:
        """What to leave with a record: the id, or nothing while the subscription does not stand."""
        return self.id if self._subscribed else b""

    def open(self) -> None:
        """Subscribe. Everybody is woken when that stands, to leave word then."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._listen())

    async def aclose(self) -> None:
        """End the task."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))

    async def _listen(self) -> None:
        for turn in itertools.count():
            try:
                masters = self._layout.masters()
                await self._receive(masters[turn % len(masters)])
            except self._broken:
                pass
            finally:
                stood, self._subscribed = self._subscribed, False
                self._waiters.wake_all()
            await asyncio.sleep(0.05 if stood else PAUSE)

    async def _receive(self, address: Any) -> None:
        connection = self._target.connection(address, False, None)
        try:
            async with asyncio.timeout(self._target.timeout):
                subscribe = command(b"SUBSCRIBE", self._channel)
                await connection.send_packed_command([subscribe], check_health=False)
                await connection.read_response()
            self._subscribed = True
            self._waiters.wake_all()
            while True:
                # Gives None when nothing came in time.
                message = await connection.read_response(timeout=QUIET)
                if message is None:
                    async with asyncio.timeout(self._target.timeout):
                        await connection.send_packed_command([_PING], check_health=False)
                        message = await connection.read_response()
                digest = _digest(message, self._channel)
                if digest is not None:
                    self._waiters.wake(digest)
        finally:
            await connection.disconnect(nowait=True)
