"""The receiver as a process: started, killed, stopped, its clock moved."""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from oncekey.errors import PolicyError

__all__ = ["Command"]

_SHOWN = 2000


class Command:
    """A command that serves at ``url``. Its processes are one group, and end together."""

    def __init__(
        self, command: str | Sequence[str], url: str, env: Mapping[str, str], patience: float
    ) -> None:
        self._words = shlex.split(command) if isinstance(command, str) else list(command)
        if not self._words:
            raise PolicyError("the command is empty: write how your receiver is started")
        parts = urlsplit(url)
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._patience = patience
        self._folder = tempfile.TemporaryDirectory(prefix="oncekey-lab-")
        self._clock = Path(self._folder.name) / "clock"
        self._env = {**os.environ, **env}
        library = _faketime()
        self.has_clock = library is not None
        if library is not None:
            self.move_clock(0)
            self._env |= {
                "LD_PRELOAD": library,
                "FAKETIME_TIMESTAMP_FILE": str(self._clock),
                "FAKETIME_NO_CACHE": "1",
                "DONT_FAKE_MONOTONIC": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None
        self.starts = 0

    def start(self) -> None:
        """Start it, and wait until it takes connections.

        Raises:
            PolicyError: It ended, or nobody answers at the URL.
        """
        if self._log is None:
            self._log = (Path(self._folder.name) / "log").open("w+b")
        try:
            # In a thread, which no interrupt reaches: a process that is started is known to us.
            with ThreadPoolExecutor(1) as apart:
                process = apart.submit(self._begin).result()
        except OSError as error:
            raise PolicyError(f"{self._words[0]} can't be started: {error}") from None
        self.starts += 1
        until = time.monotonic() + self._patience
        while not self._answers():
            if process.poll() is not None:
                raise PolicyError(f"the command ended with {process.returncode}: {self.said}")
            if time.monotonic() > until:
                raise PolicyError(f"nobody answers at port {self._address[1]}: {self.said}")
            time.sleep(0.02)

    def _begin(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(  # noqa: S603 - the caller's own command
            self._words,
            env=self._env,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return self._process

    @property
    def said(self) -> str:
        """The end of what it printed."""
        self._log.seek(0)
        text: str = self._log.read().decode("utf-8", "replace")[-_SHOWN:]
        return text.strip() or "it printed nothing"

    def _answers(self) -> bool:
        try:
            socket.create_connection(self._address, timeout=1).close()
        except OSError:
            return False
        return True

    def signal(self, number: int) -> None:
        """Send a signal to all of its processes."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                pass

    def kill(self) -> None:
        """End it at once, with -9."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            self._process = None

    def move_clock(self, seconds: float) -> None:
        """Let its clock be ahead of the machine's, or behind."""
        draft = self._clock.with_suffix(".new")
        draft.write_text(f"{seconds:+f}")
        draft.replace(self._clock)

    def close(self) -> None:
        """End it for good."""
        self.kill()
        if self._log is not None:
            self._log.close()
        self._folder.cleanup()


def _faketime() -> str | None:
    """The library that moves a process's clock, from the package libfaketime."""
    found = importlib.util.find_spec("libfaketime")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / "vendor/libfaketime/src/libfaketime.so.1"
    return str(path) if path.exists() else None
