"""How many deliveries of one key, and of one sender, are taken: by this process, or by all."""

from __future__ import annotations

import time

from oncekey._core.drive import Flow
from oncekey._core.limiter import InsertLimiter, SharedLimit
from oncekey.models import Key
from oncekey.receiver.settings import Limit, ReceiverSettings

__all__ = ["Limits"]


class Limits:
    """The limits of one receiver.

    Attributes:
        shared: They are counted by the store.
    """

    def __init__(self, namespace: str, settings: ReceiverSettings) -> None:
        self.shared = settings.limits == "shared"
        own = not self.shared
        self._per_key = _limiter(settings.per_key) if own else None
        self._per_sender = _limiter(settings.per_sender) if own else None
        self._keys = _shared(f"key {namespace}", settings.per_key)
        self._senders = _shared(f"sender {namespace}", settings.per_sender)

    def here(self, sender: str, name: str, guard: Key | None) -> int | None:
        """How many seconds to wait, if this process took too many. Counts those that need not."""
        wait = self._per_sender.admit(sender) if self._per_sender is not None else None
        if wait is None and self._per_key is not None:
            if guard is not None:  # before its id, which may be another each time
                wait = self._per_key.admit(sender + guard.name)
            if wait is None:
                wait = self._per_key.admit(sender + name)
        return wait

    def everywhere(self, sender: str, name: str, guard: Key | None) -> Flow[int | None]:
        """The same for all processes, by the store."""
        wait = None
        if self._senders is not None:
            wait = yield from self._senders.admit(sender)
        if wait is None and self._keys is not None:
            if guard is not None:
                wait = yield from self._keys.admit(f"{len(sender)}:{sender}{guard.name}")
            if wait is None:
                wait = yield from self._keys.admit(f"{len(sender)}:{sender}{name}")
        return wait


def _limiter(limit: Limit | None) -> InsertLimiter | None:
    return None if limit is None else InsertLimiter((limit,), time.monotonic)


def _shared(what: str, limit: Limit | None) -> SharedLimit | None:
    return None if limit is None else SharedLimit(f"webhook {what}", limit)
