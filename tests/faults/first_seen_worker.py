"""A worker that marks keys: says "ready", waits for a line, marks, prints what it saw first.

Arguments: database, worker number, kind (sync, thread, inline or mixed), number of shared keys,
number of its own keys. Its output is JSON: the keys that it was the first to see, and everything
that was logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import sys

from oncekey import AsyncSQLiteStore, SQLiteStore, SyncWebhookDedupStore, WebhookDedupStore
from oncekey.models import Key, Scope, Terms, Verdict

TERMS = Terms(lease_ms=600_000, ttl_ms=86_400_000)


def mark_sync(path: str, names: list[str]) -> list[str]:
    """Through ``SyncWebhookDedupStore``."""
    with SQLiteStore(path) as store:
        dedup = SyncWebhookDedupStore(store)
        wait_for_go()
        return [name for name in names if dedup.check_and_record("sender", name)]


def mark_async(path: str, names: list[str], commit: str) -> list[str]:
    """Through ``WebhookDedupStore``, sixteen deliveries at a time."""

    async def mark() -> list[str]:
        async with AsyncSQLiteStore(path, commit=commit) as backend:
            dedup = WebhookDedupStore(backend)
            wait_for_go()
            seen = []
            for start in range(0, len(names), 16):
                some = names[start : start + 16]
                first = await asyncio.gather(*(dedup.check_and_record("sender", n) for n in some))
                seen += [name for name, new in zip(some, first, strict=True) if new]
            return seen

    return asyncio.run(mark())


def write_mixed(path: str, names: list[str]) -> list[str]:
    """Straight on the store, where an error is an error: marks, and claims that are completed."""
    scope = Scope("webhook", "webhook", "sender")
    seen = []
    with SQLiteStore(path) as store:
        wait_for_go()
        for name in names:
            if int(name.rpartition("-")[2]) % 2:
                first = store.first_seen(Key(scope, name), TERMS)
            else:
                owner = os.urandom(16)
                reply = store.claim(Key(scope, name), owner, b"", TERMS)
                first = reply.verdict is Verdict.WON
                if first:
                    held = store.complete(Key(scope, name), owner, reply.fence, b"j1", TERMS)
                    assert held, f"{name} was lost within its lease"
            if first:
                seen.append(name)
    return seen


def wait_for_go() -> None:
    """Tell that the store is open, and wait until everybody's is."""
    print("ready", flush=True)
    sys.stdin.readline()


def main() -> None:
    """Mark every key, in an order of this worker's own."""
    path, worker, kind, shared, own = sys.argv[1:]
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("oncekey").addHandler(handler)
    names = [f"shared-{number}" for number in range(int(shared))]
    names += [f"own{worker}-{number}" for number in range(int(own))]
    random.Random(int(worker)).shuffle(names)
    if kind == "sync":
        seen = mark_sync(path, names)
    elif kind == "mixed":
        seen = write_mixed(path, names)
    else:
        seen = mark_async(path, names, kind)
    print(json.dumps({"seen": seen, "logged": logged}), flush=True)


if __name__ == "__main__":
    main()
