"""The dashboard and the alerts use metrics that there are, with labels that they have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from oncekey.instrument import metrics as library
from oncekey.server import metrics as gateway

# Kind and labels of every metric there is: those of the library, and the gateway's own.
METRICS = {
    **{name: (one.kind, one.labels) for name, one in library.METRICS.items()},
    **{name: (one.kind, one.labels) for name, one in gateway.METRICS.items()},
}
ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/oncekey.rules.yml"
GUIDE = (ROOT / "docs/howto/observe.md").read_text("utf-8")


def dashboard() -> Any:
    return json.loads((ROOT / "deploy/grafana/oncekey.json").read_text("utf-8"))


def alerts() -> list[Any]:
    [group] = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    found: list[Any] = group["rules"]
    return found


def expressions() -> list[str]:
    panels = [panel.get("targets", ()) for panel in dashboard()["panels"]]
    shown = [target["expr"] for targets in panels for target in targets]
    return shown + [rule["expr"] for rule in alerts()]


def used(expression: str) -> set[str]:
    return {re.sub("_bucket$", "", name) for name in re.findall(r"\boncekey_\w+", expression)}


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_and_label_is_there(expression: str) -> None:
    """No panel or alert names a metric that nothing counts, or a label that it has not."""
    assert used(expression)
    assert used(expression) <= set(METRICS)
    labels = {label for name in used(expression) for label in METRICS[name][1]}
    grouped = re.findall(r"by \(([^)]*)\)", expression)
    wanted = {label.strip() for group in grouped for label in group.split(",")} - {"le"}
    wanted |= set(re.findall(r"[{,]\s*(\w+)\s*(?:=|!=|=~)", expression))
    assert wanted <= labels


def test_the_dashboard_shows_every_metric() -> None:
    """Nothing is counted that nobody sees."""
    shown = {
        name
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
        for name in used(target["expr"])
    }
    assert shown == set(METRICS)


def test_histograms_are_read_by_their_buckets() -> None:
    """A histogram has no series of its own name; a counter is looked at by its rate."""
    for expression in expressions():
        for name in re.findall(r"\boncekey_\w+", expression):
            kind = METRICS[name.removesuffix("_bucket")][0]
            assert name.endswith("_bucket") == (kind == "histogram")
            if kind == "counter":
                assert re.search(rf"(rate|increase)\({name}\b", expression)


def test_every_alert_has_a_line_on_what_to_do() -> None:
    """The guide's table is the list of rules, in their order."""
    rows = re.findall(r"^\| `(Oncekey\w+)` \| (.+) \|$", GUIDE, re.MULTILINE)
    assert [name for name, _ in rows] == [rule["alert"] for rule in alerts()]
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in alerts())


def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    """Prometheus's own checker reads the rules, and every expression of the dashboard as one."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not here: it comes with Prometheus")
    panels = [text.replace("$__rate_interval", "5m") for text in expressions()]
    rules = [{"record": f"panel:{n}", "expr": text} for n, text in enumerate(panels)]
    drawn = tmp_path / "panels.yml"
    drawn.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    for file in (RULES, drawn):
        found = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True)
        assert found.returncode == 0, found.stderr
