"""What a ``WorkerProcess`` runs: imports a target and makes deliveries to it, one a line."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import os
import signal
import sys
from importlib import import_module
from typing import Any

from oncekey.abc import AsyncStore, Store
from oncekey.testing._kill import Kill, put_kill
from oncekey.testing._process import KILLED
from oncekey.testing._samples import SignedDelivery
from oncekey.testing._targets import Destination, _parameters, as_target, asend, send

__all__ = ["main"]


def main() -> None:
    """Take deliveries until there are no more, or until it is time to die."""
    order = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the target prints is not an answer
    sys.path.insert(0, os.getcwd())
    target = _load(order["target"])
    if order["doomed"]:
        put_kill(Kill(_die), _place(order["at"]), target)
    with asyncio.Runner() as runner:
        for line in sys.stdin:
            fields = json.loads(line)
            headers = [(name, value) for name, value in fields["headers"]]
            body = base64.b64decode(fields["body"])
            delivery = SignedDelivery(
                fields["method"], fields["url"], headers, body, now=fields["now"]
            )
            if target.is_async:
                answer = runner.run(asend(target, delivery))
            else:
                answer = send(target, delivery)
            said: dict[str, Any] = dataclasses.asdict(answer)
            said["body"] = base64.b64encode(answer.body).decode()
            answers.write(json.dumps(said) + "\n")
            answers.flush()


def _die() -> None:
    if hasattr(signal, "SIGKILL"):
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(KILLED)


def _find(text: str) -> tuple[Any, str]:
    """The object that holds what ``text`` names, and the last name."""
    module, _, path = text.partition(":")
    holder: Any = import_module(module)
    *names, last = path.split(".")
    for name in names:
        holder = getattr(holder, name)
    return holder, last


def _load(text: str) -> Destination:
    holder, name = _find(text)
    found = getattr(holder, name)
    if callable(found) and not hasattr(found, "receive") and _parameters(found) == 0:
        found = found()
    return as_target(found)


def _place(text: str) -> Any:
    if not text:
        return None
    holder, name = _find(text)
    found = getattr(holder, name, None)
    return found if isinstance(found, (Store, AsyncStore)) else (holder, name)


if __name__ == "__main__":
    main()
