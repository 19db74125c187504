"""A storm of signed webhook deliveries on one SQLite file, with workers killed in the middle.

Several receiver processes share a database. A sender throws events at them: duplicates, copies of
one event at several workers in the same moment, bad signatures. Now and then a worker is killed
with -9 between its claim and its commit, and restarted. The sender retries what was not answered
with 2xx, as providers do. At the end everything is counted from the ledger and from the answers.

    python storm_demo.py [--events 3000] [--workers 4] [--kills 3] [--seed 1]

Needs a POSIX system, for its signals.

Exit code: 0 if no event was lost or doubled, 1 if one was, 130 if it was interrupted.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import hmac
import json
import os
import queue
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from storm import Delivery, Progress, Storm, Worker, in_order

from oncekey import OncekeyError, SQLiteStore, WebhookDedup

SECRET = b"a secret that the sender and the receivers share"
SENDER = "demo-sender"  # whom the secret belongs to; never read from the payload
LEASE_SECONDS = 2  # a dead worker's delivery is free for another one after this
LIMIT_SECONDS = 300  # a storm that is not over by then counts what is missing as lost


def sign(body: bytes) -> str:
    return hmac.new(SECRET, body, hashlib.sha256).hexdigest()


# ---------------------------------------------------------------------------------- the receiver


class Receiver(BaseHTTPRequestHandler):
    """Check the signature, claim, write the effect and the mark in one transaction, answer."""

    dedup: WebhookDedup
    ledger: sqlite3.Connection
    turn: threading.Lock
    number: int
    broken: str

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.is_genuine(body):
            return self.answer(401, "bad signature")  # before anything is stored
        event = self.event_in(body)
        if self.broken == "first-seen":
            return self.first_seen(event)
        digest = hashlib.sha256(body).hexdigest()
        claim = self.dedup.claim(SENDER, event["id"], digest)
        if claim.status == "handled":
            return self.answer(200, "duplicate")
        if claim.status == "in_progress":
            return self.answer(503, "in progress", retry_after=claim.retry_after)
        if claim.status == "conflict":
            return self.answer(409, "conflict")

        delivery = (SENDER, event["id"], digest, claim.claim_token)
        try:
            with self.transaction() as connection:
                self.write_effect(connection, event, claim.takeover)
                if self.broken != "unmarked":
                    self.dedup.complete_on(connection, *delivery)
                if self.is_held(event) and not claim.takeover:
                    self.wait_to_be_killed(event)
        except (OncekeyError, sqlite3.Error):
            # The effect was rolled back. Free the delivery, so that a retry need not wait for
            # the lease; if another worker owns it by now, that one answers for it.
            with contextlib.suppress(OncekeyError):
                self.dedup.release(*delivery)
            return self.answer(503, "failed", retry_after=1)
        if self.broken == "unmarked":
            self.dedup.release(*delivery)
        return self.answer(200, "effect")

    def is_genuine(self, body: bytes) -> bool:
        given = self.headers.get("X-Signature", "")
        return hmac.compare_digest(given.encode(), sign(body).encode())

    def event_in(self, body: bytes) -> dict:
        return json.loads(body)

    def is_held(self, event: dict) -> bool:
        return bool(event.get("hold"))

    @contextlib.contextmanager
    def transaction(self):
        with self.turn:  # one connection a worker
            self.ledger.execute("BEGIN IMMEDIATE")
            try:
                yield self.ledger
                self.ledger.execute("COMMIT")
            except BaseException:
                self.ledger.rollback()
                raise

    def write_effect(self, connection, event: dict, takeover: bool) -> None:
        row = (event["id"], event["amount"], self.number, takeover)
        connection.execute("INSERT INTO ledger VALUES (?, ?, ?, ?)", row)

    def wait_to_be_killed(self, event: dict) -> None:
        """Tell the demo that this worker is between its claim and its commit."""
        print("holding", event["id"], flush=True)
        time.sleep(60)

    def first_seen(self, event: dict) -> None:
        """The wrong way for handlers: marked first, so that a crash before the effect loses it."""
        if not self.dedup.check_and_record(SENDER, event["id"]):
            return self.answer(200, "duplicate")
        with self.transaction() as connection:
            self.write_effect(connection, event, takeover=False)
            if self.is_held(event):
                self.wait_to_be_killed(event)
        return self.answer(200, "effect")

    def answer(self, status: int, what: str, retry_after: int | None = None) -> None:
        text = what.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        if retry_after is not None:
            self.send_header("Retry-After", str(retry_after))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exception(), OSError):  # that is: the sender went away
            super().handle_error(request, client_address)


def run_worker(path: str, number: int, broken: str) -> None:
    """A worker process. It ends when the demo closes its standard input, however that ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the demo, which ends its workers
    store = SQLiteStore(path)
    Receiver.dedup = WebhookDedup(store, processing_ttl_seconds=LEASE_SECONDS)
    options = {"isolation_level": None, "timeout": 60, "check_same_thread": False}
    Receiver.ledger = sqlite3.connect(path, **options)
    Receiver.turn, Receiver.number, Receiver.broken = threading.Lock(), number, broken
    server = Server(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"listening {server.server_port}", flush=True)
    sys.stdin.buffer.read()
    os._exit(0)


# ------------------------------------------------------------------------------------ the sender


def plan(events: int, kills: int, seed: int) -> list[Delivery]:
    """What the sender will send: events, 30 % duplicates, concurrent copies, bad signatures."""
    rng = random.Random(seed)
    held = {round(events * (i + 1) / (kills + 1)) for i in range(kills)}
    rounds: list[tuple[float, list[Delivery]]] = []
    for i in range(events):
        event = {"id": f"evt_{i:06d}", "amount": rng.randint(1, 9999)}
        if i in held:
            event["hold"] = True
        body = json.dumps(event).encode()
        copies = 3 if i in held or rng.random() < 0.1 else 1
        together = threading.Barrier(copies) if copies > 1 else None
        signed = {"X-Signature": sign(body)}
        first = [Delivery(0, event["id"], body, signed, together=together) for _ in range(copies)]
        rounds.append((i, first))
        if rng.random() < 0.3:  # comes again, at once or much later
            again = Delivery(0, event["id"], body, signed)
            rounds.append((i + rng.choice((0.5, 20, events / 4)), [again]))
        if rng.random() < 0.04:
            fake = {"id": f"forged_{i:06d}", "amount": 1_000_000}
            raw = json.dumps(fake).encode()
            wrong = {"X-Signature": sign(raw + b" ")}
            forged = Delivery(0, fake["id"], raw, wrong, forged=True)
            rounds.append((i + 0.7, [forged]))
    return in_order(rounds)


# -------------------------------------------------------------------------------------- the demo


def count(path: str, deliveries: list[Delivery]) -> dict[str, int]:
    """What became of the events, from the ledger and the store."""
    genuine = {delivery.event for delivery in deliveries if not delivery.forged}
    forged = {delivery.event for delivery in deliveries if delivery.forged}
    with contextlib.closing(sqlite3.connect(path)) as connection:
        effects: collections.Counter[str] = collections.Counter()
        takeovers = 0
        for event, takeover in connection.execute("SELECT event, takeover FROM ledger"):
            effects[event] += 1
            takeovers += takeover
    with SQLiteStore(path) as store:
        dedup = WebhookDedup(store)
        # Had anything been stored for that id, this payload would conflict with it.
        probes = [dedup.claim(SENDER, event, "probe").status for event in forged]
    stored = len(probes) - probes.count("claimed")
    return {
        "events": len(genuine),
        "effects": effects.total(),
        "takeovers": takeovers,
        "lost": sum(event not in effects for event in genuine),
        "doubled": sum(rows > 1 for rows in effects.values()),
        "forged": stored + sum(event in effects for event in forged),
    }


def report(found: dict[str, int], answers: collections.Counter[str], killed: int) -> None:
    rows = [
        ("deliveries sent", answers.total()),
        ("  200, effect made", answers["effect"]),
        ("  200, duplicate", answers["duplicate"]),
        ("  401, bad signature", answers["bad signature"]),
        ("  503, in progress elsewhere", answers["in progress"]),
        ("  503, rolled back", answers["failed"]),
        ("  no answer, worker was down", answers["none"]),
        ("workers killed with -9", killed),
        ("takeovers (a killed worker may hold several)", found["takeovers"]),
        ("events", found["events"]),
        ("effects in the ledger", found["effects"]),
        ("bad signatures that left a trace", found["forged"]),
        ("lost events", found["lost"]),
        ("doubled events", found["doubled"]),
    ]
    print()
    for name, value in rows:
        print(f"  {name:<45} {value:>8,}")
    print()
    print(
        f"deliveries {answers.total()}, duplicates {answers['duplicate']}, "
        f"takeovers {found['takeovers']}, effects {found['effects']}, "
        f"lost {found['lost']}, doubled {found['doubled']}",
        flush=True,
    )


def run_storm(options: argparse.Namespace, folder: str, stopped: threading.Event) -> int:
    path = os.path.join(folder, "demo.db")
    SQLiteStore(path).close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        # No unique constraint: an event that took effect twice has two rows.
        connection.execute("CREATE TABLE ledger (event TEXT, amount INT, worker INT, takeover INT)")
        connection.commit()
    deliveries = plan(options.events, options.kills, options.seed)
    news: queue.SimpleQueue[tuple[Worker, str, str]] = queue.SimpleQueue()

    def worker_of(number: int) -> Worker:
        arguments = [__file__, "--worker", path, str(number), "--break", options.broken]
        return Worker(arguments, number, news)

    workers = [worker_of(number) for number in range(options.workers)]
    storm = Storm(deliveries, workers)
    killed = 0
    try:
        print(
            f"{options.events:,} events, {len(deliveries):,} planned deliveries, "
            f"{options.workers} workers on one SQLite file, lease {LEASE_SECONDS} s",
            flush=True,
        )
        progress = Progress(len(deliveries))
        begun, started = time.monotonic(), False
        while not storm.over.is_set() and not stopped.is_set():
            if time.monotonic() - begun > LIMIT_SECONDS:
                print(f"not over after {LIMIT_SECONDS} s, given up", file=sys.stderr)
                break
            with contextlib.suppress(queue.Empty):
                worker, word, rest = news.get(timeout=0.1)
                if word == "listening":
                    worker.port = int(rest)
                    if not started and all(worker.port for worker in workers):
                        started = True
                        storm.start()
                elif word == "holding" and worker is workers[worker.number]:
                    worker.kill()  # its claim is made, its effect written, its commit not
                    killed += 1
                    progress.note(f"worker {worker.number} killed with -9 while {rest} was in hand")
                    workers[worker.number] = worker_of(worker.number)
                elif word == "ended" and worker is workers[worker.number]:
                    print("a worker ended by itself, see above", file=sys.stderr)
                    return 1
            progress.show(storm, killed, time.monotonic() - begun)
        progress.end()
    finally:
        storm.stop()
        for worker in workers:
            worker.kill()
    if stopped.is_set():
        return 130
    found = count(path, deliveries)
    report(found, storm.answers, killed)
    return 1 if found["lost"] or found["doubled"] or found["forged"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="A storm of webhooks, each handled once.")
    parser.add_argument("--events", type=int, default=3000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kills", type=int, default=3, help="workers to kill with -9")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    # Two wrong receivers, which show that the demo can fail: it must find what they do.
    wrong = ("", "unmarked", "first-seen")
    parser.add_argument("--break", dest="broken", choices=wrong, default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_worker(options.worker[0], int(options.worker[1]), options.broken)
    if min(options.events, options.workers) < 1 or options.kills < 0:
        parser.error("--events and --workers must be at least 1, --kills at least 0")

    # A signal only sets a flag: the one way out of here is through the clean-up below.
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stopped.set())
    folder = tempfile.mkdtemp(prefix="oncekey-demo-")
    try:
        code = run_storm(options, folder, stopped)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if stopped.is_set():
        print("interrupted: every worker ended, every file removed", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
