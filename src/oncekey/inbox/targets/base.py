"""What a target is to the worker: something that an event is sent to, and that answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from oncekey.inbox.models import Delivery

__all__ = ["Answer", "Target"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What an attempt gave.

    Attributes:
        ok: The target has the event.
        status: Its own word for it: an HTTP status, the code a command ended with. 0: none.
        error: A short cause of a failure, the same for failures that are alike. No payload.
        note: More for people, cut short.
        retry_after_ms: When the target asked to be tried again.
        permanent: No retry can help: the delivery is given up at once.
        sick: The failure speaks against the target as a whole, not only against this event.
        settled: The target has finished the delivery itself, in a transaction of its own.
    """

    ok: bool
    status: int = 0
    error: str = ""
    note: str = field(default="", repr=False)
    retry_after_ms: int | None = None
    permanent: bool = False
    sick: bool = True
    settled: bool = False


@runtime_checkable
class Target(Protocol):
    """A plug-in: one file each in ``oncekey.inbox.targets``."""

    async def send(self, delivery: Delivery, timeout_ms: int) -> Answer:
        """Try to deliver, within the time. What it raises is a failure that may be retried."""
        ...

    async def aclose(self) -> None:
        """Close what was opened."""
        ...
