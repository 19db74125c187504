"""Run a gateway in this process; SIGHUP reads its config again, all or nothing."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from oncekey.errors import OncekeyError, PolicyError
from oncekey.server.figures import Figures
from oncekey.server.gateway import Gateway
from oncekey.server.listening import Announce, listen, run_server, uvicorn_config
from oncekey.server.settings import ServerSettings
from oncekey.server.tunnel import tunnel_to

__all__ = ["check_reload", "serve"]

logger = logging.getLogger("oncekey")

_FIXED: Final = ("store", "host", "port", "workers", "retention", "stop_seconds")
"""Settings that only a start reads."""
_FOR_REQUESTS: Final = 0.4
_FOR_DELIVERIES: Final = 0.5
"""Parts of the time that a stop may take; the rest is for what is about them."""


async def serve(
    settings: ServerSettings,
    *,
    reload: Callable[[], ServerSettings] | None = None,
    announce: Announce | None = None,
    wrap: Callable[[Any], Any] | None = None,
    listeners: Sequence[socket.socket] = (),
    figures: Figures | None = None,
) -> None:
    """Serve until a signal says to stop.

    Args:
        settings: What to serve.
        reload: Reads the config again, for SIGHUP.
        announce: Told the address.
        wrap: Around the app, for the demo.
        listeners: Sockets that others listen on, too; not given: one of the settings' address.
        figures: Those of the workers beside this one.

    Raises:
        StoreError: The inbox can't be used.
        PolicyError: A package is missing, or the address is taken.
    """
    from oncekey.server.app import make_app

    sockets = listeners or listen(settings.host, settings.port)
    gateway = await Gateway.open(settings, figures)
    try:
        app = make_app(gateway)
        config = uvicorn_config(
            app if wrap is None else wrap(app),
            settings.stop_seconds * _FOR_REQUESTS,
            ws=tunnel_to(gateway.proxies.way),
        )
        await gateway.start()
        if reload is not None and sys.platform != "win32":
            again = _Reload(gateway, reload)
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, again.begin)
        # Streams never end by themselves.
        await run_server(
            config, sockets, announce, before_stop=gateway.live.close, bound=settings.stop_seconds
        )
    finally:
        await gateway.stop(settings.stop_seconds * _FOR_DELIVERIES)


def check_reload(old: ServerSettings, new: ServerSettings) -> None:
    """Refuse settings that only a start reads, if they are others now.

    Raises:
        PolicyError: Names them.
    """
    fixed = [name for name in _FIXED if getattr(new, name) != getattr(old, name)]
    if new.remember > old.remember:  # a new source's provider may send for longer
        fixed.append("remember")
    if fixed:
        raise PolicyError(f"{', '.join(fixed)}: needs a restart; nothing was changed")


class _Reload:
    """Reads the config again: all of it is used, or nothing changes."""

    def __init__(self, gateway: Gateway, read: Callable[[], ServerSettings]) -> None:
        self._gateway = gateway
        self._read = read
        self._task: asyncio.Task[None] | None = None
        self._wanted = False

    def begin(self) -> None:
        self._wanted = True  # also while one is under way: the file may have changed since
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self._wanted:
            self._wanted = False
            await self._read_again()

    async def _read_again(self) -> None:
        old = self._gateway.settings
        try:
            new = self._read()
            check_reload(old, new)
            await self._gateway.use(new)
        except OncekeyError as error:
            logger.error("the config was not reloaded, the old one stays: %s", error)
        except Exception:
            logger.exception("the config was not reloaded, the old one stays")
        else:
            logger.warning(
                "the config was reloaded: %d sources, %d targets",
                len(new.sources),
                len(new.targets),
            )
