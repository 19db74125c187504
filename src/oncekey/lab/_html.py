"""The report as one HTML page: charts are SVG, and nothing is loaded from anywhere."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from oncekey.lab._findings import Finding, LabReport

__all__ = ["page"]

_COLOURS: Final = {"held": "#1a7f37", "broken": "#cf222e", "error": "#9a6700", "skipped": "#6e7781"}
_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #1f2328; background: #fff; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1rem; }
td, th { border-bottom: 1px solid #d1d9e0; padding: .3rem .6rem; text-align: left;
         vertical-align: top; }
h2 { margin: 2rem 0 .2rem; font-size: 1.15rem; }
.tag { color: #fff; border-radius: .3rem; padding: .05rem .5rem; font-size: .85rem; }
.charts { display: flex; gap: 2rem; flex-wrap: wrap; }
figure { margin: 0; } figcaption { color: #59636e; font-size: .85rem; }
@media (prefers-color-scheme: dark) { body { color: #e6edf3; background: #0d1117; }
  td, th { border-color: #3d444d; } svg text { fill: #e6edf3; } }
"""
_BARS: Final = 24
_WIDTH: Final = 420


def page(report: LabReport) -> str:
    """The whole page."""
    counts = {result: sum(one.result == result for one in report.findings) for result in _COLOURS}
    told = " ".join(
        f'<span class="tag" style="background:{_COLOURS[name]}">{number} {name}</span>'
        for name, number in counts.items()
        if number
    )
    rows = "".join(_row(one) for one in report.findings)
    parts = "".join(_section(one) for one in report.findings if not one.skipped)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>oncekey lab: {escape(report.target)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>Fault laboratory</h1><p>{escape(report.target)}, seed {report.seed}: {told}</p>"
        "<table><thead><tr><th>experiment</th><th>what was broken</th><th>result</th>"
        f"<th>seconds</th></tr></thead><tbody>{rows}</tbody></table>{parts}</body></html>\n"
    )


def _row(one: Finding) -> str:
    reason = f"<br><small>{escape(one.skipped or one.error)}</small>"
    return (
        f"<tr><td>{escape(one.name)}</td><td>{escape(one.fault)}"
        f"{reason if one.skipped or one.error else ''}</td><td>{_tag(one)}</td>"
        f"<td>{one.seconds:.1f}</td></tr>"
    )


def _tag(one: Finding) -> str:
    return f'<span class="tag" style="background:{_COLOURS[one.result]}">{one.result}</span>'


def _section(one: Finding) -> str:
    facts = "".join(
        f"<tr><td>{'held' if fact.held else '<strong>broken</strong>'}</td>"
        f"<td>{escape(fact.statement)}</td><td>{escape(fact.seen)}</td></tr>"
        for fact in one.invariants
    )
    charts = ""
    if one.answers:
        charts = (
            f'<div class="charts"><figure>{_statuses(one)}<figcaption>answers by status'
            f"</figcaption></figure><figure>{_times(one)}<figcaption>time to answer: half within "
            f"{one.percentile(0.5) * 1000:.0f} ms, 99 of 100 within "
            f"{one.percentile(0.99) * 1000:.0f} ms</figcaption></figure></div>"
        )
    return (
        f"<h2>{escape(one.name)} {_tag(one)}</h2><p>{escape(one.fault)}</p>"
        "<table><thead><tr><th></th><th>what must hold</th><th>what was seen</th></tr></thead>"
        f"<tbody>{facts}</tbody></table>{charts}"
    )


def _statuses(one: Finding) -> str:
    """A bar for each status."""
    most = max(one.statuses.values())
    bars = []
    for place, (status, number) in enumerate(one.statuses.items()):
        top, width = 22 * place, max(1, round(number / most * (_WIDTH - 130)))
        colour = "held" if status.startswith("2") else "error"
        colour = "broken" if status.startswith(("3", "4")) and status != "429" else colour
        bars.append(
            f'<text x="44" y="{top + 15}" text-anchor="end" font-size="12">{escape(status)}</text>'
            f'<rect x="50" y="{top + 3}" width="{width}" height="16" fill="{_COLOURS[colour]}"/>'
            f'<text x="{width + 56}" y="{top + 15}" font-size="12">{number}</text>'
        )
    return _svg("answers by status", 22 * len(bars), "".join(bars))


def _times(one: Finding) -> str:
    """How long answers took: from nothing to the slowest, in equal steps."""
    times = [answer.seconds for answer in one.answers]
    longest = max(times) or 1e-9
    counts = [0] * _BARS
    for seconds in times:
        counts[min(_BARS - 1, int(seconds / longest * _BARS))] += 1
    step, most = _WIDTH / _BARS, max(counts)
    bars = "".join(
        f'<rect x="{place * step:.1f}" y="{90 - number / most * 80:.1f}" width="{step - 2:.1f}" '
        f'height="{number / most * 80:.1f}" fill="#0969da"/>'
        for place, number in enumerate(counts)
    )
    words = (
        '<text x="0" y="106" font-size="12">0</text>'
        f'<text x="{_WIDTH}" y="106" font-size="12" text-anchor="end">'
        f"{longest * 1000:.0f} ms</text>"
    )
    return _svg("time to answer", 112, bars + words)


def _svg(label: str, height: int, inside: str) -> str:
    return (
        f'<svg role="img" aria-label="{label}" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}">{inside}</svg>'
    )
