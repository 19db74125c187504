"""A receiver for the laboratory: ``lab_receiver.py PORT EFFECTS KIND``, its store by ``STORE_URL``.

Kinds: ``ours``, ``ours-transactional``, and what is known to go wrong: ``forgetful``, which
remembers nothing, ``check-then-put``, and ``busy``, which has every delivery sent again.
An effect is a line in the file EFFECTS, or a row.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_clock, _turn = time.time, threading.Lock()


def _one_at_a_time() -> float:
    """The time. What moves this process's clock reads a file at each look, and not for threads."""
    with _turn:
        return _clock()


time.time = _one_at_a_time  # before anybody takes the other one

from oncekey import connect  # noqa: E402
from oncekey.receiver import WebhookReceiver  # noqa: E402
from oncekey.signatures import provider  # noqa: E402
from oncekey.testing import sample_provider  # noqa: E402


class Naive:
    """A receiver of somebody's own, which remembers ids in a set, or not."""

    def __init__(self, kind: str, effect: Any) -> None:
        self.kind = kind
        self.effect = effect
        self.seen: set[str] = set()

    def receive(self, method: str, url: str, headers: Any, body: bytes) -> int:
        name = json.loads(body)["id"]
        if self.kind == "busy":
            self.effect(name)
            return 503
        if name not in self.seen:
            time.sleep(0.02)  # another copy may be here by now
            self.effect(name)
            if self.kind != "forgetful":
                self.seen.add(name)
        return 200


def main() -> None:
    """Serve."""
    port, effects, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    lock = threading.Lock()

    def effect(name: str) -> None:
        with lock, open(effects, "a", encoding="utf-8") as file:
            file.write(f"{name}\n")

    receiver: Any
    if kind.startswith("ours"):
        store = connect(os.environ["STORE_URL"])
        transactional = kind.endswith("transactional")
        secret = os.environ.get("HOOK_SECRET")
        stripe = provider("stripe", secret=secret) if secret else sample_provider("stripe")
        receiver = WebhookReceiver(stripe, store, transactional=transactional, lease=2)

        def paid(event: Any, tx: Any = None) -> None:
            if tx is None:
                effect(event.id)
            else:
                tx.connection.execute("INSERT INTO effects VALUES (?)", (event.id,))

        receiver.on("invoice.paid")((lambda event, tx: paid(event, tx)) if transactional else paid)
    else:
        receiver = Naive(kind, effect)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            url = f"http://{self.headers['Host']}{self.path}"
            answer = receiver.receive("POST", url, list(self.headers.items()), body)
            self.send_response(getattr(answer, "status", answer))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    Server(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
