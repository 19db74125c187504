"""Charts as SVG, drawn here: no script, no style of its own, and a table behind each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from markupsafe import Markup, escape

from oncekey.inbox.models import Count
from oncekey.server.percentiles import said

__all__ = ["Chart", "Series", "bars", "lines", "per_minute"]

WIDTH: Final = 480
HEIGHT: Final = 120
_LEFT: Final = 48
_TOP: Final = 8
_BOTTOM: Final = 18
_STEPS: Final = (1, 2, 5)


@dataclass(frozen=True, slots=True)
class Series:
    """Numbers of one kind, oldest first; ``look`` is a class of the style sheet."""

    name: str
    look: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Chart:
    """What a template shows: the drawing, its legend by look, and the same as rows."""

    title: str
    legend: list[tuple[str, str]]
    svg: Markup
    headings: list[str]
    rows: list[list[str]]


def per_minute(counts: Sequence[Count], kind: str, since: int, minutes: int) -> list[float]:
    """How often something happened in each minute; nothing is a zero, not a gap."""
    first = since - since % 60_000
    values = [0.0] * minutes
    for one in counts:
        place = (one.minute - first) // 60_000
        if one.kind == kind and 0 <= place < minutes:
            values[place] += one.n
    return values


def bars(title: str, since: int, series: Sequence[Series]) -> Chart:
    """A bar a minute, with the series on top of one another."""
    count = len(series[0].values)
    sums = [sum(one.values[place] for one in series) for place in range(count)]
    top = _round_up(max(sums, default=0))
    top += top % 2  # events are counted: the line at half of it is a whole number too
    room, width = HEIGHT - _TOP - _BOTTOM, (WIDTH - _LEFT) / max(count, 1)
    drawn = [_grid(f"{top / 2:g}", f"{top:g}", room, since, count)]
    for place in range(count):
        base = float(HEIGHT - _BOTTOM)
        for one in series:
            tall = one.values[place] / top * room
            if tall <= 0:
                continue
            tall = max(tall, 1.5)
            base -= tall
            drawn.append(
                f'<rect class="{escape(one.look)}" x="{_LEFT + place * width + 0.5:.1f}" '
                f'y="{base:.1f}" width="{max(width - 1, 1):.1f}" height="{tall:.1f}"/>'
            )
    told = ", ".join(f"{one.name} {sum(one.values):g}" for one in series)
    rows = [
        [_clock(since, place), *(f"{one.values[place]:g}" for one in series)]
        for place in range(count - 1, -1, -1)
        if sums[place]
    ]
    legend = [one.name for one in series] if len(series) > 1 else []
    return _chart(title, legend, told, drawn, series, rows)


def lines(title: str, since: int, series: Sequence[Series], legend: Sequence[str]) -> Chart:
    """A line for each series, of durations in milliseconds; it has gaps where a value is ``nan``.

    Args:
        title: What it shows.
        since: The first minute.
        series: The lines.
        legend: What each line is, and its value over all of the time.
    """
    count = len(series[0].values)
    known = [value for one in series for value in one.values if not math.isnan(value)]
    top = _round_up(max(known, default=0))
    room, width = HEIGHT - _TOP - _BOTTOM, (WIDTH - _LEFT) / max(count, 1)
    drawn = [_grid(said(top / 2), said(top), room, since, count)]
    for one in series:
        points: list[str] = []
        for place, value in enumerate([*one.values, math.nan]):
            if not math.isnan(value):
                x, y = _LEFT + (place + 0.5) * width, HEIGHT - _BOTTOM - value / top * room
                points.append(f"{x:.1f},{y:.1f}")
            elif points:
                drawn.append(_line(one.look, points))
                points = []
    rows = [
        [_clock(since, place), *(said(one.values[place]) for one in series)]
        for place in range(count - 1, -1, -1)
        if not math.isnan(series[0].values[place])
    ]
    return _chart(title, legend, ", ".join(legend), drawn, series, rows)


def _line(look: str, points: list[str]) -> str:
    if len(points) > 1:
        return f'<polyline class="{escape(look)}" points="{" ".join(points)}"/>'
    x, y = points[0].split(",")  # a minute by itself
    return f'<circle class="{escape(look)}" cx="{x}" cy="{y}" r="3"/>'


def _chart(
    title: str,
    legend: Sequence[str],
    told: str,
    drawn: list[str],
    series: Sequence[Series],
    rows: list[list[str]],
) -> Chart:
    summary = f"{title}, the last {len(series[0].values)} minutes: {told}"
    svg = Markup(  # noqa: S704 - numbers and escaped names only
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(summary)}" '
        f'class="chart">{"".join(drawn)}</svg>'
    )
    looks = [one.look for one in series]
    explained = list(zip(looks, legend, strict=False))
    return Chart(title, explained, svg, ["Minute", *(one.name for one in series)], rows)


def _grid(half: str, top: str, room: float, since: int, count: int) -> str:
    lines = []
    for part, label in ((0.0, ""), (0.5, half), (1.0, top)):
        y = HEIGHT - _BOTTOM - part * room
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        if label:
            lines.append(
                f'<text class="label" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
                f"{escape(label)}</text>"
            )
    for place, anchor in ((0, "start"), (count - 1, "end")):
        x = _LEFT if anchor == "start" else WIDTH
        lines.append(
            f'<text class="label" x="{x}" y="{HEIGHT - 4}" text-anchor="{anchor}">'
            f"{_clock(since, place)}</text>"
        )
    return "".join(lines)


def _clock(since: int, place: int) -> str:
    moment = datetime.fromtimestamp(since / 1000 + place * 60, UTC)
    return f"{moment:%H:%M}"


def _round_up(most: float) -> float:
    """The next number that people count in: 1, 2, 5, 10, 20, 50, ..."""
    scale = 1.0
    while True:
        for step in _STEPS:
            if most <= step * scale:
                return step * scale
        scale *= 10
