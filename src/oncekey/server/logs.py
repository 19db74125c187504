"""Log lines on standard error, so many of a kind: nobody can fill a disk by what is logged."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Final

__all__ = ["Sparing", "log_to_stderr"]

EACH: Final = 10
"""Lines of one kind within ``WINDOW``; what comes after them is counted, and told later."""
WINDOW: Final = 60.0
_KINDS: Final = 1000


class Sparing(logging.Filter):
    """Lets the first lines of each kind through. A kind is what stands in the source, unfilled.

    Whoever reaches the port can send requests that can't be read, and each would be a line; and
    while a database is away every request is.

    Args:
        clock: Monotonic seconds, for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether this one is written; it says how many like it were not."""
        kind, now = (record.name, record.levelno, str(record.msg)), self._clock()
        began, seen = self._kinds.get(kind, (now, 0))
        left_out = 0
        if now - began >= WINDOW:
            left_out, began, seen = max(0, seen - EACH), now, 0
        if len(self._kinds) >= _KINDS and kind not in self._kinds:
            self._kinds.clear()
        self._kinds[kind] = (began, seen + 1)
        if left_out:
            record.msg = f"{record.getMessage()} ({left_out} more like it were not logged)"
            record.args = ()
        return seen < EACH


def log_to_stderr() -> None:
    """Warnings and errors, sparingly, with their time."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Sparing())
    logging.basicConfig(
        level=logging.WARNING, handlers=[handler], format="%(asctime)s %(levelname)s %(message)s"
    )
