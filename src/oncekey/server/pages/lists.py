"""Rejected requests and the audit: plain lists, newest first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from starlette.responses import Response
from starlette.routing import Route

from oncekey.server.pages.desk import Desk, page
from oncekey.signatures.verdict import CODES

if TYPE_CHECKING:
    from oncekey.server.gateway import Gateway

__all__ = ["routes"]

ROWS: Final = 50
_ADVICE: Final = {
    **CODES,
    "no_such_source": "the address has no source of that name: see Sources for the right one",
    "body_too_large": "raise max_body_bytes of the source, if such bodies are expected",
    "too_many_bodies": "large bodies came slowly, and many at a time: look who sends them",
    "body_timeout": "the sender was too slow: raise body_timeout, or look at the network",
    "body_incomplete": "the sender hung up before its body was here",
    "limited": "one event came very often in a minute: look for a retry loop",
}


def routes(gateway: Gateway) -> list[Route]:
    """Of both."""
    return [page(gateway, "/rejected", rejected), page(gateway, "/audit", audit)]


async def rejected(desk: Desk) -> Response:
    """What became no event, with the cause and what to do about it."""
    found = await desk.gateway.inbox.rejected(limit=ROWS, after=desk.query("after") or None)
    return desk.show("rejected.html", here="rejected", advice=_ADVICE, **await _told(desk, found))


async def audit(desk: Desk) -> Response:
    """Who did what."""
    found = await desk.gateway.inbox.audit(limit=ROWS, after=desk.query("after") or None)
    return desk.show("audit.html", here="audit", **await _told(desk, found))


async def _told(desk: Desk, found: Any) -> dict[str, Any]:
    path = desk.request.url.path
    return {
        "rows": found.items,
        "more": f"{path}?after={quote(found.next)}" if found.next else "",
        "moment": await desk.gateway.inbox.now(),
        "first": not desk.query("after"),
    }
