"""The connections of a sync store: bytes out, replies back, nothing decided.

Calls to one server wait for each other, calls to different servers don't: each has its lane, with
connections of its own. Those that fail in any way are dropped and made anew at the next call, so
that no reply can ever be taken for another's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from oncekey._core.forks import Forking, watch_forks
from oncekey.errors import StoreClosedError
from oncekey.stores._batching import Job, ThreadBatch
from oncekey.stores._redis_engine import Engine
from oncekey.stores._redis_errors import UnsentError, driver
from oncekey.stores._redis_layout import Address, Replies, Send
from oncekey.stores._redis_ops import CLOSE, Op
from oncekey.stores._redis_target import Target

__all__ = ["SyncLanes"]

_Place = tuple[bool, Address]


def _closed() -> StoreClosedError:
    return StoreClosedError("this Redis store is closed: connect again")


class SyncLanes:
    """Sends each call by the lane of its server."""

    def __init__(self, target: Target, engine: Engine, patience: float) -> None:
        self._engine = engine
        self._connect = (target, engine, patience)
        self._lanes: dict[Address | None, ThreadBatch] = {}

    def submit(self, op: Op, args: tuple[Any, ...]) -> Any:
        """Run a call in the next batch of its lane; returns when that is done."""
        name = self._engine.lane(args[0])
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes.setdefault(name, ThreadBatch(_Lane(*self._connect).run))
        return lane.submit(op, args)

    def close(self) -> None:
        """Finish what is under way, and close the connections."""
        for lane in list(self._lanes.values()):
            lane.submit(CLOSE, (b"", None))


class _Lane(Forking):
    """The connections of one lane. ``ThreadBatch`` lets one thread in at a time."""

    def __init__(self, target: Target, engine: Engine, patience: float) -> None:
        self.engine = engine
        self._target = target
        self._patience = patience
        self._connections: dict[_Place, Any] = {}
        self._closed = False
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
        if self._closed:
            for job in jobs:
                job.result = None
                job.error = None if job.method is CLOSE else _closed()
            return
        flow = self.engine.batch(jobs)
        deadline = time.monotonic() + self._patience
        try:
            sends = next(flow)
            while True:
                sends = flow.send(self._exchange(sends, deadline))
        except StopIteration:
            pass
        for job in jobs:
            if job.method is CLOSE:
                job.result = None
                self._closed = True
                self._drop_all()

    def _exchange(self, sends: Sequence[Send], deadline: float) -> list[Replies]:
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
                self._drop(send)
            raise

    def _write(self, send: Send, until: float) -> Any:
        place = (send.sentinel, send.address)
        connection = self._connections.get(place)
        try:
            if connection is None:
                left = until - time.monotonic()
                if left < self._patience / 20:  # it is the connection's own limit from then on
                    raise TimeoutError
                connection = self._target.connection(send.address, send.sentinel, left, left)
                self._connections[place] = connection
                connection.connect()
        except self._timed_out:
            self._drop(send)
            return UnsentError(f"no connection within {self._patience:g} s")
        except self._broken as error:
            return self._failed(send, error)
        try:
            connection.send_packed_command(send.payload, check_health=False)
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
        self._drop(send)
        if isinstance(error, self._timed_out):
            return TimeoutError(f"no answer within {self._patience:g} s")
        return error

    def _drop(self, send: Send) -> None:
        connection = self._connections.pop((send.sentinel, send.address), None)
        if connection is not None:
            connection.disconnect()

    def _drop_all(self) -> None:
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.disconnect()
