"""The same traffic twice: through ``oncekey serve``, and through a receiver without oncekey.

Four providers send signed events: duplicates, copies in the same moment, copies that differ,
forgeries. The gateway keeps each event once and delivers it to an app of several workers, which
write the effect and oncekey's mark in one transaction. While that goes on, workers are killed with
-9 between their claim and their commit, and so is the gateway, and the app's database fails now
and then. Then a receiver as many are gets the same deliveries, kills and faults.

    python gateway_demo.py [--events 1000] [--workers 3] [--kills 3] [--seed 1]

Needs a POSIX system, for its signals, and ``pip install "oncekey[serve]"``.

Exit code: 0 if with oncekey no event was lost or doubled, 1 if one was, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import queue
import random
import secrets
import shutil
import signal
import socket
import sqlite3
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path

from storm import Delivery, Storm, Worker, in_order
from storm_demo import LEASE_SECONDS, Receiver, Server

from oncekey import SQLiteStore, WebhookDedup
from oncekey.signatures import provider
from oncekey.testing import sample

SECRET = "whsec_bXVjaCBsb25nZXIgdGhhbiBhbnlib2R5IGd1ZXNzZXM="  # of all of them, for the demo
SOURCES = {name: provider(name, secret=SECRET) for name in ("stripe", "github", "shopify", "slack")}
GATEWAY = provider("standard-webhooks", secret=SECRET)  # signs what it delivers
FAULTS = 0.02  # of all effects fail once, as databases do
RATE = 100  # deliveries a second
SEND_SECONDS = 35  # on a slow machine the rest is left out, so that this ends within two minutes
WAIT_SECONDS = 30  # for the rest of the work

CONFIG = """
store = "sqlite:///{folder}/inbox.db"
port = {port}
{sources}
[targets.app]
url = "http://127.0.0.1:{app}/"
allow_private = true
secret_env = "DEMO_SECRET"
timeout = 2             # and so what a killed gateway had in hand is due again after 5 s
first_delay = 0.5
tries = 100
breaker_after = 50
"""
SOURCE = '[sources.{0}]\nprovider = "{0}"\nsecret_env = "DEMO_SECRET"\ntargets = ["app"]\n'


# --------------------------------------------------------------------------- the two receivers


class App(Receiver):
    """Behind the gateway. How it claims and writes, in one transaction, is in storm_demo.py."""

    folder: Path

    def is_genuine(self, body: bytes) -> bool:
        return GATEWAY.verify("POST", "/", dict(self.headers), body).ok

    def event_in(self, body: bytes) -> dict:
        return {"id": self.headers["webhook-id"], "order": json.loads(body)["order"]}

    def is_held(self, event: dict) -> bool:
        return take_hold(self.folder)

    def write_effect(self, connection, event: dict, takeover: bool) -> None:
        fail_sometimes()
        connection.execute("INSERT INTO effects VALUES (?, ?)", (event["order"], takeover))


class Bare(Receiver):
    """Without oncekey: checks the signature, says 200 at once, and does the work afterwards."""

    folder: Path
    todo: queue.SimpleQueue

    def do_POST(self) -> None:  # noqa: N802 - the server looks for this name
        body = self.rfile.read(int(self.headers["Content-Length"]))
        sender = SOURCES[self.path.rpartition("/")[2]]
        if not sender.verify("POST", self.path, dict(self.headers), body).ok:
            return self.answer(401, "bad signature")
        self.todo.put(json.loads(body)["order"])
        return self.answer(200, "ok")

    @classmethod
    def work(cls) -> None:
        while True:
            order = cls.todo.get()
            if take_hold(cls.folder):
                print("holding", order, flush=True)
                time.sleep(60)
            with contextlib.suppress(sqlite3.Error):  # nobody will send it again: it got its 200
                fail_sometimes()
                cls.ledger.execute("INSERT INTO effects VALUES (?, 0)", (order,))


def fail_sometimes() -> None:
    if random.random() < FAULTS:
        raise sqlite3.OperationalError("a fault of the database, made for the demo")


def take_hold(folder: Path) -> bool:
    """Whether this worker is the one to be killed, in the middle of its work."""
    try:
        (folder / "hold").unlink()
    except FileNotFoundError:
        return False
    return True


def run_worker(role: str, folder: Path, handle: int) -> None:
    """One of several processes that accept from one socket, which the demo opened."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kind = {"app": App, "bare": Bare}[role]
    path = str(folder / f"{role}.db")
    options = {"isolation_level": None, "timeout": 60, "check_same_thread": False}
    kind.ledger, kind.folder = sqlite3.connect(path, **options), folder
    kind.turn, kind.broken = threading.Lock(), ""
    if role == "app":
        kind.dedup = WebhookDedup(SQLiteStore(path), processing_ttl_seconds=LEASE_SECONDS)
    else:
        Bare.todo = queue.SimpleQueue()
        threading.Thread(target=Bare.work, daemon=True).start()
    server = Server(("127.0.0.1", 0), kind, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=handle)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.buffer.read()  # until the demo ends, however it does
    os._exit(0)


# --------------------------------------------------------------------------------- the traffic


def plan(events: int, seed: int) -> list[Delivery]:
    """Events, 30 % duplicates, some in the same moment, some that differ, some forged."""
    rng = random.Random(seed)
    rounds: list[tuple[float, list[Delivery]]] = []

    def delivery(number: int, cents: int = 1200, **more) -> Delivery:
        name, order = list(SOURCES)[number % len(SOURCES)], f"o-{number:06d}"
        body = {"order": order, "cents": cents}
        one = sample(SOURCES[name], id=f"evt_{number:06d}", body=body, url=f"/hooks/{name}")
        return Delivery(0, order, one.body, dict(one.headers), f"/hooks/{name}", **more)

    for i in range(events):
        copies = 3 if rng.random() < 0.1 else 1
        first = delivery(i, together=threading.Barrier(copies) if copies > 1 else None)
        rounds.append((i, [replace(first) for _ in range(copies)]))
        if rng.random() < 0.3:  # comes again, at once or much later
            again = delivery(i, 1200 if rng.random() < 0.95 else 999)
            rounds.append((i + rng.choice((0.5, 20, events / 4)), [again]))
        if rng.random() < 0.04:
            forged = replace(delivery(i + 10**6), forged=True)
            rounds.append((i + 0.7, [replace(forged, body=forged.body.replace(b"1200", b"9"))]))
    return in_order(rounds)


class Sender(Storm):
    patience = 8.0  # a gateway that was killed is back after a second or two
    pause = 1 / RATE

    def word(self, response, text: str) -> str:
        return response.getheader("Oncekey-Outcome") or text

    def leave_out_the_rest(self) -> set[int]:
        """Send nothing new; gives the numbers of what was not sent."""
        with self._change:
            unsent = {one.number for one in self._ready}
            self._ready.clear()
            self.open -= len(unsent)
            if not self.open:
                self.over.set()
                self._change.notify_all()
        return unsent


# -------------------------------------------------------------------------------- the processes


class Team:
    """The workers of one receiver, the gateway if there is one, and what becomes of them."""

    def __init__(self, role: str, folder: Path, workers: int) -> None:
        self.role, self.folder = role, folder
        self.killed = 0
        self.news: queue.SimpleQueue[tuple[Worker, str, str]] = queue.SimpleQueue()
        with contextlib.closing(sqlite3.connect(folder / f"{role}.db")) as ledger:
            # No unique constraint: an event that took effect twice has two rows.
            ledger.executescript(
                "PRAGMA journal_mode = WAL; CREATE TABLE effects (event TEXT, takeover INT)"
            )
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self.listener.getsockname()[1]
        self.workers = [self._worker(number) for number in range(workers)]

    def _worker(self, number: int) -> Worker:
        handle = self.listener.fileno()
        arguments = [__file__, "--worker", self.role, str(self.folder), str(handle)]
        return Worker(arguments, number, self.news, pass_fds=[handle])

    def kill_one(self) -> None:
        """Kill the worker that works on the next event, when it is in the middle of it."""
        (self.folder / "hold").touch()

    def tend(self) -> None:
        """See to what happened."""
        with contextlib.suppress(queue.Empty):
            worker, word, rest = self.news.get(timeout=0.1)
            if word == "holding" and worker in self.workers:
                print(f"worker {worker.number} killed with -9 with {rest} in hand", flush=True)
                worker.kill()
                self.killed += 1
                self.workers[worker.number] = self._worker(worker.number)
            elif word == "ended" and worker.process.poll() != -signal.SIGKILL:
                raise SystemExit("a process ended by itself, see above")

    def is_idle(self) -> bool:
        """Whether no effect was made for a second."""
        before = self._effects()
        time.sleep(1)
        return self._effects() == before

    def _effects(self) -> list[tuple[str, int]]:
        with contextlib.closing(sqlite3.connect(self.folder / f"{self.role}.db")) as ledger:
            return ledger.execute("SELECT event, takeover FROM effects").fetchall()

    def end(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.listener.close()

    def count(self, sent: list[Delivery]) -> dict[str, int]:
        """What became of the events, from the ledger."""
        genuine = {one.event for one in sent if not one.forged}
        rows = self._effects()
        effects = collections.Counter(event for event, _ in rows)
        return {
            "events": len(genuine),
            "effects": len(rows),
            "doubled": sum(effects[event] > 1 for event in genuine),
            "lost": len(genuine - effects.keys()),
            "forged": len(effects.keys() - genuine),
            "takeovers": sum(takeover for _, takeover in rows),
            "killed": self.killed,
        }


class Gateway:
    """``oncekey serve``, and what it says of itself."""

    def __init__(self, team: Team) -> None:
        self.team, self.token = team, secrets.token_urlsafe(18)
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
            self.address = f"http://127.0.0.1:{free.getsockname()[1]}"
            self.port = free.getsockname()[1]
        sources = "".join(SOURCE.format(name) for name in SOURCES)
        self.config = team.folder / "gateway.toml"
        self.config.write_text(
            CONFIG.format(folder=team.folder, port=self.port, app=team.port, sources=sources)
        )
        self._start()

    def _start(self) -> None:
        environ = {**os.environ, "DEMO_SECRET": SECRET, "ONCEKEY_TOKEN": self.token}
        arguments = ["-m", "oncekey", "serve", "--config", str(self.config)]
        self.process = Worker(arguments, -1, self.team.news, env=environ)

    def kill(self) -> None:
        print("the gateway killed with -9, and started again", flush=True)
        self.process.kill()
        self.team.killed += 1
        self._start()

    def ask(self, path: str) -> dict:
        request = urllib.request.Request(f"{self.address}/_oncekey/api/v1{path}")
        request.add_header("Authorization", f"Bearer {self.token}")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def is_idle(self) -> bool:
        """Whether everything that it took was delivered."""
        try:
            return not any(one["waiting"] for one in self.ask("/targets")["items"])
        except OSError:
            return False

    def duplicates(self) -> int:
        """How many copies it stopped."""
        found, after = 0, ""
        while after is not None:
            page = self.ask(f"/events?limit=500&after={after}")
            found += sum(one["duplicates"] for one in page["items"])
            after = page["next"]
        return found


# -------------------------------------------------------------------------------------- the demo


@dataclass
class Door:
    """Where deliveries are sent to."""

    port: int


def run(
    deliveries: list[Delivery], team: Team, gateway: Gateway | None, kills: int, stopped
) -> tuple[list[Delivery], Sender]:
    """Send everything, and kill at even distances; gives what was sent, and the answers."""
    sender = Sender(
        [replace(one) for one in deliveries], [Door(gateway.port if gateway else team.port)]
    )
    what = ["worker", "gateway"] if gateway else ["worker"]
    marks = collections.deque(what * kills)
    distance = len(deliveries) / (len(marks) + 1)
    unsent: set[int] = set()
    begun, nearer = time.monotonic(), len(deliveries) - distance
    sender.start()
    while not sender.over.is_set() and not stopped.is_set():
        team.tend()
        if marks and sender.open < nearer:
            nearer -= distance
            if marks.popleft() == "worker" or gateway is None:
                team.kill_one()
            else:
                gateway.kill()
        if time.monotonic() - begun > SEND_SECONDS and not unsent:
            unsent = sender.leave_out_the_rest()
            print(f"a slow machine: {len(unsent):,} deliveries are left out", flush=True)
    sender.stop()
    ends = time.monotonic() + WAIT_SECONDS  # what is missing then counts as lost
    is_done = gateway.is_idle if gateway else team.is_idle
    while not stopped.is_set() and not is_done() and time.monotonic() < ends:
        team.tend()
    return [one for one in deliveries if one.number not in unsent], sender


def verdict(ours: dict[str, int], bare: dict[str, int], sent: int, duplicates: int) -> int:
    """Both side by side, in words; gives the exit code."""
    rows = [
        ("events", "events"),
        ("processes killed with -9", "killed"),
        ("effects, such as orders paid", "effects"),
        ("events whose effect came twice or more", "doubled"),
        ("events that were lost", "lost"),
        ("forged events that were let in", "forged"),
    ]
    print(f"\n  {'the same traffic':<42}{'without oncekey':>17}{'with oncekey':>15}")
    for title, name in rows:
        print(f"  {title:<42}{bare[name]:>17,}{ours[name]:>15,}")
    bad = ours["lost"] or ours["doubled"] or ours["forged"]
    told = f"{bare['doubled']:,} were done more than once and {bare['lost']:,} never"
    if bad:
        print("\nFAIL: with oncekey every event must take effect once, and did not; see above")
    else:
        print(f"\nPASS: with oncekey every event took effect exactly once; without it {told}.")
    print(
        f"deliveries {sent}, duplicates {duplicates}, takeovers {ours['takeovers']}, "
        f"effects {ours['effects']}, lost {ours['lost']}, doubled {ours['doubled']}",
        flush=True,
    )
    return 1 if bad else 0


def demo(options: argparse.Namespace, folder: Path, stopped: threading.Event) -> int:
    deliveries = plan(options.events, options.seed)
    team = Team("app", folder, options.workers)
    gateway = Gateway(team)
    try:
        print(
            f"{options.events:,} events of {', '.join(SOURCES)}; "
            f"{len(deliveries):,} planned deliveries\n"
            f"the dashboard, while this runs: {gateway.address}/_oncekey\n"
            f"  sign in with an empty name and this token: {gateway.token}",
            flush=True,
        )
        sent, sender = run(deliveries, team, gateway, options.kills, stopped)
        if stopped.is_set():
            return 130
        ours, duplicates = team.count(sent), gateway.duplicates()
    finally:
        gateway.process.kill()
        team.end()
    print("now the same without oncekey", flush=True)
    other = Team("bare", folder, options.workers)
    try:
        sent_to_other, _ = run(sent, other, None, options.kills, stopped)
    finally:
        other.end()
    if stopped.is_set():
        return 130
    answered = sender.answers.total() - sender.answers["none"]
    return verdict(ours, other.count(sent_to_other), answered, duplicates)


def main() -> int:
    parser = argparse.ArgumentParser(description="The same webhooks with oncekey and without.")
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--kills", type=int, default=3, help="of workers, and of the gateway")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        role, folder, handle = options.worker
        run_worker(role, Path(folder), int(handle))
    if min(options.events, options.workers) < 1 or options.kills < 0:
        parser.error("--events and --workers must be at least 1, --kills at least 0")

    # A signal only sets a flag: the one way out of here is through the clean-up below.
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stopped.set())
    folder = Path(tempfile.mkdtemp(prefix="oncekey-demo-"))
    try:
        code = demo(options, folder, stopped)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if stopped.is_set():
        print("interrupted: every process ended, every file removed", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
