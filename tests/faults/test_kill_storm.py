"""Workers are killed with -9 and stopped at random: one outcome a key, no answer lost."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sqlite3
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from oncekey._core.codec import Codec
from oncekey.abc import Store
from oncekey.models import Key, Scope, State, Terms, Verdict
from oncekey.stores.sqlite import SQLiteStore

WORKERS = 8
KEYS = 250
TRAPS = 6  # keys whose first handler stops itself until another worker has taken its key over
KILLS = 16
STOPS = 40
SEED = 20240607

NAMES = [f"k{number:04}" for number in range(KEYS)]
TERMS = Terms(lease_ms=250, ttl_ms=3_600_000)
SCOPE = Scope("once", "storm")

Spawn = Callable[..., "subprocess.Popen[bytes]"]


class Win(NamedTuple):
    """A claim that a worker won, as its log has it."""

    attempts: int
    fence: int
    takeover: bool


class Storm:
    """Starts the workers, reads their progress, and kills and stops them by it."""

    def __init__(self, spawn: Spawn, folder: Path) -> None:
        self.spawn = spawn
        self.folder = folder
        self.database = folder / "storm.db"
        self.rng = random.Random(SEED)
        self.reading, self.writing = os.pipe()
        self.incarnations = [0] * WORKERS
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.done: set[int] = set()
        self.stopped: dict[int, int] = {}  # worker -> after how many more events it goes on
        self.zombies: dict[int, tuple[str, int]] = {}  # worker -> the key and fence it stopped with
        self.freed: list[tuple[str, int]] = []
        self.waking: set[int] = set()  # zombies that were let go on and have not been fenced yet
        self.kills = self.stops = 0

    def start(self, worker: int) -> None:
        log = self.folder / f"log-{worker}-{self.incarnations[worker]}"
        self.processes[worker] = self.spawn(
            "storm_worker.py",
            *(self.database, worker, self.incarnations[worker], KEYS, TRAPS, log, self.writing),
            pass_fds=[self.writing],
        )
        self.incarnations[worker] += 1

    def events(self) -> Iterator[tuple[int, str, str, int]]:
        """What the workers tell, as it comes."""
        rest = b""
        while len(self.done) < WORKERS:
            ready, _, _ = select.select([self.reading], [], [], 0.5)
            if not ready:
                self.unblock()
                continue
            *lines, rest = (rest + os.read(self.reading, 65_536)).split(b"\n")
            for line in lines:
                worker, incarnation, what, name, fence = line.decode().split()
                if int(incarnation) == self.incarnations[int(worker)] - 1:  # not from the dead
                    yield int(worker), what, name, int(fence)

    def unblock(self) -> None:
        """Nobody can get on: a stopped worker holds the file's lock, or nobody else is left."""
        for worker in list(self.stopped):
            self.go_on(worker)
        for worker, process in self.processes.items():
            if worker not in self.done:
                code = process.poll()
                assert code is None, f"worker {worker} ended with {code}"

    def go_on(self, worker: int) -> None:
        del self.stopped[worker]
        self.processes[worker].send_signal(signal.SIGCONT)

    def kill(self, worker: int) -> None:
        self.stopped.pop(worker, None)
        self.processes[worker].send_signal(signal.SIGKILL)
        self.processes[worker].wait()
        self.start(worker)
        self.kills += 1

    def stop(self, worker: int) -> None:
        self.processes[worker].send_signal(signal.SIGSTOP)
        self.stopped[worker] = self.rng.randrange(5, 120)
        self.stops += 1

    def run(self) -> None:
        """Let it storm until every worker has an answer for every key."""
        for worker in range(WORKERS):
            self.start(worker)
        acts = ["kill"] * KILLS + ["stop"] * STOPS
        self.rng.shuffle(acts)
        calm = 40
        for worker, what, name, fence in self.events():
            if what == "done":
                self.done.add(worker)
                self.stopped.pop(worker, None)
                self.processes[worker].send_signal(signal.SIGCONT)
            elif what == "trapped":
                self.zombies[worker] = (name, fence)
            elif what == "won":
                for zombie, (its_name, its_fence) in list(self.zombies.items()):
                    if its_name == name and fence > its_fence:
                        self.freed.append(self.zombies.pop(zombie))
                        self.waking.add(zombie)
                        self.processes[zombie].send_signal(signal.SIGCONT)
            elif what == "fenced":
                self.waking.discard(worker)
            for other in list(self.stopped):
                self.stopped[other] -= 1
                if self.stopped[other] <= 0:
                    self.go_on(other)
            calm -= 1
            if calm > 0 or not acts:
                continue
            # Who just won is most often still in its handler or its commit: hit it, or anybody.
            spared = self.done | self.waking | self.zombies.keys() | self.stopped.keys()
            targets = [other for other in range(WORKERS) if other not in spared]
            if len(targets) < 3:
                continue
            calm = self.rng.randrange(5, 40)
            target = worker if what == "won" and worker in targets else self.rng.choice(targets)
            (self.kill if acts.pop() == "kill" else self.stop)(target)
        for process in self.processes.values():
            assert process.wait() == 0
        os.close(self.reading)
        os.close(self.writing)

    def logs(self) -> Iterator[list[str]]:
        """The lines of all logs; one that a kill cut short was never written."""
        for path in sorted(self.folder.glob("log-*")):
            *lines, _ = path.read_text().split("\n")
            for line in lines:
                yield line.split(" ", 2)


def judged(storm: Storm, store: Store) -> None:
    """One outcome a key, none lost, whoever was fenced off never counts; and it did storm."""
    wins: dict[str, list[Win]] = defaultdict(list)
    fenced: set[tuple[str, int]] = set()
    acknowledged: dict[str, list[str]] = defaultdict(list)
    for kind, name, rest in storm.logs():
        if kind == "W":
            fence, attempts, takeover = rest.split()
            wins[name].append(Win(int(attempts), int(fence), takeover == "1"))
        elif kind == "F":
            fenced.add((name, int(rest)))
        else:
            acknowledged[name].append(rest)
    for name in NAMES:
        _one_outcome(store, name, sorted(wins[name]), fenced, acknowledged[name])

    # The workers that stopped in a handler until their key was taken over were fenced off.
    assert storm.freed
    assert set(storm.freed) <= fenced
    assert (storm.kills, storm.stops) == (KILLS, STOPS)
    print(
        f"{storm.kills} kills, {storm.stops} stops, {len(storm.freed)} zombies freed, "
        f"{len(fenced)} completions fenced off, "
        f"{sum(win.takeover for won in wins.values() for win in won)} takeovers"
    )


def _one_outcome(
    store: Store, name: str, won: list[Win], fenced: set[tuple[str, int]], answers: list[str]
) -> None:
    record = store.read(Key(SCOPE, name))
    assert record is not None
    assert record.state is State.COMPLETED
    assert record.answer is not None
    outcome = json.dumps(Codec().decode(record.answer), sort_keys=True)

    # Nothing acknowledged is lost, and every worker that ever got an answer got this one.
    assert set(answers) == {outcome}
    assert len(answers) >= WORKERS
    for _ in range(2):
        reply = store.claim(Key(SCOPE, name), os.urandom(16), record.fingerprint, TERMS)
        assert (reply.verdict, reply.answer) == (Verdict.REPLAY, record.answer)

    # Each win is another attempt with a higher fence, and a later one is always a takeover.
    assert len({win.attempts for win in won}) == len(won)
    fences = [win.fence for win in won]
    assert fences == sorted(set(fences))
    assert all(win.takeover == (win.attempts > 1) for win in won)
    # Fences are made of the store's clock: nobody won before the lease of the last was over.
    for earlier, later in pairwise(fences):
        assert later - earlier > (TERMS.lease_ms - 1) * 1000
    # The last to win is the one that counts; a fence that was refused never does.
    assert (record.fence, record.attempts) == (won[-1].fence, won[-1].attempts)
    assert json.loads(outcome)["fence"] == record.fence
    assert (name, record.fence) not in fenced


def test_storm_of_kills_and_stops_leaves_one_outcome_for_each_key(
    spawn: Spawn, tmp_path: Path
) -> None:
    """Eight workers, kill -9 and SIGSTOP: one outcome a key, and every answer is it."""
    storm = Storm(spawn, tmp_path)
    storm.run()
    with sqlite3.connect(storm.database) as raw:
        assert raw.execute("SELECT count(*) FROM oncekey_records").fetchone() == (KEYS,)
        assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    raw.close()
    with SQLiteStore(storm.database) as store:
        judged(storm, store)
