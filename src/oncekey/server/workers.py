"""Several workers on one port: processes with one socket and one inbox, and who keeps them.

Each gets the config from here, so that all have the same; one that dies is started again. If this
process is gone, however it went, each worker finds its standard input closed and ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import signal
import socket
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from oncekey.errors import OncekeyError
from oncekey.inbox.urls import open_inbox
from oncekey.server.listening import Announce, address_of, listen
from oncekey.server.serving import check_reload
from oncekey.server.settings import ServerSettings

__all__ = ["Config", "serve_with_workers"]

logger = logging.getLogger("oncekey")

_SOON: Final = 0.1
_LATER: Final = 10.0
"""Seconds until a worker that died is started again: longer each time, if it does not live long."""
_SPARE: Final = 2.0  # seconds beside the time that a stop may take


class Config(NamedTuple):
    """A config as it was read, with what stands in place of some settings of it."""

    text: str
    file: str
    instead: Mapping[str, Any]


Read = Callable[[], tuple[Config, ServerSettings]]
"""Reads the config again; raises ``ConfigError``."""


async def serve_with_workers(read: Read, announce: Announce | None = None) -> int:
    """Serve by as many processes as the config says, until a signal says to stop.

    Args:
        read: Gives the config; called again for SIGHUP.
        announce: Told the address, once every worker takes requests.

    Returns:
        0 if all ended well.

    Raises:
        StoreError: The inbox can't be used.
        PolicyError: The config or the address can't be.
    """
    config, settings = read()
    listeners = listen(settings.host, settings.port)
    folder = tempfile.mkdtemp(prefix="oncekey-workers-")
    try:
        inbox = await open_inbox(settings.store, remember=settings.remember)
        await inbox.aclose()  # it can be used, and one process alone has made its tables
        return await _Workers(read, config, settings, listeners, folder).run(announce)
    finally:
        for one in listeners:
            one.close()
        shutil.rmtree(folder, ignore_errors=True)


class _Workers:
    def __init__(
        self,
        read: Read,
        config: Config,
        settings: ServerSettings,
        listeners: Sequence[socket.socket],
        folder: str,
    ) -> None:
        self._read = read
        self._config = config
        self._settings = settings
        self._listeners = listeners
        self._folder = folder
        self._processes: dict[int, Process] = {}
        self._stopping = asyncio.Event()
        self._ready = 0
        self._failed = False

    async def run(self, announce: Announce | None) -> int:
        loop = asyncio.get_running_loop()
        for one in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(one, self._stopping.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        tell = asyncio.Event()
        keeping = [
            asyncio.ensure_future(self._keep(number, tell))
            for number in range(self._settings.workers)
        ]
        told = asyncio.ensure_future(tell.wait())
        stopped = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((told, stopped), return_when=asyncio.FIRST_COMPLETED)
        if tell.is_set() and announce is not None:
            announce(address_of(self._listeners[0]))
        await stopped
        told.cancel()
        await self._stop(keeping)
        return 1 if self._failed else 0

    # Their lives

    async def _keep(self, number: int, tell: asyncio.Event) -> None:
        """Have one worker, until it is time to stop."""
        wait = _SOON
        while not self._stopping.is_set():
            began = time.monotonic()
            process = await self._start(number)
            assert process.stdout is not None  # noqa: S101 - it is a pipe
            lives = bool(await process.stdout.readline())  # it says that it takes requests
            if lives:
                self._ready += 1
                if self._ready == self._settings.workers:
                    tell.set()
            code = await process.wait()
            del self._processes[number]
            if self._stopping.is_set():
                # One that was about to start had nothing to end.
                self._failed = self._failed or (lives and code != 0)
                return
            if not lives and not tell.is_set():  # it said why; nothing was ever served
                self._failed = True
                self._stopping.set()
                return
            wait = _SOON if time.monotonic() - began > _LATER else min(wait * 2, _LATER)
            logger.error("worker %d ended with code %d: another is started", number + 1, code)
            await self._rest(wait)

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass

    async def _start(self, number: int) -> Process:
        handles = [one.fileno() for one in self._listeners]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "oncekey.server._worker"),
            stdin=PIPE,
            stdout=PIPE,
            pass_fds=handles,
            start_new_session=True,  # Ctrl-C comes to this process, which tells them
        )
        self._processes[number] = process
        self._tell(process, {"handles": handles, "folder": self._folder, "number": number})
        self._tell(process, self._config._asdict())
        return process

    def _tell(self, process: Process, what: Any) -> None:
        assert process.stdin is not None  # noqa: S101 - it is a pipe
        process.stdin.write(json.dumps(what).encode() + b"\n")

    # Signals

    def _reload(self) -> None:
        try:
            config, settings = self._read()
            check_reload(self._settings, settings)
        except OncekeyError as error:
            logger.error("the config was not reloaded, the old one stays: %s", error)
            return
        self._config, self._settings = config, settings
        for process in self._processes.values():
            self._tell(process, config._asdict())

    async def _stop(self, keeping: Sequence[asyncio.Future[None]]) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        _, left = await asyncio.wait(keeping, timeout=self._settings.stop_seconds + _SPARE)
        if left:
            logger.error("%d workers did not stop in time, and are killed", len(left))
            for process in self._processes.values():
                process.kill()
            await asyncio.wait(left)
