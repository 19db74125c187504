"""A worker that is stopped past its lease, and goes on when another one has its key."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.faults.conftest import Spawn

from oncekey import Once, connect
from oncekey.guard import current_claim

PATIENCE = 60.0


@pytest.fixture(params=["sqlite", "postgresql", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that processes share."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/stopped.db"
    if request.param == "postgresql":
        return str(request.getfixturevalue("own_url"))
    return f"{request.getfixturevalue('redis_server').url}?check=off"


@pytest.mark.parametrize("ended", [True, False], ids=["heir is done", "heir still runs"])
def test_a_worker_that_wakes_late_is_fenced_off(url: str, spawn: Spawn, ended: bool) -> None:
    """SIGSTOP past the lease: the heir's outcome is the one, and the zombie is given that."""
    zombie = spawn("stopped_worker.py", url, stdout=subprocess.PIPE)
    assert zombie.stdout is not None
    _, status = os.waitpid(zombie.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    with connect(url) as store:
        once = Once(store, scope="stopped", lease=30, wait=PATIENCE)
        said = []

        @once(key="name", name=None)
        def work(name: str) -> str:
            assert current_claim().takeover
            if not ended:
                zombie.send_signal(signal.SIGCONT)
                said.append(zombie.stdout.readline())  # it was told while the heir still ran
            return "the heir's"

        assert work("key") == "the heir's"
        zombie.send_signal(signal.SIGCONT)
        said += [line for line in zombie.stdout if line]
        assert zombie.wait(PATIENCE) == 0
        assert work("key") == "the heir's"
    # A zombie has the official answer where there is one, and else an error; never its own.
    first = b"the heir's\n" if ended else b"ClaimLostError\n"
    assert said == [first, b"the heir's\n"]
