"""The providers' own libraries, for cross-checks: a missing one skips on a laptop, fails in CI."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from tests.servers.redis import missing

from oncekey.signatures import SignedRequest

__all__ = ["PADDLE_HOME", "paddle", "sdk"]

PADDLE_HOME = os.environ.get("ONCEKEY_TEST_PADDLE", "")


def sdk(module: str, package: str) -> Any:
    """A module of a library that the tests install."""
    try:
        return import_module(module)
    except ImportError:
        missing(f"the package {package}")


# Runs with Paddle's library alone: it installs a package called tests, which would hide ours.
# Each request brings the time with it, as five seconds are not long for a busy machine.
_PADDLE = """
import base64, json, sys
sys.path.append(sys.argv[1])
from types import SimpleNamespace
from paddle_billing.Notifications import Secret, Verifier

secret = Secret(sys.stdin.readline().strip())
for line in sys.stdin:
    headers, body, now = json.loads(line)
    sys.modules[Verifier.__module__].time = lambda: now
    request = SimpleNamespace(headers=headers, body=base64.b64decode(body))
    try:
        answer = bool(Verifier().verify(request, secret))
    except Exception as error:
        answer = type(error).__name__
    print(json.dumps(answer), flush=True)
"""


@contextmanager
def paddle(secret: str) -> Iterator[Any]:
    """Paddle's verifier, in a process of its own: call it with a request."""
    if not PADDLE_HOME:
        missing("paddle-python-sdk in the directory that ONCEKEY_TEST_PADDLE names")
    with subprocess.Popen(
        [sys.executable, "-c", _PADDLE, PADDLE_HOME],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        print(secret, file=process.stdin, flush=True)

        def verify(request: SignedRequest) -> bool:
            body = base64.b64encode(request.body).decode()
            print(json.dumps([request.headers, body, time.time()]), file=process.stdin, flush=True)
            answer = json.loads(process.stdout.readline())  # type: ignore[union-attr]
            if isinstance(answer, str):
                raise RuntimeError(f"Paddle's library raised {answer}")
            return bool(answer)

        yield verify
        process.stdin.close()
    assert process.returncode == 0
