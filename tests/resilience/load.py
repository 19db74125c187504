"""Load on a store that goes away: workers that take the same deliveries, and what became of them.

Run by ``test_outage_load.py``. A worker takes deliveries at a steady rate, each of them sent to the
other worker too, and now and then one of a while ago again. What fails is sent again until it is
taken. It ends when its standard input does, and prints its effects.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

from oncekey import Once, connect
from oncekey.errors import IdempotencyInFlightError, StoreError
from oncekey.resilience import Breaker, resilient

RATE = 40  # deliveries a second, to each worker
THREADS = 4
AGO = 60  # every fifth delivery comes again so many deliveries later


class Worker:
    """One process of an application, and the senders that call it."""

    def __init__(self, url: str, on_outage: Any, journal: Path, scope: str) -> None:
        breaker = Breaker(failures=3, retry_after=0.5, successes=2)
        self.store = resilient(
            connect(url, timeout=1.0), on_outage=on_outage, journal=journal, breaker=breaker
        )
        once = Once(self.store, scope=scope, wait=5, lease=5)
        self.effects: list[str] = []
        self.refused = 0
        self.slowest = 0.0
        self.waiting: queue.Queue[str | None] = queue.Queue()

        @once(key="event", name="handle")
        def handle(event: str) -> None:
            self.effects.append(event)

        self.handle = handle

    def deliver(self) -> None:
        """Take deliveries until there are no more."""
        while (event := self.waiting.get()) is not None:
            while True:
                begun = time.monotonic()
                try:
                    self.handle(event)
                except (StoreError, IdempotencyInFlightError):
                    self.refused += 1
                    time.sleep(0.2)
                else:
                    break
                finally:
                    self.slowest = max(self.slowest, time.monotonic() - begun)

    def run(self, stopped: threading.Event) -> int:
        """Take deliveries at a steady rate; gives how many events there were."""
        threads = [threading.Thread(target=self.deliver) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        begun, number = time.monotonic(), 0
        while not stopped.wait(max(0, begun + number / RATE - time.monotonic())):
            self.waiting.put(str(number))
            if number >= AGO and number % 5 == 0:
                self.waiting.put(str(number - AGO))
            number += 1
        for _ in threads:
            self.waiting.put(None)
        for thread in threads:
            thread.join()
        return number


def main() -> None:
    """Work until standard input ends."""
    url, on_outage, journal, scope = sys.argv[1:]
    worker = Worker(url, on_outage, Path(journal), scope)
    stopped = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        stopped.set()

    threading.Thread(target=listen, daemon=True).start()
    print("ready", flush=True)
    taken = worker.run(stopped)
    worker.store.close()
    result = {
        "taken": taken,
        "effects": worker.effects,
        "refused": worker.refused,
        "slowest": round(worker.slowest, 2),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
