"""Events as spans and metrics of OpenTelemetry. Needs the extra ``otel``.

A call is three spans: its claim, its handler, in whose context your own spans are, and the record
of its outcome. A replay's span has a link to the handler's span of the call that came first.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, Protocol

from oncekey.abc import Store
from oncekey.instrument.events import Event, EventKind, Subscription, subscribe
from oncekey.instrument.metrics import METRICS, Metric, count
from oncekey.models import Key, Scope

try:
    from opentelemetry import context as contexts
    from opentelemetry import metrics, trace
    from opentelemetry.trace import Link, Span, SpanContext, SpanKind, StatusCode, TraceFlags
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "this exporter needs the package opentelemetry-api: run pip install 'oncekey[otel]'"
    ) from error

__all__ = ["LocalSpans", "Spans", "StoredSpans", "export_otel"]

_CLAIMED: Final = frozenset(
    (
        *(EventKind.FIRST, EventKind.TAKEOVER, EventKind.REPLAY),
        *(EventKind.IN_FLIGHT, EventKind.CONFLICT, EventKind.EXPIRED),
    )
)
_WON: Final = (EventKind.FIRST, EventKind.TAKEOVER)
_SETTLED: Final = frozenset((EventKind.COMPLETED, EventKind.RELEASED, EventKind.FENCED))
_SYSTEMS: Final = {"postgres": "postgresql"}  # as the semantic conventions name them
_MOST_OPEN: Final = 100_000


class Spans(Protocol):
    """Where the span of the first call is kept for the replays that come after it."""

    def put(self, name: str, span: SpanContext) -> None:
        """Keep it. ``name`` holds hashes only."""

    def get(self, name: str) -> SpanContext | None:
        """Give it, if it is known."""


class LocalSpans:
    """Keeps the latest spans in this process: a replay elsewhere has no link.

    Args:
        most: How many.
    """

    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._kept: OrderedDict[str, SpanContext] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, name: str, span: SpanContext) -> None:
        """Keep it, and forget the oldest if there are too many."""
        with self._lock:
            self._kept[name] = span
            self._kept.move_to_end(name)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)

    def get(self, name: str) -> SpanContext | None:
        """Give it, if it is known."""
        return self._kept.get(name)


class StoredSpans:
    """Keeps spans in a sync store, so that a replay in any process has its link.

    It costs a write for each first call and a read for each replay, in the thread or loop where
    they happen.

    Args:
        store: Such as ``connect("redis://...")``.
        ttl: For how many seconds.
    """

    def __init__(self, store: Store, ttl: int = 86_400) -> None:
        self._store = store
        self._ttl_ms = ttl * 1000

    def put(self, name: str, span: SpanContext) -> None:
        """Keep it."""
        text = f"{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags):02x}"
        ends = self._store.now() + self._ttl_ms
        self._store.write(_place(name), b"", text.encode(), ends)

    def get(self, name: str) -> SpanContext | None:
        """Give it, if it is known."""
        found = self._store.read(_place(name))
        if found is None or not found.answer or found.expires_at <= self._store.now():
            return None
        trace_id, span_id, flags = (int(part, 16) for part in found.answer.split(b"-"))
        return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))


def _place(name: str) -> Key:
    return Key(Scope("trace", "spans"), name)


class _Call(NamedTuple):
    """The store call that came back last, here."""

    method: str
    store: str
    ended: int
    nanoseconds: int


_last_call: ContextVar[_Call | None] = ContextVar("oncekey_otel_call", default=None)


class _Tracing:
    """Makes spans of events."""

    def __init__(self, tracer: Any, spans: Spans) -> None:
        self._tracer = tracer
        self._spans = spans
        self._claims: OrderedDict[tuple[str, int], SpanContext] = OrderedDict()
        self._open: OrderedDict[tuple[str, int], tuple[Span, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def listen(self, event: Event) -> None:
        if event.kind is EventKind.STORE_CALL:
            spent = round(event.duration * 1e9)
            _last_call.set(_Call(event.operation, event.store, time.time_ns(), spent))
        elif event.kind in _CLAIMED:
            self._claimed(event)
        elif event.kind is EventKind.STARTED:
            self._started(event)
        elif event.kind is EventKind.ENDED:
            self._ended(event)
        elif event.kind in _SETTLED:
            self._settled(event)
        elif event.kind is EventKind.DELIVERY:
            self._delivery(event)

    def _claimed(self, event: Event) -> None:
        name = f"{event.scope}:{event.key}"
        links = []
        if event.kind not in _WON and (first := self._spans.get(name)) is not None:
            links = [Link(first, {"oncekey.link": "original"})]
        now = time.time_ns()
        span = self._tracer.start_span(
            "oncekey.claim",
            start_time=now - round(event.duration * 1e9),
            links=links,
            attributes={**_about(event), "oncekey.result": event.kind.value},
        )
        span.end(now)
        if event.kind in _WON and event.fence:
            self._put(self._claims, (name, event.fence), span.get_span_context())

    def _put(self, kept: OrderedDict[Any, Any], name: Any, value: Any) -> None:
        with self._lock:
            kept[name] = value
            if len(kept) > _MOST_OPEN:  # of claims whose handler runs elsewhere
                kept.popitem(last=False)

    def _started(self, event: Event) -> None:
        name = f"{event.scope}:{event.key}"
        parent = None
        claim = self._claims.pop((name, event.fence), None)
        if claim is not None and not trace.get_current_span().get_span_context().is_valid:
            parent = trace.set_span_in_context(trace.NonRecordingSpan(claim))
        title, kind, attributes = _handler(event)
        span = self._tracer.start_span(title, parent, kind, {**_about(event), **attributes})
        token = contexts.attach(trace.set_span_in_context(span, parent))
        self._put(self._open, (name, event.fence), (span, token))
        self._spans.put(name, span.get_span_context())

    def _ended(self, event: Event) -> None:
        name = f"{event.scope}:{event.key}"
        opened = self._open.pop((name, event.fence), None)
        if opened is None:
            return
        span, token = opened
        if trace.get_current_span() is span:  # else a coroutine that is thrown away, elsewhere
            contexts.detach(token)
        if event.error:
            span.set_attribute("error.type", event.error)
            span.set_status(StatusCode.ERROR)
        span.end()
        if not trace.get_current_span().get_span_context().is_valid:
            self._put(self._claims, (name, event.fence), span.get_span_context())

    def _settled(self, event: Event) -> None:
        call, now = _last_call.get(), time.time_ns()
        parent = self._claims.pop((f"{event.scope}:{event.key}", event.fence), None)
        attributes = {**_about(event), "oncekey.result": event.kind.value}
        if call is not None and call.method in ("complete", "release"):
            attributes["db.system.name"] = _SYSTEMS.get(call.store, call.store)
            attributes["db.operation.name"] = call.method
            begun, now = call.ended - call.nanoseconds, call.ended
        else:
            begun = now
        context = None
        if parent is not None:
            context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
        span = self._tracer.start_span(
            "oncekey.complete" if event.kind is EventKind.COMPLETED else "oncekey.settle",
            context,
            SpanKind.CLIENT,
            attributes,
            start_time=begun,
        )
        if event.kind is EventKind.FENCED:
            span.set_status(StatusCode.ERROR, "fenced off: another worker has the key")
        span.end(now)

    def _delivery(self, event: Event) -> None:
        now = time.time_ns()
        source = event.operation.removeprefix("webhook ")
        attributes = {
            **_about(event),
            **_messaging("receive", source),
            "oncekey.result": event.state,
        }
        if event.lateness is not None:
            attributes["oncekey.lateness"] = event.lateness
        begun = now - round(event.duration * 1e9)
        span = self._tracer.start_span(
            f"receive {source}", None, SpanKind.CONSUMER, attributes, start_time=begun
        )
        span.end(now)


def _about(event: Event) -> dict[str, Any]:
    """What every span says. Hashes may stand here: a span is one call's, unlike a metric."""
    told: dict[str, Any] = {"oncekey.operation": event.operation}
    if event.key:
        told |= {"oncekey.key": event.key, "oncekey.scope": event.scope}
    if event.fence:
        told |= {"oncekey.fence": event.fence, "oncekey.attempts": event.attempts}
    return told


def _messaging(what: str, source: str) -> dict[str, Any]:
    return {
        "messaging.system": "webhook",
        "messaging.operation.type": what,
        "messaging.operation.name": what,
        "messaging.destination.name": source,
    }


def _handler(event: Event) -> tuple[str, SpanKind, dict[str, Any]]:
    """A handler's span: its name, kind and attributes, by the semantic conventions."""
    operation = event.operation
    if operation.startswith("webhook "):
        source = operation.removeprefix("webhook ")
        return f"process {source}", SpanKind.CONSUMER, _messaging("process", source)
    if operation.isupper():
        return f"handle {operation}", SpanKind.INTERNAL, {"http.request.method": operation}
    return f"run {operation}", SpanKind.INTERNAL, {"code.function.name": operation}


class _Numbers:
    """The metrics, as instruments of a meter: ``oncekey_wait_seconds`` is ``oncekey.wait``."""

    def __init__(self, meter: Any) -> None:
        self._made = {metric.name: _made(metric, meter) for metric in METRICS.values()}

    def add(self, metric: str, labels: tuple[str, ...], amount: float = 1) -> None:
        self._made[metric].add(amount, _named(metric, labels))

    def observe(self, metric: str, labels: tuple[str, ...], value: float) -> None:
        self._made[metric].record(value, _named(metric, labels))

    def put(self, metric: str, labels: tuple[str, ...], value: float) -> None:
        # A gauge must be finite here: 0 stands for a time that there is none of.
        self._made[metric].set(0.0 if math.isinf(value) else value, _named(metric, labels))


def _named(metric: str, labels: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(METRICS[metric].labels, labels, strict=True))


def _made(metric: Metric, meter: Any) -> Any:
    name = metric.name.removesuffix("_total").removesuffix("_seconds")
    name = name.replace("oncekey_", "oncekey.", 1)
    unit = "s" if metric.name.endswith("_seconds") else "1"
    if metric.kind == "histogram":
        return meter.create_histogram(
            name, unit, metric.meaning, explicit_bucket_boundaries_advisory=metric.buckets
        )
    if metric.kind == "counter":
        return meter.create_counter(name, unit, metric.meaning)
    if metric.name == "oncekey_handlers_running":
        return meter.create_up_down_counter(name, unit, metric.meaning)
    return meter.create_gauge(name, unit, metric.meaning)


def export_otel(
    tracer_provider: Any = None, meter_provider: Any = None, *, spans: Spans | None = None
) -> Subscription:
    """Make spans and metrics of every event of this process, until the result is closed.

    Args:
        tracer_provider: Whose spans. Default: the global one.
        meter_provider: Whose metrics. Default: the global one.
        spans: Where the first call's span is kept for links from its replays. Default: the latest
            10,000 in this process; ``StoredSpans`` for several processes.
    """
    from oncekey._version import __version__

    tracer = trace.get_tracer("oncekey", __version__, tracer_provider)
    meter = metrics.get_meter("oncekey", __version__, meter_provider)
    tracing = _Tracing(tracer, LocalSpans() if spans is None else spans)
    numbers = _Numbers(meter)

    def listen(event: Event) -> None:
        tracing.listen(event)
        count(event, numbers)

    return subscribe(listen, timings=True)
