"""An outage under load, in both modes, with what was lost, doubled and reconciled counted.

A few seconds here; ``ONCEKEY_OUTAGE=60 pytest -s tests/resilience/test_outage_load.py`` for the
figures in the documentation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.resilience.servers import Outage, opened, outage

from oncekey.models import Key, Scope, State
from oncekey.resilience import Findings, reconcile

__all__ = ["outage"]

SECONDS = float(os.environ.get("ONCEKEY_OUTAGE", "2"))
AROUND = 2.0  # seconds of load before and after


def loaded(outage: Outage, on_outage: str, journal: Path) -> list[dict[str, Any]]:
    """Two workers under load, while the server goes away and comes back; what they did."""
    script = str(Path(__file__).with_name("load.py"))
    workers = [
        subprocess.Popen(
            [sys.executable, script, outage.url, on_outage, str(journal), on_outage],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    time.sleep(AROUND)
    outage.stop()
    time.sleep(SECONDS)
    outage.start()
    time.sleep(AROUND)
    return [json.loads(worker.communicate()[0]) for worker in workers]


@pytest.mark.parametrize("on_outage", ["closed", "open"])
def test_an_outage_under_load(outage: Outage, on_outage: str, tmp_path: Path) -> None:
    """No event is lost in either mode, and in open mode each that was doubled is told of."""
    did = loaded(outage, on_outage, tmp_path)
    store = opened(outage)
    made = reconcile(tmp_path, store)
    effects = Counter(event for one in did for event in one["effects"])
    events = [str(number) for number in range(max(one["taken"] for one in did))]
    keys = {event: Key(Scope("once", on_outage, "handle"), event) for event in events}
    records = {event: store.read(key) for event, key in keys.items()}
    store.close()
    lost = [event for event in events if not effects[event]]
    done = {event for event, one in records.items() if one and one.state is State.COMPLETED}
    doubled = {keys[event].digest.hex() for event, count in effects.items() if count > 1}
    findings = Findings(str(tmp_path / "findings.db")).list()
    told = {found.key for found in findings}
    print(
        f"\n{outage.name} {on_outage}: {SECONDS:g} s away, {len(events)} events, "
        f"{sum(effects.values())} effects, lost {len(lost)}, doubled {len(doubled)} "
        f"(told {len(told & doubled)}), refused {sum(one['refused'] for one in did)}, "
        f"slowest call {max(one['slowest'] for one in did)} s, left for the end {made}"
    )
    assert lost == []
    assert done == set(events)
    if on_outage == "open":
        assert doubled <= told
    else:
        assert findings == []
