"""``/metrics`` of a gateway: all that is promised has a sample, and no counter falls."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from tests.server.process import TOKEN, Served, app, config, event, until
from tests.server.test_proxy import KEYED, Upstream, running

from oncekey.inbox.models import Count, bucket_of
from oncekey.server import attempts as counting
from oncekey.server.attempts import Attempts, bound
from oncekey.server.metrics import METRICS

ROOT = Path(__file__).parents[2]


def scraped(gateway: Served) -> dict[str, Metric]:
    """What Prometheus would read, by name."""
    text = gateway.call("GET", "/metrics", authorization=f"Bearer {TOKEN}")[2].decode()
    return {
        one.name + ("_total" if one.type == "counter" else ""): one
        for one in text_string_to_metric_families(text)
    }


def value(found: dict[str, Metric], metric: str, suffix: str = "", **labels: str) -> float:
    """One sample."""
    [one] = [
        sample.value
        for sample in found[metric].samples
        if sample.name == metric + suffix and sample.labels == labels
    ]
    return float(one)


def test_every_metric_that_deploy_names_is_there(tmp_path: Path) -> None:
    """Under traffic each metric of the gateway has a sample with its labels, and counts right."""
    named = set()
    for file in ("deploy/grafana/oncekey.json", "deploy/prometheus/oncekey.rules.yml"):
        named |= set(re.findall(r"\boncekey_gateway_\w+", (ROOT / file).read_text("utf-8")))
    assert {re.sub("_bucket$", "", one) for one in named} == set(METRICS)
    asked: list[str] = []

    def third_time(headers: dict[str, str]) -> int:
        asked.append(headers["webhook-id"])
        return 200 if asked.count(headers["webhook-id"]) > 2 else 500

    with app() as target, running(Upstream()) as upstream:
        target.answer = third_time
        more = f'[proxies.shop]\nupstream = "{upstream.url}"\n'
        file = config(tmp_path, target.url, more=more)
        with Served("--config", str(file), "--port", "0") as gateway:
            at_first = scraped(gateway)
            where = {"target": "app", "outcome": "delivered"}
            assert value(at_first, "oncekey_gateway_attempts_total", **where) == 0
            for _ in range(2):
                assert gateway.deliver(event("evt_1", gateway.address)) == 200
                gateway.call("POST", "/shop/charges", b"{}", **KEYED)
            assert gateway.call("POST", "/hooks/shop", b"{}")[0] == 401
            until(lambda: len(target.events()) == 1, "the delivery")

            def counted() -> bool:
                seen = scraped(gateway)
                return value(seen, "oncekey_gateway_attempts_total", **where) == 1

            until(counted, "the count of it")
            found = scraped(gateway)
    assert set(found) == set(METRICS)
    for name, one in METRICS.items():
        assert (found[name].type, found[name].documentation) == (one.kind, one.help)
        assert found[name].samples, name
        for sample in found[name].samples:
            assert set(sample.labels) - {"le"} == set(one.labels)
    failed = {"target": "app", "outcome": "failed"}
    assert value(found, "oncekey_gateway_attempts_total", **failed) == 2
    for name, number in (("attempt", 3), ("lateness", 1)):
        assert value(found, f"oncekey_gateway_{name}_seconds", "_count", target="app") == number
        inf = {"target": "app", "le": "+Inf"}
        assert value(found, f"oncekey_gateway_{name}_seconds", "_bucket", **inf) == number
    for outcome in ("new", "duplicate", "rejected"):
        labels = {"source": "shop", "outcome": outcome}
        assert value(found, "oncekey_gateway_requests_total", **labels) == 1


class Inbox(SimpleNamespace):
    """Counts as an inbox has them; any minute may be forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[tuple[int, str, str, int], int] = {}

    def add(self, minute: int, kind: str, number: int = 1) -> None:
        place = (minute * 60_000, kind, "app", 0)
        self.kept[place] = self.kept.get(place, 0) + number

    async def counts(self, since: int, until: int | None = None) -> list[Count]:
        return [
            Count(minute, kind, name, n, bucket)
            for (minute, kind, name, bucket), n in sorted(self.kept.items())
            if minute >= since
        ]


@pytest.mark.parametrize("shared", [False, True])
async def test_counters_never_fall(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt since the start is counted once, whoever is asked, and whatever is pruned."""
    inbox: Any = Inbox()
    clock = SimpleNamespace(now=100 * 60)
    monkeypatch.setattr(counting, "time", SimpleNamespace(time=lambda: clock.now))
    file = tmp_path / "attempts.kept" if shared else None
    one = two = Attempts(file)
    if shared:
        two = Attempts(file)

    async def total(who: Attempts) -> int:
        return (await who.look(inbox, 100 * 60))["delivered", "app", 0]

    inbox.add(99, "delivered", 50)  # before the start
    inbox.add(100, "received", 7)  # no attempt
    assert await total(one) == 0
    inbox.add(100, "delivered", 3)
    assert [await total(one), await total(two), await total(one)] == [3, 3, 3]
    clock.now += 5 * 60
    inbox.add(100, "delivered")  # told late, by a node that could not reach the inbox
    inbox.add(105, "delivered", 2)
    assert [await total(two), await total(one)] == [6, 6]
    clock.now += 40 * 86_400  # nobody looked for a long time
    inbox.add(5000, "delivered", 4)
    inbox.kept = {place: n for place, n in inbox.kept.items() if place[0] >= 4000 * 60_000}
    assert [await total(one), await total(two)] == [10, 10]
    if shared:
        replaced = Attempts(file)  # in the place of a worker that died
        clock.now += 60
        inbox.add(clock.now // 60, "delivered")
        assert [await total(replaced), await total(one)] == [11, 11]
        assert sorted(tmp_path.iterdir()) == [file]


def test_bounds_hold_what_is_in_their_bucket() -> None:
    """No duration is longer than the bound of its bucket, nor shorter than the one before it."""
    for ms in [*range(2000), 10_000, 3_600_000, 86_400_000]:
        bucket = bucket_of(ms)
        assert ms / 1000 <= bound(bucket)
        assert bucket == 0 or ms / 1000 > bound(bucket - 1)
