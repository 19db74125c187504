"""Saved views: the searches that somebody gave a name. Each person has their own, on every node."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.responses import Response
from starlette.routing import Route

from oncekey.server.pages.desk import HOME, Desk, page
from oncekey.server.upkeep import forget_view, save_view

if TYPE_CHECKING:
    from oncekey.server.gateway import Gateway

__all__ = ["routes"]


def routes(gateway: Gateway) -> list[Route]:
    """Of saving and forgetting."""
    return [
        page(gateway, "/events/views", do_save),
        page(gateway, "/events/views/forget", do_forget),
    ]


async def do_save(desk: Desk) -> Response:
    """Save a search, in place of one of the same name."""
    form, inbox = desk.sent(), desk.gateway.inbox
    query = await save_view(inbox, desk.session.person, form.one("name"), form.one("q"))
    return desk.go(f"{HOME}/events?q={quote(query)}", "saved")


async def do_forget(desk: Desk) -> Response:
    """Forget one."""
    await forget_view(desk.gateway.inbox, desk.session.person, desk.sent().one("name").strip())
    return desk.go(f"{HOME}/events", "forgotten")
