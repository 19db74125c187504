"""Options of a guard. Durations become whole milliseconds here, once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from math import isfinite
from typing import Any, Literal, TypedDict

from oncekey.errors import OncekeyError, PolicyError
from oncekey.models import Terms

__all__ = [
    "Duration",
    "JournalPath",
    "OnCancel",
    "OnOutage",
    "Policy",
    "PolicyOptions",
    "check_errors",
    "check_names",
    "check_on_cancel",
    "check_on_outage",
    "check_seconds",
    "did_you_mean",
    "milliseconds",
]

Duration = int | float | timedelta
"""Seconds as a number, or a ``timedelta``."""

OnCancel = Literal["finish", "lease", "release"]
"""What becomes of a handler whose caller is cancelled."""

OnOutage = Literal["closed", "open"]
"""What a call gets whose store can't answer: an error, or to go on without the store."""

JournalPath = str | os.PathLike[str]
"""A directory on a local disk, for the journals of one store."""

DAY = 86_400


def milliseconds(value: Duration, name: str, *, least: int = 0) -> int:
    """Turn seconds or a ``timedelta`` into whole milliseconds.

    Raises:
        PolicyError: It is not a duration, or is shorter than ``least`` milliseconds.
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not isfinite(seconds):
        raise PolicyError(f"{name} must be seconds or a timedelta, got {value!r}")
    result = round(seconds * 1000)
    if result < least:
        raise PolicyError(f"{name} must be at least {least / 1000:g} s, got {seconds:g} s")
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How long things last and what a duplicate gets.

    Attributes:
        ttl: How long an answer is replayed.
        lease: How long a claim outlives a worker that died. A live worker renews it every
            third of this.
        wait: How long a duplicate waits for the first call's answer. 0: it is told at once
            that the call is in flight.
        max_waiters: How many duplicates of one key wait at a time in a process. One more is told at
            once that the call is in flight. ``None``: any number.
        max_run: How long a live worker may keep renewing. ``None``: as long as it lives.
        max_answer_bytes: Larger answers are not kept: the work still counts as done.
        compress_above: Longer answers are compressed with zlib, where that makes them shorter.
            ``None``: none is. Versions before this one can't read such an answer.
        cache_entries: How many answers of a function this process keeps at hand to replay without
            asking the store, of those that it recorded and that have at most 64 KiB. 0: none.
        cache_seconds: How long it keeps them.
        replay_errors: Types of errors that are the outcome of the work: such an error is recorded,
            and raised again for later callers. Other errors free the key.
        skew: How far past its end an answer still replays.
        remember_expired: How long an expired key is refused as expired before it is forgotten.
            0: an expired key is a fresh one.
        retry_safe: The handler may be run again after it was cancelled halfway. Off, a
            cancelled call keeps its claim until the lease ends, as its outcome is unknown.
        sticky: The first payload stays bound to a key after a failure, and ``ttl`` runs from
            the first claim.
    """

    ttl: Duration = DAY
    lease: Duration = 30
    wait: Duration = 60
    max_waiters: int | None = None
    max_run: Duration | None = None
    max_answer_bytes: int = 1_048_576
    compress_above: int | None = None
    cache_entries: int = 0
    cache_seconds: Duration = 60
    replay_errors: tuple[type[Exception], ...] = ()
    skew: Duration = 0
    remember_expired: Duration = 0
    retry_safe: bool = False
    sticky: bool = False

    def __post_init__(self) -> None:
        self.terms()
        milliseconds(self.wait, "wait")
        if self.max_run is not None:
            milliseconds(self.max_run, "max_run", least=1)
        if self.max_waiters is not None and self.max_waiters < 0:
            raise PolicyError(f"max_waiters can't be negative, got {self.max_waiters}")
        if self.max_answer_bytes < 0:
            raise PolicyError(f"max_answer_bytes can't be negative, got {self.max_answer_bytes}")
        if self.compress_above is not None and self.compress_above < 0:
            raise PolicyError(f"compress_above can't be negative, got {self.compress_above}")
        if self.cache_entries < 0:
            raise PolicyError(f"cache_entries can't be negative, got {self.cache_entries}")
        milliseconds(self.cache_seconds, "cache_seconds")
        if self.replay_errors != ():
            object.__setattr__(self, "replay_errors", check_errors(self.replay_errors))

    def but(self, options: Mapping[str, Any]) -> Policy:
        """The same policy with some options changed.

        Raises:
            PolicyError: There is no such option, or its value can't work.
        """
        names = [field.name for field in fields(self)]
        check_names(options, names, "")
        return replace(self, **options)

    def check_transactional(self) -> None:
        """Refuse options that a transaction can't keep.

        Raises:
            PolicyError: There is one.
        """
        if self.replay_errors:
            raise PolicyError(
                "replay_errors is not for transactions: an error rolls back all that was written, "
                "its record too. Leave it out; error_answer= of transaction() and of "
                "IdempotencyStore.wrap records an answer for an error"
            )
        if self.cache_entries:
            raise PolicyError(
                "cache_entries is not for transactions: an answer counts only when your "
                "transaction commits. Leave it out, or write cache_entries=0 here"
            )

    def terms(self) -> Terms:
        """The part of the policy that stores see."""
        return Terms(
            lease_ms=milliseconds(self.lease, "lease", least=20),
            ttl_ms=milliseconds(self.ttl, "ttl", least=1),
            skew_ms=milliseconds(self.skew, "skew"),
            remember_ms=milliseconds(self.remember_expired, "remember_expired"),
            sticky=self.sticky,
        )


class PolicyOptions(TypedDict, total=False):
    """The options of ``Policy``, given singly: ``@once(key="order_id", ttl=60)``."""

    ttl: Duration
    lease: Duration
    wait: Duration
    max_waiters: int | None
    max_run: Duration | None
    max_answer_bytes: int
    compress_above: int | None
    cache_entries: int
    cache_seconds: Duration
    replay_errors: tuple[type[Exception], ...]
    skew: Duration
    remember_expired: Duration
    retry_safe: bool
    sticky: bool


def check_errors(given: object) -> tuple[type[Exception], ...]:
    """The types of errors that are outcomes.

    Raises:
        PolicyError: One is no such type, or stands for nearly all.
    """
    kinds = (given,) if isinstance(given, type) else tuple(given)  # type: ignore[arg-type]
    for kind in kinds:
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            raise PolicyError(
                f"replay_errors takes types of exceptions, as in replay_errors=(CardDeclined,), "
                f"got {kind!r}"
            )
        if kind is Exception or issubclass(kind, OncekeyError):
            why = "stands for any failure" if kind is Exception else "is oncekey's own"
            raise PolicyError(
                f"replay_errors can't name {kind.__name__}, which {why}: name the errors that are "
                "final, such as a declined card"
            )
    return kinds


def check_names(given: Iterable[str], names: Iterable[str], whose: str) -> None:
    """Refuse an option that is none, with the one that was meant.

    Raises:
        PolicyError: There is no such option.
    """
    known = list(names)
    for name in given:
        if name not in known:
            there = f"{whose} has no option" if whose else "there is no option"
            raise PolicyError(f"{there} {name!r}{did_you_mean(name, known)} {', '.join(known)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question after the name that is nearest to a wrong one; empty if none is near."""
    from difflib import get_close_matches

    names = list(known)
    near = [one for one in names if name.startswith(f"{one}_")]  # ttl_seconds
    near = near or get_close_matches(name, names, 1, 0.6)
    return f"; did you mean {near[0]!r}? There are" if near else "; there are"


def check_seconds(**given: object) -> None:
    """Refuse a ``timedelta`` where a number of seconds is wanted, as the name of the option says.

    Raises:
        PolicyError: One is none.
    """
    for name, value in given.items():
        if isinstance(value, timedelta):
            raise PolicyError(
                f"{name} is a number of seconds, got a timedelta: write "
                f"{name}={value.total_seconds():g}"
            )


def check_on_cancel(value: OnCancel) -> OnCancel:
    """Return ``value`` if it is one.

    Raises:
        PolicyError: It is not.
    """
    if value not in ("finish", "lease", "release"):
        raise PolicyError(f"on_cancel must be 'finish', 'lease' or 'release', got {value!r}")
    return value


def check_on_outage(value: object) -> None:
    """Raise unless ``value`` is a word for what becomes of calls in an outage.

    Raises:
        PolicyError: It is not.
    """
    if value not in (None, "closed", "open"):
        raise PolicyError(f"on_outage must be 'closed' or 'open', got {value!r}")
