"""A secret that a store keeps for itself, for digests that nobody outside of it can make.

It is made by whoever comes first, and found by everybody else: a record under a name of its own,
that never ends.
"""

from __future__ import annotations

import os
import time
from typing import Final

from oncekey._core.drive import Flow, Op, Pause
from oncekey._core.flows import new_owner
from oncekey.errors import StoreCorruptError
from oncekey.models import ClaimReply, ClaimVerdict, Key, Scope, Terms

__all__ = ["StoreSecret"]

_KEY: Final = Key(Scope("oncekey", "secret"), "1")
_MARK: Final = b"secret"
_TERMS: Final = Terms(lease_ms=5_000, ttl_ms=100 * 365 * 86_400_000)
_BYTES: Final = 32
# A store that was emptied has another secret. Processes agree on that one within this time.
_LOOK_AGAIN: Final = 60.0


class StoreSecret:
    """The secret of one store, as this process knows it: ``until`` then, without asking."""

    __slots__ = ("known", "until")

    def __init__(self) -> None:
        self.known = b""
        self.until = 0.0

    def get(self) -> Flow[bytes]:
        """The secret; asks the store once in a while."""
        now = time.monotonic()
        if now >= self.until:
            self.known = yield from _found_or_made()
            self.until = now + _LOOK_AGAIN
        return self.known


def _found_or_made() -> Flow[bytes]:
    owner = new_owner()
    while True:
        reply: ClaimReply = yield Op("claim", (_KEY, owner, _MARK, _TERMS))
        if reply.verdict is ClaimVerdict.REPLAY:
            answer = reply.answer or b""
            if len(answer) != _BYTES + 1 or answer[:1] != b"k":
                raise StoreCorruptError(
                    "the secret of this store can't be read: does another program write to it?"
                )
            return answer[1:]
        if reply.verdict is ClaimVerdict.WON:
            fresh = os.urandom(_BYTES)
            try:
                done: bool = yield Op("complete", (_KEY, owner, reply.fence, b"k" + fresh, _TERMS))
            except GeneratorExit:
                raise
            except BaseException:  # its request was cancelled: all others wait for this
                yield Op("release", (_KEY, owner, reply.fence))
                raise
            if done:
                return fresh
            owner = new_owner()
        else:
            yield Pause(_KEY, 0.02)  # another process makes it now
