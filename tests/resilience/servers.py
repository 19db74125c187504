"""Real servers whose outages tests make: stopped and started again, or hung."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from tests.servers.postgres import Postgres, make_database
from tests.servers.redis import Server as Redis

from oncekey import connect

__all__ = ["Outage", "PostgresOutage", "RedisOutage", "opened", "outage"]

TIMEOUT = 2.0  # seconds that a call of a store may take


class Outage(Protocol):
    """A server and how it goes away."""

    name: str
    url: str

    def stop(self) -> None:
        """End the server at once."""

    def start(self) -> None:
        """Start it again, with what it had."""

    def hang(self) -> None:
        """Let it hold its connections and say nothing."""

    def wake(self) -> None:
        """Let it go on."""

    def remove(self) -> None:
        """End it for good."""


class PostgresOutage:
    """A PostgreSQL server of our own."""

    name = "postgres"

    def __init__(self) -> None:
        self._server = Postgres(fsync="off").start()
        self.url = self._server.url(make_database(self._server.url()))
        with connect(self.url) as store:
            store.create_schema()  # type: ignore[attr-defined]

    def stop(self) -> None:
        """Crash it."""
        self._server.crash()

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        self._server.start()

    def _signal(self, number: signal.Signals) -> None:
        server = self._server.process
        assert server is not None
        for found in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(found.read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended meanwhile
                continue
            if parent == server.pid:
                os.kill(int(found.parent.name), number)
        os.kill(server.pid, number)

    def hang(self) -> None:
        """Stop its processes where they are."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def remove(self) -> None:
        """End it for good."""
        self._server.close()


class RedisOutage:
    """A Redis server of our own, which writes what it is told to a file."""

    name = "redis"

    def __init__(self) -> None:
        self._server = Redis()
        self.url = self._server.url

    def stop(self) -> None:
        """Kill it."""
        self._server.kill()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._server.start()

    def hang(self) -> None:
        """Stop the process where it is."""
        self._server.pause()

    def wake(self) -> None:
        """Let it go on."""
        self._server.resume()

    def remove(self) -> None:
        """End it for good."""
        self._server.resume() if self._server.process else None
        self._server.remove()


@pytest.fixture(scope="module", params=[PostgresOutage, RedisOutage], ids=["postgres", "redis"])
def outage(request: pytest.FixtureRequest) -> Iterator[Outage]:
    """A server of this module's own, for each kind."""
    made: Any = request.param()
    yield made
    made.remove()


def opened(outage: Outage, timeout: float = TIMEOUT) -> Any:
    """A store on it that soon gives up."""
    return connect(outage.url, timeout=timeout)
