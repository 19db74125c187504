"""The storm of kills and stops on servers: one outcome a key, though its workers come and go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.faults.conftest import Spawn
from tests.faults.test_kill_storm import KEYS, SCOPE, TRAPS, Storm, judged

from oncekey import connect
from oncekey.models import Key


class Forked:
    """A worker that another process started: what the storm needs of a ``Popen``."""

    def __init__(self, order: Callable[..., Any], *arguments: object) -> None:
        self._order = order
        self.pid: int = order("start", *map(str, arguments))
        self._code: int | None = None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._order("poll", self.pid)
        return self._code

    def wait(self) -> int:
        if self._code is None:
            self._code = self._order("wait", self.pid)
        assert self._code is not None
        return self._code


class ServerStorm(Storm):
    """The same storm, over a URL."""

    def __init__(self, spawn: Spawn, folder: Path, url: str) -> None:
        super().__init__(spawn, folder)
        self.url = url
        self.parent = spawn(
            "storm_servers_worker.py",
            url.partition(":")[0],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self.writing],
        )

    def order(self, *order: object) -> Any:
        assert self.parent.stdin is not None
        assert self.parent.stdout is not None
        self.parent.stdin.write(json.dumps(order).encode() + b"\n")
        self.parent.stdin.flush()
        return json.loads(self.parent.stdout.readline())

    def start(self, worker: int) -> None:
        incarnation = self.incarnations[worker]
        log = self.folder / f"log-{worker}-{incarnation}"
        arguments = (self.url, worker, incarnation, KEYS, TRAPS, log, self.writing)
        self.processes[worker] = Forked(self.order, *arguments)  # type: ignore[assignment]
        self.incarnations[worker] += 1

    def unblock(self) -> None:
        """Also let zombies go on whose key was taken over by a worker that died telling us so."""
        super().unblock()
        with connect(self.url) as store:
            for zombie, (name, fence) in list(self.zombies.items()):
                record = store.read(Key(SCOPE, name))
                if record is not None and record.fence > fence:
                    self.freed.append(self.zombies.pop(zombie))
                    self.waking.add(zombie)
                    self.processes[zombie].send_signal(signal.SIGCONT)

    def end(self) -> None:
        """End the workers that a failure has left."""
        assert self.parent.stdin is not None
        self.parent.stdin.close()
        assert self.parent.wait() == 0


@pytest.fixture(params=["postgresql", "redis"])
def url(request: pytest.FixtureRequest) -> str:
    """A server that is empty."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("own_url"))
    return str(request.getfixturevalue("redis_server").url)


def test_storm_on_a_server_leaves_one_outcome_for_each_key(
    spawn: Spawn, tmp_path: Path, url: str
) -> None:
    """Eight workers, kill -9 and SIGSTOP: one outcome a key, and every answer is it."""
    storm = ServerStorm(spawn, tmp_path, url)
    try:
        storm.run()
    finally:
        storm.end()
    with connect(url) as store:
        judged(storm, store)
