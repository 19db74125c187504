"""The calls of threads, and the connections that they share: bytes out, replies back.

Calls to one server wait for each other, calls to different servers don't: each has its lane, with
connections of its own. Those that fail in any way are dropped and made anew at the next call, so
that no reply can ever be taken for another's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from oncekey._core.drive import drive
from oncekey._core.forks import Forking, watch_forks
from oncekey.errors import StoreClosedError
from oncekey.stores._batching import Job, ThreadBatch
from oncekey.stores.redis.address import Target
from oncekey.stores.redis.batch import Batch, Batches
from oncekey.stores.redis.errors import UnsentError, driver
from oncekey.stores.redis.operations import NOW, Op
from oncekey.stores.redis.topology import Address, Replies, Send

__all__ = ["ThreadLanes"]


class ThreadLanes:
    """Sends each call by the lane of its server."""

    def __init__(self, target: Target, batches: Batches, patience: float) -> None:
        self.batches = batches
        self._target = target
        self._patience = patience
        self._lanes: dict[Address | None, tuple[_Lane, ThreadBatch]] = {}

    def submit(self, op: Op, args: tuple[Any, ...]) -> Any:
        """Run a call in the next batch of its lane; returns when that is done."""
        name = self.batches.lane(args[0])
        lane = self._lanes.get(name)
        if lane is None:
            made = _Lane(self._target, self.batches, self._patience)
            lane = self._lanes.setdefault(name, (made, ThreadBatch(made.run)))
        return lane[1].submit(op, args)

    def close(self) -> None:
        """Finish what is under way, and close the connections."""
        for lane, gathered in list(self._lanes.values()):
            lane.closed = True
            with suppress(StoreClosedError):
                gathered.submit(NOW, (b"", None))  # behind what is under way


class _Lane(Forking):
    """The connections of one lane. ``ThreadBatch`` lets one thread in at a time."""

    def __init__(self, target: Target, batches: Batches, patience: float) -> None:
        self.closed = False
        self._batches = batches
        self._target = target
        self._patience = patience
        self._connections: dict[Address, Any] = {}
        exceptions = driver().exceptions
        self._reply_error: type[Exception] = exceptions.ResponseError
        self._timed_out = (exceptions.TimeoutError, TimeoutError)
        self._broken = (exceptions.RedisError, OSError)
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        """Forget what is the parent's: the driver closes its copies without a word."""
        self._connections = {}

    def run(self, jobs: Sequence[Job]) -> None:
        """Run a batch."""
        if self.closed:
            for address in list(self._connections):
                self._drop(address)
            for job in jobs:
                job.error = StoreClosedError("this Redis store is closed: connect again")
            return
        deadline, batches = time.monotonic() + self._patience, self._batches
        send = batches.alone(jobs[0]) if len(jobs) == 1 else None
        if send is None:
            flow = batches.run(Batch(list(jobs)))
        else:
            (replies,) = self._exchange(deadline, [send])
            if batches.took(jobs[0], replies):
                return
            flow = batches.go_on(Batch(list(jobs)), send, replies)
        drive(flow, partial(self._exchange, deadline))

    def _exchange(self, deadline: float, sends: Sequence[Send]) -> list[Replies]:
        """Write to every server, then read from every server."""
        left = deadline - time.monotonic()
        until = [deadline - (1 - send.share) * left for send in sends]
        try:
            written = [self._write(send, end) for send, end in zip(sends, until, strict=True)]
            return [
                found if isinstance(found, BaseException) else self._read(send, found, end)
                for send, found, end in zip(sends, written, until, strict=True)
            ]
        except BaseException:  # interrupted: replies that nobody reads are on their way
            for send in sends:
                self._drop(send.address)
            raise

    def _write(self, send: Send, until: float) -> Any:
        """Send, on a connection that is made if there is none. Gives it, or what went wrong."""
        connection = self._connections.get(send.address)
        try:
            if connection is None:
                left = until - time.monotonic()
                if left < self._patience / 20:  # it is the connection's own limit from then on
                    raise TimeoutError
                connection = self._target.connection(send.address, send.sentinel, left, left)
                self._connections[send.address] = connection
                connection.connect()
        except self._timed_out:
            self._drop(send.address)
            return UnsentError(f"no connection within {self._patience:g} s")
        except self._broken as error:
            return self._failed(send, error)
        try:
            connection.send_packed_command([send.payload], check_health=False)
        except self._broken as error:
            return self._failed(send, error)
        return connection

    def _read(self, send: Send, connection: Any, until: float) -> Replies:
        replies: list[Any] = []
        try:
            if not connection.can_read(timeout=max(0.0, until - time.monotonic())):
                return self._failed(send, TimeoutError())
            for _ in range(send.expect):
                try:
                    replies.append(connection.read_response())
                except self._reply_error as error:
                    replies.append(error)
        except self._broken as error:
            return self._failed(send, error)
        return replies

    def _failed(self, send: Send, error: BaseException) -> BaseException:
        self._drop(send.address)
        if isinstance(error, self._timed_out):
            return TimeoutError(f"no answer within {self._patience:g} s")
        return error

    def _drop(self, address: Address) -> None:
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.disconnect()
