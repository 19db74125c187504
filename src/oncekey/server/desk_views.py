"""What the API says of things that the dashboard shows beside events: see ``views``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from oncekey.inbox.models import EventDetail
from oncekey.operate import Inspection
from oncekey.server.views import body_text, when

__all__ = [
    "ClaimView",
    "CopyView",
    "FreedView",
    "ProxyView",
    "SavedView",
    "claim_view",
    "copy_views",
    "proxy_view",
]


class CopyView(TypedDict):
    """A copy of an event that was stopped; with its body, if that was another than the first's."""

    number: int
    at: str | None
    same: bool
    size: int | None
    body: str | None
    body_encoding: str | None


class ProxyView(TypedDict):
    """A route of a proxy, and what its requests were answered since this node started."""

    name: str
    path: str
    upstream: str
    answers: dict[str, int]


class ClaimView(TypedDict):
    """A claim of whatever uses the store; times in seconds, below 0 once they are over."""

    digest: str
    scope: str
    situation: str
    attempts: int
    age: float | None
    lease_left: float | None
    retry: str


class FreedView(TypedDict):
    """A claim that was taken from its worker."""

    digest: str


class SavedView(TypedDict):
    """A search that somebody gave a name."""

    name: str
    q: str


def copy_views(found: EventDetail) -> list[CopyView]:
    """The copies of an event in the order of their arrival; the event itself is number 1."""
    shown: list[CopyView] = []
    for number, one in enumerate(found.duplicates, 2):
        body, encoding = (None, None) if one.body is None else body_text(one.body)
        shown.append(
            {
                "number": number,
                "at": when(one.at),
                "same": one.same,
                "size": None if one.body is None else len(one.body),
                "body": body,
                "body_encoding": encoding,
            }
        )
    return shown


def proxy_view(one: Mapping[str, Any]) -> ProxyView:
    """A route of a proxy."""
    return {
        "name": one["name"],
        "path": one["path"],
        "upstream": one["upstream"],
        "answers": dict(one["answers"]),
    }


def claim_view(one: Inspection) -> ClaimView:
    """A claim that nobody finishes."""
    return {
        "digest": one.digest,
        "scope": one.scope,
        "situation": one.situation,
        "attempts": one.attempts,
        "age": one.age,
        "lease_left": one.lease_left,
        "retry": one.retry,
    }
