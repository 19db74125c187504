"""The connections of a sync store: bytes out, replies back, nothing decided.

One connection a server. Those that fail in any way are dropped and made anew at the next call, so
that no reply can ever be taken for another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oncekey._core.forks import Forking, watch_forks
from oncekey.errors import StoreClosedError
from oncekey.stores._batching import Job
from oncekey.stores._redis_engine import Engine
from oncekey.stores._redis_errors import driver
from oncekey.stores._redis_layout import Address, Replies, Send
from oncekey.stores._redis_ops import CLOSE
from oncekey.stores._redis_target import Target

__all__ = ["SyncLink"]

_Place = tuple[bool, Address]


def _closed() -> StoreClosedError:
    return StoreClosedError("this Redis store is closed: connect again")


class SyncLink(Forking):
    """The connections of a sync store. ``ThreadBatch`` lets one thread in at a time."""

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
        try:
            sends = next(flow)
            while True:
                sends = flow.send(self._exchange(sends))
        except StopIteration:
            pass
        for job in jobs:
            if job.method is CLOSE:
                job.result = None
                self._closed = True
                self._drop_all()

    def _exchange(self, sends: Sequence[Send]) -> list[Replies]:
        """Write to every server, then read from every server."""
        try:
            written = [self._write(send) for send in sends]
            return [
                found if isinstance(found, BaseException) else self._read(send, found)
                for send, found in zip(sends, written, strict=True)
            ]
        except BaseException:  # interrupted: replies that nobody reads are on their way
            for send in sends:
                self._drop(send)
            raise

    def _write(self, send: Send) -> Any:
        place = (send.sentinel, send.address)
        connection = self._connections.get(place)
        try:
            if connection is None:
                connection = self._target.connection(send.address, send.sentinel, self._patience)
                self._connections[place] = connection
            connection.send_packed_command(send.payload, check_health=False)
        except self._broken as error:
            return self._failed(send, error)
        return connection

    def _read(self, send: Send, connection: Any) -> Replies:
        replies: list[Any] = []
        try:
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
