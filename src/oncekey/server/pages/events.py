"""Events: a search in the address, rows that never shift, and a replay of those that are chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from starlette.responses import Response
from starlette.routing import Route

from oncekey.errors import PolicyError
from oncekey.inbox.filters import Filter
from oncekey.inbox.models import DeliveryState, Page
from oncekey.server.endpoints import check_id
from oncekey.server.pages.desk import HOME, Desk, page
from oncekey.server.upkeep import views_of

if TYPE_CHECKING:
    from oncekey.server.gateway import Gateway

__all__ = ["routes"]

ROWS: Final = 50
MOST_CHOSEN: Final = 500
VIEWS: Final = (
    ("All", ""),
    ("Waiting", "state:waiting"),
    ("Dead", "state:dead"),
    ("Last hour", "age:<1h"),
)


def routes(gateway: Gateway) -> list[Route]:
    """Of the list of events."""
    return [
        page(gateway, "/events", events),
        page(gateway, "/events/replay", do_replay, "operate"),
    ]


async def events(desk: Desk) -> Response:
    """The list."""
    query, after = desk.query("q"), desk.query("after") or None
    wrong, asked = "", Filter()
    try:
        asked = Filter.parse(query)
        found = await desk.gateway.inbox.search(asked, limit=ROWS, after=after)
    except PolicyError as error:
        wrong, found = str(error), Page(())
    more = f"{HOME}/events?q={quote(query)}&after={quote(found.next)}" if found.next else ""
    return desk.show(
        "events.html",
        422 if wrong else 200,
        here="events",
        query=query,
        wrong=wrong,
        events=found.items,
        views=VIEWS,
        saved=await views_of(desk.gateway.inbox, desk.session.person),
        more=more,
        first=not after,
        base=desk.base,
        moment=await desk.gateway.inbox.now(),
        source=next(iter(desk.gateway.settings.sources.values()), None),
        can_replay=desk.session.person.may("operate"),
        can_replay_all=asked.state in (DeliveryState.DEAD, DeliveryState.DELIVERED),
    )


async def do_replay(desk: Desk) -> Response:
    """Replay the rows that were chosen."""
    form = desk.sent()
    chosen = form.all("id")
    if not 1 <= len(chosen) <= MOST_CHOSEN:
        raise PolicyError(f"choose 1 to {MOST_CHOSEN} events")
    queued = 0
    for one in chosen:
        queued += await desk.gateway.inbox.replay(check_id(one), actor=desk.session.person.name)
    done = "replayed" if queued else "busy"
    return desk.go(f"{HOME}/events?q={quote(form.one('q'))}", done, queued)
