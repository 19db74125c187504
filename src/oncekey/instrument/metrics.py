"""Which metrics there are, and what each event does to them: once, for every exporter.

Labels are names from your code and words from short lists: no key, sender, caller or id is one.
Every gauge has one, so that a process that serves nothing, as gunicorn's own, has no value of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, Protocol

from oncekey.instrument import timings
from oncekey.instrument.events import Event, EventKind

__all__ = ["METRICS", "Metric", "Sink", "count"]

# From a memory store's microseconds to what a caller would no longer wait for.
_CALL_BUCKETS: Final = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
_WORK_BUCKETS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(30.0, 60.0, 300.0, 1800.0),
)
# Providers retry for hours and days.
_LATE_BUCKETS: Final = (
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0),
    *(3600.0, 21600.0, 86400.0, 259200.0),
)

BREAKER_STATES: Final = ("closed", "open", "half_open")
_UNPROVEN: Final = ("rejected", "unavailable")  # nobody knows that such a delivery is genuine


class Metric(NamedTuple):
    """One metric.

    Attributes:
        name: As Prometheus has it.
        kind: ``counter``, ``histogram`` or ``gauge``.
        labels: Their names.
        meaning: One sentence.
        buckets: Of a histogram.
        across: Of a gauge: how the values of several processes become one.
    """

    name: str
    kind: Literal["counter", "histogram", "gauge"]
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()
    across: Literal["livesum", "livemin", "max", "mostrecent"] = "livesum"


METRICS: Final = {
    metric.name: metric
    for metric in (
        Metric(
            *("oncekey_claims_total", "counter", ("operation", "result")),
            "Claims by result: first and takeover are misses, replay is a hit, in_flight, conflict "
            "and expired are refusals.",
        ),
        Metric(
            *("oncekey_settled_total", "counter", ("operation", "result")),
            "Won claims by how they ended: completed, released after a failure, or fenced off.",
        ),
        Metric(
            *("oncekey_wait_seconds", "histogram", ("operation",)),
            "How long duplicates waited for the call that came first.",
            _WORK_BUCKETS,
        ),
        Metric(
            *("oncekey_handler_seconds", "histogram", ("operation", "result")),
            "How long handlers ran, by result: ok or error.",
            _WORK_BUCKETS,
        ),
        Metric(
            *("oncekey_handlers_running", "gauge", ("operation",)),
            "Handlers that run now.",
        ),
        Metric(
            *("oncekey_oldest_handler_start_seconds", "gauge", ("operation",)),
            "When the handler began that has run for longest, in seconds since 1970; +Inf: none.",
            (),
            "livemin",
        ),
        Metric(
            *("oncekey_store_call_seconds", "histogram", ("store", "method", "result")),
            "How long calls of the store took, by result: ok or error.",
            _CALL_BUCKETS,
        ),
        Metric(
            *("oncekey_store_errors_total", "counter", ("operation", "error")),
            "Failures of the store, by what was being done and the class of the error.",
        ),
        Metric(
            *("oncekey_swept_records_total", "counter", ("store",)),
            "Records past their time that were removed.",
        ),
        Metric(
            *("oncekey_sweep_lag_seconds", "gauge", ("store",)),
            "How long ago the oldest record of the last sweep had ended.",
            (),
            "mostrecent",
        ),
        Metric(
            *("oncekey_deliveries_total", "counter", ("source", "outcome")),
            "Webhook deliveries by outcome.",
        ),
        Metric(
            *("oncekey_delivery_seconds", "histogram", ("source",)),
            "From the arrival of a delivery to its answer.",
            _WORK_BUCKETS,
        ),
        Metric(
            *("oncekey_delivery_lateness_seconds", "histogram", ("source",)),
            "From the provider's signature to the answer.",
            _LATE_BUCKETS,
        ),
        Metric(
            *("oncekey_effect_lateness_seconds", "histogram", ("source",)),
            "From the provider's signature to the recorded effect.",
            _LATE_BUCKETS,
        ),
        Metric(
            *("oncekey_last_delivery_seconds", "gauge", ("source",)),
            "When the last genuine delivery came, in seconds since 1970.",
            (),
            "max",
        ),
        Metric(
            *("oncekey_ignored_events_total", "counter", ("source",)),
            "Events of a type that has no handler.",
        ),
        Metric(
            *("oncekey_breaker_processes", "gauge", ("breaker", "state")),
            "Processes whose circuit breaker is closed, open or half_open.",
        ),
        Metric(
            *("oncekey_bypassed_total", "counter", ("operation",)),
            "Work that ran, or copies that were answered, without the store.",
        ),
        Metric(
            *("oncekey_reconciled_total", "counter", ("operation",)),
            "Records that were entered into the store after an outage.",
        ),
        Metric(
            *("oncekey_slipped_total", "counter", ("operation",)),
            "Work that was done more than once during an outage, as reconciliation found.",
        ),
        Metric(
            *("oncekey_late_events_total", "counter", ("operation",)),
            "Events that came after their window and were handled as new.",
        ),
        Metric(
            *("oncekey_collisions_total", "counter", ("operation",)),
            "Keys that came with another payload, or from another sender.",
        ),
        Metric(
            *("oncekey_limited_total", "counter", ("operation",)),
            "Calls that were refused, as there were too many.",
        ),
    )
}


class Sink(Protocol):
    """What an exporter does with numbers. Labels come in the order of the metric's."""

    def add(self, metric: str, labels: tuple[str, ...], amount: float = 1) -> None:
        """Count."""

    def observe(self, metric: str, labels: tuple[str, ...], value: float) -> None:
        """Take a value into a histogram."""

    def put(self, metric: str, labels: tuple[str, ...], value: float) -> None:
        """Set a gauge."""


def count(event: Event, sink: Sink) -> None:
    """Do to the metrics what ``event`` does."""
    effect = _EFFECTS.get(event.kind)
    if effect is not None:
        effect(event, sink)


def _claimed(event: Event, sink: Sink) -> None:
    sink.add("oncekey_claims_total", (event.operation, event.kind.value))


def _settled(event: Event, sink: Sink) -> None:
    sink.add("oncekey_settled_total", (event.operation, event.kind.value))


def _waited(event: Event, sink: Sink) -> None:
    sink.observe("oncekey_wait_seconds", (event.operation,), event.duration)


def _result(event: Event) -> str:
    return "error" if event.error else "ok"


def _store_call(event: Event, sink: Sink) -> None:
    labels = (event.store, event.operation, _result(event))
    sink.observe("oncekey_store_call_seconds", labels, event.duration)


def _store_error(event: Event, sink: Sink) -> None:
    sink.add("oncekey_store_errors_total", (event.operation, event.error))


def _started(event: Event, sink: Sink) -> None:
    sink.add("oncekey_handlers_running", (event.operation,), 1)
    _put_oldest(event.operation, sink)


def _ended(event: Event, sink: Sink) -> None:
    sink.add("oncekey_handlers_running", (event.operation,), -1)
    _put_oldest(event.operation, sink)
    sink.observe("oncekey_handler_seconds", (event.operation, _result(event)), event.duration)


def _put_oldest(operation: str, sink: Sink) -> None:
    oldest = timings.oldest(operation)
    since = oldest.since if oldest is not None else math.inf
    sink.put("oncekey_oldest_handler_start_seconds", (operation,), since)


def _swept(event: Event, sink: Sink) -> None:
    sink.add("oncekey_swept_records_total", (event.store,), event.count)
    if event.lateness is not None:
        sink.put("oncekey_sweep_lag_seconds", (event.store,), event.lateness)


def _source(event: Event) -> str:
    return event.operation.removeprefix("webhook ")


def _delivery(event: Event, sink: Sink) -> None:
    source = (_source(event),)
    sink.add("oncekey_deliveries_total", (*source, event.state))
    sink.observe("oncekey_delivery_seconds", source, event.duration)
    if event.lateness is not None:
        sink.observe("oncekey_delivery_lateness_seconds", source, event.lateness)
    if event.state not in _UNPROVEN:
        sink.put("oncekey_last_delivery_seconds", source, time.time())


def _effect(event: Event, sink: Sink) -> None:
    if event.lateness is not None:
        sink.observe("oncekey_effect_lateness_seconds", (_source(event),), event.lateness)


def _ignored(event: Event, sink: Sink) -> None:
    sink.add("oncekey_ignored_events_total", (_source(event),))


def _breaker(event: Event, sink: Sink) -> None:
    for state in BREAKER_STATES:
        labels = (event.operation or event.store, state)
        sink.put("oncekey_breaker_processes", labels, float(state == event.state))


def _counts(metric: str) -> Callable[[Event, Sink], None]:
    def add(event: Event, sink: Sink) -> None:
        sink.add(metric, (event.operation,), event.count or 1)

    return add


_EFFECTS: Final[dict[EventKind, Callable[[Event, Sink], None]]] = {
    EventKind.FIRST: _claimed,
    EventKind.TAKEOVER: _claimed,
    EventKind.REPLAY: _claimed,
    EventKind.IN_FLIGHT: _claimed,
    EventKind.CONFLICT: _claimed,
    EventKind.EXPIRED: _claimed,
    EventKind.COMPLETED: _settled,
    EventKind.RELEASED: _settled,
    EventKind.FENCED: _settled,
    EventKind.WAITED: _waited,
    EventKind.STORE_CALL: _store_call,
    EventKind.STORE_ERROR: _store_error,
    EventKind.STARTED: _started,
    EventKind.ENDED: _ended,
    EventKind.SWEPT: _swept,
    EventKind.DELIVERY: _delivery,
    EventKind.EFFECT: _effect,
    EventKind.IGNORED: _ignored,
    EventKind.BREAKER: _breaker,
    EventKind.BYPASS: _counts("oncekey_bypassed_total"),
    EventKind.RECONCILED: _counts("oncekey_reconciled_total"),
    EventKind.SLIPPED: _counts("oncekey_slipped_total"),
    EventKind.LATE: _counts("oncekey_late_events_total"),
    EventKind.COLLISION: _counts("oncekey_collisions_total"),
    EventKind.LIMITED: _counts("oncekey_limited_total"),
}
