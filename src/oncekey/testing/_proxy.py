"""A network that fails when a test says so: a TCP proxy before a server."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Final, Self
from urllib.parse import SplitResult, urlsplit, urlunsplit

from oncekey.errors import PolicyError

__all__ = ["Proxy"]

_PORTS: Final = {
    "http": 80,
    "https": 443,
    "postgresql": 5432,
    "postgres": 5432,
    "redis": 6379,
    "rediss": 6379,
    "mysql": 3306,
}
_PIECE: Final = 65_536
_AT_ONCE: Final = struct.pack("ii", 1, 0)  # SO_LINGER: closing throws away what is on its way


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
        connections: How many connections were carried so far.

    Raises:
        PolicyError: The URL has no host and port.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "://" in url else f"tcp://{url}")
        self._server = _address(parts)
        self._lock = threading.Lock()
        self._lose = 0
        self._lose_after = b""
        self._delay = 0.0
        self._black = self._refusing = False
        self._open = threading.Event()
        self._open.set()
        self._ended = threading.Event()
        self._lines: set[_Line] = set()
        self.lost = 0
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        user = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
        here = f"{user}127.0.0.1:{self.port}"
        self.url = urlunsplit(parts._replace(netloc=here)) if "://" in url else here
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_replies(self, count: int = 1, after: bytes = b"") -> None:
        """Let the next requests reach the server, and hang up instead of handing over replies.

        Args:
            count: How many replies are lost.
            after: Only replies to requests that hold these bytes, such as ``b"COMMIT"``.
        """
        with self._lock:
            self._lose, self._lose_after = count, after

    @contextlib.contextmanager
    def delay(self, seconds: float) -> Iterator[None]:
        """Hold every piece of data for so long, both ways, while the block runs."""
        before, self._delay = self._delay, seconds
        try:
            yield
        finally:
            self._delay = before

    @contextlib.contextmanager
    def partition(self) -> Iterator[None]:
        """Carry nothing, in either direction, while the block runs; then all that was held."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    @contextlib.contextmanager
    def blackhole(self) -> Iterator[None]:
        """Take everything and hand over nothing while the block runs: it is lost for good.

        Connections that lost something, and those that were made meanwhile, are cut at the end.
        """
        self._black = True
        try:
            yield
        finally:
            self._black = False
            self._end_lines(lambda line: line.lossy, reset=False)

    @contextlib.contextmanager
    def refuse(self) -> Iterator[None]:
        """Be a server that is down while the block runs: what stands breaks, nothing is taken."""
        self._refusing = True
        self.reset()
        try:
            yield
        finally:
            self._refusing = False

    @contextlib.contextmanager
    def flapping(self, seconds: float = 0.05, seed: int = 0) -> Iterator[None]:
        """Reset every connection again and again while the block runs.

        Args:
            seconds: How long the network holds, on average.
            seed: The same number gives the same pauses.
        """
        stop = threading.Event()
        chance = random.Random(seed)  # noqa: S311 - pauses, not secrets

        def flap() -> None:
            while not stop.wait(chance.uniform(0, 2 * seconds)):
                self.reset()

        thread = threading.Thread(target=flap, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def cut(self) -> None:
        """End every connection that stands, as a server that closes it. New ones are carried."""
        self._end_lines(lambda line: True, reset=False)

    def reset(self) -> None:
        """Break every connection that stands, with what is on its way. New ones are carried."""
        self._end_lines(lambda line: True, reset=True)

    def close(self) -> None:
        """Carry nothing any more. Closing twice does nothing."""
        self._ended.set()
        self._open.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _end_lines(self, which: Callable[[_Line], bool], reset: bool) -> None:
        with self._lock:
            chosen = [line for line in self._lines if which(line)]
        for line in chosen:
            line.end(reset)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._ended.is_set():
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        line = _Line(client)
        with self._lock:
            self._lines.add(line)
            self.connections += 1
        try:
            if self._refusing:
                line.end(reset=True)
            elif self._black:
                line.lossy = True
                with contextlib.suppress(OSError):
                    while client.recv(_PIECE):
                        pass
            else:
                self._carry_both(line)
        finally:
            with self._lock:
                self._lines.discard(line)
            line.close()

    def _carry_both(self, line: _Line) -> None:
        self._open.wait()
        try:
            line.server = socket.create_connection(self._server)
        except OSError:
            return
        if line.ended:  # while it was being made
            return
        back = threading.Thread(target=self._carry, args=(line, True), daemon=True)
        back.start()
        self._carry(line, False)
        back.join()

    def _carry(self, line: _Line, replies: bool) -> None:
        """One direction, until either side ends it; then the other one is ended too."""
        source, sink = (line.server, line.client) if replies else (line.client, line.server)
        assert source is not None  # noqa: S101 - for the type checker
        assert sink is not None  # noqa: S101
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE):
                if self._delay:
                    self._ended.wait(self._delay)
                self._open.wait()
                if line.ended:  # what comes in the moment of a reset goes nowhere
                    break
                if self._black:
                    line.lossy = True
                    continue
                if not replies:
                    line.meant = self._lose_after in data
                elif self._loses(line):
                    break
                self._heard(line, replies, data)
                sink.sendall(data)
        line.end(reset=False)

    def _heard(self, line: _Line, replies: bool, data: bytes) -> None:
        """Nothing: for who makes a proxy of this one that looks at what it carries."""

    def _loses(self, line: _Line) -> bool:
        with self._lock:
            if not self._lose or not line.meant:
                return False
            self._lose -= 1
            self.lost += 1
            return True


class _Line:
    """A connection of a client's, and the one to the server that belongs to it."""

    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self.server: socket.socket | None = None
        self.lossy = False  # something of it is gone for good
        self.meant = True  # its last request is one whose reply may be lost
        self.ended = False
        self._lock = threading.Lock()

    def _sockets(self) -> list[socket.socket]:
        return [one for one in (self.client, self.server) if one is not None]

    def end(self, reset: bool) -> None:
        """Have both directions end: the threads that read wake up, and close."""
        with self._lock:
            if self.ended:
                return
            self.ended = True
        for one in self._sockets():
            with contextlib.suppress(OSError):
                if reset:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                one.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)

    def close(self) -> None:
        for one in self._sockets():
            one.close()


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
