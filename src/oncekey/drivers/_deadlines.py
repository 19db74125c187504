"""How long a call to a server may take, and how one that takes longer is ended.

A connection whose peer is gone says nothing: no error, no end. So every call has a deadline; one
that misses it closes its connection, as nobody can know what is still to come on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from concurrent.futures import Future
from typing import Any, Final

from oncekey.errors import StoreConfigError, StoreTimeoutError

__all__ = [
    "Attempts",
    "Deadline",
    "Late",
    "Watch",
    "acall_in_time",
    "alimited",
    "call_in_time",
    "check_timeout",
    "end",
    "engine_connection",
    "in_time",
    "limited",
    "to_driver",
]

SLACK: Final = 0.5  # seconds: psycopg ends a statement itself; asyncio only what it left


class Late(Exception):
    """Raised in place of an answer that is late. No ``OSError``, as drivers catch those."""


class Deadline:
    """When a call must have its answer, and whether it was sent at all."""

    __slots__ = ("seconds", "sent", "until")

    def __init__(self, seconds: float, until: float | None = None) -> None:
        self.seconds = seconds
        self.until = time.monotonic() + seconds if until is None else until
        self.sent = False

    def left(self) -> float:
        """The seconds that are left.

        Raises:
            Late: None are.
        """
        left = self.until - time.monotonic()
        if left <= 0:
            raise Late
        return left

    def missed(self) -> StoreTimeoutError:
        """The error for a call that has missed it."""
        known = not self.sent
        what = (
            "Nothing was sent, so that nothing was changed"
            if known
            else "The call may or may not have been carried out, doing it again is safe"
        )
        return StoreTimeoutError(
            f"PostgreSQL did not answer within {self.seconds:g} s: check that the server runs and "
            f"the network between, or raise timeout=. {what}",
            outcome_known=known,
        )


def check_timeout(value: Any) -> float:
    """A store's option ``timeout`` as seconds.

    Raises:
        StoreConfigError: It is no number above 0.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < threading.TIMEOUT_MAX:
        raise StoreConfigError(f"timeout must be seconds above 0, got {value!r}")
    return float(value)


def to_driver(connection: Any) -> str:
    """The driver that a raw connection is of: ``psycopg``, ``asyncpg`` or something else."""
    return type(connection).__module__.partition(".")[0]


def _until(work: Generator[Any, Any, Any], deadline: Deadline) -> Generator[Any, Any, Any]:
    """What psycopg waits for, given up at the deadline: it looks ten times a second."""
    try:
        wanted = next(work)
        while True:
            wanted = work.send((yield wanted))
            deadline.left()  # after what has come was taken: it may have been the rest
    except StopIteration as stop:
        return stop.value


def end(connection: Any) -> None:
    """Close a raw connection at once, without a word to a server that may not hear it."""
    with contextlib.suppress(Exception):
        if to_driver(connection) == "asyncpg":
            connection.terminate()
        else:
            connection.pgconn.finish()  # close() could give it back to its pool


@contextlib.contextmanager
def limited(connection: Any, deadline: Deadline | None) -> Iterator[None]:
    """Let no statement of psycopg in this block go past the deadline; then close the connection.

    Other drivers are not touched.
    """
    if deadline is None or to_driver(connection) != "psycopg":
        yield
        return
    wait = connection.wait
    connection.wait = lambda work, *args, **options: wait(_until(work, deadline), *args, **options)
    try:
        yield
    except Late:
        end(connection)
        raise
    finally:
        del connection.wait


def call_in_time(connection: Any, deadline: Deadline, call: Callable[..., Any], *args: Any) -> Any:
    """Make one call, in which no statement of psycopg may go past the deadline. See ``limited``."""
    if not type(connection).__module__.startswith("psycopg"):
        return call(*args)
    wait = connection.wait
    connection.wait = lambda work, *rest, **options: wait(_until(work, deadline), *rest, **options)
    try:
        return call(*args)
    except Late:
        end(connection)
        raise
    finally:
        del connection.wait


@contextlib.asynccontextmanager
async def in_time(deadline: Deadline | None) -> AsyncIterator[None]:
    """Cancel what is waited for in this block at the deadline."""
    if deadline is None:
        yield
        return
    until = asyncio.timeout(deadline.left())
    try:
        async with until:
            yield
    except TimeoutError:
        if until.expired():
            raise Late from None
        raise


@contextlib.asynccontextmanager
async def alimited(connection: Any, deadline: Deadline | None) -> AsyncIterator[None]:
    """The same for what runs in an event loop, whatever the driver."""
    if deadline is None:
        yield
        return
    own = to_driver(connection) == "psycopg"
    until = asyncio.timeout(deadline.left() + SLACK * own)
    try:
        # A cancelled statement of psycopg asks the server for its end, and waits for that.
        with limited(connection, deadline):
            async with until:
                yield
    except TimeoutError:
        if not until.expired():
            raise
        end(connection)
        raise Late from None


async def acall_in_time(
    connection: Any, deadline: Deadline, call: Callable[..., Awaitable[Any]], *args: Any
) -> Any:
    """Make one call and await it; one that is late ends its connection. See ``alimited``."""
    async with alimited(connection, deadline):
        return await call(*args)


class Watch:
    """Ends a connection of asyncpg whose call is late, with one timer for all of its calls.

    Whatever waits on such a connection learns of its end at once: no need to cancel it.
    """

    __slots__ = ("_connection", "_late", "_timer", "_until")

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._late = False
        self._timer: asyncio.TimerHandle | None = None
        self._until = math.inf  # while no call is under way

    async def call(
        self, deadline: Deadline, call: Callable[..., Awaitable[Any]], *args: Any
    ) -> Any:
        """Make one call and await it."""
        left = deadline.left()
        self._until = deadline.until
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(left, self._look)
        try:
            return await call(*args)
        except Exception:
            if self._late:
                raise Late from None
            raise
        finally:
            self._until = math.inf

    def _look(self) -> None:
        left = self._until - time.monotonic()
        if left == math.inf:
            self._timer = None
        elif left > 0:
            self._timer = asyncio.get_running_loop().call_later(left, self._look)
        else:
            self._late = True
            end(self._connection)

    def stop(self) -> None:
        """No more calls are to come."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Attempts:
    """Connections that are being made, each in a thread or task of its own.

    One that is late for its call is there for the next: of several hosts the first may be down,
    and to find that out can take longer than a call may.
    """

    def __init__(self) -> None:
        self._late: list[Any] = []

    def wait(self, connect: Callable[[], Any], deadline: Deadline) -> Any:
        """A connection, in time."""
        future: Future[Any] = self._late.pop() if self._late else _in_thread(connect)
        taken = False
        try:
            made = future.result(deadline.left())
            taken = True
            return made
        except (TimeoutError, Late):
            taken = future.done()
            if taken:
                return future.result()  # the time-out was the driver's, or it came just now
            raise Late from None
        except Exception:
            taken = True
            raise
        finally:
            if not taken:
                self._late.append(future)

    async def wait_async(self, connect: Callable[[], Awaitable[Any]], deadline: Deadline) -> Any:
        """The same in an event loop; its attempts stay in it."""
        task: Any = self._late.pop() if self._late else asyncio.ensure_future(connect())
        try:
            await asyncio.wait((task,), timeout=deadline.left())
        finally:
            if not task.done():
                self._late.append(task)
                task.add_done_callback(_seen)
        if not task.done():
            raise Late
        return task.result()

    def drop(self, close: Callable[[Any], Any]) -> None:
        """Close what still comes."""
        late, self._late = self._late, []
        for attempt in late:
            attempt.add_done_callback(lambda done: _closed(done, close))


def engine_connection(engine: Any, deadline: Deadline) -> Any:
    """A connection of a SQLAlchemy ``Engine``, in time, also where it has to be made first."""
    attempts = Attempts()
    try:
        return attempts.wait(engine.connect, deadline)
    except Late:
        attempts.drop(lambda connection: connection.close())  # back to its pool
        raise


def _closed(done: Any, close: Callable[[Any], Any]) -> None:
    if not done.cancelled() and done.exception() is None:
        close(done.result())


def _seen(task: Any) -> None:
    """Take note of an error that nobody may come for."""
    if not task.cancelled():
        task.exception()


def _in_thread(connect: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(connect())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            future.set_exception(error)

    threading.Thread(target=run, name="oncekey-connect", daemon=True).start()
    return future
