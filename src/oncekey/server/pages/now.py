"""Now: what came in, what was stopped, what got through, and what does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from starlette.responses import Response
from starlette.routing import Route

from oncekey.errors import PolicyError
from oncekey.inbox.filters import Filter
from oncekey.inbox.models import Count
from oncekey.server.charts import Chart, Series, bars, lines, per_minute
from oncekey.server.pages.desk import HOME, Desk, page
from oncekey.server.percentiles import ATTEMPTS, LATE, PERCENTS, by_minute, said
from oncekey.server.probe import send_copies
from oncekey.server.views import span_view

if TYPE_CHECKING:
    from oncekey.server.gateway import Gateway

__all__ = ["routes"]

MINUTES: Final = 60


def routes(gateway: Gateway) -> list[Route]:
    """Of the first page."""
    return [
        page(gateway, "", now),
        page(gateway, "/send-copies", do_send_copies, "operate"),
    ]


async def now(desk: Desk) -> Response:
    """The first page."""
    gateway, inbox = desk.gateway, desk.gateway.inbox
    moment = await inbox.now()
    since = moment - moment % 60_000 - (MINUTES - 1) * 60_000
    counts = await inbox.counts(since)
    targets = await gateway.target_views()
    sources = await gateway.source_views()
    latest = await inbox.search(Filter(), limit=5)
    return desk.show(
        "now.html",
        here="now",
        totals=_totals(counts),
        charts=_charts(counts, since),
        targets=targets,
        sources=sources,
        waiting=sum(one["waiting"] for one in targets),
        dead=sum(one["dead"] for one in targets),
        oldest=min((one["oldest_at"] for one in targets if one["oldest_at"]), default=None),
        latest=latest.items,
        moment=moment,
        base=desk.base,
        can_send=desk.session.person.may("operate") and bool(sources),
    )


def _totals(counts: list[Count]) -> dict[str, int]:
    kinds = ("received", "duplicate", "delivered", "failed", "dead", "rejected")
    found: dict[str, int] = {kind: 0 for kind in kinds}  # noqa: C420 - of any kind, later
    for one in counts:
        found[one.kind] = found.get(one.kind, 0) + one.n
    return found


def _charts(counts: list[Count], since: int) -> list[Chart]:
    def values(kind: str) -> list[float]:
        return per_minute(counts, kind, since, MINUTES)

    return [
        bars("Received", since, [Series("received", "new", values("received"))]),
        bars("Duplicates stopped", since, [Series("copies", "copy", values("duplicate"))]),
        bars("Delivered", since, [Series("delivered", "good", values("delivered"))]),
        bars(
            "Failing",
            since,
            [Series("failed", "warn", values("failed")), Series("dead", "bad", values("dead"))],
        ),
        _durations("An attempt took", counts, ATTEMPTS, since),
        _durations("From arrival to delivery", counts, LATE, since),
    ]


def _durations(title: str, counts: list[Count], kinds: Sequence[str], since: int) -> Chart:
    found = by_minute(counts, kinds, since, MINUTES)
    series = [Series(f"p{percent}", f"p{percent}", found[percent]) for percent in PERCENTS]
    whole = span_view(counts, kinds)
    values = (whole["p50"], whole["p95"], whole["p99"])
    legend = [f"{one.name} {said(ms)}" for one, ms in zip(series, values, strict=True)]
    return lines(title, since, series, legend)


async def do_send_copies(desk: Desk) -> Response:
    """Send five copies of one signed event to a source, at the same time."""
    name = desk.sent().one("source")
    source = desk.gateway.settings.sources.get(name)
    if source is None:
        raise PolicyError("there is no such source: choose one of the list")
    found = await send_copies(desk.gateway, source)
    await desk.gateway.inbox.record("send copies", name, found, actor=desk.session.person.name)
    return desk.go(f"{HOME}/events/{found}" if found else HOME, "sent")
