"""Worker processes for the fault tests: real ones, so that they can be killed and stopped."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Spawn = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start a script of this directory with arguments; what still lives at the end is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start(script: str, *args: object, **options: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, args)]
        process = subprocess.Popen(command, **options)
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)  # also ends one that is stopped
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
