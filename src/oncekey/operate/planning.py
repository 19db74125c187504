"""``plan``: the memory, disk and writes that a load needs, from bytes a key that were measured.

``measured.json`` beside this file has the bytes; it is made by ``benchmarks/bytes_a_key.py`` with
real servers, and says when and with which versions.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

from oncekey.errors import PolicyError
from oncekey.policy import Duration, milliseconds

__all__ = ["Plan", "measured", "plan"]

LEASE_AND_SWEEP: Final = 120.0
"""Seconds that a record outlives its time to live, about: grace, and sweeping in small steps."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a load needs of one backend.

    Attributes:
        backend: ``memory``, ``sqlite``, ``postgresql`` or ``redis``.
        keys: How many records there are at a time.
        memory_bytes: Memory for them; 0 where they lie on disk.
        disk_bytes: Disk for them, at rest; for Redis its log, just rewritten.
        written_bytes: Bytes written to disk in a second.
        commits: Commits in a second, each a sync to disk unless callers share it.
        note: What to know beside the numbers.
    """

    backend: str
    keys: int
    memory_bytes: int
    disk_bytes: int
    written_bytes: int
    commits: int
    note: str


_NOTES: Final = {
    "memory": "in each process; nothing survives it",
    "sqlite": "callers of one process that come at once share a commit",
    "postgresql": "with its indexes and the room that updates need; WAL is what is written, and "
    "backups or replicas get it too",
    "redis": "memory without fragmentation and replicas; the log grows to a multiple before it is "
    "rewritten, and a rewrite can need twice the memory",
}


def plan(rate: float, ttl: Duration, size: int = 200) -> list[Plan]:
    """What each backend needs for a load.

    Args:
        rate: New keys in a second. Duplicates are read and write nothing.
        ttl: How long a key is remembered.
        size: How long an answer is, in bytes.

    Raises:
        PolicyError: A number is below 0, or the time to live is not a duration.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise PolicyError(f"rate must be new keys in a second, above 0, got {rate!r}")
    if size < 0:
        raise PolicyError(f"size must be bytes from 0, got {size!r}")
    seconds = milliseconds(ttl, "ttl") / 1000
    keys = math.ceil(rate * (seconds + LEASE_AND_SWEEP))
    plans = []
    for name, row in measured()["backends"].items():
        memory, disk, written = (
            _at(row["sizes"], row[part], size) for part in ("memory", "disk", "written")
        )
        plans.append(
            Plan(
                name,
                keys,
                math.ceil(keys * memory),
                math.ceil(keys * disk),
                math.ceil(rate * written),
                0 if name == "memory" else math.ceil(rate * 2),
                _NOTES[name],
            )
        )
    return plans


@cache
def measured() -> dict[str, Any]:
    """The table of bytes a key: when and how it was made, and the sizes of answers it has."""
    text = files("oncekey.operate").joinpath("measured.json").read_text("utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def _at(sizes: list[int], values: list[float], size: int) -> float:
    """What was measured, between two sizes by a line, past the last one by the last line."""
    place = next((n for n in range(1, len(sizes)) if size <= sizes[n]), len(sizes) - 1)
    low, high = sizes[place - 1], sizes[place]
    slope = (values[place] - values[place - 1]) / (high - low)
    return values[place - 1] + slope * (size - low)
