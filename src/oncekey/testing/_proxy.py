"""A network that fails when a test says so: a TCP proxy before a server."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Final, Self
from urllib.parse import SplitResult, urlsplit, urlunsplit

from oncekey.errors import PolicyError

__all__ = ["Proxy"]

_PORTS: Final = {"http": 80, "https": 443, "postgresql": 5432, "postgres": 5432, "redis": 6379}
_PIECE: Final = 65_536


class Proxy:
    """Stands between a client and a server, and loses what it is told to lose.

    Put it before the database of a worker, or before the worker itself. It knows nothing of what
    it carries, so TLS goes through, as long as the client does not check the name of the host.

    Args:
        url: Where the server is: ``http://localhost:8000``, ``postgresql://user@host/db``, or
            ``host:port``.

    Attributes:
        url: The same, through the proxy.
        port: Where it listens, on 127.0.0.1.
        lost: How many replies were lost so far.

    Raises:
        PolicyError: The URL has no host and port.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "://" in url else f"tcp://{url}")
        self._server = _address(parts)
        self._lock = threading.Lock()
        self._lose = 0
        self._open = threading.Event()
        self._open.set()
        self._sockets: set[socket.socket] = set()
        self._closed = False
        self.lost = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        user = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
        here = f"{user}127.0.0.1:{self.port}"
        self.url = urlunsplit(parts._replace(netloc=here)) if "://" in url else here
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_replies(self, count: int = 1) -> None:
        """Let the next requests reach the server, and hang up instead of handing over replies."""
        with self._lock:
            self._lose = count

    @contextlib.contextmanager
    def partition(self) -> Iterator[None]:
        """Carry nothing, in either direction, while the block runs; then all that was held."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def cut(self) -> None:
        """Break every connection that stands. New ones are carried."""
        with self._lock:
            there = list(self._sockets)
        for one in there:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Carry nothing any more. Closing twice does nothing."""
        self._closed = True
        self._open.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._closed:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._open.wait()
        try:
            server = socket.create_connection(self._server)
        except OSError:
            client.close()
            return
        with self._lock:
            self._sockets |= {client, server}
        back = threading.Thread(target=self._carry, args=(server, client, True), daemon=True)
        back.start()
        self._carry(client, server, False)
        back.join()
        with self._lock:
            self._sockets -= {client, server}
        client.close()
        server.close()

    def _carry(self, source: socket.socket, sink: socket.socket, replies: bool) -> None:
        """One direction, until either side ends it; then the other one is ended too."""
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE):
                self._open.wait()
                if replies and self._loses():
                    break
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _loses(self) -> bool:
        with self._lock:
            if not self._lose:
                return False
            self._lose -= 1
            self.lost += 1
            return True


def _address(parts: SplitResult) -> tuple[str, int]:
    try:
        port = parts.port or _PORTS.get(parts.scheme.partition("+")[0])
    except ValueError:
        port = None
    if not port or not parts.hostname:
        raise PolicyError(
            f"{parts.hostname or 'that'} names no server: write it like http://localhost:8000"
        )
    return parts.hostname, port
