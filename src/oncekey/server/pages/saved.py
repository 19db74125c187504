"""Saved views: the searches that somebody gave a name. Each person has their own, on every node."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from starlette.responses import Response
from starlette.routing import Route

from oncekey.errors import PolicyError
from oncekey.inbox.filters import Filter
from oncekey.server.pages.desk import HOME, Desk, page

if TYPE_CHECKING:
    from oncekey.server.gateway import Gateway

__all__ = ["routes", "saved_views"]

MOST_VIEWS: Final = 20
MOST_NAME: Final = 40
_KEPT_MS: Final = 10 * 365 * 86_400_000


def routes(gateway: Gateway) -> list[Route]:
    """Of saving and forgetting."""
    return [
        page(gateway, "/events/views", do_save),
        page(gateway, "/events/views/forget", do_forget),
    ]


async def saved_views(desk: Desk) -> list[tuple[str, str]]:
    """Names and searches, in the order in which they were saved."""
    kept = await desk.gateway.inbox.get_note(_note(desk))
    return [(str(name), str(query)) for name, query in json.loads(kept or b"[]")]


def _note(desk: Desk) -> str:
    return f"views:{desk.session.person.name}"


async def _keep(desk: Desk, views: list[tuple[str, str]], action: str, name: str) -> None:
    inbox = desk.gateway.inbox
    await inbox.put_note(_note(desk), json.dumps(views).encode(), _KEPT_MS)
    await inbox.record(action, name, "", actor=desk.session.person.name)


async def do_save(desk: Desk) -> Response:
    """Save a search, in place of one of the same name."""
    form = desk.sent()
    name, query = form.one("name").strip(), str(Filter.parse(form.one("q")))
    if not 1 <= len(name) <= MOST_NAME or not name.isprintable():
        raise PolicyError(f"give the view a name of 1 to {MOST_NAME} characters")
    if not query:
        raise PolicyError("there is nothing to save: search for something first")
    views = await saved_views(desk)
    if name in dict(views):
        views = [(one, query if one == name else asked) for one, asked in views]
    elif len(views) < MOST_VIEWS:
        views.append((name, query))
    else:
        raise PolicyError(f"{MOST_VIEWS} views are saved already: forget one first")
    await _keep(desk, views, "save view", name)
    return desk.go(f"{HOME}/events?q={quote(query)}", "saved")


async def do_forget(desk: Desk) -> Response:
    """Forget one."""
    name = desk.sent().one("name").strip()
    views = [(one, query) for one, query in await saved_views(desk) if one != name]
    await _keep(desk, views, "forget view", name)
    return desk.go(f"{HOME}/events", "forgotten")
