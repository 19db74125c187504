"""A sender that retries as providers do, and processes that are there to be killed.

Both demos use it: ``storm_demo.py`` and ``gateway_demo.py``.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import http.client
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

SENDER_THREADS = 16


class Worker:
    """A worker process as the demo sees it. What it prints arrives in ``news``."""

    def __init__(
        self, arguments: list[str], number: int, news: queue.SimpleQueue, **options
    ) -> None:
        command, pipe = [sys.executable, *arguments], subprocess.PIPE
        with sigint_held_back():  # the child inherits that, until it ignores the signal itself
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, **options)
        self.number = number
        self.port = 0
        threading.Thread(target=self._listen, args=(news,), daemon=True).start()

    def _listen(self, news: queue.SimpleQueue) -> None:
        for line in self.process.stdout:
            word, _, rest = line.strip().partition(" ")
            news.put((self, word, rest))
        news.put((self, "ended", ""))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()


@contextlib.contextmanager
def sigint_held_back():
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


@dataclass
class Delivery:
    number: int
    event: str
    body: bytes
    headers: dict[str, str]
    path: str = "/"
    together: threading.Barrier | None = None  # copies that go out in the same moment
    forged: bool = False


def in_order(rounds: list[tuple[float, list[Delivery]]]) -> list[Delivery]:
    """Deliveries by their time, numbered."""
    rounds.sort(key=lambda item: item[0])
    deliveries = [delivery for _, group in rounds for delivery in group]
    for number, delivery in enumerate(deliveries):
        delivery.number = number
    return deliveries


class Storm:
    """Sends every delivery until it is answered for good, from many threads."""

    patience = 1.0  # how much longer than most to wait for a receiver that is down
    pause = 0.0  # seconds between deliveries that are new

    def __init__(self, deliveries: list[Delivery], workers: list[Worker]) -> None:
        self.workers = workers
        self.open = len(deliveries)
        self.answers: collections.Counter[str] = collections.Counter()
        self.over = threading.Event()
        self._ready = collections.deque(deliveries)
        self._next_at = 0.0
        self._later: list[tuple[float, int, Delivery]] = []
        self._change = threading.Condition()

    def start(self) -> None:
        for _ in range(SENDER_THREADS):
            threading.Thread(target=self._send_all, daemon=True).start()

    def stop(self) -> None:
        with self._change:
            self.over.set()
            self._change.notify_all()

    def _next(self) -> Delivery | None:
        with self._change:
            while not self.over.is_set():
                now = time.monotonic()
                if self._later and self._later[0][0] <= now:
                    return heapq.heappop(self._later)[2]
                if self._ready and self._next_at <= now:
                    self._next_at = max(self._next_at + self.pause, now - 1)
                    return self._ready.popleft()
                due = [self._next_at] if self._ready else []
                due += [self._later[0][0]] if self._later else []
                self._change.wait(min(due) - now if due else None)
        return None

    def _count(self, delivery: Delivery, answer: str, wait: float | None) -> None:
        with self._change:
            self.answers[answer] += 1
            if wait is not None:
                heapq.heappush(self._later, (time.monotonic() + wait, delivery.number, delivery))
                self._change.notify()
                return
            self.open -= 1
            if not self.open:
                self.over.set()
                self._change.notify_all()

    def _send_all(self) -> None:
        connections: dict[int, http.client.HTTPConnection] = {}
        rng = random.Random()
        while (delivery := self._next()) is not None:
            if delivery.together is not None:
                with contextlib.suppress(threading.BrokenBarrierError):
                    delivery.together.wait(timeout=5)
                delivery.together = None
                target = delivery.number  # neighbours, so that each goes to another worker
            else:
                target = rng.randrange(len(self.workers))
            port = self._port(target)
            try:
                status, text, retry_after = self._post(connections, port, delivery)
            except (OSError, http.client.HTTPException):
                connections.pop(port).close()
                self._count(delivery, "none", rng.uniform(0.05, 0.2) * self.patience)
                continue
            final = status in (200, 401, 409)
            wait = None if final else float(retry_after or 1) * rng.uniform(1.0, 1.2)
            self._count(delivery, text, wait)

    def _port(self, target: int) -> int:
        """The port of that worker, or of the next one that is up, as a load balancer does it."""
        ports = [worker.port for worker in self.workers]
        around = [ports[(target + i) % len(ports)] for i in range(len(ports))]
        return next((port for port in around if port), 1)

    def _post(
        self, connections: dict[int, http.client.HTTPConnection], port: int, delivery: Delivery
    ) -> tuple[int, str, str | None]:
        if port not in connections:
            connections[port] = http.client.HTTPConnection("127.0.0.1", port, timeout=90)
        connection = connections[port]
        connection.request("POST", delivery.path, delivery.body, delivery.headers)
        response = connection.getresponse()
        text = response.read().decode()
        return response.status, self.word(response, text), response.getheader("Retry-After")

    def word(self, response: http.client.HTTPResponse, text: str) -> str:
        """What an answer is counted as."""
        return text


class Progress:
    """One line rewritten in place on a terminal; elsewhere a plain line every quarter."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.live = sys.stdout.isatty()
        self._shown = 0

    def show(self, storm: Storm, killed: int, seconds: float) -> None:
        with storm._change:
            answers, done = storm.answers.copy(), self.total - storm.open
        quarter = done * 4 // self.total
        if not self.live and quarter == self._shown:
            return
        self._shown = quarter
        text = (
            f"{seconds:5.1f} s  {done * 100 // self.total:3d} %  sent {answers.total():,}  "
            f"effects {answers['effect']:,}  duplicates {answers['duplicate']:,}  "
            f"refused {answers['bad signature']:,}  killed {killed}"
        )
        print(f"\r\x1b[2K{text}" if self.live else text, end="" if self.live else "\n", flush=True)

    def note(self, text: str) -> None:
        if not self.live:
            print(text, flush=True)

    def end(self) -> None:
        if self.live:
            print("\r\x1b[2K", end="", flush=True)
