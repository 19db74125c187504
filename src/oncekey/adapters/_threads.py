"""Threads for sync code in an event loop. Imports no framework.

Not the loop's own threads, which resolve names and serve everybody's ``asyncio.to_thread``: a copy
that waits for another holds a thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from oncekey._core.waiters import POOLED

__all__ = ["in_thread"]

T = TypeVar("T")

THREADS: Final = 32  # of each pool; more calls wait for their turn
# How many wait for one key, so that copies of one slow call leave threads for others. Clients make
# as many copies as they like; senders of webhooks repeat an event now and then.
WAITERS: Final = {"tool": 8}

# A pool lives as long as its loop, and so does not outlive a fork.
_pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, ThreadPoolExecutor]] = (
    weakref.WeakKeyDictionary()
)


async def in_thread(name: str, function: Callable[..., T], *args: Any) -> T:
    """Call a function in a thread of the pool of that name.

    A caller that is cancelled leaves it running, so that its outcome is recorded.
    """
    loop = asyncio.get_running_loop()
    pools = _pools.setdefault(loop, {})
    pool = pools.get(name)
    if pool is None:
        pool = pools[name] = ThreadPoolExecutor(THREADS, thread_name_prefix=f"oncekey-{name}")
    context = contextvars.copy_context()
    context.run(POOLED.set, WAITERS.get(name))
    return await loop.run_in_executor(pool, lambda: context.run(function, *args))
