"""The guide to observing says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from oncekey.instrument.metrics import METRICS

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/howto/observe.md").read_text("utf-8")


def test_the_table_of_metrics_is_the_code() -> None:
    """Name, type, labels and meaning of every metric, in its order."""
    rows = re.findall(r"^\| `(oncekey_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", GUIDE, re.MULTILINE)
    assert rows == [
        (one.name, one.kind, ", ".join(f"`{label}`" for label in one.labels), one.meaning)
        for one in METRICS.values()
    ]
