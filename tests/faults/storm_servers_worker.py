"""Workers of the storm on a server: ``storm_worker`` with a URL in place of a file.

One process loads everything and forks a worker for each order: most of a worker's life would be
spent loading otherwise. Orders, one a line of JSON, and what is answered:
    ["start", argument, ...]    the worker's process id
    ["wait", id]                its exit code, when it has ended
    ["poll", id]                the same, or null while it lives
At the end of the orders it kills the workers that are left.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys

import storm_worker  # it lies beside this script

from oncekey import connect


def _work(arguments: list[str]) -> None:
    sys.argv[1:] = arguments
    storm_worker.main()


def main() -> None:
    """Start workers and say how they end."""
    scheme = sys.argv[1]
    storm_worker.SQLiteStore = connect
    importlib.import_module("psycopg" if scheme == "postgresql" else "redis")
    importlib.import_module(f"oncekey.stores.{'postgres' if scheme == 'postgresql' else scheme}")
    alive: set[int] = set()
    for line in sys.stdin:
        order, *arguments = json.loads(line)
        answer: int | None
        if order == "start":
            answer = os.fork()
            if answer == 0:
                _work(arguments)  # an error ends it with a traceback and 1
                os._exit(0)
            alive.add(answer)
        else:
            process, status = os.waitpid(arguments[0], os.WNOHANG if order == "poll" else 0)
            alive.discard(process)
            answer = os.waitstatus_to_exitcode(status) if process else None
        print(json.dumps(answer), flush=True)
    for process in alive:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


if __name__ == "__main__":
    main()
