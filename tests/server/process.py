"""A gateway as a process, an app that it delivers to, and a provider that sends."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from oncekey.signatures import provider
from oncekey.testing import SignedDelivery, sample

PATIENCE = 180.0  # three leases of a worker that was killed
TOKEN = "an-admin-token-for-the-tests"
SECRET = "whsec_of_the_shop"

LEAST = """
store = "{store}"
[sources.shop]
provider = "stripe"
secret_env = "SHOP_SECRET"
targets = ["app"]
[targets.app]
url = "{url}"
allow_private = true
first_delay = 0.05
factor = 1.0
tries = 1000
"""


@dataclass
class App:
    """What the gateway delivers to: notes every request, answers as it is told."""

    url: str = ""
    requests: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    answer: Callable[[dict[str, str]], int] = lambda headers: 200

    def events(self) -> set[str]:
        """The ids of the events that came, however often."""
        return {headers["webhook-id"] for headers, _ in list(self.requests)}


@contextlib.contextmanager
def app() -> Iterator[App]:
    """An app on a free port."""
    noted = App()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status = noted.answer(headers)
            if 200 <= status < 300:
                noted.requests.append((headers, body))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    noted.url = f"http://127.0.0.1:{server.server_port}/events"
    try:
        yield noted
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Served:
    """``oncekey serve`` as a process of its own."""

    def __init__(self, *arguments: str, environ: dict[str, str] | None = None) -> None:
        given = {"SHOP_SECRET": SECRET, "ONCEKEY_TOKEN": TOKEN, **(environ or {})}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "oncekey", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **given},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if "http://" not in line:
            _, errors = self.process.communicate(timeout=PATIENCE)
            raise AssertionError(f"it did not start: {line}{errors}")
        self.first_lines = [line]
        self.address = "http://" + line.split("http://")[1].split("/")[0].split(",")[0].strip()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def call(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """A request; names of headers are written with ``_``."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            fields = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, fields)
            answer = connection.getresponse()
            told = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, told, answer.read()
        finally:
            connection.close()

    def api(self, method: str, path: str, body: Any = None) -> Any:
        """What the API answers an admin."""
        raw = None if body is None else json.dumps(body).encode()
        status, _, answer = self.call(
            method, f"/_oncekey/api/v1{path}", raw, authorization=f"Bearer {TOKEN}"
        )
        assert status == 200, answer
        return json.loads(answer)

    def deliver(self, one: SignedDelivery) -> int:
        """Send a delivery; its status."""
        return self.call("POST", urlsplit(one.url).path, one.body, **dict(one.headers))[0]

    def stop(self, how: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Stop it; its exit code, and what it said on standard error."""
        self.process.send_signal(how)
        _, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, errors

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=PATIENCE)


def event(name: str, address: str = "http://127.0.0.1") -> SignedDelivery:
    """A delivery of the shop's."""
    stripe = provider("stripe", secret=SECRET)
    return sample(stripe, id=name, type="invoice.paid", url=f"{address}/hooks/shop")


def config(folder: Path, url: str, store: str = "", more: str = "") -> Path:
    """The least config, and more."""
    file = folder / "gateway.toml"
    file.write_text(LEAST.format(store=store or f"sqlite:///{folder}/inbox.db", url=url) + more)
    return file


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait until something holds."""
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends, f"{what} did not happen"
        time.sleep(0.02)
