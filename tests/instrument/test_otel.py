"""Spans and metrics of OpenTelemetry: a trace from a delivery to its effect to its replay."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from oncekey import AsyncOnce, Once, aconnect, connect
from oncekey.instrument.metrics import METRICS
from oncekey.instrument.otel import LocalSpans, StoredSpans, export_otel
from oncekey.receiver import WebhookReceiver
from oncekey.signatures import provider


class Traced:
    """A tracer whose spans are in memory."""

    def __init__(self, **options: Any) -> None:
        self.memory = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.memory))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])
        self.tracer = self.provider.get_tracer("test")
        self.subscription = export_otel(self.provider, self.meters, **options)

    def spans(self) -> dict[str, ReadableSpan]:
        found = {span.name: span for span in self.memory.get_finished_spans()}
        self.memory.clear()
        return found

    def __enter__(self) -> Traced:
        return self

    def __exit__(self, *raised: object) -> None:
        self.subscription.close()
        self.provider.shutdown()
        self.meters.shutdown()


def ids(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


def test_a_trace_from_delivery_to_effect_to_replay() -> None:
    """Claim, handler and completion are in the request's trace; the replay links to the handler."""
    receiver = WebhookReceiver(provider("stripe", secret="whsec_test"), "memory://")
    body = json.dumps({"id": "evt_1", "type": "t"}).encode()
    fields = {"Content-Type": "application/json"}
    sent = receiver.provider.sign("POST", "https://x.example/h", fields, body)
    with Traced() as traced:

        @receiver.on("t")
        def paid(event: Any) -> None:
            with traced.tracer.start_as_current_span("effect"):
                pass

        with traced.tracer.start_as_current_span("POST /h"):
            receiver.receive(*sent)
        first = traced.spans()
        with traced.tracer.start_as_current_span("POST /h"):
            receiver.receive(*sent)
        again = traced.spans()
    assert set(first) == {
        *("POST /h", "oncekey.claim", "process stripe"),
        *("effect", "oncekey.complete", "receive stripe"),
    }
    request, handler = first["POST /h"], first["process stripe"]
    for name in ("oncekey.claim", "process stripe", "oncekey.complete", "receive stripe"):
        assert first[name].parent == request.get_span_context(), name
    assert first["effect"].parent == handler.get_span_context()
    assert handler.kind is SpanKind.CONSUMER
    assert handler.attributes is not None
    assert handler.attributes["messaging.operation.type"] == "process"
    assert handler.attributes["messaging.destination.name"] == "stripe"
    complete = first["oncekey.complete"].attributes
    assert complete is not None
    assert complete["db.operation.name"] == "complete"
    times = [first[name].start_time or 0 for name in ("oncekey.claim", "process stripe", "effect")]
    assert times == sorted(times)
    assert set(again) == {"POST /h", "oncekey.claim", "receive stripe"}
    replay = again["oncekey.claim"]
    assert (replay.attributes or {})["oncekey.result"] == "replay"
    [link] = replay.links
    assert link.context == handler.get_span_context()
    assert ids(replay)[0] != ids(handler)[0], "another request, another trace"


def test_without_a_request_a_call_is_one_trace() -> None:
    """Claim, handler and completion hang together also where nobody began a trace."""
    once = Once("memory://")
    with Traced() as traced:
        with once.guard("k") as claim:
            assert claim.replayed in (True, False)
        spans = traced.spans()
        assert not trace.get_current_span().get_span_context().is_valid
    assert spans["run guard"].parent == spans["oncekey.claim"].get_span_context()
    assert spans["oncekey.complete"].parent == spans["run guard"].get_span_context()


@pytest.mark.parametrize("store", ["memory", "sqlite"])
async def test_async_calls_leave_no_span_behind(store: str, tmp_path: Path) -> None:
    """After a call, and after one that fails, the caller's own span is the current one again."""
    opened = aconnect("memory://" if store == "memory" else f"sqlite:///{tmp_path}/x.db")
    once = AsyncOnce(opened)

    @once(key="order")
    async def charge(order: str) -> None:
        await asyncio.sleep(0)
        if order == "bad":
            raise ValueError

    with Traced() as traced, traced.tracer.start_as_current_span("mine") as mine:
        await charge("good")
        assert trace.get_current_span() is mine
        good = traced.spans()
        with pytest.raises(ValueError):
            await charge("bad")
        assert trace.get_current_span() is mine
        bad = traced.spans()
    await opened.aclose()
    name = f"run {charge.__qualname__}"
    assert good[name].status.status_code is StatusCode.UNSET
    assert bad[name].status.status_code is StatusCode.ERROR
    assert (bad[name].attributes or {})["error.type"] == "ValueError"
    assert good["oncekey.complete"].parent == mine.get_span_context()
    assert "oncekey.settle" in bad


def test_a_cancelled_call_ends_its_span(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is logged about it, and no span stays open."""
    once = AsyncOnce("memory://")

    async def hang() -> None:
        async with once.guard("k"):
            await asyncio.Event().wait()

    async def main() -> Any:
        task = asyncio.get_running_loop().create_task(hang())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with Traced() as traced:
        asyncio.run(main())
        assert "run guard" in traced.spans()
    assert caplog.records == []


def kept_in(kind: str, folder: Path) -> Callable[[], Any]:
    if kind == "local":
        return lambda: LocalSpans(most=2)
    return lambda: StoredSpans(connect(f"sqlite:///{folder}/spans.db"))


def test_a_replay_in_another_process_has_its_link_from_a_store(tmp_path: Path) -> None:
    """With ``StoredSpans`` an exporter that never saw the first call knows its span."""
    once = Once(f"sqlite:///{tmp_path}/x.db")
    with Traced(spans=kept_in("stored", tmp_path)()) as traced:
        with once.guard("k") as claim:
            assert claim.replayed in (True, False)
        handler = traced.spans()["run guard"]
    with Traced(spans=kept_in("stored", tmp_path)()) as traced:
        with once.guard("k") as claim:
            assert claim.replayed in (True, False)
        [link] = traced.spans()["oncekey.claim"].links
    assert (link.context.trace_id, link.context.span_id) == ids(handler)
    assert link.context.is_remote
    once.store.close()


def test_the_spans_kept_in_a_process_are_bounded(tmp_path: Path) -> None:
    """The oldest is forgotten, and its replay has no link."""
    once = Once("memory://")
    with Traced(spans=kept_in("local", tmp_path)()) as traced:
        for key in ("a", "b", "c"):
            with once.guard(key) as claim:
                assert claim.replayed in (True, False)
        traced.spans()
        links = {}
        for key in ("a", "c"):
            with once.guard(key) as claim:
                assert claim.replayed in (True, False)
            links[key] = len(traced.spans()["oncekey.claim"].links)
    assert links == {"a": 0, "c": 1}


def test_metrics_have_names_and_units_by_convention() -> None:
    """The same numbers as for Prometheus: dots for the name's parts, seconds as the unit."""
    once = Once("memory://")
    with Traced() as traced:
        for _ in range(2):
            with once.guard("k") as claim:
                assert claim.replayed in (True, False)
        data = traced.reader.get_metrics_data()
    assert data is not None
    found = {
        metric.name: metric
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert {"oncekey.claims", "oncekey.handler", "oncekey.store_call"} <= set(found)
    assert found["oncekey.handler"].unit == "s"
    points: Any = found["oncekey.claims"].data.data_points
    assert {(p.attributes["result"], p.value) for p in points} == {("first", 1), ("replay", 1)}
    [handled] = found["oncekey.handler"].data.data_points
    assert tuple(handled.explicit_bounds) == METRICS["oncekey_handler_seconds"].buckets


def test_a_missing_package_names_the_extra() -> None:
    """Without opentelemetry-api the import says what to install."""
    code = "import sys; sys.modules['opentelemetry'] = None\nimport oncekey.instrument.otel"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'oncekey[otel]'" in found.stderr
