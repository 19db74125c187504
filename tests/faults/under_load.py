"""Threads that work on a store while somebody takes its server away."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from tests.servers.redis import eventually

from oncekey.abc import Store
from oncekey.errors import StoreError
from oncekey.models import Key, Scope, Terms, Verdict

__all__ = ["Load", "load"]

TERMS = Terms(lease_ms=30_000, ttl_ms=86_400_000)
PRINT = b"f" * 64


def key(name: str) -> Key:
    return Key(Scope("once", "load"), name)


class Load:
    """Threads that claim and complete one key after the other, and remember what they were told."""

    def __init__(self, store: Store, threads: int = 4) -> None:
        self.store = store
        self.acknowledged: dict[str, bytes] = {}
        self.marked: list[str] = []
        self.errors: list[BaseException] = []
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self._work) for _ in range(threads)]
        for thread in self.threads:
            thread.start()

    def _work(self) -> None:
        while not self.stop.is_set():
            name, owner = os.urandom(8).hex(), os.urandom(16)
            try:
                won = self.store.claim(key(name), owner, PRINT, TERMS)
                if self.store.complete(key(name), owner, won.fence, owner, TERMS):
                    self.acknowledged[name] = owner
                mark = os.urandom(8).hex()
                if self.store.first_seen(key(mark), TERMS):
                    self.marked.append(mark)
            except StoreError as error:
                self.errors.append(error)
                self.stop.wait(0.05)
            except BaseException as error:
                self.errors.append(error)
                raise

    def more(self, count: int = 50) -> None:
        """Wait until so many more were acknowledged."""
        target = len(self.acknowledged) + count
        eventually(lambda: len(self.acknowledged) >= target, "more acknowledged work")

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()

    def check(self) -> None:
        """Nothing that was acknowledged is contradicted."""
        for name, answer in self.acknowledged.items():
            reply = self.store.claim(key(name), os.urandom(16), PRINT, TERMS)
            assert (reply.verdict, reply.answer) == (Verdict.REPLAY, answer)
        for name in self.marked:
            assert self.store.first_seen(key(name), TERMS) is False


@contextlib.contextmanager
def load(store: Store) -> Iterator[Load]:
    working = Load(store)
    try:
        yield working
    finally:
        working.end()
