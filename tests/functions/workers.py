"""Real workers of task queues: started, watched and killed by the tests.

What a task does is seen from outside, in files: a line for each effect, and gates that hold it up.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

HERE = Path(__file__).parent
PATIENCE = 60.0


class Place:
    """A directory that a worker and the tests share."""

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = Path(directory or tempfile.mkdtemp(prefix="oncekey-tasks-"))
        self.database = self.directory / "records.db"

    # What tasks do

    def effect(self, name: str) -> None:
        """Something that can be seen from outside, and is done when this returns."""
        with (self.directory / "effects").open("a") as file:
            file.write(f"{name}\n")

    def pass_gate(self, name: str) -> None:
        """Wait until the tests open it."""
        (self.directory / f"{name}.waiting").touch()
        eventually(lambda: (self.directory / f"{name}.open").exists(), f"the gate {name}")

    def die_at_first(self, name: str) -> None:
        """Kill this process with -9, the first time that it comes here."""
        mark = self.directory / f"{name}.died"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    # What tests see

    def effects(self, name: str) -> int:
        """How often it was done."""
        file = self.directory / "effects"
        return file.read_text().split("\n").count(name) if file.exists() else 0

    def rows(self, name: str) -> int:
        """How often it is in the table that transactional tasks write."""
        with closing(sqlite3.connect(self.database)) as db:
            found = db.execute("SELECT count(*) FROM effects WHERE name = ?", (name,)).fetchone()
        return int(found[0])

    def wait_at_gate(self, name: str) -> None:
        """Until a task waits there."""
        eventually((self.directory / f"{name}.waiting").exists, f"a task at the gate {name}")

    def open_gate(self, name: str) -> None:
        (self.directory / f"{name}.open").touch()

    def wait_for(self, name: str, times: int = 1) -> None:
        """Until an effect was there so often."""
        eventually(lambda: self.effects(name) >= times, f"{name} for {times} times")


def eventually(condition: object, what: str) -> None:
    """Wait for something that another process does; fails after long patience."""
    until = time.monotonic() + PATIENCE
    while not condition():  # type: ignore[operator]
        if time.monotonic() > until:
            raise AssertionError(f"{what} did not happen")
        time.sleep(0.01)


class Worker:
    """A worker process with its children, in a group of its own."""

    def __init__(self, place: Place, *command: str) -> None:
        path = os.pathsep.join([str(HERE), *(p for p in sys.path if p)])
        self.log = place.directory / f"worker-{os.urandom(3).hex()}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=place.directory,
                env={**os.environ, "PYTHONPATH": path, "PLACE": str(place.directory)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        """End all of it at once, as a crash of the machine would."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
