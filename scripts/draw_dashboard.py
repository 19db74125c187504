"""Draw the panels of the Grafana dashboard from what a Prometheus has: a page, without Grafana.

``python scripts/draw_dashboard.py http://localhost:9090 out.html [SECONDS]``, then open the page.
"""

from __future__ import annotations

import html
import json
import math
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parents[1] / "deploy/grafana/oncekey.json"
COLOURS = ["#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f"]
WIDTH, HEIGHT, LEFT, TOP = 380, 150, 48, 8


def series(server: str, expression: str, seconds: int) -> list[dict[str, Any]]:
    """What Prometheus answers for the last ``seconds``."""
    now = time.time()
    asked = {
        "query": expression.replace("$__rate_interval", "20s"),
        "start": now - seconds,
        "end": now,
        "step": max(1, seconds // 60),
    }
    url = f"{server}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
    with urllib.request.urlopen(url) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def shown(value: float, unit: str) -> str:
    """A value with its unit."""
    if unit == "percentunit":
        return f"{value * 100:.0f}%"
    if unit == "s" and value < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g}{' s' if unit == 's' else '/s' if unit == 'ops' else ''}"


def drawn(panel: dict[str, Any], server: str, seconds: int) -> str:
    """One panel as SVG, with its legend."""
    lines: list[tuple[str, list[tuple[float, float]]]] = []
    for target in panel["targets"]:
        for found in series(server, target["expr"], seconds):
            name = target["legendFormat"]
            for label, value in found["metric"].items():
                name = name.replace("{{" + label + "}}", value)
            points = [(at, float(text)) for at, text in found["values"]]
            lines.append((name, [point for point in points if math.isfinite(point[1])]))
    flat = [point for _, points in lines for point in points]
    unit = panel["fieldConfig"]["defaults"]["unit"]
    top = max((value for _, value in flat), default=0) or 1
    end = max((at for at, _ in flat), default=time.time())
    svg = [f'<svg width="{WIDTH}" height="{HEIGHT + 20}">']
    for step in range(3):
        y = TOP + (HEIGHT - TOP) * step / 2
        label = shown(top * (1 - step / 2), unit)
        svg.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        svg.append(f'<text x="{LEFT - 4}" y="{y + 4}" text-anchor="end">{label}</text>')
    legend = []
    for number, (name, points) in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(
            f"{LEFT + (WIDTH - LEFT) * (1 - (end - at) / seconds):.1f},"
            f"{HEIGHT - (HEIGHT - TOP) * value / top:.1f}"
            for at, value in points
        )
        svg.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        legend.append(f'<b style="color:{colour}">&#9632;</b> {html.escape(name)}')
    state = "" if flat else "<em>no data</em>"
    return (
        f'<div class="panel"><h3>{panel["title"]}</h3>{"".join(svg)}</svg>{state}'
        f"<p>{' &nbsp; '.join(legend)}</p></div>"
    )


def page(server: str, seconds: int) -> str:
    """All panels, row by row."""
    parts = []
    for panel in json.loads(DASHBOARD.read_text("utf-8"))["panels"]:
        if panel["type"] == "row":
            parts.append(f"<h2>{panel['title']}</h2>")
        else:
            parts.append(drawn(panel, server, seconds))
    style = (
        "body{font:12px sans-serif;width:1640px;margin:16px;background:#f4f5f5}"
        "h2{margin:12px 4px 4px;font-size:15px}h3{margin:0 0 4px;font-size:13px}"
        ".panel{display:inline-block;vertical-align:top;width:380px;min-height:225px;padding:8px;"
        "margin:4px;background:#fff;border:1px solid #ddd}text{font-size:10px;fill:#555}"
        "p{margin:2px 0;font-size:10px;line-height:1.3}em{color:#c00}"
    )
    return f'<!doctype html><meta charset="utf-8"><style>{style}</style>{"".join(parts)}'


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(page(sys.argv[1], int((sys.argv[3:] or ["300"])[0])), "utf-8")
