"""``/metrics`` in the text format of Prometheus: what this node did, and what waits."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from oncekey.inbox.models import bucket_ms
from oncekey.server.attempts import Place, bound
from oncekey.server.percentiles import ATTEMPTS, LATE

if TYPE_CHECKING:
    from oncekey.server.gateway import Gateway

__all__ = ["CONTENT_TYPE", "METRICS", "Metric", "exposition"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Metric(NamedTuple):
    """What a metric is."""

    kind: str
    help: str
    labels: tuple[str, ...]


METRICS: Final = {
    "oncekey_gateway_requests_total": Metric(
        "counter",
        "Requests to a source by outcome: new, duplicate, rejected, unavailable, ignored.",
        ("source", "outcome"),
    ),
    "oncekey_gateway_proxied_total": Metric(
        "counter",
        "Requests through a route of a proxy by answer: replayed, or 2xx to 5xx; none: cut off.",
        ("route", "answer"),
    ),
    "oncekey_gateway_attempts_total": Metric(
        "counter",
        "Attempts of all nodes by target and outcome: delivered, failed (tried again), dead.",
        ("target", "outcome"),
    ),
    "oncekey_gateway_attempt_seconds": Metric(
        "histogram",
        "How long attempts of all nodes took, by target; their sum is right to about a tenth.",
        ("target",),
    ),
    "oncekey_gateway_lateness_seconds": Metric(
        "histogram",
        "From arrival to delivery, on all nodes, by target, without replays; "
        "their sum is right to about a tenth.",
        ("target",),
    ),
    "oncekey_gateway_waiting": Metric(
        "gauge", "Deliveries that are not finished, by target.", ("target",)
    ),
    "oncekey_gateway_dead": Metric(
        "gauge", "Deliveries that were given up, by target.", ("target",)
    ),
    "oncekey_gateway_oldest_seconds": Metric(
        "gauge", "Age of the oldest unfinished event, by target.", ("target",)
    ),
    "oncekey_gateway_in_hand": Metric(
        "gauge", "Attempts under way on this node, by target.", ("target",)
    ),
    "oncekey_gateway_breaker_open": Metric(
        "gauge", "1 while a target is left alone, by target.", ("target",)
    ),
    "oncekey_gateway_uptime_seconds": Metric("gauge", "Since this node started.", ()),
}
"""Every metric: its type, what it says, and its labels."""

_HISTOGRAMS: Final = {
    "oncekey_gateway_attempt_seconds": (ATTEMPTS, range(8, 69, 4)),
    "oncekey_gateway_lateness_seconds": (LATE, range(8, 109, 4)),
}
"""Of which counts they are, and the buckets of the inbox that are shown: each doubles the time."""


async def exposition(gateway: Gateway) -> str:
    """All metrics, as text."""
    rows: dict[str, list[str]] = {name: [] for name in METRICS}
    attempts = await gateway._figures.attempts.look(gateway.inbox, gateway.started_at)
    figures = gateway.figures()
    for (source, outcome), count in sorted(figures.requests.items()):
        labels = _labels(source=source, outcome=outcome)
        rows["oncekey_gateway_requests_total"].append(f"{labels} {count}")
    for (route, answer), count in sorted(figures.proxied.items()):
        labels = _labels(route=route, answer=answer)
        rows["oncekey_gateway_proxied_total"].append(f"{labels} {count}")
    now = await gateway.inbox.now()
    depths = {one.target: one for one in await gateway.inbox.depths()}
    counted = {target for _, target, _ in attempts}
    for name in sorted({*depths, *counted, *gateway.settings.targets}):
        depth, label = depths.get(name), _labels(target=name)
        oldest = depth.oldest_at if depth else None
        age = 0.0 if oldest is None else max(0, now - oldest) / 1000
        rows["oncekey_gateway_waiting"].append(f"{label} {depth.waiting if depth else 0}")
        rows["oncekey_gateway_dead"].append(f"{label} {depth.dead if depth else 0}")
        rows["oncekey_gateway_oldest_seconds"].append(f"{label} {age:g}")
        rows["oncekey_gateway_in_hand"].append(f"{label} {figures.running[name]}")
        rows["oncekey_gateway_breaker_open"].append(f"{label} {int(figures.is_open(name))}")
        for outcome in ATTEMPTS:  # at 0, too: else nobody sees the first one rise
            count = sum(n for place, n in attempts.items() if place[:2] == (outcome, name))
            labels = _labels(target=name, outcome=outcome)
            rows["oncekey_gateway_attempts_total"].append(f"{labels} {count}")
        for metric in _HISTOGRAMS:
            rows[metric] += _histogram(metric, name, attempts)
    rows["oncekey_gateway_uptime_seconds"].append(f" {time.time() - gateway.started_at:g}")
    lines = []
    for name, one in METRICS.items():
        lines += [f"# HELP {name} {one.help}", f"# TYPE {name} {one.kind}"]
        lines += [f"{name}{row}" for row in rows[name]]
    return "\n".join(lines) + "\n"


def _histogram(metric: str, target: str, attempts: Mapping[Place, int]) -> list[str]:
    """The samples of one target: what comes after the metric's name."""
    kinds, shown = _HISTOGRAMS[metric]
    buckets: Counter[int] = Counter()
    for (kind, name, bucket), count in attempts.items():
        if kind in kinds and name == target:
            buckets[bucket] += count
    found = []
    for top in shown:
        count = sum(n for bucket, n in buckets.items() if bucket <= top)
        found.append(f"_bucket{_labels(target=target, le=f'{bound(top):.4g}')} {count}")
    total, label = buckets.total(), _labels(target=target)
    seconds = sum(bucket_ms(bucket) * n for bucket, n in buckets.items()) / 1000
    found.append(f"_bucket{_labels(target=target, le='+Inf')} {total}")
    return [*found, f"_sum{label} {seconds:.12g}", f"_count{label} {total}"]


def _labels(**given: str) -> str:
    inner = ",".join(f'{name}="{_escaped(value)}"' for name, value in given.items())
    return f"{{{inner}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
