"""A guarded call that counts against the limit of whoever makes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from oncekey._core.call import Job
from oncekey._core.limiter import InsertLimiter

__all__ = ["Counted"]


class Counted(NamedTuple):
    """A guarded call, and the limit that holds for it."""

    job: Job
    limiter: InsertLimiter | None
    payer: str

    def wait(self) -> int | None:
        """Seconds until this caller may make a new key; known keys are never held up."""
        return None if self.limiter is None else self.limiter.retry_after(self.payer)

    @contextlib.contextmanager
    def counted(self, handler: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        """Count a new key before it is claimed, and give that back if the handler did not run."""
        limiter = self.limiter
        if limiter is None:
            yield handler
            return
        ran = False

        def runs(*args: Any, **kwargs: Any) -> Any:
            nonlocal ran
            ran = True
            return handler(*args, **kwargs)

        limiter.count(self.payer)
        try:
            yield runs
        finally:
            if not ran:
                limiter.count(self.payer, -1)
