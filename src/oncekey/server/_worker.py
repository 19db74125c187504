"""One of the processes of ``workers``. Told what to do by standard input, whose end is its own."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oncekey.errors import OncekeyError
from oncekey.server.config import settings_from
from oncekey.server.figures import Figures
from oncekey.server.listening import run_loop
from oncekey.server.logs import log_to_stderr
from oncekey.server.serving import serve
from oncekey.server.settings import ServerSettings


def _lines(handle: int) -> Iterator[Any]:
    """What comes in, a line of JSON after another.

    Without a buffer of Python's: a thread that waits in one keeps a process from ending.
    """
    rest = b""
    while part := os.read(handle, 65_536):
        *whole, rest = (rest + part).split(b"\n")
        yield from map(json.loads, whole)


class _Told:
    """The config as the process above gave it last."""

    def __init__(self, lines: Iterator[Any]) -> None:
        self._lines = lines
        self._config: dict[str, Any] = next(lines)

    def settings(self) -> ServerSettings:
        told = self._config
        return dataclasses.replace(
            settings_from(told["text"], told["file"], os.environ), **told["instead"]
        )

    def listen(self) -> None:
        """Take what comes after the start: other configs, and the end."""
        for config in self._lines:
            self._config = config
            os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)  # nobody is above us any more


def _main() -> int:
    log_to_stderr()
    lines = _lines(sys.stdin.fileno())
    given = next(lines)
    told = _Told(lines)

    def ready(address: str) -> None:
        sys.stdout.write(f"{address}\n")
        sys.stdout.flush()
        threading.Thread(target=told.listen, daemon=True).start()

    try:
        work = serve(
            told.settings(),
            reload=told.settings,
            announce=ready,
            listeners=[socket.socket(fileno=one) for one in given["handles"]],
            figures=Figures(Path(given["folder"]), given["number"]),
        )
        run_loop(work)
    except OncekeyError as error:
        sys.stderr.write(f"oncekey: {error}\n")
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(_main())
