"""A worker of the storm: asks for the answer of every key until it has them all.

Arguments: database, worker number, incarnation, number of keys, number of keys whose first handler
stops itself, log file, descriptor of the progress pipe.

Log lines, each written before anything else happens:
    W key fence attempts takeover     a claim was won, its handler runs
    F key fence                       the engine said that this fence came too late
    A key answer                      the call returned: the answer is acknowledged
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from typing import Any

from oncekey import ClaimLostError, Once, SQLiteStore
from oncekey.errors import IdempotencyInFlightError
from oncekey.guard import current_claim
from oncekey.instrument import subscribe
from oncekey.instrument.events import Event, EventKind
from oncekey.models import Key, Scope

RENEWING = threading.Lock()


def calm(store: Any) -> Any:
    """Let the heartbeat of a store be kept from beginning a write."""
    renew = store.renew

    def renew_alone(*args: Any) -> bool:
        with RENEWING:
            held: bool = renew(*args)
            return held

    store.renew = renew_alone
    return store


def main() -> None:
    """Work until every key has an answer."""
    path, worker, incarnation, keys, traps, log_path, pipe = sys.argv[1:]
    rng = random.Random(f"{worker}/{incarnation}")
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    progress = int(pipe)
    trapped = {f"k{number:04}" for number in range(int(traps))}
    missing = [f"k{number:04}" for number in range(int(keys))]
    names = {Key(Scope("once", "storm"), name).shown: name for name in missing}

    def note(*words: object) -> None:
        os.write(log, (" ".join(map(str, words)) + "\n").encode())

    def tell(*words: object) -> None:
        line = " ".join(map(str, (worker, incarnation, *words))) + "\n"
        os.write(progress, line.encode())

    names: dict[str, str] = {}  # by what events show of a key

    def fenced(event: Event) -> None:
        if event.kind is EventKind.FENCED:
            note("F", names[event.key], event.fence)
            tell("fenced", names[event.key], event.fence)

    once = Once(calm(SQLiteStore(path)), scope="storm", lease=0.25, wait=0, ttl=3600)

    @once(key="name", name=None)
    def work(name: str) -> dict[str, object]:
        claim = current_claim()
        names[claim.key.shown] = name
        note("W", name, claim.fence, claim.attempts, int(claim.takeover))
        if name in trapped and claim.attempts == 1:
            # Inside a handler, with the heartbeat stopped too: a zombie, once it goes on.
            # Never in the middle of a renewal, which would stop with the file's lock in hand.
            with RENEWING:
                tell("trapped", name, claim.fence)
                os.kill(os.getpid(), signal.SIGSTOP)
        else:
            tell("won", name, claim.fence)
        return {"key": name, "worker": worker, "fence": claim.fence, "nonce": rng.random()}

    subscribe(fenced)
    while missing:
        rng.shuffle(missing)
        left = []
        for name in missing:
            try:
                answer = work(name)
            except (IdempotencyInFlightError, ClaimLostError):
                left.append(name)
                continue
            note("A", name, json.dumps(answer, sort_keys=True))
            tell("acked", name, 0)
        missing = left
    tell("done", "-", 0)


if __name__ == "__main__":
    main()
