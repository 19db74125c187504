"""What the benchmarks start is what the gateway is now."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx
from tests.server.process import until

from oncekey.signatures import provider
from oncekey.testing import sample

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_server_of_the_benchmark_takes_an_event(tmp_path: Path) -> None:
    """It starts, keeps a signed event, and ends well."""
    path = tmp_path / "bench.socket"
    command = [sys.executable, "bench_gateway.py", "oncekey", str(tmp_path / "inbox.db"), str(path)]
    with subprocess.Popen(command, cwd=BENCHMARKS) as server:
        until(lambda: path.exists() or server.poll() is not None, "the socket")
        one = sample(provider("stripe", "whsec_bench"))
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            headers = dict(one.headers)
            answer = client.post("http://bench/hooks/stripe", content=one.body, headers=headers)
        server.send_signal(signal.SIGTERM)
    assert (answer.status_code, answer.headers["oncekey-outcome"]) == (200, "new")
    assert server.returncode == 0
