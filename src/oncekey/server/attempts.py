"""Counters of attempts for ``/metrics``, which never fall while a node runs.

The inbox counts attempts a minute, those of every node and of consumers elsewhere. Of that a node
keeps what was added since it started: so its counters are whole whoever made the attempts, and an
old minute that the inbox forgets takes nothing from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from oncekey.inbox.abc import AsyncInbox
from oncekey.server.percentiles import ATTEMPTS, LATE

__all__ = ["Attempts", "Place", "bound"]

_MINUTE: Final = 60_000
_OPEN_MS: Final = 10 * _MINUTE
"""For so long a minute may still get more: clocks differ, and an inbox that was away is told late.
"""

Place = tuple[str, str, int]
"""What is counted: the kind, the target, and the bucket of how long it took."""


def bound(bucket: int) -> float:
    """The seconds that nothing in a bucket exceeds: see ``bucket_of``."""
    return (math.exp2((bucket + 0.5) / 4) - 1) / 1000


@dataclass(frozen=True, slots=True)
class _State:
    """How far it was counted.

    Attributes:
        since: The first minute that may still get more.
        seen: What each of these minutes had.
        totals: All that was ever added.
    """

    since: int
    seen: dict[tuple[int, Place], int] = field(default_factory=dict)
    totals: Counter[Place] = field(default_factory=Counter)

    def as_text(self) -> str:
        seen = [[minute, *place, number] for (minute, place), number in self.seen.items()]
        totals = [[*place, number] for place, number in self.totals.items()]
        return json.dumps([self.since, seen, totals])

    @classmethod
    def of(cls, text: str) -> Self:
        since, seen, totals = json.loads(text)
        return cls(
            since,
            {(minute, (kind, name, bucket)): n for minute, kind, name, bucket, n in seen},
            Counter({(kind, name, bucket): n for kind, name, bucket, n in totals}),
        )


class Attempts:
    """What attempts were made since this node started.

    Args:
        file: What the workers of a node share. Whichever is asked goes on from there, so all of
            them say the same, and one that takes the place of another forgets nothing. ``None``:
            there are no others.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._state: _State | None = None
        self._turn = asyncio.Lock()

    async def look(self, inbox: AsyncInbox, started_at: float) -> Counter[Place]:
        """All that was counted so far.

        Args:
            inbox: Where it is counted.
            started_at: When this node started, in seconds since 1970.

        Raises:
            StoreError: The inbox can't be read.
        """
        async with self._turn:
            now = int(time.time() * 1000)
            first = _State(max(int(started_at * 1000), now - _OPEN_MS) // _MINUTE * _MINUTE)
            state = self._read() or self._state or first
            # What was added to a state since it was written is the same whoever adds it: that two
            # workers do at once, or that one writes over what another wrote, changes no sum.
            seen, totals = dict(state.seen), Counter(state.totals)
            for one in await inbox.counts(state.since):
                if one.kind in ATTEMPTS or one.kind in LATE:
                    place = (one.kind, one.name, one.bucket)
                    more = one.n - seen.get((one.minute, place), 0)
                    if more > 0:
                        totals[place] += more
                        seen[one.minute, place] = one.n
            since = max(state.since, (now - _OPEN_MS) // _MINUTE * _MINUTE)
            self._state = _State(
                since, {which: n for which, n in seen.items() if which[0] >= since}, totals
            )
            self._write(self._state)
            return totals

    def _read(self) -> _State | None:
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError):
                return _State.of(self._file.read_text("utf-8"))
        return None

    def _write(self, state: _State) -> None:
        if self._file is not None:
            fresh = self._file.with_suffix(f".{os.getpid()}")
            with contextlib.suppress(OSError):  # a full disk: told all the same
                fresh.write_text(state.as_text(), "utf-8")
                os.replace(fresh, self._file)
