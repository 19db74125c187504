"""How many calls of this process wait for one key.

A copy that waits costs a thread, or at least a task and a look at the store now and then. Beyond a
number of them a copy gains nothing by waiting too: it is told at once that the call is in flight.
"""

from __future__ import annotations

import os
import threading
from contextvars import ContextVar
from typing import Any

from oncekey.models import Key

__all__ = ["POOLED", "join", "leave"]

# Set by whoever runs calls in a pool of threads, for policies that say nothing themselves: waiting
# copies of one call must leave threads for others.
POOLED: ContextVar[int | None] = ContextVar("oncekey_pooled_waiters", default=None)

_waiting: dict[tuple[int, bytes], int] = {}
_lock = threading.Lock()


def join(key: Key, store: Any, most: int | None) -> bool:
    """Wait for ``key``, too. False: there are enough; else ``leave`` must follow."""
    most = POOLED.get() if most is None else most
    name = (id(store), key.digest)
    with _lock:
        count = _waiting.get(name, 0)
        if most is not None and count >= most:
            return False
        _waiting[name] = count + 1
    return True


def leave(key: Key, store: Any) -> None:
    """Wait no more."""
    name = (id(store), key.digest)
    with _lock:
        count = _waiting.get(name, 1) - 1
        if count > 0:
            _waiting[name] = count
        else:
            _waiting.pop(name, None)


def _forget() -> None:
    """In a forked child nobody waits, and a lock of the parent may never open."""
    global _lock
    _lock = threading.Lock()
    _waiting.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
