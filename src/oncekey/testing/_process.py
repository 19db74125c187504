"""A worker in a process of its own, which can be killed as only the system kills."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
from typing import Any, Final, Self

from oncekey.errors import PolicyError
from oncekey.testing._samples import SignedDelivery
from oncekey.testing._targets import Answer, NoWorkerError, WorkerKilled
from oncekey.testing._wire import pairs

__all__ = ["KILLED", "WorkerProcess"]

KILLED: Final = 137  # what a shell says of a process that SIGKILL ended
_SHOWN: Final = 2000


class WorkerProcess:
    """Starts a worker that is doomed, and when that is dead another one that is not."""

    def __init__(self, target: str, at: str | None) -> None:
        if ":" not in target:
            raise PolicyError(f"{target!r} can't be imported: write it like shop.hooks:receiver")
        self.happened = False
        self._order = {"target": target, "at": at or ""}
        self._process: subprocess.Popen[str] | None = None
        self._errors: Any = None

    def arm(self) -> None:
        """Start the doomed worker."""
        self._start(doomed=True)

    def disarm(self) -> None:
        """It is dead; the next delivery starts the other one."""
        self._stop()

    def let_time_pass(self) -> bool:
        """A process has a real clock."""
        return False

    def call(self, delivery: SignedDelivery) -> Answer:
        """Have the worker take a delivery.

        Raises:
            WorkerKilled: It was killed.
            NoWorkerError: It ended in another way, or never began.
        """
        process = self._process or self._start(doomed=False)
        assert process.stdin is not None  # noqa: S101 - for the type checker
        assert process.stdout is not None  # noqa: S101
        line = {
            "method": delivery.method,
            "url": delivery.url,
            "headers": pairs(delivery.headers),
            "body": base64.b64encode(delivery.body).decode(),
            "now": delivery.now,
        }
        try:
            process.stdin.write(json.dumps(line) + "\n")
            process.stdin.flush()
        except OSError:
            pass  # it is gone; its last words are what counts
        found = process.stdout.readline()
        if found:
            fields = json.loads(found)
            fields["body"] = base64.b64decode(fields["body"])
            return Answer(**fields)
        if _was_killed(process.wait()):
            self.happened = True
            raise WorkerKilled
        self._errors.seek(0)
        said = self._errors.read().decode("utf-8", "replace")[-_SHOWN:]
        raise NoWorkerError(f"the worker with {self._order['target']} ended by itself:\n{said}")

    def _start(self, doomed: bool) -> subprocess.Popen[str]:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in _stop
        # What can be imported here can be imported there.
        paths = os.pathsep.join(one for one in sys.path if one)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "oncekey.testing._worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        assert self._process.stdin is not None  # noqa: S101 - for the type checker
        self._process.stdin.write(json.dumps({**self._order, "doomed": doomed}) + "\n")
        self._process.stdin.flush()
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
            self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()


def _was_killed(code: int) -> bool:
    return code in (-9, KILLED)
