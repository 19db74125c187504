"""Early wake-up of waiters within one process, for threads and event loops alike."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

__all__ = ["Waiters"]


class Waiters:
    """Callbacks by key. ``wake`` calls and forgets them; none is lost or called twice."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, list[Callable[[], object]]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def wake(self, key: Hashable) -> None:
        """Wake everybody who waits for ``key``."""
        if not self._waiting:
            return
        with self._lock:
            callbacks = self._waiting.pop(key, ())
        for callback in callbacks:
            callback()

    def _add(self, key: Hashable, callback: Callable[[], object]) -> None:
        with self._lock:
            self._waiting.setdefault(key, []).append(callback)

    def _drop(self, key: Hashable, callback: Callable[[], object]) -> None:
        with self._lock:
            callbacks = self._waiting.get(key)
            if callbacks and callback in callbacks:
                callbacks.remove(callback)
                if not callbacks:
                    del self._waiting[key]

    def wait(self, key: Hashable, seconds: float, settled: Callable[[], bool]) -> None:
        """Block until ``key`` is woken, unless ``settled`` says there is nothing to wait for."""
        event = threading.Event()
        callback = event.set
        try:
            self._add(key, callback)
            # Looked at only after the callback is in place, so that no change falls between.
            if not settled():
                event.wait(seconds)
        finally:
            self._drop(key, callback)

    async def wait_async(
        self, key: Hashable, seconds: float, settled: Callable[[], bool | Awaitable[bool]]
    ) -> None:
        """The same for a task; other tasks go on meanwhile."""
        import asyncio

        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def callback() -> None:
            try:
                loop.call_soon_threadsafe(_resolve, future)
            except RuntimeError:
                pass  # that loop is closed: nobody waits there any more

        self._add(key, callback)
        try:
            over = settled()
            if not isinstance(over, bool):
                over = await over
            if not over:
                await asyncio.wait((future,), timeout=seconds)
        finally:
            self._drop(key, callback)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
