"""A live race: processes of their own claim the same keys at once, and each key has one winner.

What a racer needs goes by its standard input, as the URL of a store may hold a password.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import Any, Final

from oncekey._core.flows import new_owner
from oncekey.errors import StoreError

__all__ = ["RACERS", "race"]

RACERS: Final = 4
KEYS: Final = 25
PATIENCE: Final = 60.0  # seconds for all of it


def race(url: str) -> dict[int, int]:
    """How many keys had so many winners: ``{1: 25}`` is as it should be.

    Gives its few keys back, so that nobody takes them for stuck; the records end a minute later.

    Raises:
        StoreError: A racer could not use the store; says why.
    """
    task = json.dumps({"url": url, "scope": new_owner().hex(), "keys": KEYS})
    command = [sys.executable, "-m", "oncekey.doctor._racer"]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
        for _ in range(RACERS)
    ]
    try:
        for racer in racers:
            _say(racer, task)
        for racer in racers:
            _hear(racer)  # it is connected
        for racer in racers:
            _say(racer, "go")
        won = [number for racer in racers for number in _hear(racer)["won"]]
        for racer in racers:
            _say(racer, "done")
        for racer in racers:
            racer.wait(PATIENCE)
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
    winners = [won.count(number) for number in range(KEYS)]
    return {many: winners.count(many) for many in sorted(set(winners))}


def _say(racer: subprocess.Popen[str], text: str) -> None:
    if racer.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # it says why itself
            racer.stdin.write(text + "\n")
            racer.stdin.flush()


def _hear(racer: subprocess.Popen[str]) -> dict[str, Any]:
    line = racer.stdout.readline() if racer.stdout is not None else ""
    told: dict[str, Any] = json.loads(line) if line else {"error": "a racer ended early"}
    if "error" in told:
        raise StoreError(f"the race could not be run: {told['error']}")
    return told
