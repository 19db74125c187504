"""Events of a type that nobody handles: never in silence, and refused where that is asked for."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable
from typing import Final

from oncekey.instrument.events import EventKind, emit

__all__ = ["TypesSeen"]

logger = logging.getLogger("oncekey")

MOST_TOLD: Final = 100  # types: a sender that makes them up must not fill a log
_SHOWN: Final = 64


class TypesSeen:
    """Tells once of each type that came and has no handler.

    Args:
        title: The provider's, for the log.
        operation: For the events.
        strict: Whether such events are refused, so that the sender keeps them.
    """

    def __init__(self, title: str, operation: str, *, strict: bool) -> None:
        self._title, self._operation, self._strict = title, operation, strict
        self._told: set[str] = set()

    def unhandled(self, kind: str, handled: Iterable[str]) -> str:
        """The outcome of an event of such a type: ``ignored``, or ``unhandled`` if that is strict.

        Args:
            kind: The type as it was sent, empty if there is none.
            handled: The types that have a handler.
        """
        emit(EventKind.IGNORED, operation=self._operation)
        shown = kind[:_SHOWN]
        if shown not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(shown)
            near = difflib.get_close_matches(shown, handled, 1)
            # As ASCII literals: what a sender wrote must not write lines of its own.
            logger.warning(
                "no handler takes %s events of type %a%s: %s. Add @receiver.on(%a), or "
                "@receiver.on() for all other types",
                self._title,
                shown,
                f"; there is one for {near[0]!a}, a typing error?" if near else "",
                "the sender is told to retry them" if self._strict else "they are ignored",
                shown,
            )
        return "unhandled" if self._strict else "ignored"
