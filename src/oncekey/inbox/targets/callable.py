"""Python functions as targets."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from oncekey.errors import PermanentError
from oncekey.inbox.models import Delivery
from oncekey.inbox.targets.base import Answer

__all__ = ["CallableTarget"]


class CallableTarget:
    """Calls a function with each delivery.

    A plain function runs in a thread of the target's own. Whatever it raises is a failure that is
    tried again; ``PermanentError`` gives the delivery up. Python can't stop a thread: one that
    takes too long goes on, and keeps its place among the target's threads.

    Args:
        function: Takes a ``Delivery``; sync or async.
        threads: How many plain calls run at a time.
    """

    def __init__(self, function: Callable[[Delivery], Any], *, threads: int = 16) -> None:
        self._function = function
        self._awaits = inspect.iscoroutinefunction(function)
        self._threads = None if self._awaits else ThreadPoolExecutor(threads, "oncekey-target")

    async def send(self, delivery: Delivery, timeout_ms: int) -> Answer:
        """See ``Target``."""
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                if self._awaits:
                    await self._function(delivery)
                else:
                    loop = asyncio.get_running_loop()
                    await loop.run_in_executor(self._threads, self._function, delivery)
        except TimeoutError:
            return Answer(False, error="timeout")
        except PermanentError as error:
            note = str(error)
            return Answer(False, error="PermanentError", note=note, permanent=True, sick=False)
        except Exception as error:  # noqa: BLE001 - a handler's failure is an outcome
            return Answer(False, error=type(error).__name__, sick=False)
        return Answer(True)

    async def aclose(self) -> None:
        """See ``Target``."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
