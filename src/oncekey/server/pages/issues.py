"""Issues: failures that are alike, and the replay of all of them at a rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from starlette.responses import Response
from starlette.routing import Route

from oncekey.errors import PolicyError
from oncekey.inbox.filters import Filter
from oncekey.inbox.models import DeliveryState
from oncekey.server.endpoints import MOST_RATE, issue_query
from oncekey.server.pages.desk import HOME, Desk, page
from oncekey.server.views import hint

if TYPE_CHECKING:
    from oncekey.server.gateway import Gateway

__all__ = ["routes"]

RATE: Final = 20.0


def routes(gateway: Gateway) -> list[Route]:
    """Of issues and bulk replays."""
    return [
        page(gateway, "/issues", issues),
        page(gateway, "/issues/replay", preview, "operate"),
        page(gateway, "/issues/replay", do_begin, "operate"),
        page(gateway, "/issues/cancel", do_cancel, "operate"),
    ]


async def issues(desk: Desk) -> Response:
    """What fails, and the replays under way."""
    inbox = desk.gateway.inbox
    found = await inbox.issues()
    return desk.show(
        "issues.html",
        here="issues",
        issues=[(one, issue_query(one), hint(one.status, one.target)) for one in found],
        bulks=await inbox.bulk_replays(10),
        moment=await inbox.now(),
        can_replay=desk.session.person.may("operate"),
    )


async def preview(desk: Desk) -> Response:
    """The dry run: the search once more, and how many deliveries it means."""
    asked = Filter.parse(desk.query("q"))
    rate = _rate(desk.query("rate") or str(RATE))
    count = await desk.gateway.inbox.count_replays(asked)
    return desk.show(
        "bulk.html",
        here="issues",
        query=str(asked),
        count=count,
        made=asked.state is DeliveryState.DELIVERED,
        rate=rate,
        seconds=count / rate,
        most=MOST_RATE,
    )


async def do_begin(desk: Desk) -> Response:
    """Begin what the dry run showed."""
    form = desk.sent()
    asked, rate = Filter.parse(form.one("q")), _rate(form.one("rate"))
    counted = form.one("count")
    count = await desk.gateway.inbox.count_replays(asked)
    if counted != str(count):  # it is another question by now
        return desk.go(f"{HOME}/issues/replay?q={quote(str(asked))}&rate={rate:g}")
    await desk.gateway.inbox.begin_bulk_replay(asked, rate=rate, actor=desk.session.person.name)
    return desk.go(f"{HOME}/issues", "bulk")


async def do_cancel(desk: Desk) -> Response:
    """Stop one."""
    number = desk.sent().one("id", 18)
    if not number.isascii() or not number.isdigit():
        raise PolicyError("which bulk replay?")
    await desk.gateway.inbox.cancel_bulk_replay(int(number), actor=desk.session.person.name)
    return desk.go(f"{HOME}/issues", "cancelled")


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0
    if not 0 < rate <= MOST_RATE:
        raise PolicyError(f"give a rate of more than 0 and at most {MOST_RATE} a second")
    return rate
