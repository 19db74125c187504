"""One event: its lifeline with each copy's arrival, its body, and what can be done with it."""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

from oncekey.inbox.models import (
    Duplicate,
    Event,
    EventDetail,
    Outcome,
    event_number,
    event_time,
)
from oncekey.server.endpoints import ApiError, check_id, known_targets
from oncekey.server.pages.bodies import SHOWN, Line, compared, readable
from oncekey.server.pages.desk import HOME, Desk, RefusedError, page
from oncekey.server.views import hint

if TYPE_CHECKING:
    from oncekey.server.gateway import Gateway

__all__ = ["routes"]


def routes(gateway: Gateway) -> list[Route]:
    """Of one event."""
    return [
        page(gateway, "/events/{id}", event),
        page(gateway, "/events/{id}/body", body),
        page(gateway, "/events/{id}/replay", do_replay, "operate"),
        page(gateway, "/events/{id}/discard", do_discard, "operate"),
    ]


@dataclass(frozen=True, slots=True)
class Moment:
    """One point of the lifeline."""

    at: int
    look: str
    icon: str
    title: str
    text: str = ""


async def _detail(desk: Desk) -> EventDetail:
    try:
        number = check_id(desk.request.path_params["id"])
    except ApiError:
        raise RefusedError(404, "There is no such event.") from None
    found = await desk.gateway.inbox.event(number)
    if found is None:
        raise RefusedError(404, "There is no such event: it may be older than what is kept.")
    return found


async def event(desk: Desk) -> Response:
    """The page."""
    found = await _detail(desk)
    one = found.event
    text, is_text = readable(one.body)
    return desk.show(
        "event.html",
        here="events",
        event=one,
        detail=found,
        hint=hint,
        lifeline=_lifeline(found),
        comparison=await _comparison(desk, found),
        text=text[:SHOWN],
        cut=len(text) > SHOWN,
        is_text=is_text,
        copies=_copies_of(desk, one),
        can_replay=desk.session.person.may("operate"),
        moment=await desk.gateway.inbox.now(),
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The first copy beside one that differs.

    Attributes:
        number: Which copy; the first is 1.
        copy: That copy.
        text: What it says.
        lines: In which lines it differs; ``None``: too long to compare.
        others: The numbers of all copies that differ.
    """

    number: int
    copy: Duplicate
    text: str
    lines: list[Line] | None
    others: list[int]


async def _comparison(desk: Desk, found: EventDetail) -> Comparison | None:
    """With the copy that the address names, else with the first that differs, if any does."""
    differing = {number: copy for number, copy in enumerate(found.duplicates, 2) if not copy.same}
    if not differing:
        return None
    asked = desk.query("copy", 9)
    number = int(asked) if asked.isascii() and asked.isdigit() else 0
    number = number if number in differing else min(differing)
    body = differing[number].body or b""
    lines = await asyncio.to_thread(compared, found.event.body, body)  # it may take a moment
    return Comparison(number, differing[number], readable(body)[0][:SHOWN], lines, list(differing))


def _lifeline(found: EventDetail) -> list[Moment]:
    """What happened to an event, oldest first."""
    one = found.event
    arrived = event_time(event_number(one.id))
    targets = ", ".join(dict.fromkeys(delivery.target for delivery in found.deliveries))
    points = [
        Moment(arrived, "new", "↓", "Received and verified", f"from {one.source}"),
        Moment(arrived, "new", "●", "Committed", f"new event, for {targets or 'no target'}"),
    ]
    for number, copy in enumerate(found.duplicates, 2):
        same = "same body" if copy.same else "with another body: the first one counts"
        points.append(
            Moment(copy.at, "copy" if copy.same else "warn", "⊘", f"Copy {number} stopped", same)
        )
    looks = {
        "delivered": ("good", "✓"),
        "dead": ("bad", "✕"),
        "discarded": ("", "⌫"),
        "lost": ("warn", "?"),
    }
    for attempt in found.attempts:
        look, icon = looks.get(str(attempt.outcome), ("warn", "↻"))
        took = "" if attempt.outcome is Outcome.LOST else f"{attempt.ms} ms"
        known = str(attempt.status) in attempt.error  # "HTTP 401"
        status = f"status {attempt.status}" if attempt.status and not known else ""
        told = ", ".join(filter(None, [took, status, attempt.error]))
        points.append(Moment(attempt.at, look, icon, f"{attempt.target}: {attempt.outcome}", told))
    points += [Moment(act.at, "act", "✎", act.action, f"by {act.actor}") for act in found.actions]
    return sorted(points, key=lambda point: point.at)


def _copies_of(desk: Desk, one: Event) -> list[tuple[str, str]]:
    """What can be pasted elsewhere: each with its name."""
    api = f"{desk.base}{HOME}/api/v1/events/{one.id}"
    bearer = '-H "Authorization: Bearer $ONCEKEY_TOKEN"'
    gateway = f"--gateway {shlex.quote(desk.base)}"
    curl = f"curl -X POST {bearer} {shlex.quote(api + '/replay')}"
    fixture = (
        "import pytest\n\n\n@pytest.fixture\n"
        f"def {_identifier(one.type)}_event() -> bytes:\n"
        f'    """{one.source} sent this as {one.id}."""\n'
        f"    return {one.body!r}\n"
    )
    return [
        ("curl: replay it", curl),
        ("curl: read it", f"curl {bearer} {shlex.quote(api)}"),
        ("oncekey: replay it", f"oncekey replay {one.id} {gateway}"),
        ("oncekey: read it", f"oncekey event {one.id} {gateway}"),
        ("pytest fixture", fixture),
    ]


def _identifier(kind: str) -> str:
    name = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in kind)
    return name.strip("_").lower() if name[:1].isalpha() else "webhook"


async def body(desk: Desk) -> Response:
    """The raw bytes, to be saved: no browser shows them."""
    found = await _detail(desk)
    headers = {"Content-Disposition": f'attachment; filename="{found.event.id}.bin"'}
    return Response(found.event.body, 200, headers, "application/octet-stream")


async def do_replay(desk: Desk) -> Response:
    """Deliver it again, to all or to one."""
    found = await _detail(desk)
    target = desk.sent().one("target")
    names = known_targets(desk.gateway, [target] if target else None)
    queued = await desk.gateway.inbox.replay(found.event.id, names, actor=desk.session.person.name)
    return desk.go(f"{HOME}/events/{found.event.id}", "replayed" if queued else "busy", queued)


async def do_discard(desk: Desk) -> Response:
    """Give its deliveries up."""
    found = await _detail(desk)
    gone = await desk.gateway.inbox.discard(found.event.id, actor=desk.session.person.name)
    return desk.go(f"{HOME}/events/{found.event.id}", "discarded", gone)
