"""Listen, and serve an ASGI app by uvicorn in this process: SIGTERM ends it in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from oncekey.errors import PolicyError

__all__ = ["Announce", "address_of", "listen", "run_loop", "run_server", "uvicorn_config"]

logger = logging.getLogger("oncekey")

Announce = Callable[[str], None]
"""Called with the address, once requests are taken."""
BACKLOG: Final = 2048
_STOPPING: Final = (signal.SIGINT, signal.SIGTERM)


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen at every address of a host.

    Args:
        host: Its name or address.
        port: The port; 0 takes a free one, at the first address only.

    Raises:
        PolicyError: It can't be had; says why.
    """
    made: list[socket.socket] = []
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in infos if port else infos[:1]:
            one = socket.socket(family, socket.SOCK_STREAM)
            made.append(one)
            if os.name == "posix":
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
            one.listen(BACKLOG)
    except OSError as error:
        for one in made:
            one.close()
        taken = "; --port 0 takes one that is free" if error.errno == errno.EADDRINUSE else ""
        told = f"it can't listen on {host}, port {port}: {error.strerror}{taken}"
        raise PolicyError(told) from None
    return made


def uvicorn_config(app: Any, stop_seconds: float, *, ws: Any) -> Any:
    """How uvicorn serves an app here: it adds no header, believes none, and logs no request.

    Args:
        app: The ASGI app.
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
    limit: Any = stop_seconds  # it only waits for so long, though its type says int
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws=ws,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=limit,
    )


async def run_server(
    config: Any,
    listeners: Sequence[socket.socket],
    announce: Announce | None = None,
    *,
    before_stop: Callable[[], None] | None = None,
    bound: float,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        config: Of ``uvicorn_config``.
        listeners: Where requests come in.
        announce: Told the address.
        before_stop: Called when it begins to stop.
        bound: Seconds after the signal at which the process ends, whatever still hangs in it.
    """
    import uvicorn

    base: Any = uvicorn.Server

    class Server(base):  # type: ignore[misc, unused-ignore]
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets=sockets)
            if announce is not None and self.started:
                announce(address_of(listeners[0]))

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

        def handle_exit(self, sig: int, frame: Any) -> None:
            if not self.should_exit:
                _cut_off(bound)
            super().handle_exit(sig, frame)

        async def shutdown(self, sockets: Any = None) -> None:
            if before_stop is not None:
                before_stop()
            await super().shutdown(sockets=sockets)

    await Server(config).serve(sockets=list(listeners))


def run_loop(work: Any) -> None:
    """Run a coroutine, on uvloop where it is there."""
    try:
        import uvloop
    except ImportError:  # it is not on every platform, and only makes it faster
        asyncio.run(work)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work)


def address_of(listener: socket.socket) -> str:
    """Where a socket listens, as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _cut_off(seconds: float) -> None:
    """End the process after so long: a thread may hang in a disk, or a server in its network.

    That is no worse than kill -9, which loses nothing: what is in hand is due when its lease ends.
    """

    def end() -> None:
        logger.error("it did not stop within %g s, and is cut off", seconds)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
