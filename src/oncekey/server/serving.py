"""Run a gateway or a proxy: uvicorn in this process, SIGTERM to end in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from oncekey.errors import OncekeyError, PolicyError
from oncekey.server.gateway import Gateway
from oncekey.server.settings import ServerSettings

__all__ = ["Announce", "run_server", "serve", "uvicorn_config"]

logger = logging.getLogger("oncekey")

Announce = Callable[[str], None]
"""Called with the address, once requests are taken."""
BACKLOG: Final = 2048
_FIXED: Final = ("store", "host", "port", "retention", "stop_seconds")
"""Settings that only a start reads."""
_STOPPING: Final = (signal.SIGINT, signal.SIGTERM)


async def serve(
    settings: ServerSettings,
    *,
    reload: Callable[[], ServerSettings] | None = None,
    announce: Announce | None = None,
    wrap: Callable[[Any], Any] | None = None,
) -> None:
    """Serve until a signal says to stop.

    Args:
        settings: What to serve.
        reload: Reads the config again, for SIGHUP.
        announce: Told the address.
        wrap: Around the app, for the demo.

    Raises:
        StoreError: The inbox can't be used.
        PolicyError: A package is missing, or the address is taken.
    """
    from oncekey.server.app import make_app

    gateway = await Gateway.open(settings)
    try:
        app = make_app(gateway)
        config = uvicorn_config(
            app if wrap is None else wrap(app),
            settings.host,
            settings.port,
            settings.stop_seconds / 2,
        )
        await gateway.start()
        if reload is not None and sys.platform != "win32":
            again = _Reload(gateway, reload)
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, again.begin)
        # Streams never end by themselves.
        await run_server(config, announce, before_stop=gateway.live.close)
    finally:
        await gateway.stop(max(1.0, settings.stop_seconds / 2))


def uvicorn_config(app: Any, host: str, port: int, stop_seconds: float, *, ws: Any = "none") -> Any:
    """How uvicorn serves an app here: it adds no header, believes none, and logs no request.

    Args:
        app: The ASGI app.
        host: The address to listen on.
        port: The port; 0 takes a free one.
        stop_seconds: How long requests under way have to end.
        ws: The protocol of WebSockets.

    Raises:
        PolicyError: Uvicorn is not there.
    """
    try:
        import uvicorn

        from oncekey.server.wire import BoundedProtocol  # needs httptools, too
    except ImportError:
        raise PolicyError("the gateway needs uvicorn: pip install 'oncekey[serve]'") from None
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=BoundedProtocol,
        ws=ws,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, round(stop_seconds)),
    )


async def run_server(
    config: Any,
    announce: Announce | None = None,
    *,
    before_stop: Callable[[], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        config: Of ``uvicorn_config``.
        announce: Told the address.
        before_stop: Called when it begins to stop.
    """
    import uvicorn

    base: Any = uvicorn.Server

    class Server(base):  # type: ignore[misc, unused-ignore]
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets=sockets)
            if announce is not None and self.started:
                host, port = self.servers[0].sockets[0].getsockname()[:2]
                announce(f"http://{f'[{host}]' if ':' in host else host}:{port}")

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            # Uvicorn's own raises the signal again at its end: that ends all, half done.
            loop = asyncio.get_running_loop()
            for one in _STOPPING:
                loop.add_signal_handler(one, self.handle_exit, one, None)
            try:
                yield
            finally:
                for one in _STOPPING:
                    loop.remove_signal_handler(one)

        async def shutdown(self, sockets: Any = None) -> None:
            if before_stop is not None:
                before_stop()
            await super().shutdown(sockets=sockets)

    await Server(config).serve()


class _Reload:
    """Reads the config again: all of it is used, or nothing changes."""

    def __init__(self, gateway: Gateway, read: Callable[[], ServerSettings]) -> None:
        self._gateway = gateway
        self._read = read
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        old = self._gateway.settings
        try:
            new = self._read()
            fixed = [name for name in _FIXED if getattr(new, name) != getattr(old, name)]
            if new.remember > old.remember:  # a new source's provider may send for longer
                fixed.append("remember")
            if fixed:
                raise PolicyError(f"{', '.join(fixed)}: needs a restart; nothing was changed")
            await self._gateway.use(new)
        except OncekeyError as error:
            logger.error("the config was not reloaded, the old one stays: %s", error)
        else:
            logger.warning(
                "the config was reloaded: %d sources, %d targets",
                len(new.sources),
                len(new.targets),
            )
