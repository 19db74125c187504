"""Thousands of deliveries, copies at once, failing handlers, killed workers: each handled once.

Short here. ``ONCEKEY_STORM=100000`` sets the number of deliveries for each store (``make storm``),
``ONCEKEY_STORM_SEED`` the seed; ``-s`` shows how it goes.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.scale import scaled

WHOLE = int(os.environ.get("ONCEKEY_STORM", "0"))
SEED = int(os.environ.get("ONCEKEY_STORM_SEED", "20261116"))
SCRIPT = Path(__file__).with_name("delivery_storm.py")
DEATHS = {"kill", "die early", "die late", "die mute"}


def storm(folder: Path, url: str, deliveries: int, *options: str) -> dict[str, Any]:
    """Let it storm in a process of its own, as it forks; give what it saw."""
    path = folder / "report.json"
    command = [sys.executable, str(SCRIPT), url, *options, "--report", str(path)]
    numbers = ["--deliveries", str(WHOLE or max(400, scaled(deliveries))), "--seed", str(SEED)]
    if WHOLE:
        faulthandler.cancel_dump_traceback_later()  # it takes minutes; a storm that hangs says so
    print(f"\n{url.partition(':')[0]} {' '.join(options)}", flush=True)
    subprocess.run([*command, *numbers], check=False)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def check(found: dict[str, Any], *, kills: bool = True) -> None:
    """Nothing went wrong, and that is no wonder of calm weather."""
    assert found["faults"] == {}
    assert found["events"] == found["deliveries"] * 7 // 10
    if found["transactional"]:
        assert found["effects"] == found["events"]
    else:
        again = found["twice_by_kill"] + found["twice_by_lost_claim"]
        assert found["effects"] == found["events"] + again
    assert found["at_once"] == found["deliveries"] * 3 // 20
    assert found["answers"].pop("500 failed Flaky") > 0
    assert {answer.partition(" ")[0] for answer in found["answers"]} <= {"200", "500", "503", "429"}
    failed = {answer for answer in found["answers"] if answer.startswith("500")}
    assert failed <= {"500 failed ClaimLostError"}
    assert found["sent"] > found["deliveries"]
    assert set(found["kills"]) == (DEATHS if kills else set())
    assert (found["lost_on_the_way"] > 0) == kills


def test_storm_in_memory(tmp_path: Path) -> None:
    """Threads of one process: each event is handled once, whatever fails."""
    check(storm(tmp_path, "memory://storm", 3000), kills=False)


@pytest.mark.parametrize("mode", ["lease", "transactional"])
def test_storm_on_sqlite(tmp_path: Path, mode: str) -> None:
    """Killed workers lose no event; with transactions the effects are as many as the events."""
    # What survives kill -9 survives it without syncs too; only power needs them.
    url = f"sqlite:///{tmp_path / 'storm.db'}" + ("" if WHOLE else "?durability=normal")
    options = ["--transactional"] if mode == "transactional" else []
    check(storm(tmp_path, url, 1500 if options else 2000, *options))


@pytest.mark.parametrize("mode", ["lease", "transactional"])
def test_storm_on_postgresql(tmp_path: Path, own_url: str, mode: str) -> None:
    """Killed workers lose no event; with transactions the effects are as many as the events."""
    options = ["--transactional"] if mode == "transactional" else []
    check(storm(tmp_path, own_url, 1500 if options else 2000, *options))


def test_storm_on_redis(tmp_path: Path, redis_server: Any) -> None:
    """Killed workers lose no event, and only a kill after an effect can repeat it."""
    check(storm(tmp_path, redis_server.url, 3000))


@pytest.mark.parametrize("receiver", ["mark first", "mark last"])
def test_storm_finds_what_is_wrong(tmp_path: Path, receiver: str) -> None:
    """A receiver that marks before the handler loses events, one that marks after repeats them."""
    if WHOLE:
        pytest.skip("the same at any length")
    url = f"sqlite:///{tmp_path / 'storm.db'}?durability=normal"
    faults = storm(tmp_path, url, 400, "--receiver", receiver)["faults"]
    assert ("acknowledged and never handled" in faults) == (receiver == "mark first")
    assert receiver == "mark first" or "handled again after a kill" in faults
