"""A look before a leap: what an action would do, kept under an id that lets it be done once.

The id is bound to who asked and to what was shown. If that is no longer so when the action is
asked for, it is not done.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from typing import Any, Final

from oncekey.inbox.abc import AsyncInbox
from oncekey.server.endpoints import ApiError

__all__ = ["SECONDS", "Previews"]

SECONDS: Final = 300
"""How long an id can be used."""


class Previews:
    """Ids of previews, on every node.

    Args:
        inbox: Where they are kept, as hashes.
    """

    def __init__(self, inbox: AsyncInbox) -> None:
        self._inbox = inbox

    async def keep(self, whose: str, asked: Mapping[str, Any], shown: Any) -> str:
        """Take note of what somebody was shown; gives the id.

        Args:
            whose: Who, by what they are known by, and what they may do.
            asked: What they want to have done.
            shown: What they saw of it.
        """
        made = f"pre_{secrets.token_urlsafe(18)}"
        told = {"whose": whose, "asked": dict(asked), "shown": _digest(shown)}
        await self._inbox.put_note(_name(made), json.dumps(told).encode(), SECONDS * 1000)
        return made

    async def take(self, whose: str, id: str) -> Taken:
        """What was asked for under an id, which is worth nothing afterwards.

        Raises:
            ApiError: Nobody was shown this, it was too long ago, done already, or somebody else's.
        """
        kept = await self._inbox.take_note(_name(id))
        told = json.loads(kept) if kept is not None else None
        if told is None or told["whose"] != whose:
            raise ApiError(
                409,
                "no such preview",
                f"it lasts {SECONDS} s, for one use, by who asked for it: ask for another",
            )
        return Taken(told["asked"], told["shown"])


class Taken:
    """What a preview was of."""

    def __init__(self, asked: dict[str, Any], shown: str) -> None:
        self.asked = asked
        self._shown = shown

    def check(self, shown: Any) -> None:
        """See that it would be shown alike now.

        Raises:
            ApiError: It would not.
        """
        if _digest(shown) != self._shown:
            raise ApiError(
                409, "it is no longer what was shown", "nothing was done: ask for another preview"
            )


def _digest(shown: Any) -> str:
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


def _name(id: str) -> str:
    return f"preview:{hashlib.sha256(id.encode('utf-8', 'surrogateescape')).hexdigest()}"
