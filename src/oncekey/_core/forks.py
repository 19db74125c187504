"""What stores do when the process forks.

A child must not inherit a locked lock, nor an open database: SQLite keeps file locks in the
memory of the process, so that a child with a copy of an open connection believes in locks that
only its parent has. Stores therefore close before a fork and open again after it, on both sides.
"""

from __future__ import annotations

import os
import threading
import weakref

__all__ = ["Forking", "watch_forks"]


class Forking:
    """Three moments of a fork; a store overrides those that matter to it."""

    def before_fork(self) -> None:
        """In the parent, before: wait for work under way, and close what can't be inherited."""

    def after_fork_in_parent(self) -> None:
        """In the parent, after: go on."""

    def after_fork_in_child(self) -> None:
        """In the child: start over, with fresh locks."""


_stores: dict[int, weakref.ref[Forking]] = {}  # copied in one step, whatever threads add meanwhile
_forking: list[Forking] = []
_one_at_a_time = threading.Lock()  # two threads may fork at the same moment


def watch_forks(store: Forking) -> None:
    """Tell ``store`` of every fork while it lives."""
    name = id(store)
    _stores[name] = weakref.ref(store, lambda gone: _stores.pop(name, None))


def _before() -> None:
    _one_at_a_time.acquire()
    _forking[:] = filter(None, [held() for held in _stores.copy().values()])
    for store in _forking:
        store.before_fork()


def _in_parent() -> None:
    for store in _forking:
        store.after_fork_in_parent()
    _forking.clear()
    _one_at_a_time.release()


def _in_child() -> None:
    for store in _forking:
        store.after_fork_in_child()
    _forking.clear()
    _one_at_a_time.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
