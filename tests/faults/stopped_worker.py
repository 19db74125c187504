"""A worker that stops itself in its handler, with its heartbeat: ``stopped_worker.py URL``.

It prints what its call gave, or the name of the error, when it was let go on and is done.
"""

from __future__ import annotations

import os
import signal
import sys

from oncekey import Once

LEASE = 0.5


def main() -> None:
    """Win the key, stop, and say what came of it."""
    once = Once(sys.argv[1], scope="stopped", lease=LEASE, wait=60)

    @once(key="name", name=None)
    def work(name: str) -> str:
        os.kill(os.getpid(), signal.SIGSTOP)
        return "the zombie's"

    try:
        print(work("key"), flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
    print(work("key"), flush=True)


if __name__ == "__main__":
    main()
