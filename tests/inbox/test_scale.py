"""The arithmetic of sizing, beside a simulation that does not know it: ``scripts/scale.py``."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from oncekey.cli import main
from oncekey.errors import PolicyError
from oncekey.inbox import TargetPolicy
from oncekey.operate import GatewayLoad, plan_gateway
from oncekey.operate.sizing import TRIES, attempts_of, backlog_after
from oncekey.signatures.table import known_provider

SCRIPT = Path(__file__).parents[2] / "scripts/scale.py"


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    spec = importlib.util.spec_from_file_location("oncekey_scale", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_attempts_and_slots_are_what_is_simulated(scale: ModuleType) -> None:
    """Retries and attempts at a time come out as the arithmetic says, for many and few failures."""
    for fails in (0.0, 0.02, 0.3):
        load = GatewayLoad(100, fails=fails)
        size = plan_gateway(load)
        (lane,) = scale.Simulation(load, size.slots).run(30.0)
        assert lane.attempts / (len(lane.done) + lane.dead) == pytest.approx(
            size.attempts, rel=0.05
        )
        assert lane.busy / 30.0 == pytest.approx(size.in_flight, rel=0.15)


def test_a_delivery_that_always_fails_is_tried_as_often_as_the_policy_says(
    scale: ModuleType,
) -> None:
    """No event is lost: each is delivered or dead, after all of its tries."""
    load = GatewayLoad(20, fails=1.0)
    (lane,) = scale.Simulation(load, 1_000).run(5.0)
    assert lane.done == []
    assert lane.attempts == 12 * lane.dead
    assert attempts_of(1.0, 12) == 12


def test_a_backlog_is_as_long_and_lasts_as_long_as_computed(scale: ModuleType) -> None:
    """After an outage the slots that are left over work off what came meanwhile."""
    load = GatewayLoad(100)
    waits, drains = backlog_after(load, 30.0, 20)
    (lane,) = scale.Simulation(load, 20, away=(10.0, 40.0)).run(150.0)
    assert lane.most_waiting == pytest.approx(waits, rel=0.1)
    assert lane.drained_at - 40.0 == pytest.approx(drains, rel=0.3)
    assert backlog_after(load, 30.0, 10)[1] == math.inf  # too few slots: it never ends


def test_a_slow_target_keeps_its_queue_to_itself(scale: ModuleType) -> None:
    """A healthy target's delays are the same beside one that takes a hundred times as long."""
    load = GatewayLoad(100, targets=2)
    calm = scale.Simulation(load, 20).run(10.0)[1]
    slow, healthy = scale.Simulation(load, 20, slow=1).run(10.0)
    assert slow.most_waiting > 500
    assert healthy.most_waiting < 100
    assert scale.percentile(healthy.done, 90) < 1.5 * scale.percentile(calm.done, 90)


def test_the_same_seed_gives_the_same_run(scale: ModuleType) -> None:
    """A figure of the page can be made again."""
    load = GatewayLoad(50)
    runs = [scale.Simulation(load, 10, seed).run(10.0)[0].done for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_the_page_has_what_the_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Each row of the table of sizes is what ``oncekey plan --gateway`` works out for its rate."""
    text = (SCRIPT.parents[1] / "docs/explanation/scale.md").read_text("utf-8")
    rows = re.findall(
        r"^\| ([\d,]+) \| ([\d.]+) cores.*?\| ([\d.]+) cores.*?\| ([\d,]+)", text, re.MULTILINE
    )
    assert [row[0] for row in rows] == ["100", "10,000", "1,000,000"]
    for rate, gateways, store, slots in rows:
        per = 100 if rate == "1,000,000" else 1  # partitions
        number = int(rate.replace(",", ""))
        assert main(["plan", "--gateway", "--rate", str(number / per), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["postgresql"]
        assert float(gateways) == pytest.approx(found["gateway_cores"] * per, rel=0.1)
        assert float(store) == pytest.approx(found["store_cores"] * per, rel=0.1)
        assert int(slots.replace(",", "")) == found["slots"]


def test_a_gateway_is_sized_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """For both stores; what SQLite is not for is said; nonsense is refused."""
    assert main(["plan", "--gateway", "--rate", "20000", "--targets", "3", "--fails", "0.5"]) == 0
    told = capsys.readouterr().out
    assert "slots on all nodes together" in told
    assert "SQLite is for the processes of one machine" in told
    assert "set concurrency =" in told
    assert "a lone event costs up to ten times as much" in told
    assert TargetPolicy().tries == TRIES
    assert main(["plan", "--gateway", "--rate", "70", "--provider", "stripe"]) == 0
    few = capsys.readouterr().out
    assert TargetPolicy().concurrency == 16
    assert "concurrency =" not in few  # 11 slots
    assert "--provider" not in few
    keys = []
    for more in ([], ["--provider", "stripe"], ["--provider", "shopify"]):
        assert main(["plan", "--gateway", "--rate", "70", "--json", *more]) == 0
        keys.append(json.loads(capsys.readouterr().out)["sqlite"]["keys"])
    assert keys[1] / keys[0] == pytest.approx(known_provider("stripe").retention / 604_800)
    assert keys[2] == keys[0]  # a week at least
    small = plan_gateway(GatewayLoad(10), store="sqlite")
    assert small.store_cores == 0
    assert plan_gateway(GatewayLoad(10, targets=0)).slots > 0
    for words, wrong in (
        (["--rate", "10", "--fails", "0.5"], "--fails goes with --gateway"),
        (["--rate", "10", "--provider", "stripe"], "--provider goes with --gateway"),
        (["--rate", "1", "--gateway", "--provider", "x", "--remember", "1d"], "leave out"),
        (["--rate", "0", "--gateway"], "above 0"),
        (["--rate", "1", "--gateway", "--fails", "2"], "0 to 1"),
        (["--rate", "1", "--gateway", "--seconds", "0"], "no time"),
    ):
        assert main(["plan", *words]) == 2
        assert wrong in capsys.readouterr().err
    with pytest.raises(PolicyError):
        GatewayLoad(math.inf)
