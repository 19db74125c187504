"""Serves ``metered_shop.py`` by two workers of gunicorn, and gives it something to do."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from oncekey.signatures import provider

HERE = Path(__file__).parent
PATIENCE = 40
STRIPE = provider("stripe", secret="whsec_test")

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Site:
    """A server that runs, with its two processes."""

    def __init__(self, url: str, server: subprocess.Popen[bytes]) -> None:
        self.url, self.server = url, server
        self.http = httpx.Client(timeout=PATIENCE, trust_env=False, verify=False)

    def post(self, path: str, **asked: Any) -> Any:
        return self.http.post(f"{self.url}/{path}", json=asked).json()

    def deliver(self, number: int, kind: str = "invoice.paid", age: float = 0) -> int:
        body = json.dumps({"id": f"evt_{number}", "type": kind}).encode()
        fields = {"Content-Type": "application/json"}
        sent = STRIPE.sign("POST", "https://x.example/hook", fields, body, now=time.time() - age)
        return self.http.post(
            f"{self.url}/hook", content=sent.body, headers=dict(sent.headers)
        ).status_code

    def workers(self) -> list[int]:
        pid = self.server.pid
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def wake(self, shared: Path) -> None:
        """Make both workers count something, whoever of them accepts connections first."""
        end = time.monotonic() + PATIENCE
        while len(list(shared.glob("counter_*.db"))) < 2 and time.monotonic() < end:
            with ThreadPoolExecutor(8) as pool:
                asked = [pool.submit(self._charge_alone) for _ in range(16)]
            for one in asked:
                one.result()

    def _charge_alone(self) -> None:
        """A charge on a connection of its own: one that is kept belongs to one worker."""
        asked = {"order": "wake", "cents": 1}
        httpx.post(f"{self.url}/charge", json=asked, timeout=PATIENCE, trust_env=False)

    def scrape(self) -> Samples:
        # prometheus-client fails on the file of a worker that is just being born.
        text = self.http.get(f"{self.url}/metrics").raise_for_status().text
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def load(self, base: int = 0) -> None:
        """All that can happen, once; and charges and deliveries from many threads at once."""
        for path in ("hurry", "short", "fail", "meet", "busy", "rough"):
            self.post(path, order=f"{path}-{base}")
        self.post("charge", order=f"o-{base}", cents=1)
        self.post("charge", order=f"o-{base}", cents=2)  # a conflict
        self.post("charge", order=f"bad-{base}", cents=1)
        self.deliver(base, kind="unknown.type")
        self.http.post(f"{self.url}/hook", content=b"{}", headers={"Content-Type": "text/x"})
        with ThreadPoolExecutor(8) as pool:
            orders = [f"o-{base + number // 2}" for number in range(80)]
            list(pool.map(lambda order: self.post("charge", order=order, cents=1), orders))
            numbers = [base + number // 2 for number in range(80)]
            list(pool.map(lambda number: self.deliver(number, age=number % 30), numbers))


@contextlib.contextmanager
def served(folder: Path, database: str) -> Iterator[Site]:
    """Two workers, until the block ends."""
    shared = folder / "metrics"
    shared.mkdir()
    env = {
        **os.environ,
        "DATABASE": database,
        "PROMETHEUS_MULTIPROC_DIR": str(shared),
    }
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        command = [sys.executable, "-m", "gunicorn", "--workers", "2", "--preload"]
        command += [
            "--threads",
            "4",
            "--graceful-timeout",
            "2",
            "--no-control-socket",
            "--config",
            str(HERE / "gunicorn_hooks.py"),
        ]
        command += [
            "--bind",
            f"fd://{listener.fileno()}",
            "--pythonpath",
            str(HERE),
            "metered_shop:app",
        ]
        with (folder / "log").open("wb") as stream:
            server = subprocess.Popen(
                command,
                cwd=folder,
                env=env,
                pass_fds=[listener.fileno()],
                stdout=stream,
                stderr=stream,
            )
        site = Site(f"http://127.0.0.1:{listener.getsockname()[1]}", server)
        try:
            yield site
        finally:
            site.http.close()
            server.terminate()
            server.wait(PATIENCE)
