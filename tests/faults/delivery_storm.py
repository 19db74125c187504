"""A storm of deliveries: copies, failing handlers, and workers that are killed with -9.

    python tests/faults/delivery_storm.py sqlite:////tmp/storm.db --transactional
    python tests/faults/delivery_storm.py redis://127.0.0.1:6379 --deliveries 100000 --seed 7

The sender hands signed deliveries to receivers in worker processes (``delivery_storm_worker``),
some with threads, some with an event loop. A delivery is sent again when its worker died or its
answer said so, until it is acknowledged. At the end every event must have been handled, and the
marks that the handlers left must be explained one by one. Else: exit code 1 and a list of faults.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import heapq
import json
import multiprocessing
import os
import random
import selectors
import signal
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # also where it is imported

import delivery_storm_worker as worker_side
from delivery_storm_worker import (
    DIE_EARLY,
    DIE_LATE,
    DIE_MUTE,
    FAIL,
    FAIL_LATE,
    PROVIDER,
    Task,
    effects_of,
    prepared,
)

ENDPOINT = "https://shop.example/hooks/stripe"
RETRYABLE = frozenset({429, 500, 503})
KILL = "kill"  # from outside, wherever the worker is
DEATHS = (DIE_EARLY, DIE_LATE, DIE_MUTE)
CUT = "cut off"
DUPLICATES = 0.3
FAILURES = 0.02
PATIENCE = 120.0  # seconds without any answer: something hangs


@dataclasses.dataclass(slots=True)
class Copy:
    """One delivery of an event, to be sent until it is acknowledged."""

    event: int
    tries: int = 0
    first: bool = False  # nobody has seen the event before this
    twin: Copy | None = None  # is sent at the same time, to another worker
    after_ack: bool = False  # the event was acknowledged before this was sent the last time


@dataclasses.dataclass(slots=True)
class Lane:
    """A way to a worker, for one delivery at a time."""

    worker: int
    pipe: Connection
    number: int = 0
    copy: Copy | None = None
    act: str = ""  # what is to happen to it


@dataclasses.dataclass
class Report:
    """What was seen, in numbers."""

    url: str
    transactional: bool
    seed: int
    deliveries: int = 0
    events: int = 0
    sent: int = 0
    at_once: int = 0
    lost_on_the_way: int = 0
    kills: dict[str, int] = dataclasses.field(default_factory=dict)
    answers: dict[str, int] = dataclasses.field(default_factory=dict)
    effects: int = 0
    twice_by_kill: int = 0
    twice_by_lost_claim: int = 0
    seconds: float = 0.0
    faults: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # and what they hit

    def __str__(self) -> str:
        answers = ", ".join(f"{number:,} {name}" for name, number in sorted(self.answers.items()))
        kills = ", ".join(f"{number} {name}" for name, number in sorted(self.kills.items()))
        faults = "; ".join(
            f"{what}: {len(hit)} times, such as {hit[0]}" for what, hit in self.faults.items()
        )
        return (
            f"{self.deliveries:,} deliveries of {self.events:,} events in {self.seconds:.1f} s "
            f"({self.deliveries / max(self.seconds, 1e-9):,.0f}/s), seed {self.seed}\n"
            f"  sent {self.sent:,} times, {self.at_once:,} pairs at once, "
            f"{self.lost_on_the_way:,} cut off by {sum(self.kills.values())} kills ({kills})\n"
            f"  answers: {answers}\n"
            f"  effects: {self.effects:,}, of them {self.twice_by_kill} again after a kill and "
            f"{self.twice_by_lost_claim} again after a lost claim\n"
            f"  faults: {faults or 'none'}"
        )


def planned(rng: random.Random, deliveries: int) -> tuple[list[Copy], int]:
    """First copies in order; half of the duplicates beside theirs, half somewhere behind."""
    duplicates = int(deliveries * DUPLICATES)
    events = deliveries - duplicates
    beside = set(rng.sample(range(events), duplicates // 2))
    behind = collections.defaultdict(list)
    for _ in range(duplicates - duplicates // 2):
        event = rng.randrange(events)
        behind[min(events - 1, event + int(rng.expovariate(1 / 200)))].append(event)
    plan: list[Copy] = []
    for event in range(events):
        plan.append(Copy(event, first=True, twin=Copy(event) if event in beside else None))
        plan.extend(Copy(late) for late in behind[event])
    return plan, events


def request(event: int) -> tuple[Any, ...]:
    """The event as its sender sends it now: the same bytes each time, signed anew."""
    body = json.dumps(
        {
            "id": f"evt_{event}",
            "object": "event",
            "type": "invoice.paid",
            "data": {"object": {"id": f"in_{event}", "amount_paid": 100 + event % 900}},
        }
    ).encode()
    return tuple(PROVIDER.sign("POST", ENDPOINT, {"Content-Type": "application/json"}, body))


class Storm:
    """The sender's side: hands out deliveries, kills workers, remembers every answer."""

    def __init__(self, task: Task, report: Report, workers: int, lanes: int, kills: int) -> None:
        self.task = task
        self.report = report
        self.lanes_each = lanes
        self.threads = task.url.startswith("memory")  # nobody else sees that store: no processes
        self.rng = random.Random(report.seed)
        plan, report.events = planned(self.rng, report.deliveries)
        self.queue = collections.deque(plan)
        self.retries: list[tuple[float, int, Copy]] = []
        self.ways = selectors.DefaultSelector()
        self.lanes: list[list[Lane]] = [[] for _ in range(workers)]
        self.free: list[list[Lane]] = [[] for _ in range(workers)]
        self.pids: list[int] = [0] * workers
        self.doomed: set[int] = set()  # workers that were killed and have not been missed yet
        self.fates: dict[int, tuple[int, str]] = {}  # sending: event, and what became of it
        self.acknowledged: set[int] = set()
        self.left = report.deliveries
        self.answers: collections.Counter[str] = collections.Counter()
        self.kills: collections.Counter[str] = collections.Counter()
        acts = [KILL, KILL, KILL, *DEATHS] * (0 if self.threads else kills // 6)
        self.rng.shuffle(acts)
        self.acts = acts
        # How many sendings until the next: the last come near the end.
        self.calm = self.every = 0.9 * report.deliveries / (len(acts) + 1)
        self.at_work: list[threading.Thread] = []
        self.begun = time.monotonic()
        self.shown = 0

    # Workers

    def pipes(self) -> list[Connection]:
        return [lane.pipe for lanes in self.lanes for lane in lanes]

    def start(self, worker: int) -> None:
        pairs = [multiprocessing.Pipe() for _ in range(self.lanes_each)]
        theirs = [pair[1] for pair in pairs]
        in_loop = worker % 2 == 1 and not self.threads
        if self.threads:
            thread = threading.Thread(target=worker_side.serve, args=(self.task, False, theirs))
            thread.start()
            self.at_work.append(thread)
        else:
            self.pids[worker] = os.fork()
            if self.pids[worker] == 0:
                for pipe in (*self.pipes(), *(pair[0] for pair in pairs)):
                    pipe.close()  # ours: whoever keeps them open hides our end from the others
                code = 70
                with contextlib.suppress(BaseException):
                    worker_side.serve(self.task, in_loop, theirs)
                    code = 0
                os._exit(code)
            for pipe in theirs:
                pipe.close()
        self.lanes[worker] = [Lane(worker, pair[0]) for pair in pairs]
        self.free[worker] = list(self.lanes[worker])
        for lane in self.lanes[worker]:
            self.ways.register(lane.pipe.fileno(), selectors.EVENT_READ, lane)

    def died(self, worker: int) -> None:
        """Send again what the dead worker had in hand, and start another in its place."""
        _, status = os.waitpid(self.pids[worker], 0)
        code = os.waitstatus_to_exitcode(status)
        if code != -signal.SIGKILL:
            raise SystemExit(f"worker {worker} ended by itself with {code}")
        for lane in self.lanes[worker]:
            self.ways.unregister(lane.pipe.fileno())
            if lane.copy is not None and lane.pipe.poll():  # it had answered before it died
                with contextlib.suppress(EOFError, OSError):
                    self.answered(lane, *lane.pipe.recv())
            lane.pipe.close()
            if lane.copy is not None:
                self.report.lost_on_the_way += 1
                self.fates[lane.number] = (lane.copy.event, CUT)
                self.again(lane.copy)
        acts = [lane.act for lane in self.lanes[worker] if lane.copy and lane.act in DEATHS]
        if worker in self.doomed:
            acts.append(KILL)
        self.doomed.discard(worker)
        self.kills[acts.pop() if acts else "for no known reason"] += 1
        self.acts += acts  # what another death came before: let it hit another worker
        self.start(worker)

    def kill(self) -> None:
        """Kill a worker that has something in hand."""
        busy = {lane.worker for lanes in self.lanes for lane in lanes if lane.copy is not None}
        if busy - self.doomed:
            worker = self.rng.choice(sorted(busy - self.doomed))
            self.doomed.add(worker)
            os.kill(self.pids[worker], signal.SIGKILL)
        else:
            self.acts.append(KILL)

    # Deliveries

    def again(self, copy: Copy) -> None:
        """As a sender would, only sooner: later each time."""
        copy.tries += 1
        wait = self.rng.uniform(0.5, 1.5) * 0.02 * 2 ** min(copy.tries - 1, 4)
        heapq.heappush(self.retries, (time.monotonic() + wait, self.rng.getrandbits(48), copy))

    def act(self, copy: Copy) -> str:
        """What is to happen to the next sending."""
        self.calm -= 1
        if self.calm <= 0 and self.acts and copy.first and not copy.tries:  # its handler will run
            self.calm = self.rng.uniform(0.5, 1.5) * self.every
            return self.acts.pop()
        if self.rng.random() >= FAILURES:
            return ""
        return self.rng.choice([FAIL, FAIL_LATE]) if self.task.transactional else FAIL

    def send(self, copy: Copy, worker: int) -> None:
        lane = self.free[worker].pop()
        self.report.sent += 1
        copy.after_ack = copy.event in self.acknowledged
        lane.number, lane.copy, lane.act = self.report.sent, copy, self.act(copy)
        with contextlib.suppress(OSError):  # it died just now: its lanes say so in a moment
            lane.pipe.send((lane.number, lane.act, request(copy.event)))
        if lane.act == KILL:
            self.kill()

    def send_some(self) -> None:
        """Hand out what is due, while there is somebody to take it."""
        now = time.monotonic()
        while True:
            ready = [worker for worker, lanes in enumerate(self.free) if lanes]
            if not ready:
                return
            if self.retries and self.retries[0][0] <= now:
                self.send(heapq.heappop(self.retries)[2], self.rng.choice(ready))
            elif not self.queue:
                return
            elif self.queue[0].twin is None:
                self.send(self.queue.popleft(), self.rng.choice(ready))
            elif len(ready) < 2:
                return  # a twin is for another worker
            else:
                copy = self.queue.popleft()
                first, second = self.rng.sample(ready, 2)
                self.send(copy, first)
                assert copy.twin is not None
                self.send(copy.twin, second)
                self.report.at_once += 1

    def answered(self, lane: Lane, status: int, outcome: str, code: str) -> None:
        copy, lane.copy = lane.copy, None
        assert copy is not None
        self.fates[lane.number] = (copy.event, outcome)
        name = " ".join(filter(None, (str(status), outcome, code)))
        self.answers[name] += 1
        if copy.after_ack and outcome not in ("duplicate", "unavailable", "limited"):
            self.fault(f"acknowledged before, now answered {name}", f"evt_{copy.event}")
        if lane.act in (DIE_EARLY, DIE_LATE):
            self.acts.append(lane.act)  # its twin was faster, no handler ran: let it hit another
        if 200 <= status < 300:
            self.acknowledged.add(copy.event)
            self.left -= 1
        elif status in RETRYABLE:
            self.again(copy)
        else:
            self.fault(f"a genuine delivery is answered {name}", f"evt_{copy.event}")
            self.left -= 1

    def fault(self, what: str, hit: object) -> None:
        self.report.faults.setdefault(what, []).append(str(hit))

    def run(self) -> None:
        """Send until everything is acknowledged."""
        for worker in range(len(self.pids)):
            self.start(worker)
        heard = time.monotonic()
        while self.left:
            self.send_some()
            now = time.monotonic()
            due = self.retries[0][0] - now if self.retries else 1.0
            for key, _ in self.ways.select(max(0.0, min(due, 1.0))):
                heard = now
                self.hear(key.data)
            if now - heard > PATIENCE:
                raise SystemExit(f"no answer for {PATIENCE:.0f} s, {self.left:,} left")
            self.show()
        self.report.seconds = time.monotonic() - self.begun
        for pipe in self.pipes():
            pipe.close()
        for thread in self.at_work:
            thread.join()
        for worker, pid in enumerate(self.pids):
            if pid and os.waitpid(pid, 0)[1] and worker not in self.doomed:
                self.fault("a worker could not end well", worker)
        self.report.kills, self.report.answers = dict(self.kills), dict(self.answers)

    def hear(self, lane: Lane) -> None:
        if lane not in self.lanes[lane.worker]:
            return  # of a worker that was replaced in this very round
        try:
            answer = lane.pipe.recv()
        except (EOFError, OSError):
            self.died(lane.worker)
            return
        self.answered(lane, *answer)
        self.free[lane.worker].append(lane)

    def show(self) -> None:
        done = self.report.deliveries - self.left
        if done - self.shown >= max(5_000, self.report.deliveries // 20):
            self.shown = done
            spent = time.monotonic() - self.begun
            print(
                f"  {done:,} acknowledged, {done / spent:,.0f}/s, sent {self.report.sent:,} times, "
                f"{sum(self.kills.values())} kills, {self.answers.total():,} answers",
                flush=True,
            )

    # The end

    def judge(self, effects: list[tuple[str, int]], exact: bool) -> None:
        """Explain every effect: one for each event, and more only where that is no fault."""
        report = self.report
        report.effects = len(effects)
        by_event: dict[str, list[str]] = collections.defaultdict(list)
        for event, number in effects:
            its_event, fate = self.fates.get(number, (-1, "never sent"))
            if f"evt_{its_event}" != event:
                self.fault(f"handled by a delivery of evt_{its_event}", event)
            by_event[event].append(fate)
        for number in range(report.events):
            if f"evt_{number}" not in by_event:
                self.fault("acknowledged and never handled", f"evt_{number}")
        for event, fates in by_event.items():
            if fates.count("handled") > 1:
                self.fault("recorded as handled more than once", event)
            # The last one counts. Each before it was begun by a worker that died with it in hand,
            # or that lost its claim and was told so.
            spare = collections.Counter(fates)
            spare.subtract(["handled" if "handled" in fates else fates[-1]])
            killed = spare.pop(CUT, 0)
            overtaken = spare.pop("failed", 0) + spare.pop("duplicate", 0)
            report.twice_by_kill += killed
            report.twice_by_lost_claim += overtaken
            if exact and killed:
                self.fault("handled again after a kill", event)
            if exact and overtaken:
                self.fault("handled again after a failure", event)
            if spare.total():
                self.fault(f"handled again for no reason ({', '.join(fates)})", event)


def copies_afterwards(storm: Storm) -> None:
    """Whoever asks now is told that it is done, and no handler runs."""
    task = storm.task
    before = len(effects_of(task))
    receiver = worker_side.sync_receiver(task, worker_side.Effects(task))
    worker_side.TURN.set((0, ""))
    events = range(storm.report.events)
    for event in storm.rng.sample(events, min(len(events), 300)):
        answer = receiver.receive(*worker_side.SignedRequest(*request(event)))
        if (answer.status, answer.outcome) != (200, "duplicate"):
            what = f"afterwards a copy is answered {answer.status} {answer.outcome}"
            storm.fault(what, f"evt_{event}")
    receiver.close()
    if len(effects_of(task)) != before:
        storm.fault("copies that came afterwards were handled", before)


def storm_on(
    url: str,
    *,
    transactional: bool = False,
    deliveries: int = 3000,
    seed: int = 1,
    workers: int = 4,
    lanes: int = 4,
    kills: int | None = None,
    lease: float = 1.0,
    receiver: str = "",
) -> Report:
    """Let it storm on one store, and say what was seen."""
    report = Report(url.partition(":")[0], transactional, seed, deliveries)
    with tempfile.TemporaryDirectory() as folder:
        task = Task(url, transactional, lease, str(Path(folder) / "effects"), receiver)
        with prepared(task):
            number = max(18, deliveries // 400) if kills is None else kills
            storm = Storm(task, report, workers, lanes, number)
            storm.run()
            storm.judge(effects_of(task), exact=transactional or bool(receiver))
            copies_afterwards(storm)
    return report


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="A storm of deliveries on one store.")
    parser.add_argument("url", help="memory://storm, or an empty SQLite, PostgreSQL or Redis store")
    parser.add_argument("--transactional", action="store_true", help="handlers write in the store")
    parser.add_argument("--deliveries", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--lanes", type=int, default=4, help="deliveries at once, for each worker")
    parser.add_argument(
        "--kills", type=int, help="default: one for every 400 deliveries, at least 18"
    )
    parser.add_argument("--lease", type=float, default=1.0)
    parser.add_argument("--receiver", default="", help='"mark first" or "mark last": for control')
    parser.add_argument("--report", type=Path, help="where to write the numbers, as JSON")
    given = vars(parser.parse_args())
    path = given.pop("report")
    report = storm_on(**given)
    print(report, flush=True)
    if path:
        path.write_text(json.dumps(dataclasses.asdict(report)))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
