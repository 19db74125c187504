"""What stores must do in a forked child: forget locks and connections of the parent.

Inherited connections are dropped, never closed: closing would talk to the parent's server
session, or release the parent's file locks.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["keep_forever", "reset_after_fork"]


class _Resettable(Protocol):
    def after_fork(self) -> None: ...


_stores: weakref.WeakSet[_Resettable] = weakref.WeakSet()


def reset_after_fork(store: _Resettable) -> None:
    """Call ``store.after_fork()`` in every child that is forked while ``store`` lives."""
    _stores.add(store)


def _reset_all() -> None:
    for store in list(_stores):
        store.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)


def keep_forever(connection: object) -> None:
    """Make sure that an inherited connection is never closed, not even when the child exits."""
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
