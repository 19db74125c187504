"""One connection a process that hears which keys were settled. Waiters themselves hold none."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from oncekey.stores.postgres.connections import psycopg_options

__all__ = ["AsyncListener", "Listener"]

CHANNEL: Final = "oncekey"
LOOK_SECONDS: Final = 0.5  # how often the thread looks whether it is still wanted
IDLE_SECONDS: Final = 60.0  # after so long without a waiter the connection is given back
RETRY_SECONDS: Final = 1.0

Heard = Callable[[str], None]  # takes what was said on the channel, by whomever


class Listener:
    """For threads: a thread that is started by the first waiter and ends when none is left."""

    def __init__(self, dsn: str, heard: Heard) -> None:
        self._dsn = dsn
        self._heard = heard
        self._wanted_at = 0.0
        self._closed = False
        self.reset()

    def reset(self) -> None:
        """Start over, as after a fork."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def want(self) -> None:
        """Listen, for a while at least."""
        self._wanted_at = time.monotonic()
        if self._thread is not None or self._closed:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._listen, name="oncekey-pg-listener", daemon=True
                )
                self._thread.start()

    def _listen(self) -> None:
        import psycopg

        while not self._over():
            try:
                with psycopg.connect(self._dsn, **psycopg_options(self._dsn)) as connection:
                    connection.execute(f"LISTEN {CHANNEL}")
                    while not self._over():
                        for note in connection.notifies(timeout=LOOK_SECONDS):
                            self._heard(note.payload)
            except psycopg.Error:
                time.sleep(RETRY_SECONDS)  # those who wait look for themselves meanwhile

    def _over(self) -> bool:
        if not self._closed and time.monotonic() - self._wanted_at < IDLE_SECONDS:
            return False
        self._thread = None
        return True

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        thread = self._thread
        if thread is not None:
            thread.join(timeout=4 * LOOK_SECONDS)


class AsyncListener:
    """For the tasks of one event loop."""

    def __init__(self, dsn: str, driver: str, heard: Heard) -> None:
        self._dsn = dsn
        self._driver = driver
        self._heard = heard
        self._task: asyncio.Task[None] | None = None
        self._wanted_at = 0.0

    def want(self) -> None:
        """Listen, for a while at least."""
        self._wanted_at = time.monotonic()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._listen())

    async def _listen(self) -> None:
        while time.monotonic() - self._wanted_at < IDLE_SECONDS:
            try:
                if self._driver == "asyncpg":
                    await self._listen_asyncpg()
                else:
                    await self._listen_psycopg()
            except Exception:  # noqa: BLE001 - those who wait look for themselves meanwhile
                await asyncio.sleep(RETRY_SECONDS)

    def _over(self) -> bool:
        return time.monotonic() - self._wanted_at >= IDLE_SECONDS

    async def _listen_asyncpg(self) -> None:
        import asyncpg

        connection = await asyncpg.connect(self._dsn, timeout=10)
        gone = asyncio.Event()
        try:
            connection.add_termination_listener(lambda _: gone.set())
            await connection.add_listener(CHANNEL, self._note)
            while not (gone.is_set() or self._over()):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(gone.wait(), IDLE_SECONDS)
        finally:
            connection.terminate()

    def _note(self, connection: Any, pid: int, channel: str, payload: Any) -> None:
        self._heard(str(payload))

    async def _listen_psycopg(self) -> None:
        import psycopg

        connection = await psycopg.AsyncConnection.connect(self._dsn, **psycopg_options(self._dsn))
        try:
            await connection.execute(f"LISTEN {CHANNEL}")
            while not self._over():
                async for note in connection.notifies(timeout=IDLE_SECONDS):
                    self._heard(note.payload)
        finally:
            await connection.close()

    async def aclose(self) -> None:
        """End the task."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
