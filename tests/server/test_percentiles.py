"""Percentiles of durations: of the inbox's histograms, in charts, in the API and on Targets."""

from __future__ import annotations

import math
from dataclasses import replace

import httpx
import pytest
from tests.server.kit import bearer, deliver, sign_in
from tests.server.test_pages import Signed

from oncekey.inbox.models import Count, Outcome, Result, bucket_of
from oncekey.server.charts import Series, bars, lines
from oncekey.server.gateway import Gateway
from oncekey.server.percentiles import LATE, by_minute, percentile, said


def took(ms: int, n: int = 1, minute: int = 0, kind: str = "late") -> Count:
    """So many that took so long."""
    return Count(minute * 60_000, kind, "app", n, bucket_of(ms))


def test_a_percentile_is_what_so_many_did_not_exceed() -> None:
    """By rank, over all buckets; of nothing there is none."""
    counts = [took(10, 50), took(100, 45), took(1000, 4), took(10_000, 1)]
    assert [percentile(counts, percent) for percent in (50, 95, 99, 100)] == [10, 107, 1023, 9741]
    assert percentile([took(0)], 99) == 0
    assert percentile([], 50) is None


def test_minutes_without_any_are_gaps() -> None:
    """A minute in which nothing ended is no zero, and other kinds don't count."""
    counts = [took(10, minute=5), took(10, minute=7), took(999, minute=6, kind="delivered")]
    found = by_minute(counts, LATE, 5 * 60_000 + 1, 3)
    assert found[50][0] == found[99][2] == 10
    assert math.isnan(found[50][1])


def test_durations_are_said_as_people_do() -> None:
    """In the largest unit that they fill."""
    assert [said(ms) for ms in (0, 999, 1500, 90_000, 7_200_000)] == [
        "0 ms", "999 ms", "1.5 s", "1.5 min", "2 h",
    ]  # fmt: skip
    assert said(None) == said(math.nan) == "-"


def test_lines_have_gaps_and_a_table() -> None:
    """What is apart is drawn apart, a lone point as a dot; the table has what there is."""
    values = [1.0, 2.0, math.nan, 3.0, math.nan]
    chart = lines("Took", 0, [Series("p50", "p50", values)], ["p50 2 ms"])
    assert chart.svg.count("<polyline") == chart.svg.count("<circle") == 1
    assert chart.legend == [("p50", "p50 2 ms")]
    assert chart.rows == [["00:03", "3 ms"], ["00:01", "2 ms"], ["00:00", "1 ms"]]
    empty = lines("Took", 0, [Series("p50", "p50", [math.nan])], ["none"])
    assert "<polyline" not in empty.svg
    assert "<circle" not in empty.svg
    assert empty.rows == []


async def test_what_was_delivered_is_timed(
    gateway: Gateway, http: httpx.AsyncClient, signed: Signed
) -> None:
    """An attempt of 100 ms a minute after the arrival: so say Now, Targets and the API."""
    await deliver(http, signed("shop"))
    (delivery,) = await gateway.inbox.fetch({"app": 1}, 1000)
    old = replace(delivery.event, at=delivery.event.at - 60_000)
    result = Result(replace(delivery, event=old), Outcome.DELIVERED, 100, 200)
    assert await gateway.inbox.finish([result]) == [True]
    stats = (await http.get("/_oncekey/api/v1/stats", headers=bearer("read"))).json()
    assert stats["took"] == {"count": 1, "p50": 107, "p95": 107, "p99": 107}
    assert 55_000 < stats["late"]["p99"] < 120_000
    assert stats["totals"] == {"received": 1, "delivered": 1}
    targets = (await http.get("/_oncekey/api/v1/targets", headers=bearer("read"))).json()
    assert {one["name"]: one["took"]["p95"] for one in targets["items"]} == {
        "app": 107, "other": None,
    }  # fmt: skip
    await sign_in(http, "rita")
    assert "p50 107 ms, p95 107 ms, p99 107 ms" in (await http.get("/_oncekey")).text
    assert '<td class="num">107 ms</td>' in (await http.get("/_oncekey/targets")).text


@pytest.mark.parametrize("most, shown", [(0, "1"), (1, "1"), (4, "3"), (7, "5"), (40, "25")])
def test_counts_are_shown_by_whole_numbers(most: int, shown: str) -> None:
    """The line at half of a chart of events has a whole number, as half an event never comes."""
    chart = bars("Received", 0, [Series("received", "received", (most,))])
    assert f">{shown}</text>" in str(chart.svg)
