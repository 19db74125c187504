"""Events as metrics for Prometheus, by ``prometheus-client``. Needs the extra ``prometheus``.

Several processes that serve together, as those of gunicorn, have one set of metrics if
``PROMETHEUS_MULTIPROC_DIR`` names a directory before they start.
"""

from __future__ import annotations

import os
from typing import Any

from oncekey.instrument.events import Event, Subscription, subscribe
from oncekey.instrument.metrics import METRICS, Metric, count

try:
    import prometheus_client as client
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "this exporter needs the package prometheus-client: run pip install 'oncekey[prometheus]'"
    ) from error

__all__ = ["PrometheusSubscription", "export_prometheus", "scraped_registry"]


def _made(metric: Metric, registry: Any) -> Any:
    about = (metric.name, metric.meaning, metric.labels)
    if metric.kind == "histogram":
        return client.Histogram(*about, registry=registry, buckets=metric.buckets)
    if metric.kind == "gauge":
        return client.Gauge(*about, registry=registry, multiprocess_mode=metric.across)
    return client.Counter(*about, registry=registry)


class _Numbers:
    """The metrics of one registry."""

    def __init__(self, registry: Any) -> None:
        self.made: list[Any] = []
        self._parents: dict[str, Any] = {}
        try:
            for metric in METRICS.values():
                self._parents[metric.name] = _made(metric, registry)
                self.made.append(self._parents[metric.name])
        except ValueError as error:
            for one in self.made:
                registry.unregister(one)
            raise ValueError(
                "these metrics are exported to this registry already: close the subscription of "
                "before, or pass another registry"
            ) from error
        self._children: dict[tuple[str, tuple[str, ...]], Any] = {}

    def _child(self, metric: str, labels: tuple[str, ...]) -> Any:
        found = self._children.get((metric, labels))
        if found is None:
            parent = self._parents[metric]
            found = self._children[metric, labels] = parent.labels(*labels) if labels else parent
        return found

    def add(self, metric: str, labels: tuple[str, ...], amount: float = 1) -> None:
        self._child(metric, labels).inc(amount)

    def observe(self, metric: str, labels: tuple[str, ...], value: float) -> None:
        self._child(metric, labels).observe(value)

    def put(self, metric: str, labels: tuple[str, ...], value: float) -> None:
        self._child(metric, labels).set(value)


class PrometheusSubscription(Subscription):
    """The metrics' place in the stream and in their registry; ``close`` ends both."""

    def __init__(self, listener: Any, registry: Any, made: list[Any]) -> None:
        super().__init__(listener)
        self._registry, self._made = registry, made

    def close(self) -> None:
        """Stop counting, and take the metrics out of the registry. Closing twice does nothing."""
        super().close()
        while self._made:
            self._registry.unregister(self._made.pop())


def export_prometheus(registry: Any = None) -> PrometheusSubscription:
    """Count every event of this process in metrics for Prometheus, until the result is closed.

    Call it once in a process, or once before it forks: children count on their own. The metrics
    and their labels are listed in the guide "Observe it".

    Args:
        registry: Where to. Default: that of ``prometheus_client``.

    Raises:
        ValueError: That registry has these metrics already.

    Example:
        >>> from oncekey.instrument.prometheus import export_prometheus
        >>> metrics = export_prometheus()
        >>> metrics.close()
    """
    registry = client.REGISTRY if registry is None else registry
    numbers = _Numbers(registry)

    def listen(event: Event) -> None:
        count(event, numbers)

    subscribe(listen, timings=True)
    return PrometheusSubscription(listen, registry, numbers.made)


def scraped_registry() -> Any:
    """What to show to Prometheus: the metrics of all processes that serve together, or of this one.

    Pass it to ``prometheus_client.make_asgi_app`` or ``make_wsgi_app``, and mount that.
    """
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return client.REGISTRY
    from prometheus_client import multiprocess

    registry = client.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return registry
