"""The state machine for authors of stores: read a record, decide with these, write the result."""

from oncekey._core.transitions import (
    CLAIMS,
    SETTLEMENTS,
    Act,
    Event,
    Situation,
    claim,
    mark,
    mark_fence,
    settle,
    situate,
)

__all__ = [
    "CLAIMS",
    "SETTLEMENTS",
    "Act",
    "Event",
    "Situation",
    "claim",
    "mark",
    "mark_fence",
    "settle",
    "situate",
]
