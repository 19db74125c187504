"""Metrics for Prometheus: from one process and from several, and what is never in them."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.instrument.served import PATIENCE, Samples, Site, served

from oncekey import Once, WebhookDedup, connect
from oncekey.instrument import events
from oncekey.instrument.metrics import METRICS
from oncekey.instrument.prometheus import export_prometheus

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the workers")


def total(samples: Samples, name: str, **labels: str) -> float:
    return sum(
        value
        for (found, having), value in samples.items()
        if found == name and labels.items() <= dict(having).items()
    )


def moved(before: Samples, after: Samples) -> set[str]:
    """The names of the metrics that are not as they were."""
    suffix = re.compile("_(bucket|sum|count)$")
    return {suffix.sub("", name) for (name, labels), value in after.items()
            if before.get((name, labels)) != value}  # fmt: skip


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "redis"])
def test_two_workers_have_one_set_of_metrics(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Behind gunicorn every metric moves under load, whoever is asked, and the sums are right."""
    url = f"sqlite:///{tmp_path}/shop.db"
    if kind != "sqlite":
        url = request.getfixturevalue({"postgres": "pg_url", "redis": "redis_url"}[kind])
    with served(tmp_path, url) as site:
        site.wake(tmp_path / "metrics")
        site.load(0)
        first = site.scrape()
        site.load(1000)
        second = site.scrape()
        counted = [p.name for p in (tmp_path / "metrics").glob("counter_*.db")]
    assert len(counted) == 2, "one of the two workers served nothing"
    # Redis removes what is past its time by itself.
    swept = {"oncekey_swept_records_total", "oncekey_sweep_lag_seconds"}
    here = set(METRICS) - (swept if kind == "redis" else set())
    assert here <= moved({}, first)
    assert here - moved(first, second) <= {
        "oncekey_handlers_running",  # none before, none after; see the next test
        "oncekey_oldest_handler_start_seconds",
        "oncekey_breaker_processes",  # open before and after
        "oncekey_sweep_lag_seconds",  # it may be the same by chance
    }
    stripe = {"operation": "webhook stripe"}
    assert total(second, "oncekey_claims_total", result="first", **stripe) == 80
    assert total(second, "oncekey_claims_total", result="replay", **stripe) == 80
    assert total(second, "oncekey_settled_total", result="completed", **stripe) == 80
    assert total(second, "oncekey_handler_seconds_count", **stripe) == 80
    assert total(second, "oncekey_deliveries_total", outcome="handled", source="stripe") == 80
    assert total(second, "oncekey_effect_lateness_seconds_count", source="stripe") == 80
    assert total(second, "oncekey_store_call_seconds_count", store=kind, method="claim") > 300
    assert total(second, "oncekey_claims_total", result="conflict", operation="charge") == 2
    assert total(second, "oncekey_claims_total", result="takeover") >= 2
    assert total(second, "oncekey_settled_total", result="fenced") >= 2
    assert total(second, "oncekey_handlers_running") == 0
    assert total(second, "oncekey_oldest_handler_start_seconds", operation="charge") == math.inf


def wait_until(site: Site, true: Any) -> Samples:
    """Ask again until it is as it must become."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        with contextlib.suppress(httpx.HTTPError):  # a connection to a worker that was killed
            if true(samples := site.scrape()):
                return samples
    raise AssertionError("it did not become so")


def test_what_a_killed_worker_ran_runs_no_more(tmp_path: Path) -> None:
    """A hung handler is seen, with its age; once its worker is killed it is not in flight."""

    def hang() -> None:
        try:
            site.post("hang", order="h-1")
        except (httpx.HTTPError, ValueError):
            pass

    with served(tmp_path, f"sqlite:///{tmp_path}/shop.db") as site:
        site.scrape()
        begun = time.time()
        hung = threading.Thread(target=hang)
        hung.start()
        labels = {"operation": "guard"}
        seen = wait_until(site, lambda it: total(it, "oncekey_handlers_running", **labels) == 1)
        since = total(seen, "oncekey_oldest_handler_start_seconds", **labels)
        assert begun - 1 <= since <= time.time() + 1
        for worker in site.workers():
            os.kill(worker, signal.SIGKILL)
        wait_until(site, lambda it: total(it, "oncekey_handlers_running", **labels) == 0)
        hung.join(PATIENCE)


def test_no_id_and_no_name_of_a_sender_is_a_label() -> None:
    """Whatever keys, scopes and senders there are, the series stay the same few."""
    registry = CollectorRegistry()
    once = Once("memory://", scope="the-scope")
    dedup = WebhookDedup(connect("memory://"))
    with export_prometheus(registry):
        for number in range(50):
            with once.guard(f"key-{number}"):
                pass
            dedup.check_and_record(f"sender-{number}", f"key-{number}")
        text = generate_latest(registry).decode()
    labels = "".join(re.findall(r"{.*}", text))
    assert not re.search(r"key-\d|sender-|the-scope|[0-9a-f]{12}", labels)
    assert text.count("oncekey_claims_total{") == 2
    for metric in METRICS.values():
        assert set(metric.labels) <= {
            *("operation", "result", "store", "method", "error"),
            *("source", "outcome", "breaker", "state"),
        }


def test_the_usual_percentiles_are_readable() -> None:
    """A handler of some milliseconds falls between two bounds that lie close together."""
    registry = CollectorRegistry()
    once = Once("memory://")
    with export_prometheus(registry):
        with once.guard("k"):
            time.sleep(0.03)
        text = generate_latest(registry).decode()
    found = re.findall(r'oncekey_handler_seconds_bucket{le="([^"]+)".*} (\S+)', text)
    least = next(float(bound) for bound, count in found if float(count) == 1)
    assert 0.03 <= least <= 10
    for name in ("oncekey_store_call_seconds", "oncekey_handler_seconds"):
        bounds = METRICS[name].buckets
        assert all(b / a <= 6 for a, b in itertools.pairwise(bounds))


def test_a_registry_takes_the_metrics_once() -> None:
    """A second export to one registry is refused with a reason; after closing it is taken."""
    registry = CollectorRegistry()
    first = export_prometheus(registry)
    with pytest.raises(ValueError, match="close the subscription"):
        export_prometheus(registry)
    assert len(events._listeners) == 1
    first.close()
    first.close()
    export_prometheus(registry).close()
    assert not events._listeners


def test_a_missing_package_names_the_extra() -> None:
    """Without prometheus-client the import says what to install."""
    code = (
        "import sys; sys.modules['prometheus_client'] = None\nimport oncekey.instrument.prometheus"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'oncekey[prometheus]'" in found.stderr
