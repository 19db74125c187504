"""Whether a guard that somebody put at one route covers the methods of that route.

A guard in front of a whole application lets most methods pass, and that is meant. One that stands
at a single route and covers none of its methods is a mistake, which nothing else would show.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from oncekey.http.settings import GUARDED, Settings

__all__ = ["Passing", "uncovered"]

logger = logging.getLogger("oncekey")

SAFE: Final = frozenset({"CONNECT", "GET", "HEAD", "OPTIONS", "TRACE"})  # they change nothing


def uncovered(methods: Iterable[str], settings: Settings) -> list[str]:
    """The methods of a route that change something, and that its guard lets pass.

    None where the owner has said which methods are guarded.
    """
    if settings.methods is not GUARDED:
        return []
    return sorted({method.upper() for method in methods} - SAFE - set(GUARDED))


class Passing:
    """Tells once, in the log, that a guard at one route has let a request pass for its method."""

    def __init__(self, settings: Settings) -> None:
        self._told = settings.methods is not GUARDED

    def tell(self, method: str, path: str, keyed: bool) -> None:
        """Look at a request whose method is not guarded.

        Args:
            method: Its method.
            path: Its path.
            keyed: It has a key, so that its client takes it for guarded.
        """
        if self._told or not (keyed or method not in SAFE):
            return
        self._told = True
        logger.warning(
            "%s %s ran unguarded, though its route has a guard: that covers %s. Name the methods "
            "to guard, methods=[%r]; or methods=%r, if this one is to pass. Said once for a guard",
            method,
            ascii(path[:100]),
            " and ".join(GUARDED),
            method,
            list(GUARDED),
        )
