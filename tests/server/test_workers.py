"""``oncekey serve --workers``: several processes on one port, kept alive, stopped and reloaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.process import TOKEN, App, Served, app, config, event, until

from oncekey.server.figures import Figures, Own


@pytest.fixture
def target() -> Iterator[App]:
    with app() as one:
        yield one


def _workers(gateway: Served) -> set[int]:
    """The processes under the one that was started."""
    task = f"/proc/{gateway.process.pid}/task/{gateway.process.pid}/children"
    return set(map(int, Path(task).read_text().split()))


def _agreed(gateway: Served) -> set[tuple[int, ...]]:
    """New events, copies and deliveries as /metrics has them, whichever worker is asked."""
    found = set()
    for _ in range(8):
        text = gateway.call("GET", "/metrics", authorization=f"Bearer {TOKEN}")[2].decode()
        named = [f'{{source="shop",outcome="{what}"}} ' for what in ("new", "duplicate")]
        named.append('{target="app",outcome="delivered"} ')
        found.add(tuple(int((text + one + "0").split(one)[1].split()[0]) for one in named))
    return found


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux to find workers")
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_workers_share_a_port_and_live_on(
    kind: str, target: App, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Events reach the app once; a worker killed is replaced; SIGHUP and SIGTERM reach all."""
    store = f"sqlite:///{tmp_path}/inbox.db"
    if kind == "postgresql":
        store = request.getfixturevalue("pg_url")
        command = [sys.executable, "-m", "oncekey", "migrate", "--inbox", store]
        subprocess.run(command, check=True, capture_output=True)
    file = config(tmp_path, target.url, store)
    good = file.read_text()
    with Served("--config", str(file), "--port", "0", "--workers", "2") as gateway:
        first = _workers(gateway)
        assert len(first) == 2
        for name in ("evt_1", "evt_2"):
            one = event(name, gateway.address)
            assert [gateway.deliver(one) for _ in range(4)] == [200] * 4
        until(lambda: len(target.events()) == 2, "the deliveries")
        until(lambda: _agreed(gateway) == {(2, 6, 2)}, "what both counted")

        victim = min(first)
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(_workers(gateway) - {victim}) == 2, "another worker")
        until(lambda: gateway.call("GET", "/readyz")[0] == 200, "it works")
        until(lambda: _agreed(gateway) == {(2, 6, 2)}, "what the dead one counted")

        second = '[sources.second]\nprovider = "stripe"\nsecret_env = "SHOP_SECRET"\n'
        file.write_text(good + second + 'targets = ["app"]\n')
        gateway.process.send_signal(signal.SIGHUP)
        asked = range(12)
        until(
            lambda: {gateway.call("GET", "/hooks/second")[0] for _ in asked} == {200}, "the reload"
        )
        file.write_text(good.replace("stripe", "strpe"))
        gateway.process.send_signal(signal.SIGHUP)
        assert gateway.process.stderr is not None
        told = ""
        while "Did you mean 'stripe'?" not in told:
            told += gateway.process.stderr.readline()
        assert told.count("worker") >= 1
        assert "ended with code -9: another is started" in told
        assert gateway.call("GET", "/hooks/second")[0] == 200
        last = _workers(gateway)
        code, errors = gateway.stop()
    assert code == 0, errors
    assert not any(os.path.exists(f"/proc/{pid}") for pid in last)
    assert len(target.requests) == 2


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux to find workers")
def test_workers_end_with_who_keeps_them(tmp_path: Path) -> None:
    """If the process above is killed with -9, its workers end by themselves."""
    file = config(tmp_path, "http://127.0.0.1:9/events")
    with Served("--config", str(file), "--port", "0", "--workers", "2") as gateway:
        workers = _workers(gateway)
        gateway.process.kill()
        gateway.process.wait()
        until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers), "their end")


def test_what_can_not_start_ends_with_the_reason(tmp_path: Path) -> None:
    """An address that is taken, no workers, or the demo: exit code 2 and a sentence."""
    file = config(tmp_path, "http://127.0.0.1:9/events")
    with Served("--config", str(file), "--port", "0") as gateway:
        taken = ["--config", str(file), "--port", str(gateway.port)]
        for words, told in (
            ([*taken, "--workers", "2"], "can't listen on 127.0.0.1"),
            ([*taken, "--workers", "0"], "--workers: give 1 or more"),
            (["--demo", "--workers", "2"], "--demo takes no --config and no --workers"),
        ):
            command = [sys.executable, "-m", "oncekey", "serve", *words]
            environ = {**os.environ, "SHOP_SECRET": "whsec_x"}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
            assert done.returncode == 2, done.stderr
            assert told in done.stderr


def test_figures_are_of_all_workers(tmp_path: Path) -> None:
    """Sums of what each counted, an open breaker of any, and no step back after a restart."""
    one, two = Figures(tmp_path, 0), Figures(tmp_path, 1)
    mine, other = Own(), Own()
    mine.requests["shop", "new"] = 3
    mine.running["app"] = 1
    mine.breakers["app"] = "open"
    other.requests["shop", "new"] = 4
    other.breakers["app"] = "trying"
    one.write(mine)
    assert two.together(other).requests["shop", "new"] == 7  # and so it is written
    for total in (one.together(mine), two.together(other)):
        assert total.requests["shop", "new"] == 7
        assert total.running["app"] == 1
        assert total.is_open("app")
    again = Figures(tmp_path, 0)
    assert again.together(Own()).requests["shop", "new"] == 7
    assert again.together(Own()).running["app"] == 0
    alone = Figures()
    assert alone.together(mine) == mine
