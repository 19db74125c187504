"""What this node did since it started: of one process, or of the workers that share its port.

Each worker writes its own figures to a file that the others read, so that /metrics and the pages
say the same whichever of them answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from oncekey.server.attempts import Attempts

__all__ = ["Figures", "Own"]

EVERY: Final = 1.0
_SEPARATOR: Final = "\t"  # in no name of a source


@dataclass(frozen=True, slots=True)
class Own:
    """The figures of one process, or the sum of several.

    Attributes:
        requests: How many requests, by source and outcome.
        running: Attempts under way, by target.
        breakers: ``open`` or ``trying``, by target; closed ones are left out.
        proxied: How many requests, by route of a proxy and class of the answer.
    """

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    running: Counter[str] = field(default_factory=Counter)
    breakers: dict[str, str] = field(default_factory=dict)
    proxied: Counter[tuple[str, str]] = field(default_factory=Counter)

    def plus(self, other: Own) -> Own:
        """Both together; an open breaker counts more than one that is being tried."""
        opened = [name for one in (self, other) for name in one.breakers if one.is_open(name)]
        breakers = {**self.breakers, **other.breakers, **dict.fromkeys(opened, "open")}
        return Own(
            self.requests + other.requests,
            self.running + other.running,
            breakers,
            self.proxied + other.proxied,
        )

    def is_open(self, name: str) -> bool:
        """Whether a target is left alone."""
        return self.breakers.get(name) == "open"

    def as_text(self) -> str:
        """As it is written to a file."""
        requests, proxied = (
            {_SEPARATOR.join(place): count for place, count in counts.items()}
            for counts in (self.requests, self.proxied)
        )
        return json.dumps([requests, self.running, self.breakers, proxied])

    @classmethod
    def of(cls, text: str) -> Own:
        """What a file says."""
        requests, running, breakers, proxied = json.loads(text)
        places: list[Any] = [
            {tuple(name.split(_SEPARATOR)): count for name, count in counts.items()}
            for counts in (requests, proxied)
        ]
        return cls(Counter(places[0]), Counter(running), breakers, Counter(places[1]))


class Figures:
    """The figures of a worker and of those beside it.

    Args:
        folder: Where each has its file. ``None``: there are no others.
        number: Which worker this is. One that takes the place of another counts on from there.

    Attributes:
        attempts: What attempts were made, by whomever.
    """

    def __init__(self, folder: Path | None = None, number: int = 0) -> None:
        self._folder = folder
        self._file = f"{number}.json"
        self._before = Own()
        self.attempts = Attempts(None if folder is None else folder / "attempts.kept")
        if folder is not None:
            last = self._read(folder / self._file)
            self._before = Own(last.requests, proxied=last.proxied)

    @staticmethod
    def _read(file: Path) -> Own:
        with contextlib.suppress(OSError, ValueError):
            return Own.of(file.read_text("utf-8"))
        return Own()  # it did not write any yet

    def together(self, own: Own) -> Own:
        """All that is known, with what this process has now.

        It is written first: what was told once is not less after this process was killed.
        """
        with contextlib.suppress(OSError):  # a full disk: told all the same
            self.write(own)
        total = self._before.plus(own)
        if self._folder is not None:
            for file in sorted(self._folder.glob("*.json")):
                if file.name != self._file:
                    total = total.plus(self._read(file))
        return total

    def write(self, own: Own) -> None:
        """Let the others know."""
        if self._folder is not None:
            file = self._folder / self._file
            fresh = file.with_suffix(".new")
            fresh.write_text(self._before.plus(own).as_text(), "utf-8")
            os.replace(fresh, file)

    async def keep_writing(self, own: Callable[[], Own]) -> None:
        """Write once a second what has changed; ends at once where there are no others."""
        last = ""
        while self._folder is not None:
            now = own()
            if (text := now.as_text()) != last:
                with contextlib.suppress(OSError):  # a full disk; the next second tells
                    self.write(now)
                    last = text
            await asyncio.sleep(EVERY)
