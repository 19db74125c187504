"""The figures of the performance page: those of the run that is kept."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "performance.md").read_text("utf-8")
KEPT = json.loads((ROOT / "benchmarks" / "results.json").read_text("utf-8"))
PARTS = {
    "calls": "guarded calls",
    "memory": "memory",
    "sqlite": "SQLite",
    "postgres": "PostgreSQL",
    "redis": "Redis",
    "receiver": "receiver",
    "http": "header",
    "gateway": "gateway",
}


def missed() -> str:
    """The table that the page must have: a row for each target that the kept run missed."""
    rows = ["| path | who | beside | wanted | measured |", "|---|---|---|--:|--:|"]
    for one in KEPT["targets"]:
        if not one["met"]:
            path = f"{PARTS[one['part']]}, {one['operation']}"
            who = re.sub(r"\*\*oncekey(.*?)\*\*", r"oncekey\1", one["case"])
            beside = one["reference"].removeprefix("limit: ").removeprefix("floor: ")
            figures = f"{one['wanted']:.3g} | {one['measured']:.3g}"
            rows.append(f"| {path} | {who} | {beside} | {figures} |")
    return "\n".join(rows)


def test_the_page_lists_the_targets_that_were_missed() -> None:
    """Each miss of the kept run, as wanted and measured, and nothing else."""
    shown = re.findall(r"<!-- missed -->\n(.*?)\n<!-- /missed -->", PAGE, re.DOTALL)
    assert shown == [missed()], f"write this into the page:\n{missed()}"


def test_quoted_ratios_of_the_gateway_are_those_of_the_kept_run() -> None:
    """The pages on performance and on scale say what was measured of whole paths."""
    gateway = KEPT["parts"]["gateway"]
    scale = (ROOT / "docs" / "explanation" / "scale.md").read_text("utf-8")
    cases = {
        "ingest": ("**oncekey serve**", "limit: raw ASGI, a durable insert"),
        "delivery": ("**oncekey** worker", "limit: bare aiohttp"),
    }
    found = {}
    for operation, (ours, limit) in cases.items():
        timed = gateway[f"{operation}, processor time"]
        mine, bare = timed[ours]["seconds"], timed[limit]["seconds"]
        ratio = statistics.median(b / m for m, b in zip(mine, bare, strict=True))
        found[operation] = (f"{ratio:.2f}", f"{statistics.median(mine) * 1e6:.0f}")
    (ingest, take), (delivery, send) = found["ingest"], found["delivery"]
    assert f"ingest is {ingest} of a raw ASGI app" in PAGE
    assert f"delivery {delivery} of a bare client" in PAGE
    assert re.search(rf"has\s+{ingest} times the speed of a raw ASGI app", scale)
    assert re.search(rf"has\s+{delivery} times the speed of a bare aiohttp client", scale)
    rows = dict(re.findall(r"^\| `(take|send)`:[^|]*\| (\d+) \|", scale, re.MULTILINE))
    assert rows == {"take": take, "send": send}


def test_the_report_is_about_the_targets_that_were_missed() -> None:
    """Every part with a miss has a row in the report beside the benchmarks."""
    report = (ROOT / "benchmarks" / "REPORT.md").read_text("utf-8").partition("not reached, and")[2]
    parts = {PARTS[one["part"]] for one in KEPT["targets"] if not one["met"]}
    told = {part for part in parts if re.search(rf"^\| {part}", report, re.MULTILINE)}
    assert told == parts
