"""Draw ``results.json`` and ``growth.json`` as SVG files for the documentation.

    python benchmarks/plots.py

The pictures have a background of their own and follow the reader's colour scheme, light or dark.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "docs" / "reference" / "plots"
WIDTH, LEFT, RIGHT, BAR, GAP, TITLE = 760, 250, 190, 15, 4, 26

STYLE = """
.card { fill: #ffffff; stroke: #d0d7de }
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600; font-size: 14px }
.group { font-weight: 600 }
.soft { fill: #59636e }
.ours { fill: #1a7f64 }
.limit { fill: #8c959f }
.floor { fill: none; stroke: #8c959f; stroke-dasharray: 3 2 }
.peer { fill: #c4733b }
.mark { stroke: #1f2328; stroke-width: 2 }
.axis { stroke: #d0d7de }
.line { fill: none; stroke-width: 2 }
.c0 { stroke: #1a7f64; fill: #1a7f64 } .c1 { stroke: #c4733b; fill: #c4733b }
.c2 { stroke: #4a6fd0; fill: #4a6fd0 } .c3 { stroke: #9a4fb0; fill: #9a4fb0 }
@media (prefers-color-scheme: dark) {
.card { fill: #161b22; stroke: #3d444d }
text { fill: #e6edf3 }
.soft { fill: #9198a1 }
.ours { fill: #3fb68f }
.limit { fill: #6e7681 }
.floor { stroke: #8b949e }
.peer { fill: #d98e5b }
.mark { stroke: #e6edf3 }
.axis { stroke: #3d444d }
}
"""

TITLES = {
    "calls": "Guarded calls on the memory store, and the first import",
    "memory": "Memory store",
    "sqlite": "SQLite, durable",
    "postgres": "PostgreSQL, durable",
    "redis": "Redis",
    "receiver": "Webhook receiver behind uvicorn",
    "http": "Idempotency-Key header behind uvicorn",
    "canonical": "Canonical hash",
    "gateway": "Gateway: ingest, delivery and the inbox",
    "targets": "Targets",
    "growth": "Growth",
}


def kind(case: str) -> str:
    """How a case is drawn."""
    if case.startswith(("limit:", "floor:")):
        return case[:5]
    return "ours" if "oncekey" in case else "peer"


def number(value: float) -> str:
    """Three digits that count."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def text(x: float, y: float, what: str, style: str = "", anchor: str = "start") -> str:
    """A line of text."""
    place = f'x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(what)}</text>"


def bar(style: str, x: float, y: float, long: float) -> str:
    """A bar that begins at a place."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{long:.1f}" height="{BAR}"'
    return f'<rect class="{style}" {place} rx="2"/>'


def picture(title: str, height: float, body: list[str]) -> str:
    """A whole file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style>"
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="8"/>'
        f"{''.join(f'{chr(10)}{line}' for line in body)}\n</svg>\n"
    )


# ------------------------------------------------------------------------------------------- bars


def bars(title: str, operations: dict[str, dict[str, Any]], wanted: list[dict[str, Any]]) -> str:
    """A group of bars for each operation, as long as the case is fast; floors are cut off.

    A bar's number is its speed, and beside it that as a ratio to the limit, or else to the floor.
    A tick stands where a target is.
    """
    body, y = [text(16, 26, title, "title")], 44.0
    body.append(text(16, y, "speed; in brackets of the limit, or of the floor; | target", "soft"))
    y += 8
    for operation, cases in operations.items():
        y += TITLE
        body.append(text(16, y - 8, operation, "group"))
        body += group(y, operation, cases, wanted)
        y += len(cases) * (BAR + GAP)
    return picture(title, y + 14, body)


def group(
    top: float, operation: str, cases: dict[str, Any], wanted: list[dict[str, Any]]
) -> Iterator[str]:
    """The bars of one operation, and the ticks of its targets."""
    speeds = {name: 1 / statistics.median(case["seconds"]) for name, case in cases.items()}
    kinds = {name: kind(name) for name in cases}
    reference = next(
        (name for what in ("limit", "floor") for name in cases if kinds[name] == what), None
    )
    room = WIDTH - LEFT - RIGHT
    most = max(speed for name, speed in speeds.items() if kinds[name] != "floor")
    for at, (name, speed) in enumerate(speeds.items()):
        y = top + at * (BAR + GAP)
        shown = name.replace("**", "").replace("`", "")
        long = min(max(2, room * speed / most), room * 1.05)  # a floor may be far ahead
        yield text(LEFT - 8, y + 12, shown, "" if kinds[name] == "ours" else "soft", "end")
        yield bar(kinds[name], LEFT, y, long)
        is_time = operation.startswith("import")
        said = f"{1000 / speed:.3g} ms" if is_time else f"{number(speed)}/s"
        if reference is not None and name != reference:
            said += f" ({speed / speeds[reference]:.2g})"
        if "p99_ms" in cases[name]:
            said += f" p50 {cases[name]['p50_ms']:.3g}, p99 {cases[name]['p99_ms']:.3g} ms"
        yield text(LEFT + long + 6, y + 12, said, "soft")
        for target in wanted:
            other = speeds.get(target["reference"])
            if (target["operation"], target["case"]) != (operation, name) or other is None:
                continue
            x = LEFT + room * other * target["wanted"] / most
            if x <= LEFT + room * 1.05:
                yield f'<path class="mark" d="M{x:.1f} {y - 2:.1f}v{BAR + 4}"/>'


# ---------------------------------------------------------------------------------------- targets


def judged(wanted: list[dict[str, Any]]) -> str:
    """A bar for each target: how much of it was reached, the line being all of it."""
    left, right, most = 430, 110, 1.6
    room = WIDTH - left - right
    line = left + room / most
    body = [text(16, 26, "Targets", "title")]
    body.append(
        text(16, 44, "what was measured, of what is wanted; the line is the target", "soft")
    )
    y, part = 52.0, ""
    for target in wanted:
        if target["part"] != part:
            part = target["part"]
            y += TITLE
            body.append(text(16, y - 8, TITLES.get(part, part), "group"))
        other = target["reference"].removeprefix("limit: ")
        said = f"{target['operation']}, of {other}".replace("**", "").replace("`", "")
        if not target["ratio"]:
            said = f"{target['operation']}, {other}, {target['bound']}"
        reached = target["reached"]
        long = room * min(reached, most) / most
        style = "ours" if target["met"] else "peer"
        body.append(text(left - 8, y + 12, said, "soft", "end"))
        body.append(bar(style, left, y, long))
        figures = f"{target['measured']:.3g} / {target['wanted']:g}"
        body.append(text(left + max(long, room / most) + 6, y + 12, figures, "soft"))
        y += BAR + GAP
    body.append(f'<path class="mark" d="M{line:.1f} 60V{y:.1f}"/>')
    return picture(TITLES["targets"], y + 14, body)


# ------------------------------------------------------------------------------------------ lines


def lines(title: str, stores: dict[str, list[dict[str, Any]]]) -> str:
    """The cost of a call by the number of keys: each store's, as times its first."""
    left, right, top, bottom, height = 60, 190, 60, 50, 360
    keys = [step["keys"] for steps in stores.values() for step in steps]
    least, most = math.log10(min(keys)), math.log10(max(keys))
    times = {name: [step["times"] for step in steps] for name, steps in stores.items()}
    highest = max(2.0, *(value for values in times.values() for value in values))

    def x(value: float) -> float:
        return left + (WIDTH - left - right) * (math.log10(value) - least) / max(most - least, 1e-9)

    def y(value: float) -> float:
        return height - bottom - (height - top - bottom) * value / highest

    what = "a claim and its completion, times the same beside it in a store of the fewest keys"
    body = [text(16, 26, title, "title"), text(16, 44, what, "soft")]
    for level in range(int(highest) + 1):
        body.append(f'<path class="axis" d="M{left} {y(level):.1f}H{WIDTH - right}"/>')
        body.append(text(left - 8, y(level) + 4, str(level), "soft", "end"))
    body.append(f'<path class="floor" d="M{left} {y(1.5):.1f}H{WIDTH - right}"/>')
    body.append(text(WIDTH - right - 4, y(1.5) - 5, "1.5: no longer flat", "soft", "end"))
    for power in range(math.ceil(least), math.floor(most) + 1):
        at = x(10**power), height - bottom + 18
        body.append(text(*at, f"{10**power:,} keys", "soft", "middle"))
    for number_, (name, steps) in enumerate(stores.items()):
        points = [
            (x(step["keys"]), y(value)) for step, value in zip(steps, times[name], strict=True)
        ]
        path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in points)
        style = f"c{number_}"
        body.append(f'<path class="line {style}" style="fill:none" d="{path}"/>')
        body += [
            f'<circle class="{style}" cx="{px:.1f}" cy="{py:.1f}" r="3"/>' for px, py in points
        ]
        side, down, last = WIDTH - right + 12, top + 34 * number_, steps[-1]
        said = f"{last['p50_us']:,.0f} us, {last['bytes_a_key']:,.0f} bytes a key"
        body.append(f'<rect class="{style}" x="{side}" y="{down}" width="10" height="10"/>')
        body += [text(side + 16, down + 10, name), text(side + 16, down + 25, said, "soft")]
    return picture(title, height, body)


def drawn() -> Iterator[tuple[str, str]]:
    """The name and the picture of each part that there are results of."""
    results, growth = HERE / "results.json", HERE / "growth.json"
    if results.exists():
        found = json.loads(results.read_text("utf-8"))
        for part, operations in found["parts"].items():
            wanted = [target for target in found["targets"] if target["part"] == part]
            yield part, bars(TITLES[part], operations, wanted)
        yield "targets", judged(found["targets"])
    if growth.exists():
        yield "growth", lines(TITLES["growth"], json.loads(growth.read_text("utf-8")))


def draw(folder: Path = FOLDER) -> None:
    """Write all pictures; where there are no results yet, one that says so."""
    folder.mkdir(parents=True, exist_ok=True)
    found = dict(drawn())
    for name, title in TITLES.items():
        command = "make bench-growth" if name == "growth" else "make bench"
        missing = [
            text(16, 26, title, "title"),
            text(16, 48, f"not measured yet: {command}", "soft"),
        ]
        picture_ = found.get(name) or picture(title, 64, missing)
        (folder / f"{name}.svg").write_text(picture_, "utf-8")


if __name__ == "__main__":
    draw()
