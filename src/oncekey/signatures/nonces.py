"""Nonces: a signed delivery is accepted once, whichever process it comes to.

The marks lie in the store that everything else uses, under a scope of their own. How many of them
each key has is capped, and what is over the cap is refused: forgetting an old nonce to make room
would open the door to a replay exactly while somebody is pushing against it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from math import ceil
from typing import Any, Final, Literal

from oncekey._core.drive import Op, arun, run
from oncekey._core.forks import Forking, watch_forks
from oncekey.abc import AsyncStore, Store
from oncekey.errors import BackendMismatchError, PolicyError, StoreFullError
from oncekey.models import Key, Scope, Terms
from oncekey.signatures.verdict import Nonce

__all__ = ["NonceOutcome", "Nonces"]

PER_KEY: Final = 100_000
TOTAL: Final = 10_000_000

NonceOutcome = Literal["fresh", "replayed", "full"]


class Nonces(Forking):
    """Which nonces were used, by key id.

    The nonces themselves are shared by all who share the store. The caps count what *this*
    process let in: looking them up costs no call to the store, so that a stranger's bad signatures
    cost none either. With several processes, divide the cap you want by their number.

    Args:
        store: A sync store for ``verify``, an async one for ``averify``.
        per_key: How many live nonces one key may have.
        total: How many live nonces all keys may have together.
        namespace: Part of the scope. Providers with different namespaces share no nonces: give
            senders whose key ids could be the same a namespace each.
        clock: Seconds, any origin, for the caps. The store's own clock decides on the marks.

    Raises:
        PolicyError: A cap is less than 1, or the namespace is empty.
        BackendMismatchError: It is no store.
    """

    def __init__(
        self,
        store: Store | AsyncStore,
        *,
        per_key: int = PER_KEY,
        total: int = TOTAL,
        namespace: str = "webhook",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(store, (Store, AsyncStore)):
            raise BackendMismatchError(
                f"nonces need a Store or an AsyncStore, got {type(store).__name__}: pass "
                "connect(url), aconnect(url), MemoryStore() or AsyncMemoryStore()"
            )
        if per_key < 1 or total < 1:
            raise PolicyError("per_key and total must be at least 1")
        if not namespace:
            raise PolicyError("namespace must not be empty")
        self.store = store
        self.is_async = isinstance(store, AsyncStore)
        self._per_key, self._total, self._namespace = per_key, total, namespace
        self._clock = clock
        self._live = 0
        self._counts: dict[str, int] = {}
        self._ending: dict[int, dict[str, int]] = {}  # second -> key id -> nonces that end in it
        self._swept_at = 0
        self.after_fork_in_child()
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        """A fresh lock: another thread of the parent may have held the old one."""
        self._lock = threading.Lock()

    def is_full(self, key_id: str) -> bool:
        """Whether another nonce of this key would be refused. Costs no call to the store."""
        with self._lock:
            return self._is_full(key_id)

    def use(self, nonce: Nonce) -> NonceOutcome:
        """Use a nonce, on a sync store. ``fresh``: nobody did before.

        Raises:
            BackendMismatchError: The store is async: use ``ause``.
            StoreError: The store can't be asked; nobody knows whether it is a replay.
        """
        if not isinstance(self.store, Store):
            raise BackendMismatchError("the nonces are on an async store: await ause(...) instead")
        return run(self.using(nonce), self.store)

    async def ause(self, nonce: Nonce) -> NonceOutcome:
        """``use``, on an async store.

        Raises:
            BackendMismatchError: The store is sync: use ``use``.
            StoreError: The store can't be asked; nobody knows whether it is a replay.
        """
        if not isinstance(self.store, AsyncStore):
            raise BackendMismatchError("the nonces are on a sync store: call use(...) instead")
        return await arun(self.using(nonce), self.store)

    def using(self, nonce: Nonce) -> Generator[Op, Any, NonceOutcome]:
        """The steps of ``use``, for whoever drives them."""
        ends = self._reserve(nonce)
        if ends is None:
            return "full"
        first = False
        try:
            key = Key(Scope("nonce", self._namespace, nonce.key_id), nonce.value)
            terms = Terms(lease_ms=nonce.lasts_ms, ttl_ms=nonce.lasts_ms)
            first = yield Op("first_seen", (key, terms), self.store)
        except StoreFullError:
            return "full"
        finally:
            if not first:
                self._give_back(nonce.key_id, ends)
        return "fresh" if first else "replayed"

    # --- the caps ----------------------------------------------------------------------------

    def _is_full(self, key_id: str) -> bool:
        self._sweep()
        return self._live >= self._total or self._counts.get(key_id, 0) >= self._per_key

    def _reserve(self, nonce: Nonce) -> int | None:
        with self._lock:
            if self._is_full(nonce.key_id):
                return None
            ends = ceil(self._clock() + nonce.lasts_ms / 1000)
            self._count(nonce.key_id, ends, 1)
            return ends

    def _give_back(self, key_id: str, ends: int) -> None:
        with self._lock:
            if key_id in self._ending.get(ends, ()):  # else it ended meanwhile
                self._count(key_id, ends, -1)

    def _count(self, key_id: str, ends: int, number: int) -> None:
        counts = self._ending.setdefault(ends, {})
        for holder in (counts, self._counts):
            left = holder.get(key_id, 0) + number
            if left:
                holder[key_id] = left
            else:
                del holder[key_id]
        self._live += number

    def _sweep(self) -> None:
        now = int(self._clock())
        if now == self._swept_at:
            return
        self._swept_at = now
        for ends in [second for second in self._ending if second <= now]:
            for key_id, number in self._ending.pop(ends).items():
                self._live -= number
                self._counts[key_id] -= number
                if not self._counts[key_id]:
                    del self._counts[key_id]
