"""``/metrics`` in the text format of Prometheus: what this node did, and what waits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from oncekey.server.gateway import Gateway

__all__ = ["CONTENT_TYPE", "METRICS", "exposition"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

METRICS: Final = {
    # name: (type, help, labels)
    "oncekey_gateway_requests_total": (
        "counter",
        "Requests to a source by outcome: new, duplicate, rejected, unavailable, ignored.",
    ),
    "oncekey_gateway_proxied_total": (
        "counter",
        "Requests through a route of a proxy by answer: replayed, or 2xx to 5xx; none: cut off.",
    ),
    "oncekey_gateway_waiting": ("gauge", "Deliveries that are not finished, by target."),
    "oncekey_gateway_dead": ("gauge", "Deliveries that were given up, by target."),
    "oncekey_gateway_oldest_seconds": ("gauge", "Age of the oldest unfinished event, by target."),
    "oncekey_gateway_in_hand": ("gauge", "Attempts under way on this node, by target."),
    "oncekey_gateway_breaker_open": ("gauge", "1 while a target is left alone, by target."),
    "oncekey_gateway_uptime_seconds": ("gauge", "Since this node started."),
}
"""Every metric: its type and what it says."""


async def exposition(gateway: Gateway) -> str:
    """All metrics, as text."""
    rows: dict[str, list[str]] = {name: [] for name in METRICS}
    figures = gateway.figures()
    for (source, outcome), count in sorted(figures.requests.items()):
        labels = _labels(source=source, outcome=outcome)
        rows["oncekey_gateway_requests_total"].append(f"{labels} {count}")
    for (route, answer), count in sorted(figures.proxied.items()):
        labels = _labels(route=route, answer=answer)
        rows["oncekey_gateway_proxied_total"].append(f"{labels} {count}")
    now = await gateway.inbox.now()
    depths = {one.target: one for one in await gateway.inbox.depths()}
    for name in sorted({*depths, *gateway.settings.targets}):
        depth, label = depths.get(name), _labels(target=name)
        oldest = depth.oldest_at if depth else None
        age = 0.0 if oldest is None else max(0, now - oldest) / 1000
        rows["oncekey_gateway_waiting"].append(f"{label} {depth.waiting if depth else 0}")
        rows["oncekey_gateway_dead"].append(f"{label} {depth.dead if depth else 0}")
        rows["oncekey_gateway_oldest_seconds"].append(f"{label} {age:g}")
        rows["oncekey_gateway_in_hand"].append(f"{label} {figures.running[name]}")
        rows["oncekey_gateway_breaker_open"].append(f"{label} {int(figures.is_open(name))}")
    rows["oncekey_gateway_uptime_seconds"].append(f" {time.time() - gateway.started_at:g}")
    lines = []
    for name, (kind, told) in METRICS.items():
        lines += [f"# HELP {name} {told}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{row}" for row in rows[name]]
    return "\n".join(lines) + "\n"


def _labels(**given: str) -> str:
    inner = ",".join(f'{name}="{_escaped(value)}"' for name, value in given.items())
    return f"{{{inner}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
