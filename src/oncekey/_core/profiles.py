"""The rules of request-side profiles, and what their numbers are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from oncekey._core.limiter import InsertLimiter
from oncekey.abc import Clock
from oncekey.errors import PolicyError

__all__ = ["STRICT_KEY", "OnCancel", "Rules", "check_on_cancel"]

INSERT_WINDOWS = ((60 * 60, 60), (300 * 10, 10))  # 60/s over a minute, 300/s over ten seconds
READ_WINDOWS = ((300 * 60, 60), (1500 * 10, 10))  # of handlers that change nothing
STRICT_KEY = re.compile(r"[A-Za-z0-9_.:-]{16,255}\Z")

OnCancel = Literal["finish", "lease", "release"]
"""What becomes of a handler whose caller is cancelled."""

_PROFILES: Final = {"classic": False, "adcp-3.2": True}


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules that differ between the profiles; each can be set alone."""

    require_principal: bool
    reject_expired: bool
    limit_inserts: bool
    strict_keys: bool
    mark_replays: bool
    bind_operation: bool

    @classmethod
    def of(cls, profile: str, *chosen: bool | None) -> Rules:
        """The rules of ``profile``, but for those that are chosen.

        Raises:
            PolicyError: There is no such profile.
        """
        if profile not in _PROFILES:
            raise PolicyError(f"profile must be one of {', '.join(_PROFILES)}, got {profile!r}")
        base = _PROFILES[profile]
        return cls(*(base if value is None else value for value in chosen))

    def limiters(self, clock: Clock) -> tuple[InsertLimiter, InsertLimiter] | None:
        """What counts the new keys of handlers, and of those that change nothing."""
        if not self.limit_inserts:
            return None
        return InsertLimiter(INSERT_WINDOWS, clock), InsertLimiter(READ_WINDOWS, clock)


def check_on_cancel(value: OnCancel) -> OnCancel:
    """Return ``value`` if it is one.

    Raises:
        PolicyError: It is not.
    """
    if value not in ("finish", "lease", "release"):
        raise PolicyError(f"on_cancel must be 'finish', 'lease' or 'release', got {value!r}")
    return value
