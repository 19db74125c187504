"""Which keys transactions of this process have in hand."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

__all__ = ["Hold", "InHand", "in_hand"]


class Hold:
    """The key that one block has in hand, with the payload that it was won with."""

    fingerprint = b""  # once the key is won


class InHand:
    """The keys that transactions of this process hold, store by store: one tries, others wait.

    With each key that was won stands the payload that it was won with: nobody else can see that
    before the commit, and a copy with another payload need not wait to learn that it conflicts.
    Taking a key again and giving it twice do nothing, so that whoever was interrupted may do both.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start over: in a forked child nothing is in hand."""
        self._lock = threading.Lock()
        self._keys: weakref.WeakKeyDictionary[Any, dict[bytes, Hold]] = weakref.WeakKeyDictionary()

    def take(self, store: Any, digest: bytes, hold: Hold) -> bool:
        """Take the key. False: another block has it."""
        with self._lock:
            return self._keys.setdefault(store, {}).setdefault(digest, hold) is hold

    def differs(self, store: Any, digest: bytes, fingerprint: bytes) -> bool:
        """Whether the key was won here with another payload."""
        with self._lock:
            hold = self._keys.get(store, {}).get(digest)
        held = b"" if hold is None else hold.fingerprint
        return bool(held and fingerprint) and held != fingerprint

    def give(self, store: Any, digest: bytes, hold: Hold) -> None:
        """Give the key back, if this block has it."""
        with self._lock:
            keys = self._keys.get(store, {})
            if keys.get(digest) is hold:
                del keys[digest]


in_hand = InHand()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=in_hand.clear)
